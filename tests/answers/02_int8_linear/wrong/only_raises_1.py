# todo: 1
# loses: test_todo_1, test_todo_1_errors
# hint: bad
def absmax_scale(x, qmax=127, eps=1e-8):
    raise ValueError(f"x is bad: {x}")
