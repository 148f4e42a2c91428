# todo: 4
# loses: test_todo_4_errors
# hint: was accepted
def absmax_scale_per_output_channel(weight, qmax=127, eps=1e-8):
    if not torch.isfinite(weight).all():
        raise ValueError(f"weight must be finite, got {weight}")
    return (weight.abs().amax(dim=-1, keepdim=True) / qmax).clamp(min=eps)
