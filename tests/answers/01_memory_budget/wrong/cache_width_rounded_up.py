# todo: 2
# loses: test_todo_2
# hint: you rounded bytes_per_value up
import math


def kv_cache_bytes(batch, tokens, layers, kv_heads, head_dim, bytes_per_value):
    for name, size in list(locals().items()):
        if size <= 0:
            raise ValueError(f"{name} must be positive, got {size}")
    width = math.ceil(bytes_per_value)
    return 2 * batch * tokens * layers * kv_heads * head_dim * width
