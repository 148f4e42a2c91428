# todo: 3
# loses: test_todo_3, test_todo_3_model
# hint: these are the new tokens alone
def update_layer(
    state: dict | None,
    key_states: Tensor,
    value_states: Tensor,
    restore_prefix,
    append,
) -> tuple[Tensor, Tensor, dict]:
    """What attention reads in this step, and the state after it."""
    return key_states, value_states, append(state, key_states, value_states)
