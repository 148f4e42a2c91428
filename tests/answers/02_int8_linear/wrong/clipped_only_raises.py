# todo: 5
# loses: test_todo_5, test_todo_5_errors
# hint: was refused with ValueError
def clipped_fraction(x, scale):
    raise ValueError(f"x or scale is bad: {x} {scale}")


def calibrate_scale(batches, qmax=127, eps=1e-8):
    if len(batches) == 0:
        raise ValueError("batches must not be empty, got 0")
    for batch in batches:
        if not torch.isfinite(batch).all():
            raise ValueError(f"batches must be finite, got {batch}")
    peak = torch.stack([batch.abs().max() for batch in batches]).max()
    return (peak / qmax).clamp(min=eps)
