# todo: 1
# loses: test_todo_1
# hint: that is in GB
def weight_bytes(parameters, bits):
    if parameters <= 0:
        raise ValueError(f"parameters must be positive, got {parameters}")
    if bits <= 0:
        raise ValueError(f"bits must be positive, got {bits}")
    return parameters * bits / 8 / 1e9
