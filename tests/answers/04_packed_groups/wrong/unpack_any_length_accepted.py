# todo: 1
# loses: test_todo_1_errors
# hint: length
import math

import torch


def pack(codes, bits):
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8, got {bits}")
    if codes.numel() and int(codes.max()) >= 2**bits:
        raise ValueError(f"codes up to {int(codes.max())} do not fit {bits} bits")
    per_byte = 8 // bits
    missing = -codes.shape[-1] % per_byte
    filled = torch.nn.functional.pad(codes, (0, missing))
    parts = filled.unflatten(-1, (-1, per_byte))
    packed = torch.zeros_like(parts[..., 0])
    for place in range(per_byte):
        packed |= parts[..., place] << (place * bits)
    return packed


def unpack(packed, bits, length):
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8, got {bits}")
    mask = 2**bits - 1
    parts = [(packed >> down) & mask for down in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)[..., :length]
