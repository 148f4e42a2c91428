# todo: 4
def absmax_scale_per_output_channel(weight, qmax=127, eps=1e-8):
    if len(weight.shape) != 2:
        raise ValueError(f"weight must have 2 dimensions, got {weight.ndim}")
    rows = []
    for row in weight:
        if not torch.isfinite(row).all():
            raise ValueError(f"weight must be finite, got {row}")
        peak = float(row.abs().max())
        rows.append([peak / qmax if peak > 0 else 1.0])
    return torch.tensor(rows)
