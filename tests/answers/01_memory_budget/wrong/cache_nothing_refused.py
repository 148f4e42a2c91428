# todo: 2
# loses: test_todo_2_errors
# hint: batch (it is 0) was accepted
import math


def kv_cache_bytes(batch, tokens, layers, kv_heads, head_dim, bytes_per_value):
    return math.ceil(2 * batch * tokens * layers * kv_heads * head_dim * bytes_per_value)
