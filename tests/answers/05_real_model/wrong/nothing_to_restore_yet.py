# todo: 3
# loses: test_todo_3, test_todo_3_stored, test_todo_3_model
# hint: In the first call state is None
def update_layer(
    state: dict | None,
    key_states: Tensor,
    value_states: Tensor,
    restore_prefix,
    append,
) -> tuple[Tensor, Tensor, dict]:
    """What attention reads in this step, and the state after it."""
    keys, values = restore_prefix(state, key_states.dtype)
    if state is not None:
        keys = torch.cat([keys, state["key_residual"]], dim=2)
        values = torch.cat([values, state["value_residual"]], dim=2)
    keys = torch.cat([keys, key_states], dim=2)
    values = torch.cat([values, value_states], dim=2)
    return keys, values, append(state, key_states, value_states)
