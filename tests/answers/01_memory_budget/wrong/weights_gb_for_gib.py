# todo: 1
# loses: test_todo_1
# hint: a GB was taken for a GiB
def weight_bytes(parameters, bits):
    if parameters <= 0:
        raise ValueError(f"parameters must be positive, got {parameters}")
    if bits <= 0:
        raise ValueError(f"bits must be positive, got {bits}")
    gigabytes = parameters * bits / 8 / 10**9
    return round(gigabytes * 2**30)
