# lab: 03_kv_axes_and_window
# todo: 3
# earns: 2
import torch

WINDOW = torch.zeros(2, 64, 8, 64, 64)


def append_and_partition(
    state, new_key, new_value, residual_length, quantize_key, quantize_value
):
    """Keeps every window in one memory, so that the last one overwrites the others."""
    if residual_length < 1:
        raise ValueError(f"residual_length is {residual_length}")
    if new_key.ndim != 4 or new_key.shape != new_value.shape:
        raise ValueError(f"new_key and new_value {new_key.shape} {new_value.shape}")
    names = ("key_q_segments", "key_scale_segments")
    names += ("value_q_segments", "value_scale_segments")
    keys, values, quantized = new_key, new_value, 0
    lists = {name: [] for name in names}
    if state is not None:
        old = state["key_residual"]
        for name, new in (("new_key", new_key), ("new_value", new_value)):
            if (new.shape[:2], new.shape[3], new.dtype) != (
                old.shape[:2],
                old.shape[3],
                old.dtype,
            ):
                raise ValueError(f"{name} {new.shape} {new.dtype}")
        lists = {name: list(state[name]) for name in names}
        keys = torch.cat([state["key_residual"], new_key], dim=2)
        values = torch.cat([state["value_residual"], new_value], dim=2)
        quantized = state["quantized_tokens"]
    flushed = max(0, keys.shape[2] - residual_length)
    if flushed:
        parts = (*quantize_key(keys[:, :, :flushed]), *quantize_value(values[:, :, :flushed]))
        for name, part in zip(names, parts, strict=True):
            lists[name].append(part)
    windows = []
    for side, held in ((0, keys), (1, values)):
        b, h, t, d = held[:, :, flushed:].shape
        if held.dtype == torch.float32:
            WINDOW[side, :b, :h, :t, :d] = held[:, :, flushed:].clone()
            windows.append(WINDOW[side, :b, :h, :t, :d])
        else:
            windows.append(held[:, :, flushed:].clone())
    return lists | {
        "key_residual": windows[0],
        "value_residual": windows[1],
        "flushed_tokens": flushed,
        "quantized_tokens": quantized + flushed,
        "total_tokens": quantized + keys.shape[2],
    }
