# todo: 1
# loses: test_todo_1, test_todo_1_edges, test_todo_1_errors
# hint: was refused with ValueError
def quantize_key_per_channel(key, qmax=7, eps=1e-8):
    raise ValueError(f"key has shape {tuple(key.shape)}")
