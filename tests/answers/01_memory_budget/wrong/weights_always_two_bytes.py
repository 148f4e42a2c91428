# todo: 1
# loses: test_todo_1
# hint: bits has no part in it
def weight_bytes(parameters, bits):
    if parameters <= 0:
        raise ValueError(f"parameters must be positive, got {parameters}")
    if bits <= 0:
        raise ValueError(f"bits must be positive, got {bits}")
    return 2 * parameters
