# todo: 2
def restore_segments(
    state: dict, bits: int, dtype: torch.dtype, unpack
) -> tuple[Tensor, Tensor]:
    """Every segment goes to its place in a tensor that is made first."""
    sides = []
    for side in ("key", "value"):
        batch, heads, _, head_dim = state[f"{side}_residual"].shape
        stored = [
            state[f"{side}_{part}_segments"] for part in ("q", "scale", "minimum")
        ]
        tokens = sum(packed.shape[2] for packed in stored[0])
        out = torch.empty(batch, heads, tokens, head_dim, dtype=dtype)
        at = 0
        for packed, scale, minimum in zip(*stored):
            found = restore(unpack(packed, bits, head_dim), scale, minimum)
            out[:, :, at : at + found.shape[2]] = found
            at += found.shape[2]
        sides.append(out)
    return tuple(sides)
