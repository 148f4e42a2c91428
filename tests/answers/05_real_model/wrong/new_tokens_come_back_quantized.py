# todo: 3
# loses: test_todo_3
# hint: come back quantized, and they are new
def update_layer(
    state: dict | None,
    key_states: Tensor,
    value_states: Tensor,
    restore_prefix,
    append,
) -> tuple[Tensor, Tensor, dict]:
    """What attention reads in this step, and the state after it."""
    state = append(state, key_states, value_states)
    keys, values = restore_prefix(state, key_states.dtype)
    keys = torch.cat([keys, state["key_residual"]], dim=2)
    values = torch.cat([values, state["value_residual"]], dim=2)
    return keys, values, state
