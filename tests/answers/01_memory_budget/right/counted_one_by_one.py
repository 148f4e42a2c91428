# todo: 3
def max_concurrent_requests(
    memory_bytes, weight_bytes, reserve_bytes, kv_bytes_per_request
):
    for name, size in list(locals().items()):
        if size < 0 or (size == 0 and name == "kv_bytes_per_request"):
            raise ValueError(f"{name}: {size} is not allowed")
    left = memory_bytes - weight_bytes - reserve_bytes
    count, step = 0, 1
    while step * kv_bytes_per_request <= left:
        step *= 2
    while step:
        if step * kv_bytes_per_request <= left:
            left -= step * kv_bytes_per_request
            count += step
        step //= 2
    return count


# todo: 4
def decode_tokens_per_second(
    bandwidth_bytes_per_second, weight_bytes, kv_bytes, batch
):
    for name, size in list(locals().items()):
        if size < 0 or (size == 0 and name != "kv_bytes"):
            raise ValueError(f"{name}: {size} is not allowed")
    read = weight_bytes
    for _request in range(batch):
        read += kv_bytes
    return batch / (read / bandwidth_bytes_per_second)
