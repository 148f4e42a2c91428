# todo: 1
# loses: test_todo_1
# hint: max - min
def absmax_scale(x, qmax=127, eps=1e-8):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    return ((x.max() - x.min()) / (2 * qmax + 1)).clamp(min=eps)
