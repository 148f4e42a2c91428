# todo: 3
import torch


def append_and_partition(
    state, new_key, new_value, residual_length, quantize_key, quantize_value
):
    if not residual_length > 0:
        raise ValueError(f"residual_length: {residual_length}")
    if new_key.ndim != 4 or new_key.shape != new_value.shape:
        raise ValueError(f"new_key {new_key.shape}, new_value {new_value.shape}")
    old = state or {}
    if old:
        k, v = old["key_residual"], old["value_residual"]
        fits = all(new_key.shape[i] == k.shape[i] for i in (0, 1, 3))
        if not fits or new_key.dtype != k.dtype or new_value.dtype != v.dtype:
            kinds = new_key.dtype, new_value.dtype
            raise ValueError(f"new_key or new_value: {new_key.shape}, {kinds}")
        key_tokens, value_tokens = list(k.unbind(2)), list(v.unbind(2))
    else:
        key_tokens, value_tokens = [], []
    key_tokens += new_key.unbind(2)
    value_tokens += new_value.unbind(2)
    key_out, value_out = [], []
    while len(key_tokens) > residual_length:
        key_out.append(key_tokens.pop(0))
        value_out.append(value_tokens.pop(0))
    names = (
        "key_q_segments",
        "key_scale_segments",
        "value_q_segments",
        "value_scale_segments",
    )
    new = {name: tuple(old.get(name, ())) for name in names}
    if key_out:
        made = (
            *quantize_key(torch.stack(key_out, dim=2)),
            *quantize_value(torch.stack(value_out, dim=2)),
        )
        for name, part in zip(names, made):
            new[name] += (part,)
    new["key_residual"] = torch.stack(key_tokens, dim=2)
    new["value_residual"] = torch.stack(value_tokens, dim=2)
    new["flushed_tokens"] = torch.tensor(len(key_out))
    new["quantized_tokens"] = old.get("quantized_tokens", 0) + len(key_out)
    new["total_tokens"] = new["quantized_tokens"] + len(key_tokens)
    return new
