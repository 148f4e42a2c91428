# todo: 3
# loses: test_todo_3
# hint: dimension was not kept
def linear_error_bound(x, scale):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    if scale.numel() == 1:
        return x.abs().sum(dim=1) * scale / 2
    return x.abs().sum(dim=1, keepdim=True) * scale.T / 2
