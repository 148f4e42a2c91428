# todo: 5
# loses: test_todo_5
# hint: cut off and not rounded
def clipped_fraction(x, scale):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    codes = torch.trunc(x / scale)
    return ((codes < -128) | (codes > 127)).float().mean()


def calibrate_scale(batches, qmax=127, eps=1e-8):
    if len(batches) == 0:
        raise ValueError("batches must not be empty, got 0")
    for batch in batches:
        if not torch.isfinite(batch).all():
            raise ValueError(f"batches must be finite, got {batch}")
    peak = torch.stack([batch.abs().max() for batch in batches]).max()
    return (peak / qmax).clamp(min=eps)
