# todo: 2
# loses: test_todo_2, test_todo_2_errors
# hint: bytes_per_value must be at least 1, got 0.5
import math


def kv_cache_bytes(batch, tokens, layers, kv_heads, head_dim, bytes_per_value):
    for name, size in list(locals().items()):
        if size <= 0:
            raise ValueError(f"{name} must be positive, got {size}")
    if bytes_per_value < 1:
        raise ValueError(f"bytes_per_value must be at least 1, got {bytes_per_value}")
    return math.ceil(2 * batch * tokens * layers * kv_heads * head_dim * bytes_per_value)
