# todo: 2
# loses: test_todo_2_restore
# hint: float32 is wanted
def quantize_int8(x, scale):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    return torch.round(x / scale).clamp(-128, 127).to(torch.int8)


def dequantize(codes, scale):
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    return codes.half() * scale.half()
