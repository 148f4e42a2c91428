# todo: 1
def weight_bytes(parameters, bits):
    if parameters <= 0:
        raise ValueError(f"parameters must be positive, got {parameters}")
    if bits <= 0:
        raise ValueError(f"bits must be positive, got {bits}")
    whole, rest = divmod(parameters * bits, 8)
    return int(whole) + (1 if rest else 0)


# todo: 3
def max_concurrent_requests(
    memory_bytes, weight_bytes, reserve_bytes, kv_bytes_per_request
):
    for name, size in list(locals().items()):
        if size < 0 or (size == 0 and name == "kv_bytes_per_request"):
            raise ValueError(f"{name}: {size} is not allowed")
    room = memory_bytes - weight_bytes - reserve_bytes
    if room < kv_bytes_per_request:
        return 0
    count, _left = divmod(room, kv_bytes_per_request)
    return count
