# todo: 2
# loses: test_todo_2_errors
# hint: scale (it is 0.0) was accepted
def quantize_int8(x, scale):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    return torch.round(x / scale).clamp(-128, 127).to(torch.int8)


def dequantize(codes, scale):
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    return codes.float() * scale
