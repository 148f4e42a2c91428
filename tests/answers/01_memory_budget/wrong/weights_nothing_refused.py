# todo: 1
# loses: test_todo_1_errors
# hint: was accepted
import math


def weight_bytes(parameters, bits):
    return math.ceil(parameters * bits / 8)
