# todo: 1
# loses: test_todo_1
# hint: divides by 128
def absmax_scale(x, qmax=127, eps=1e-8):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    return (x.abs().max() / (qmax + 1)).clamp(min=eps)
