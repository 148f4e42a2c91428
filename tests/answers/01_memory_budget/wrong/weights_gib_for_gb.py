# todo: 1
# loses: test_todo_1
# hint: a GiB was taken for a GB
def weight_bytes(parameters, bits):
    if parameters <= 0:
        raise ValueError(f"parameters must be positive, got {parameters}")
    if bits <= 0:
        raise ValueError(f"bits must be positive, got {bits}")
    gibibytes = parameters * bits / 8 / 2**30
    return round(gibibytes * 10**9)
