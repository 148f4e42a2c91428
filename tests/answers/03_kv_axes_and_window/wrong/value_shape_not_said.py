# todo: 2
# loses: test_todo_2_errors
# hint: must say what was given, (3, 5, 8)
import torch


def quantize_value_per_token(value, qmax=7, eps=1e-8):
    if value.ndim != 4:
        raise ValueError("value must have 4 dimensions")
    values = value.float()
    peak = values.abs().amax(dim=3, keepdim=True)
    scale = (peak / qmax).clamp(min=eps)
    codes = (values / scale).round().clamp(-qmax, qmax)
    return codes.to(torch.int8), scale
