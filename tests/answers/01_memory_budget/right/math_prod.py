# todo: 2
import math


def kv_cache_bytes(batch, tokens, layers, kv_heads, head_dim, bytes_per_value):
    sizes = dict(
        batch=batch,
        tokens=tokens,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        bytes_per_value=bytes_per_value,
    )
    for name in sizes:
        if not sizes[name] > 0:
            raise ValueError("%s = %r is not positive" % (name, sizes[name]))
    return math.ceil(math.prod(sizes.values()) * 2)
