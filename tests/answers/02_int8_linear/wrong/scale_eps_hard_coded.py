# todo: 1
# loses: test_todo_1_errors
# hint: an eps of its own, 1e-08
def absmax_scale(x, qmax=127, eps=1e-8):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    peak = x.abs().max()
    return (peak / qmax).clamp(min=1e-8)
