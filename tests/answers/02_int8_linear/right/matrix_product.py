# todo: 3
def linear_error_bound(x, scale):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    half_steps = (scale.reshape(-1, 1) / 2).expand(-1, x.shape[1])
    return x.abs() @ half_steps.T
