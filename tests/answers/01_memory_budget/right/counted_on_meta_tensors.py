# todo: 2
import math
import torch


def kv_cache_bytes(batch, tokens, layers, kv_heads, head_dim, bytes_per_value):
    for name, size in list(locals().items()):
        if size <= 0:
            raise ValueError(f"{name} must be positive, got {size}")
    values = 0
    for _ in range(layers):
        key = torch.empty(batch, kv_heads, tokens, head_dim, device="meta")
        value = torch.empty_like(key)
        values += key.numel() + value.numel()
    return math.ceil(values * bytes_per_value)
