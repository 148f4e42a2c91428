# todo: 1
# loses: test_todo_1, test_todo_1_errors
# hint: upside down
def absmax_scale(x, qmax=127, eps=1e-8):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    return qmax / x.abs().max().clamp(min=eps)
