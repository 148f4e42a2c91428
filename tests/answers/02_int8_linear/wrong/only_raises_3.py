# todo: 3
# loses: test_todo_3, test_todo_3_errors
# hint: refused with ValueError
def linear_error_bound(x, scale):
    raise ValueError(f"x or scale is bad: {x} {scale}")
