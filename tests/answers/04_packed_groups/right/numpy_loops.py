# todo: 1
import math

import torch


import numpy as np


def pack(codes, bits):
    if bits not in (2, 4, 8):
        raise ValueError(f"bits {bits}")
    array = codes.numpy()
    if array.max() >= 2**bits:
        raise ValueError(f"codes {array.max()}")
    rows = array.reshape(-1, array.shape[-1])
    size = (array.shape[-1] * bits + 7) // 8
    out = np.zeros((len(rows), size), dtype=np.uint8)
    for r, row in enumerate(rows):
        for n, code in enumerate(row):
            out[r, n * bits // 8] |= code << (n * bits % 8)
    return torch.from_numpy(out).reshape(*codes.shape[:-1], size)


def unpack(packed, bits, length):
    if bits not in (2, 4, 8):
        raise ValueError(f"bits {bits}")
    if (length * bits + 7) // 8 != packed.shape[-1]:
        raise ValueError(f"length {length}")
    out = [
        [(row[n * bits // 8] >> (n * bits % 8)) & (2**bits - 1) for n in range(length)]
        for row in packed.reshape(-1, packed.shape[-1]).tolist()
    ]
    return torch.tensor(out, dtype=torch.uint8).reshape(*packed.shape[:-1], length)
