# todo: 3
import torch
import copy


def append_and_partition(
    state, new_key, new_value, residual_length, quantize_key, quantize_value
):
    if residual_length < 1:
        raise ValueError(f"residual_length is {residual_length}, it must be >= 1")
    for name, new in (("new_key", new_key), ("new_value", new_value)):
        if new.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(new.shape)}")
    if new_key.shape != new_value.shape:
        shapes = list(new_key.shape), list(new_value.shape)
        raise ValueError(f"new_key and new_value have different shapes: {shapes}")
    if state is None:
        state = {
            "key_q_segments": [],
            "key_scale_segments": [],
            "value_q_segments": [],
            "value_scale_segments": [],
            "key_residual": new_key[:, :, :0],
            "value_residual": new_value[:, :, :0],
            "flushed_tokens": 0,
            "quantized_tokens": 0,
            "total_tokens": 0,
        }
    for side, new in (("key", new_key), ("value", new_value)):
        held = state[f"{side}_residual"]
        for axis in (0, 1, 3):
            if new.shape[axis] != held.shape[axis]:
                raise ValueError(f"new_{side}: axis {axis} is {new.shape[axis]}")
        if new.dtype is not held.dtype:
            raise ValueError(f"new_{side} is {new.dtype}, was {held.dtype}")
    state = copy.deepcopy(state)
    count = 0
    for side, new, quantize in (
        ("key", new_key, quantize_key),
        ("value", new_value, quantize_value),
    ):
        joined = torch.cat((state[f"{side}_residual"], new), dim=-2)
        count = max(joined.shape[-2] - residual_length, 0)
        old, kept = joined.split([count, joined.shape[-2] - count], dim=-2)
        if count:
            codes, scale = quantize(old.contiguous())
            state[f"{side}_q_segments"] += [codes]
            state[f"{side}_scale_segments"] += [scale]
        state[f"{side}_residual"] = kept
    state["flushed_tokens"] = count
    state["quantized_tokens"] += count
    state["total_tokens"] += new_key.shape[-2]
    return state
