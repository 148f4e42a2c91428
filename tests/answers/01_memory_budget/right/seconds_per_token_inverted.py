# todo: 4
def decode_tokens_per_second(
    bandwidth_bytes_per_second, weight_bytes, kv_bytes, batch
):
    for name, size in list(locals().items()):
        if size < 0 or (size == 0 and name != "kv_bytes"):
            raise ValueError(f"{name}: {size} is not allowed")
    weights = weight_bytes / bandwidth_bytes_per_second / batch
    cache = kv_bytes / bandwidth_bytes_per_second
    return 1 / (weights + cache)
