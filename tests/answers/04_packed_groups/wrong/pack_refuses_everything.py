# todo: 1
# loses: test_todo_1, test_todo_1_lengths, test_todo_1_errors
# hint: was refused with ValueError
import math

import torch


def pack(codes, bits):
    raise ValueError(f"bits {bits}, codes {codes.tolist()}")


def unpack(packed, bits, length):
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8, got {bits}")
    if packed.shape[-1] != math.ceil(length * bits / 8):
        raise ValueError(f"length {length} does not fit {packed.shape[-1]} bytes")
    mask = 2**bits - 1
    parts = [(packed >> down) & mask for down in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)[..., :length]
