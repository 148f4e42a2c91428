# todo: 2
# loses: test_todo_2, test_todo_2_values, test_todo_2_edges, test_todo_2_errors
# hint: was refused with ValueError
import torch


def quantize_key_groups(key, bits=4, group_size=32, eps=1e-5):
    raise ValueError(f"key {tuple(key.shape)} bits {bits} group_size {group_size}")


def quantize_value_groups(value, bits=4, group_size=32, eps=1e-5):
    raise ValueError(f"value {tuple(value.shape)} bits {bits} group_size {group_size}")
