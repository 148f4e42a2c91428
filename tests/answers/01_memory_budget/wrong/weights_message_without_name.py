# todo: 1
# loses: test_todo_1_errors
# hint: must name bits
import math


def weight_bytes(parameters, bits):
    if parameters <= 0 or bits <= 0:
        raise ValueError("wrong input")
    return math.ceil(parameters * bits / 8)
