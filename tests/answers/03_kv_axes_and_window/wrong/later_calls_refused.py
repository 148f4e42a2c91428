# todo: 3
# loses: test_todo_3, test_todo_3_segments, test_todo_3_errors
# hint: refused with ValueError
import torch


def append_and_partition(
    state, new_key, new_value, residual_length, quantize_key, quantize_value
):
    if residual_length <= 0:
        raise ValueError(f"residual_length must be positive, got {residual_length}")
    if new_key.ndim != 4:
        raise ValueError(f"new_key must be 4-D, got {tuple(new_key.shape)}")
    if new_key.shape != new_value.shape:
        raise ValueError(
            f"new_key {tuple(new_key.shape)} and "
            f"new_value {tuple(new_value.shape)} differ"
        )
    k_q, k_s, v_q, v_s = [], [], [], []
    quantized = 0
    keys, values = new_key, new_value
    if state is not None:
        raise ValueError(f"state: new_key and new_value {new_key.shape} refused")
        for name, new in (("key", new_key), ("value", new_value)):
            old = state[name + "_residual"]
            if new[:, :, :0].shape != old[:, :, :0].shape or new.dtype != old.dtype:
                raise ValueError(
                    f"new_{name} does not fit the state: "
                    f"{tuple(new.shape)} {new.dtype}"
                )
        k_q = list(state["key_q_segments"])
        k_s = list(state["key_scale_segments"])
        v_q = list(state["value_q_segments"])
        v_s = list(state["value_scale_segments"])
        quantized = state["quantized_tokens"]
        keys = torch.cat([state["key_residual"], new_key], dim=2)
        values = torch.cat([state["value_residual"], new_value], dim=2)
    flushed = max(0, keys.shape[2] - residual_length)
    if flushed > 0:
        codes, scale = quantize_key(keys[:, :, :flushed])
        k_q.append(codes)
        k_s.append(scale)
        codes, scale = quantize_value(values[:, :, :flushed])
        v_q.append(codes)
        v_s.append(scale)
    quantized += flushed
    return {
        "key_q_segments": k_q,
        "key_scale_segments": k_s,
        "value_q_segments": v_q,
        "value_scale_segments": v_s,
        "key_residual": keys[:, :, flushed:].clone(),
        "value_residual": values[:, :, flushed:].clone(),
        "flushed_tokens": flushed,
        "quantized_tokens": quantized,
        "total_tokens": quantized + keys.shape[2] - flushed,
    }
