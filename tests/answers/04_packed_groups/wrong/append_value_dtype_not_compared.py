# todo: 3
# loses: test_todo_3_errors
# hint: its dtype alone is not the state
import torch


def append_by_groups(
    state, new_key, new_value, residual_length, group_size, quantize_key, quantize_value
):
    if residual_length < 1:
        raise ValueError(f"residual_length must be positive, got {residual_length}")
    if group_size < 1:
        raise ValueError(f"group_size must be positive, got {group_size}")
    if new_key.ndim != 4:
        raise ValueError(f"new_key must be 4-D, got {tuple(new_key.shape)}")
    if new_key.shape != new_value.shape:
        raise ValueError(
            f"new_key {tuple(new_key.shape)} and "
            f"new_value {tuple(new_value.shape)} differ"
        )
    names = (
        "key_q_segments",
        "key_scale_segments",
        "key_minimum_segments",
        "value_q_segments",
        "value_scale_segments",
        "value_minimum_segments",
    )
    segments = {name: [] for name in names}
    quantized = 0
    keys, values = new_key, new_value
    if state is not None:
        for name, new in (("key", new_key), ("value", new_value)):
            old = state[name + "_residual"]
            if new[:, :, :0].shape != old[:, :, :0].shape or (name == "key" and new.dtype != old.dtype):
                raise ValueError(
                    f"new_{name} does not fit the state: "
                    f"{tuple(new.shape)} {new.dtype}"
                )
        segments = {name: list(state[name]) for name in names}
        quantized = state["quantized_tokens"]
        keys = torch.cat([state["key_residual"], new_key], dim=2)
        values = torch.cat([state["value_residual"], new_value], dim=2)
    flushed = max(0, keys.shape[2] - residual_length) // group_size * group_size
    if flushed > 0:
        parts = (*quantize_key(keys[:, :, :flushed]), *quantize_value(values[:, :, :flushed]))
        for name, part in zip(names, parts):
            segments[name].append(part)
    quantized += flushed
    return {
        **segments,
        "key_residual": keys[:, :, flushed:].clone(),
        "value_residual": values[:, :, flushed:].clone(),
        "flushed_tokens": flushed,
        "quantized_tokens": quantized,
        "total_tokens": quantized + keys.shape[2] - flushed,
    }
