# todo: 3
import torch


import copy


def append_by_groups(
    state, new_key, new_value, residual_length, group_size, quantize_key, quantize_value
):
    if residual_length < 1:
        raise ValueError(f"residual_length is {residual_length}, it must be >= 1")
    if not group_size > 0:
        raise ValueError(f"group_size is {group_size}")
    for name, new in (("new_key", new_key), ("new_value", new_value)):
        if new.ndim != 4:
            raise ValueError(f"{name} has shape {new.shape}")
    if new_key.shape != new_value.shape:
        raise ValueError(f"new_value is {new_value.shape}, new_key is {new_key.shape}")
    if state is None:
        state = {
            f"{side}_{part}_segments": []
            for side in ("key", "value")
            for part in ("q", "scale", "minimum")
        }
        state |= {"key_residual": new_key[:, :, :0], "value_residual": new_value[:, :, :0]}
        state |= {"flushed_tokens": 0, "quantized_tokens": 0, "total_tokens": 0}
    for side, new in (("key", new_key), ("value", new_value)):
        held = state[f"{side}_residual"]
        if new.dtype is not held.dtype:
            raise ValueError(f"new_{side} is {new.dtype}, was {held.dtype}")
        for axis in (0, 1, 3):
            if new.shape[axis] != held.shape[axis]:
                raise ValueError(f"new_{side}: {new.shape}, was {held.shape}")
    state = copy.deepcopy(state)
    held = state["key_residual"].shape[2] + new_key.shape[2]
    count = 0
    while held - count - group_size >= residual_length:
        count += group_size
    for side, new, quantize in (
        ("key", new_key, quantize_key),
        ("value", new_value, quantize_value),
    ):
        joined = torch.cat((state[f"{side}_residual"], new), dim=-2)
        old, kept = joined.split([count, held - count], dim=-2)
        if count:
            codes, scale, minimum = quantize(old.contiguous())
            state[f"{side}_q_segments"] += [codes]
            state[f"{side}_scale_segments"] += [scale]
            state[f"{side}_minimum_segments"] += [minimum]
        state[f"{side}_residual"] = kept
    state["flushed_tokens"] = count
    state["quantized_tokens"] += count
    state["total_tokens"] += new_key.shape[-2]
    return state
