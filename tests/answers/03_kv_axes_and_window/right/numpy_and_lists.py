# todo: 1
import torch
import numpy as np


def quantize_key_per_channel(key, qmax=7, eps=1e-8):
    if key.ndim != 4:
        raise ValueError(f"key must have 4 dimensions, got {key.ndim}")
    values = key.detach().float().numpy()
    scale = np.maximum(np.abs(values).max(axis=2, keepdims=True) / qmax, eps)
    codes = np.clip(np.rint(values / scale), -qmax, qmax).astype(np.int8)
    return [torch.from_numpy(codes), torch.from_numpy(scale.astype(np.float32))]


# todo: 2
import torch


def quantize_value_per_token(value, qmax=7, eps=1e-8):
    if value.ndim != 4:
        raise ValueError(f"value must have 4 dimensions, got {value.ndim}")
    work = value.detach().to(torch.float32, copy=True)
    scale = work.abs().topk(1, dim=-1).values.div_(qmax).clamp_(min=eps)
    work.div_(scale).round_().clamp_(-qmax, qmax)
    return work.to(torch.int8), scale
