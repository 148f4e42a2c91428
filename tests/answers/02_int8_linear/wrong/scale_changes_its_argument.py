# todo: 1
# loses: test_todo_1
# hint: changed its argument x
def absmax_scale(x, qmax=127, eps=1e-8):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    return (x.abs_().max() / qmax).clamp(min=eps)
