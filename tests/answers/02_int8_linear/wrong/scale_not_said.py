# todo: 2
# loses: test_todo_2_errors
# hint: must say what was given, -0.1
def quantize_int8(x, scale):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    if not (scale > 0).all():
        raise ValueError("scale must be above 0")
    return torch.round(x / scale).clamp(-128, 127).to(torch.int8)


def dequantize(codes, scale):
    if not (scale > 0).all():
        raise ValueError("scale must be above 0")
    return codes.float() * scale
