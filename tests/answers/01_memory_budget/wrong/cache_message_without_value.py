# todo: 2
# loses: test_todo_2_errors
# hint: must say what was given, 0
import math


def kv_cache_bytes(batch, tokens, layers, kv_heads, head_dim, bytes_per_value):
    for name, size in list(locals().items()):
        if size <= 0:
            raise ValueError(f"{name} must be positive")
    values = 2 * batch * tokens * layers * kv_heads * head_dim
    return math.ceil(values * bytes_per_value)
