# todo: 3
def linear_error_bound(x, scale):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    return torch.einsum("bi,o->bo", x.abs().double(), scale.double().flatten()) * 0.5
