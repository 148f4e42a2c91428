# todo: 1
import math
from fractions import Fraction


def weight_bytes(parameters, bits):
    if parameters <= 0:
        raise ValueError(f"parameters must be positive, got {parameters}")
    if bits <= 0:
        raise ValueError(f"bits must be positive, got {bits}")
    return math.ceil(Fraction(bits) * parameters / 8)


# todo: 2
import math
from fractions import Fraction


def kv_cache_bytes(batch, tokens, layers, kv_heads, head_dim, bytes_per_value):
    for name, size in list(locals().items()):
        if size <= 0:
            raise ValueError(f"{name} must be positive, got {size}")
    values = 2 * batch * tokens * layers * kv_heads * head_dim
    return math.ceil(values * Fraction(bytes_per_value))


# todo: 4
from fractions import Fraction


def decode_tokens_per_second(
    bandwidth_bytes_per_second, weight_bytes, kv_bytes, batch
):
    for name, size in list(locals().items()):
        if size < 0 or (size == 0 and name != "kv_bytes"):
            raise ValueError(f"{name}: {size} is not allowed")
    step = Fraction(weight_bytes + batch * kv_bytes) / Fraction(bandwidth_bytes_per_second)
    return batch / step
