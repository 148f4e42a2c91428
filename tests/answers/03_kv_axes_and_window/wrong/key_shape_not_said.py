# todo: 1
# loses: test_todo_1_errors
# hint: must say what was given, (3, 5, 8)
import torch


def quantize_key_per_channel(key, qmax=7, eps=1e-8):
    if key.ndim != 4:
        raise ValueError("key must have 4 dimensions")
    values = key.float()
    peak = values.abs().amax(dim=2, keepdim=True)
    scale = (peak / qmax).clamp(min=eps)
    codes = (values / scale).round().clamp(-qmax, qmax)
    return codes.to(torch.int8), scale
