# todo: 3
# loses: test_todo_3, test_todo_3_segments, test_todo_3_errors
# hint: was refused with ValueError
import torch


def append_by_groups(
    state, new_key, new_value, residual_length, group_size, quantize_key, quantize_value
):
    raise ValueError(
        f"new_key {tuple(new_key.shape)} {new_key.dtype}, new_value "
        f"{tuple(new_value.shape)} {new_value.dtype}, "
        f"residual_length {residual_length}, group_size {group_size}"
    )
