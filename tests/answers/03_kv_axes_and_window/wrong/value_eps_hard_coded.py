# todo: 2
# loses: test_todo_2_edges
# hint: an eps of its own, 1e-08
import torch


def quantize_value_per_token(value, qmax=7, eps=1e-8):
    if value.ndim != 4:
        raise ValueError(f"value must have 4 dimensions, got {tuple(value.shape)}")
    values = value.float()
    peak = values.abs().amax(dim=3, keepdim=True)
    scale = (peak / qmax).clamp(min=1e-8)
    codes = (values / scale).round().clamp(-qmax, qmax)
    return codes.to(torch.int8), scale
