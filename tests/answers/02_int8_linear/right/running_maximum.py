# todo: 5
def clipped_fraction(x, scale):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    clipped = 0
    for code in torch.round(x / scale).flatten().tolist():
        clipped += code < -128 or code > 127
    return clipped / x.numel()


def calibrate_scale(batches, qmax=127, eps=1e-8):
    peak = None
    for batch in batches:
        here = batch.abs().max().item()
        if not here < float("inf"):
            raise ValueError(f"batches must be finite, got a peak of {here}")
        peak = here if peak is None else max(peak, here)
    if peak is None:
        raise ValueError("batches must hold a tensor, got none")
    return max(peak / qmax, eps)
