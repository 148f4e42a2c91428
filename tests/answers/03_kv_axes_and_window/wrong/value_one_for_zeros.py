# todo: 2
# loses: test_todo_2_edges
# hint: eps had no say
import torch


def quantize_value_per_token(value, qmax=7, eps=1e-8):
    if value.ndim != 4:
        raise ValueError(f"value must have 4 dimensions, got {tuple(value.shape)}")
    values = value.float()
    peak = values.abs().amax(dim=3, keepdim=True)
    scale = torch.where(peak == 0, torch.ones_like(peak), peak / qmax)
    codes = (values / scale).round().clamp(-qmax, qmax)
    return codes.to(torch.int8), scale
