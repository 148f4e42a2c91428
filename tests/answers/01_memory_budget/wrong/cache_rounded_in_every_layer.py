# todo: 2
# loses: test_todo_2
# hint: the bytes of each layer up
import math


def kv_cache_bytes(batch, tokens, layers, kv_heads, head_dim, bytes_per_value):
    for name, size in list(locals().items()):
        if size <= 0:
            raise ValueError(f"{name} must be positive, got {size}")
    one_layer = 2 * batch * tokens * kv_heads * head_dim * bytes_per_value
    return layers * math.ceil(one_layer)
