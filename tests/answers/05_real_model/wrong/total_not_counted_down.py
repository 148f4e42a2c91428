# todo: 4
# loses: test_todo_4_drop
# hint: total_tokens is
def seq_length(state: dict | None) -> int:
    """How many tokens a layer holds; 0 while its state is None."""
    return 0 if state is None else state["total_tokens"]


def held_bytes(state: dict | None) -> int:
    """Bytes of all tensors of a state, whatever their dtype; 0 for None."""
    # the six lists of segments, and the two tensors of the window
    if state is None:
        return 0
    total = 0
    for held in state.values():
        if isinstance(held, Tensor):
            total += held.nbytes
        elif isinstance(held, list):
            total += sum(part.nbytes for part in held)
    return total


def select_rows(state: dict, rows: Tensor) -> dict:
    """The state of the chosen sequences, in the order of rows.

    state   as append_by_groups returns it; it is not changed
    rows    int64 [new batch]: numbers of rows, any order, repeats allowed
    return  a state in which row i of every tensor is the old row rows[i];
            the counters stay
    """
    # every tensor of the state has the batch as its first dimension
    chosen = {}
    for name, held in state.items():
        if isinstance(held, Tensor):
            held = held[rows]
        elif isinstance(held, list):
            held = [part[rows] for part in held]
        chosen[name] = held
    return chosen


def drop_newest(state: dict, count: int) -> dict:
    """The state without its newest tokens.

    state   as append_by_groups returns it; it is not changed
    count   how many tokens of the window to drop; 0 drops none
    return  a state with a shorter window and a smaller total_tokens; the
            segments stay
    raises  ValueError that names count and its value when it is below 0 or
            more than the window holds
    """
    left = state["key_residual"].shape[2] - count
    if count < 0 or left < 0:
        raise ValueError(
            f"count must be from 0 to {left + count}, the tokens of the "
            f"window, got {count}"
        )
    return state | {
        "key_residual": state["key_residual"][:, :, :left],
        "value_residual": state["value_residual"][:, :, :left],
        "total_tokens": state["total_tokens"],
    }
