# todo: 1
# loses: test_todo_1_append
# hint: append_by_groups is missing in this notebook
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
    packed = torch.zeros_like(parts[..., 0])
    for place in range(per_byte):
        packed |= parts[..., place] << (place * bits)
    return packed


def unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """Lab 04, TODO 1: the codes that were packed, `length` of them."""
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8, got {bits}")
    if packed.shape[-1] != math.ceil(length * bits / 8):
        raise ValueError(
            f"length {length} at {bits} bits does not take {packed.shape[-1]} bytes"
        )
    mask = 2**bits - 1
    parts = [(packed >> down) & mask for down in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)[..., :length]


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
