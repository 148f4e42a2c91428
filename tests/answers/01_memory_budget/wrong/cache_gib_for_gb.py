# todo: 2
# loses: test_todo_2
# hint: a GiB was taken for a GB
def kv_cache_bytes(batch, tokens, layers, kv_heads, head_dim, bytes_per_value):
    for name, size in list(locals().items()):
        if size <= 0:
            raise ValueError(f"{name} must be positive, got {size}")
    return int(2 * batch * tokens * layers * kv_heads * head_dim * bytes_per_value / 2**30 * 10**9)
