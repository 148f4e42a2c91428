# todo: 1
def pack(codes: Tensor, bits: int) -> Tensor:
    """Lab 04, TODO 1: 8 / bits codes in each byte."""
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8, got {bits}")
    if codes.numel() and int(codes.max()) >= 2**bits:
        raise ValueError(
            f"codes must be below {2**bits} at {bits} bits, got {int(codes.max())}"
        )
    per_byte = 8 // bits
    missing = -codes.shape[-1] % per_byte
    filled = torch.nn.functional.pad(codes, (0, missing))
    parts = filled.unflatten(-1, (-1, per_byte))
    weights = 2 ** (bits * torch.arange(per_byte))
    return (parts.int() * weights).sum(dim=-1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """Lab 04, TODO 1: the codes that were packed, `length` of them."""
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8, got {bits}")
    if packed.shape[-1] != math.ceil(length * bits / 8):
        raise ValueError(
            f"length {length} at {bits} bits does not take {packed.shape[-1]} bytes"
        )
    mask = 2**bits - 1
    codes = torch.zeros(*packed.shape[:-1], length, dtype=torch.uint8)
    for at in range(length):
        byte, place = divmod(at, 8 // bits)
        codes[..., at] = (packed[..., byte] >> (place * bits)) & mask
    return codes


def quantize_key_groups(
    key: Tensor, bits: int = 4, group_size: int = 32, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """Lab 04, TODO 2: codes, scale and minimum, groups along tokens."""
    if key.ndim != 4:
        raise ValueError(
            "key must be [batch, heads, tokens, head_dim], "
            f"got shape {tuple(key.shape)}"
        )
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8, got {bits}")
    tokens = key.shape[2]
    if group_size < 1 or tokens % group_size:
        raise ValueError(
            f"group_size must divide the {tokens} tokens, got {group_size}"
        )
    largest = 2**bits - 1
    groups = key.float().unflatten(2, (-1, group_size))
    low = groups.amin(dim=3, keepdim=True)
    high = groups.amax(dim=3, keepdim=True)
    scale = ((high - low) / largest).clamp(min=eps).half()
    minimum = low.half()
    steps = (groups - minimum.float()) / scale.float()
    codes = steps.round().clamp(0, largest).to(torch.uint8)
    return codes.flatten(2, 3), scale.squeeze(3), minimum.squeeze(3)


def quantize_value_groups(
    value: Tensor, bits: int = 4, group_size: int = 32, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """Lab 04, TODO 2: codes, scale and minimum, groups along head_dim."""
    if value.ndim != 4:
        raise ValueError(
            "value must be [batch, heads, tokens, head_dim], "
            f"got shape {tuple(value.shape)}"
        )
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8, got {bits}")
    head_dim = value.shape[3]
    if group_size < 1 or head_dim % group_size:
        raise ValueError(
            f"group_size must divide head_dim {head_dim}, got {group_size}"
        )
    largest = 2**bits - 1
    groups = value.float().unflatten(3, (-1, group_size))
    low = groups.amin(dim=4, keepdim=True)
    high = groups.amax(dim=4, keepdim=True)
    scale = ((high - low) / largest).clamp(min=eps).half()
    minimum = low.half()
    steps = (groups - minimum.float()) / scale.float()
    codes = steps.round().clamp(0, largest).to(torch.uint8)
    return codes.flatten(3, 4), scale.squeeze(4), minimum.squeeze(4)


def append_by_groups(
    state: dict | None,
    new_key: Tensor,
    new_value: Tensor,
    residual_length: int,
    group_size: int,
    quantize_key,
    quantize_value,
) -> dict:
    """Lab 04, TODO 3: the state after new tokens; whole groups flush."""
    segments = [
        f"{side}_{part}_segments"
        for side in ("key", "value")
        for part in ("q", "scale", "minimum")
    ]
    if state is None:
        lists = {name: [] for name in segments}
        keys, values = new_key, new_value
        quantized = 0
    else:
        lists = {name: list(state[name]) for name in segments}
        keys = torch.cat([state["key_residual"], new_key], dim=2)
        values = torch.cat([state["value_residual"], new_value], dim=2)
        quantized = state["quantized_tokens"]

    too_many = max(0, keys.shape[2] - residual_length)
    flushed = too_many // group_size * group_size
    if flushed:
        parts = (
            *quantize_key(keys[:, :, :flushed]),
            *quantize_value(values[:, :, :flushed]),
        )
        for name, part in zip(segments, parts, strict=True):
            lists[name].append(part)

    return lists | {
        "key_residual": keys[:, :, flushed:].clone(),
        "value_residual": values[:, :, flushed:].clone(),
        "flushed_tokens": flushed,
        "quantized_tokens": quantized + flushed,
        "total_tokens": quantized + keys.shape[2],
    }
