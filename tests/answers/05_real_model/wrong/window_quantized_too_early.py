# todo: 3
# loses: test_todo_3
# hint: and they were in the window
def update_layer(
    state: dict | None,
    key_states: Tensor,
    value_states: Tensor,
    restore_prefix,
    append,
) -> tuple[Tensor, Tensor, dict]:
    """What attention reads in this step, and the state after it."""
    if state is None:
        return key_states, value_states, append(state, key_states, value_states)
    new = key_states.shape[2]
    state = append(state, key_states, value_states)
    keys, values = restore_prefix(state, key_states.dtype)
    keys = torch.cat([keys, state["key_residual"]], dim=2)[:, :, :-new]
    values = torch.cat([values, state["value_residual"]], dim=2)[:, :, :-new]
    keys = torch.cat([keys, key_states], dim=2)
    values = torch.cat([values, value_states], dim=2)
    return keys, values, state
