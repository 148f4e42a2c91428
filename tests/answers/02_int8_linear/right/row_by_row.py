# todo: 4
def absmax_scale_per_output_channel(weight, qmax=127, eps=1e-8):
    if len(weight.shape) != 2:
        raise ValueError(f"weight must have 2 dimensions, got shape {list(weight.shape)}")
    rows = []
    for row in weight:
        if not torch.isfinite(row).all():
            raise ValueError(f"weight must be finite, got {row}")
        peak = float(row.abs().max())
        rows.append([max(peak / qmax, eps)])
    return torch.tensor(rows)
