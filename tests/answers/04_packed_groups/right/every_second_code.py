# todo: 1
import math

import torch


def pack(codes, bits):
    if bits not in (2, 4, 8):
        raise ValueError(f"bits={bits}")
    if int(codes.max()) > 2**bits - 1:
        raise ValueError(f"codes: largest {int(codes.max())}")
    step = 8 // bits
    size = math.ceil(codes.shape[-1] / step)
    packed = torch.zeros((*codes.shape[:-1], size), dtype=torch.uint8)
    for place in range(step):
        part = codes[..., place::step]
        packed[..., : part.shape[-1]] += part << bits * place
    return packed


def unpack(packed, bits, length):
    if bits not in (2, 4, 8):
        raise ValueError(f"bits={bits}")
    step = 8 // bits
    if -(-length // step) != packed.shape[-1]:
        raise ValueError(f"length: {length}")
    codes = torch.zeros((*packed.shape[:-1], packed.shape[-1] * step), dtype=torch.uint8)
    for place in range(step):
        codes[..., place::step] = (packed >> bits * place) & ((1 << bits) - 1)
    return codes[..., :length]
