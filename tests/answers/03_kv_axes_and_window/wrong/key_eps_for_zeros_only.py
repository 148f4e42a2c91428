# todo: 1
# loses: test_todo_1_edges
# hint: eps had no say, since they are not 0
import torch


def quantize_key_per_channel(key, qmax=7, eps=1e-8):
    if key.ndim != 4:
        raise ValueError(f"key must have 4 dimensions, got {tuple(key.shape)}")
    values = key.float()
    peak = values.abs().amax(dim=2, keepdim=True)
    scale = torch.where(peak == 0, eps, peak / qmax)
    codes = (values / scale).round().clamp(-qmax, qmax)
    return codes.to(torch.int8), scale
