# todo: 5
def clipped_fraction(x, scale):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    steps = torch.round(x / scale)
    return (steps != steps.clamp(-128, 127)).double().mean()


def calibrate_scale(batches, qmax=127, eps=1e-8):
    if not batches:
        raise ValueError("batches must not be empty")
    every = torch.cat([batch.flatten() for batch in batches])
    if not torch.isfinite(every).all():
        raise ValueError("batches must be finite")
    return (every.abs().max() / qmax).clamp(min=eps)
