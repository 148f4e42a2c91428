# todo: 2
def restore_segments(
    state: dict, bits: int, dtype: torch.dtype, unpack
) -> tuple[Tensor, Tensor]:
    """Arithmetic in the dtype that is asked for; a list comes back."""

    def floats(side, number, head_dim):
        packed = state[f"{side}_q_segments"][number]
        codes = unpack(packed, bits=bits, length=head_dim).to(dtype)
        for part in ("scale", "minimum"):
            held = state[f"{side}_{part}_segments"][number].to(dtype)
            for axis in (2, 3):
                times = codes.shape[axis] // held.shape[axis]
                held = held.repeat_interleave(times, dim=axis)
            codes = codes * held if part == "scale" else codes + held
        return codes

    found = []
    for side in ("key", "value"):
        window = state[f"{side}_residual"]
        count = len(state[f"{side}_q_segments"])
        parts = [floats(side, n, window.shape[-1]) for n in range(count)]
        if not parts:
            parts = [torch.zeros_like(window, dtype=dtype)[:, :, :0]]
        found.append(torch.cat(parts, dim=-2))
    return found
