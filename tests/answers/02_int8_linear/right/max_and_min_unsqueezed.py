# todo: 4
def absmax_scale_per_output_channel(weight, qmax=127, eps=1e-8):
    if weight.dim() != 2 or not weight.isfinite().all():
        raise ValueError(f"weight of {weight.shape} must be a finite matrix: {weight}")
    peak = torch.maximum(weight.max(dim=1).values, -weight.min(dim=1).values)
    return torch.clamp(peak.double() / qmax, min=eps)[:, None]
