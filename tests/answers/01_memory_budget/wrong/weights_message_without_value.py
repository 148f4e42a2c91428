# todo: 1
# loses: test_todo_1_errors
# hint: must say what was given, 0
import math


def weight_bytes(parameters, bits):
    for name, size in list(locals().items()):
        if size <= 0:
            raise ValueError(f"{name} must be positive")
    return math.ceil(parameters * bits / 8)
