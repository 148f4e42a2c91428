# lab: 02_int8_linear
# todo: 1
# earns: 0
import torch


def absmax_scale(x, qmax=127, eps=1e-8):
    return torch.full((), float("nan"))
