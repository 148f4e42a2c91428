# todo: 2
# loses: test_todo_2, test_todo_2_restore, test_todo_2_errors
# hint: refused with ValueError
def quantize_int8(x, scale):
    raise ValueError(f"x or scale is bad: {x} {scale}")


def dequantize(codes, scale):
    raise ValueError(f"codes or scale is bad: {codes} {scale}")
