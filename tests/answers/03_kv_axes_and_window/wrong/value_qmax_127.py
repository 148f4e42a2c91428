# todo: 2
# loses: test_todo_2, test_todo_2_edges
# hint: you wrote 127 where qmax stands
import torch


def quantize_value_per_token(value, qmax=7, eps=1e-8):
    if value.ndim != 4:
        raise ValueError(f"value must have 4 dimensions, got {tuple(value.shape)}")
    values = value.float()
    peak = values.abs().amax(dim=3, keepdim=True)
    scale = (peak / 127).clamp(min=eps)
    codes = (values / scale).round().clamp(-127, 127)
    return codes.to(torch.int8), scale
