# todo: 2
# loses: test_todo_2_errors
# hint: bytes_per_value (it is 0) was accepted
import math


def kv_cache_bytes(batch, tokens, layers, kv_heads, head_dim, bytes_per_value):
    counts = [batch, tokens, layers, kv_heads, head_dim]
    for name, size in zip(["batch", "tokens", "layers", "kv_heads", "head_dim"], counts):
        if size <= 0:
            raise ValueError(f"{name} must be positive, got {size}")
    return math.ceil(2 * batch * tokens * layers * kv_heads * head_dim * bytes_per_value)
