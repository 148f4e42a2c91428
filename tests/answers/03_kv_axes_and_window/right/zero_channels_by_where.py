# todo: 1
import torch


def quantize_key_per_channel(key, qmax=7, eps=1e-8):
    if key.ndim != 4:
        raise ValueError(f"key must have 4 dimensions, got {tuple(key.shape)}")
    values = key.float()
    peak = values.abs().amax(dim=2, keepdim=True)
    scale = torch.where(peak < eps, eps, peak) / qmax
    codes = (values / scale).round().clamp(-qmax, qmax)
    return codes.to(torch.int8), scale


# todo: 2
import torch


def quantize_value_per_token(value, qmax=7, eps=1e-8):
    if value.ndim != 4:
        raise ValueError(f"value must have 4 dimensions, got {tuple(value.shape)}")
    values = value.float()
    peak = values.abs().amax(dim=3, keepdim=True)
    scale = peak / qmax
    scale[scale < eps] = eps
    codes = (values / scale).round().clamp(-qmax, qmax)
    return codes.to(torch.int8), scale
