# todo: 1
def absmax_scale(x, qmax=127, eps=1e-8):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    every = tuple(range(x.ndim))
    return torch.linalg.vector_norm(x, float("inf"), dim=every, keepdim=True).div(
        qmax
    ).clamp_min(eps)
