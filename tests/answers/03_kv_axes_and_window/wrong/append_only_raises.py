# todo: 3
# loses: test_todo_3, test_todo_3_segments, test_todo_3_errors
# hint: refused with ValueError
def append_and_partition(
    state, new_key, new_value, residual_length, quantize_key, quantize_value
):
    raise ValueError(
        f"residual_length {residual_length}, new_key {new_key.shape} {new_key.dtype}, "
        f"new_value {new_value.shape} {new_value.dtype}"
    )
