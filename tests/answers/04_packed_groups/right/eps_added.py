# todo: 2
import torch


def quantize_key_groups(key, bits=4, group_size=32, eps=1e-5):
    if key.ndim != 4:
        raise ValueError(f"key has shape {tuple(key.shape)}, not four dimensions")
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8, got {bits}")
    if group_size < 1 or key.shape[2] % group_size:
        raise ValueError(
            f"group_size {group_size} does not divide {key.shape[2]} tokens"
        )
    largest = 2**bits - 1
    groups = key.float().unflatten(2, (-1, group_size))
    low = groups.amin(dim=3, keepdim=True)
    high = groups.amax(dim=3, keepdim=True)
    scale = ((high - low) / largest + eps).half()
    minimum = low.half()
    steps = (groups - minimum.float()) / scale.float()
    codes = steps.round().clamp(0, largest).to(torch.uint8)
    return codes.flatten(2, 3), scale.squeeze(3), minimum.squeeze(3)


def quantize_value_groups(value, bits=4, group_size=32, eps=1e-5):
    if value.ndim != 4:
        raise ValueError(f"value has shape {tuple(value.shape)}, not four dimensions")
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8, got {bits}")
    if group_size < 1 or value.shape[3] % group_size:
        raise ValueError(
            f"group_size {group_size} does not divide {value.shape[3]} channels"
        )
    largest = 2**bits - 1
    groups = value.float().unflatten(3, (-1, group_size))
    low = groups.amin(dim=4, keepdim=True)
    high = groups.amax(dim=4, keepdim=True)
    scale = ((high - low) / largest + eps).half()
    minimum = low.half()
    steps = (groups - minimum.float()) / scale.float()
    codes = steps.round().clamp(0, largest).to(torch.uint8)
    return codes.flatten(3, 4), scale.squeeze(4), minimum.squeeze(4)
