# todo: 2
import torch


def _quantize(x, bits, size, eps, axis):
    if bits not in (2, 4, 8):
        raise ValueError(f"bits={bits}")
    if size < 1 or x.shape[axis] % size != 0:
        raise ValueError(f"group_size={size}")
    top = 2**bits - 1
    x = x.to(torch.float32)
    shape = list(x.shape)
    shape[axis] //= size
    codes = torch.zeros(x.shape, dtype=torch.uint8)
    scale = torch.zeros(shape, dtype=torch.float16)
    minimum = torch.zeros(shape, dtype=torch.float16)
    for n in range(shape[axis]):
        part = x.narrow(axis, n * size, size)
        low, _ = part.min(dim=axis)
        high, _ = part.max(dim=axis)
        step = torch.maximum((high - low) / top, torch.tensor(eps))
        scale.select(axis, n).copy_(step)
        minimum.select(axis, n).copy_(low)
        s = scale.narrow(axis, n, 1).float()
        m = minimum.narrow(axis, n, 1).float()
        # adding a half and cutting rounds to the nearest as well
        codes.narrow(axis, n * size, size).copy_(((part - m) / s + 0.5).clamp(0, top).floor())
    return codes, scale, minimum


def quantize_key_groups(key, bits=4, group_size=32, eps=1e-5):
    if key.ndim != 4:
        raise ValueError(f"key is {list(key.shape)}")
    return _quantize(key, bits, group_size, eps, 2)


def quantize_value_groups(value, bits=4, group_size=32, eps=1e-5):
    if value.ndim != 4:
        raise ValueError(f"value is {list(value.shape)}")
    return _quantize(value, bits, group_size, eps, 3)
