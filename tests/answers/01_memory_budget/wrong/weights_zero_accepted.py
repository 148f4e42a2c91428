# todo: 1
# loses: test_todo_1_errors
# hint: bits (it is 0) was accepted
import math


def weight_bytes(parameters, bits):
    if parameters < 0:
        raise ValueError(f"parameters is {parameters}")
    if bits < 0:
        raise ValueError(f"bits is {bits}")
    return math.ceil(parameters * bits / 8)
