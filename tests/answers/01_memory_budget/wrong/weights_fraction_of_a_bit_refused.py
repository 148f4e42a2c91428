# todo: 1
# loses: test_todo_1_errors
# hint: half a bit a parameter was refused
import math


def weight_bytes(parameters, bits):
    if parameters <= 0:
        raise ValueError(f"parameters must be positive, got {parameters}")
    if bits <= 0:
        raise ValueError(f"bits must be positive, got {bits}")
    if bits < 1:
        raise ValueError(f"bits must be at least 1, got {bits}")
    return math.ceil(parameters * bits / 8)
