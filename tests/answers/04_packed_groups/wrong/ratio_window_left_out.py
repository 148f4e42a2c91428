# todo: 4
# loses: test_todo_4_ratio
# hint: left out
def stored_bytes(state):
    def total(part):
        held = state[f"key_{part}_segments"] + state[f"value_{part}_segments"]
        return sum(tensor.nbytes for tensor in held)

    return {
        "codes": total("q"),
        "scales": total("scale"),
        "minima": total("minimum"),
        "window": state["key_residual"].nbytes + state["value_residual"].nbytes,
    }


def times_smaller(state):
    batch, heads, _, head_dim = state["key_residual"].shape
    values = 2 * batch * heads * state["total_tokens"] * head_dim
    return 2 * values / (sum(stored_bytes(state).values()) - stored_bytes(state)["window"])
