# todo: 1
# loses: test_todo_1
# hint: a number
import math


def weight_bytes(parameters, bits):
    if parameters <= 0:
        raise ValueError(f"parameters must be positive, got {parameters}")
    if bits <= 0:
        raise ValueError(f"bits must be positive, got {bits}")
    return f"{math.ceil(parameters * bits / 8)} bytes"
