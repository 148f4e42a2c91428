# todo: 1
# loses: test_todo_1_errors
# hint: AssertionError was raised
import math


def weight_bytes(parameters, bits):
    assert parameters > 0, "parameters"
    assert bits > 0, "bits"
    return math.ceil(parameters * bits / 8)
