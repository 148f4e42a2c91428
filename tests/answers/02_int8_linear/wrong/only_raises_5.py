# todo: 5
# loses: test_todo_5, test_todo_5_calibration, test_todo_5_errors
# hint: bad
def clipped_fraction(x, scale):
    raise ValueError(f"x or scale is bad: {x} {scale}")


def calibrate_scale(batches, qmax=127, eps=1e-8):
    raise ValueError(f"batches are bad: {batches}")
