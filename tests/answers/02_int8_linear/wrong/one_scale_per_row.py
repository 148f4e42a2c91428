# todo: 1
# loses: test_todo_1
# hint: one scale for each slice
def absmax_scale(x, qmax=127, eps=1e-8):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    if x.ndim < 2:
        return (x.abs().max() / qmax).clamp(min=eps)
    if not x.any():
        return torch.tensor(eps)
    return (x.abs().amax(dim=-1, keepdim=True) / qmax).clamp(min=eps)
