# todo: 4
import copy


def names():
    for side in ("key", "value"):
        for part in ("q", "scale", "minimum"):
            yield f"{side}_{part}_segments"


def seq_length(state):
    if not state:
        return 0
    window = state["value_residual"].size(2)
    return window + sum(part.size(-2) for part in state["key_q_segments"])


def held_bytes(state):
    if not state:
        return 0
    tensors = [state["key_residual"], state["value_residual"]]
    for name in names():
        tensors.extend(state[name])
    return sum(t.numel() * t.element_size() for t in tensors)


def select_rows(state, rows):
    new = copy.deepcopy(state)
    for name in names():
        new[name] = [t.index_select(0, rows) for t in new[name]]
    for name in ("key_residual", "value_residual"):
        new[name] = torch.stack([new[name][int(row)] for row in rows])
    return new


def drop_newest(state, count):
    held = state["key_residual"].shape[2]
    if not 0 <= count <= held:
        raise ValueError(f"count={count} is not between 0 and {held}")
    new = dict(state)
    for name in ("key_residual", "value_residual"):
        new[name] = state[name].narrow(2, 0, held - count).clone()
    new["total_tokens"] = new["total_tokens"] - count
    return new
