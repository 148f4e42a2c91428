# todo: 2
# loses: test_todo_2, test_todo_2_edges, test_todo_2_errors
# hint: was refused with ValueError
def quantize_value_per_token(value, qmax=7, eps=1e-8):
    raise ValueError(f"value has shape {tuple(value.shape)}")
