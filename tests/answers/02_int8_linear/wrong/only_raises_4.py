# todo: 4
# loses: test_todo_4, test_todo_4_errors
# hint: bad
def absmax_scale_per_output_channel(weight, qmax=127, eps=1e-8):
    raise ValueError(f"weight is bad: {weight} {tuple(weight.shape)}")
