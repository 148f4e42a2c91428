# todo: 2
# loses: test_todo_2, test_todo_2_errors
# hint: bad input
def kv_cache_bytes(batch, tokens, layers, kv_heads, head_dim, bytes_per_value):
    raise ValueError(f"bad input: {locals()}")
