# todo: 1
import torch


def quantize_key_per_channel(key, qmax=7, eps=1e-8):
    if key.ndim != 4:
        raise ValueError(f"key must have 4 dimensions, got {tuple(key.shape)}")
    values = key.float()
    peak = torch.linalg.vector_norm(values, ord=float("inf"), dim=2, keepdim=True)
    scale = (peak / qmax).clamp(min=eps)
    codes = (values / scale).round().clamp(-qmax, qmax)
    return codes.to(torch.int8), scale


# todo: 2
import torch


def quantize_value_per_token(value, qmax=7, eps=1e-8):
    if value.dim() != 4:
        raise ValueError(f"value has {value.dim()} dimensions, 4 are needed")
    last = value.float().permute(3, 0, 1, 2)
    peak = torch.maximum(last.max(dim=0).values, -last.min(dim=0).values)
    scale = torch.clamp_min(peak / qmax, eps)
    codes = torch.floor(last / scale + 0.5).clamp(-qmax, qmax).char()
    return codes.permute(1, 2, 3, 0), scale.unsqueeze(-1)
