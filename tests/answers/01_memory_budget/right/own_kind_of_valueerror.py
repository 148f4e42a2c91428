# todo: 1
import math


class NotPositive(ValueError):
    pass


def weight_bytes(parameters: int, bits: float = 16) -> int:
    for name, value in (("parameters", parameters), ("bits", bits)):
        if value <= 0:
            raise NotPositive(name, value)
    return math.ceil(bits / 8 * parameters)


# todo: 2
import math


def kv_cache_bytes(
    batch, tokens, layers, kv_heads, head_dim, bytes_per_value=2, *, check=True
):
    names = "batch tokens layers kv_heads head_dim bytes_per_value".split()
    given = (batch, tokens, layers, kv_heads, head_dim, bytes_per_value)
    bad = [(n, g) for n, g in zip(names, given) if g <= 0]
    if check and bad:
        raise ValueError(f"not positive: {bad}")
    one_vector = head_dim * bytes_per_value
    one_token = 2 * layers * kv_heads * one_vector
    return math.ceil(one_token * tokens * batch)
