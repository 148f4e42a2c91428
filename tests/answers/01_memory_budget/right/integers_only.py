# todo: 1
def weight_bytes(parameters, bits):
    if parameters <= 0:
        raise ValueError(f"parameters must be positive, got {parameters}")
    if bits <= 0:
        raise ValueError(f"bits must be positive, got {bits}")
    if isinstance(bits, int):
        return (parameters * bits + 7) // 8
    return int(-(-parameters * bits // 8))


# todo: 2
def kv_cache_bytes(batch, tokens, layers, kv_heads, head_dim, bytes_per_value):
    for name, size in list(locals().items()):
        if size <= 0:
            raise ValueError(f"{name} must be positive, got {size}")
    size = 2 * batch * tokens * layers * kv_heads * head_dim * bytes_per_value
    whole = int(size)
    return whole if whole == size else whole + 1
