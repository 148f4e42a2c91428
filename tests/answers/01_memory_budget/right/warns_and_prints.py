# todo: 1
import math
import sys
import warnings


def weight_bytes(parameters, bits):
    if parameters <= 0:
        raise ValueError(f"parameters must be positive, got {parameters}")
    if bits <= 0:
        raise ValueError(f"bits must be positive, got {bits}")
    warnings.warn("computing")
    print("bytes", file=sys.stderr)
    print("bytes")
    return math.ceil(parameters * bits / 8)


# todo: 2
import math
import warnings


def kv_cache_bytes(batch, tokens, layers, kv_heads, head_dim, bytes_per_value):
    for name, size in list(locals().items()):
        if size <= 0:
            raise ValueError(f"{name} must be positive, got {size}")
    warnings.warn("computing")
    return math.ceil(2 * batch * tokens * layers * kv_heads * head_dim * bytes_per_value)
