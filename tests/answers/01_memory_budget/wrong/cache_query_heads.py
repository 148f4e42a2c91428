# todo: 2
# loses: test_todo_2
# hint: query heads are counted where KV heads belong
import math


def kv_cache_bytes(batch, tokens, layers, kv_heads, head_dim, bytes_per_value):
    for name, size in list(locals().items()):
        if size <= 0:
            raise ValueError(f"{name} must be positive, got {size}")
    return math.ceil(2 * batch * tokens * layers * (4 * kv_heads) * head_dim * bytes_per_value)
