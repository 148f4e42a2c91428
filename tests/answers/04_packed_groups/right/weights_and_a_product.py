# todo: 1
import math

import torch


def pack(codes, bits):
    if bits not in {2, 4, 8}:
        raise ValueError("bits: 2, 4 or 8, not %d" % bits)
    if (codes > 2**bits - 1).any():
        raise ValueError("codes: %d is too large" % codes.max())
    share = 8 // bits
    n = codes.size(-1)
    size = (n + share - 1) // share
    wide = codes.new_zeros(*codes.shape[:-1], size * share, dtype=torch.int64)
    wide[..., :n] = codes
    weights = 2 ** (bits * torch.arange(share))
    return (wide.reshape(*codes.shape[:-1], size, share) * weights).sum(-1).to(torch.uint8)


def unpack(packed, bits, length):
    if bits not in {2, 4, 8}:
        raise ValueError("bits: 2, 4 or 8, not %d" % bits)
    if (length * bits + 7) // 8 != packed.size(-1) or length < 1:
        raise ValueError("length=%d" % length)
    shifts = torch.arange(0, 8, bits)
    codes = (packed.unsqueeze(-1).long() >> shifts) % 2**bits
    return codes.reshape(*packed.shape[:-1], -1).narrow(-1, 0, length).byte()
