# todo: 1
def absmax_scale(x, qmax=127, eps=1e-8):
    if x.isnan().any() or x.isinf().any():
        raise ValueError(f"x must be finite, got {x}")
    low, high = torch.aminmax(x)
    peak = torch.maximum(-low, high).double()
    return torch.where(peak < eps, eps, peak) / qmax
