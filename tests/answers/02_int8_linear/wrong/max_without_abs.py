# todo: 1
# loses: test_todo_1
# hint: sign included
def absmax_scale(x, qmax=127, eps=1e-8):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    return (x.max() / qmax).abs().clamp(min=eps)
