# todo: 2
import torch


def quantize_key_groups(key, bits=4, group_size=32, eps=1e-5):
    if key.dim() != 4:
        raise ValueError(f"key: {key.shape}")
    return _groups(key, bits, group_size, eps, 2)


def quantize_value_groups(value, bits=4, group_size=32, eps=1e-5):
    if value.dim() != 4:
        raise ValueError(f"value: {value.shape}")
    return _groups(value, bits, group_size, eps, 3)


def _groups(x, bits, group_size, eps, dim):
    if bits not in (2, 4, 8):
        raise ValueError(f"bits is {bits}")
    if group_size <= 0 or x.size(dim) % group_size != 0:
        raise ValueError(f"group_size is {group_size} and size {x.size(dim)}")
    top = 2**bits - 1
    parts = torch.stack(x.double().split(group_size, dim), 0)
    ends = parts.aminmax(dim=dim + 1)
    m = ends.min.movedim(0, dim).to(torch.float16)
    s = ((ends.max - ends.min) / top).movedim(0, dim).clamp_min(eps).to(torch.float16)
    wide = [t.double().repeat_interleave(group_size, dim) for t in (s, m)]
    codes = torch.clamp(torch.round((x.double() - wide[1]) / wide[0]), 0, top)
    return [codes.byte(), s, m]
