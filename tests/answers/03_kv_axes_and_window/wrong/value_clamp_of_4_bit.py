# todo: 2
# loses: test_todo_2
# hint: with qmax = 127
import torch


def quantize_value_per_token(value, qmax=7, eps=1e-8):
    if value.ndim != 4:
        raise ValueError(f"value must have 4 dimensions, got {tuple(value.shape)}")
    values = value.float()
    peak = values.abs().amax(dim=3, keepdim=True)
    scale = (peak / qmax).clamp(min=eps)
    codes = (values / scale).round().clamp(-8, 7)
    return codes.to(torch.int8), scale
