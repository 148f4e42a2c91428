# todo: 5
# loses: test_todo_5_errors
# hint: there is none) was accepted
def clipped_fraction(x, scale):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    codes = torch.round(x / scale)
    return float(((codes < -128) | (codes > 127)).float().mean())


def calibrate_scale(batches, qmax=127, eps=1e-8):
    peak = max((float(batch.abs().max()) for batch in batches), default=0.0)
    return torch.tensor(max(peak / qmax, eps))
