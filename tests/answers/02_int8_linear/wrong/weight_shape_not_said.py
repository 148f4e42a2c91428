# todo: 4
# loses: test_todo_4_errors
# hint: must say what was given, (6,)
def absmax_scale_per_output_channel(weight, qmax=127, eps=1e-8):
    if weight.ndim != 2:
        raise ValueError(f"weight must be [out, in], which it is not")
    if not torch.isfinite(weight).all():
        raise ValueError(f"weight must be finite, got {weight}")
    peak = weight.abs().amax(dim=1, keepdim=True)
    return (peak / qmax).clamp(min=eps)
