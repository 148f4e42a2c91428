# todo: 3
# loses: test_todo_3_stored, test_todo_3_model
# hint: append was called without the state of the last step
def update_layer(
    state: dict | None,
    key_states: Tensor,
    value_states: Tensor,
    restore_prefix,
    append,
) -> tuple[Tensor, Tensor, dict]:
    """What attention reads in this step, and the state after it.

    state           None in the first step, else what the last step returned
    key_states,     new tokens, [batch, heads, new, head_dim]
    value_states
    restore_prefix  restore_prefix(state, dtype) gives keys, values of all
                    quantized tokens, [batch, heads, quantized, head_dim] in
                    dtype; quantized may be 0; state must not be None
    append          append(state, key, value) gives the next state; state may
                    be None
    return          keys, values: [batch, heads, all tokens, head_dim], dtypes
                    of key_states and value_states: the quantized tokens,
                    the window, the new tokens; and the next state
    """
    # 1. no state: the new tokens are all there is to read
    # 2. else: restored tokens, key_residual or value_residual, new tokens
    # 3. append the new tokens, once, to the state that came in
    keys, values = key_states, value_states
    if state is not None:
        old_keys, old_values = restore_prefix(state, key_states.dtype)
        keys = torch.cat([old_keys, state["key_residual"], keys], dim=2)
        values = torch.cat([old_values, state["value_residual"], values], dim=2)
    return keys, values, append(None, key_states, value_states)
