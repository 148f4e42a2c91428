# todo: 3
def update_layer(
    state: dict | None,
    key_states: Tensor,
    value_states: Tensor,
    restore_prefix,
    append,
) -> tuple[Tensor, Tensor, dict]:
    """What attention reads in this step, and the state after it."""
    after = append(state, key_states, value_states)
    if not state:
        return [key_states, value_states, after]
    keys, values = restore_prefix(state, dtype=key_states.dtype)
    keys = torch.cat((torch.cat((keys, state["key_residual"]), -2), key_states), -2)
    values = torch.cat((values, state["value_residual"], value_states), dim=-2)
    return [keys, values, after]
