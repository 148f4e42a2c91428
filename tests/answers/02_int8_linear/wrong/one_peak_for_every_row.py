# todo: 4
# loses: test_todo_4, test_todo_4_errors
# hint: the same for every row
def absmax_scale_per_output_channel(weight, qmax=127, eps=1e-8):
    if weight.ndim != 2:
        raise ValueError(f"weight must be [out, in], got {tuple(weight.shape)}")
    if not torch.isfinite(weight).all():
        raise ValueError(f"weight must be finite, got {weight}")
    peak = weight.abs().max().expand(weight.shape[0], 1)
    return (peak / qmax).clamp(min=eps)
