# todo: 2
# loses: test_todo_2, test_todo_2_edges
# hint: so length is head_dim
def restore_segments(
    state: dict, bits: int, dtype: torch.dtype, unpack
) -> tuple[Tensor, Tensor]:
    """The quantized tokens of a layer as floats, oldest first.

    state   as append_by_groups returns it, with packed codes
    bits    of a code: 2, 4 or 8
    dtype   of the result; compute in float32 and convert at the end
    unpack  unpack(packed, bits, length) gives the codes, uint8
    return  keys, values: each [batch, heads, quantized tokens, head_dim],
            without the window; state is not changed
    """
    # for Keys, then for Values:
    # 1. take the three lists of segments
    # 2. of each segment, unpack the codes (how many has a row?) and restore
    # 3. join the segments along tokens; without any, 0 tokens
    # 4. dtype
    sides = []
    for side in ("key", "value"):
        window = state[f"{side}_residual"]
        parts = [window[:, :, :0].to(dtype)]
        for packed, scale, minimum in zip(
            state[f"{side}_q_segments"],
            state[f"{side}_scale_segments"],
            state[f"{side}_minimum_segments"],
            strict=True,
        ):
            codes = unpack(packed, bits, packed.shape[-1] * 8 // bits)
            parts.append(restore(codes, scale, minimum).to(dtype))
        sides.append(torch.cat(parts, dim=2))
    return sides[0], sides[1]
