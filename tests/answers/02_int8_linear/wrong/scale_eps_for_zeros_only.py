# todo: 1
# loses: test_todo_1_errors
# hint: eps had no say, since they are not 0
def absmax_scale(x, qmax=127, eps=1e-8):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    peak = x.abs().max()
    return torch.where(peak == 0, eps, peak / qmax)
