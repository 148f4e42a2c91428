# todo: 3
def update_layer(
    state: dict | None,
    key_states: Tensor,
    value_states: Tensor,
    restore_prefix,
    append,
) -> tuple[Tensor, Tensor, dict]:
    """What attention reads in this step, and the state after it."""
    if state is None:
        return key_states, value_states, append(None, key_states, value_states)
    read = []
    restored = restore_prefix(state, key_states.dtype)
    windows = state["key_residual"], state["value_residual"]
    for old, window, new in zip(restored, windows, (key_states, value_states)):
        sizes = [part.shape[2] for part in (old, window, new)]
        out = new.new_empty(new.shape[0], new.shape[1], sum(sizes), new.shape[3])
        for target, part in zip(out.split(sizes, dim=2), (old, window, new)):
            target.copy_(part)
        read.append(out)
    return read[0], read[1], append(state, key_states, value_states)
