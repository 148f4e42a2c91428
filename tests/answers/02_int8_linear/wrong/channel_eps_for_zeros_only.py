# todo: 4
# loses: test_todo_4_errors
# hint: eps had no say, since they are not 0
def absmax_scale_per_output_channel(weight, qmax=127, eps=1e-8):
    if weight.ndim != 2:
        raise ValueError(f"weight must be [out, in], got {tuple(weight.shape)}")
    if not torch.isfinite(weight).all():
        raise ValueError(f"weight must be finite, got {weight}")
    peak = weight.abs().amax(dim=1, keepdim=True)
    return torch.where(peak == 0, eps, peak / qmax)
