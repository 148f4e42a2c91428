# todo: 4
def stored_bytes(state):
    ledger = {"codes": 0, "scales": 0, "minima": 0, "window": 0}
    names = {"q": "codes", "scale": "scales", "minimum": "minima"}
    for key, held in state.items():
        if key.endswith("_segments"):
            for tensor in held:
                part = names[key.split("_")[1]]
                ledger[part] += tensor.numel() * tensor.element_size()
        elif key.endswith("_residual"):
            ledger["window"] += held.untyped_storage().nbytes()
    return ledger


def times_smaller(state):
    shape = list(state["key_residual"].shape)
    shape[2] = state["total_tokens"]
    import torch

    key = torch.empty(shape, dtype=torch.float16, device="meta")
    return torch.tensor((key.nbytes + key.nbytes) / sum(stored_bytes(state).values()))
