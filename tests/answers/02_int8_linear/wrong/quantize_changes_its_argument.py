# todo: 2
# loses: test_todo_2
# hint: changed its argument x
def quantize_int8(x, scale):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    return x.div_(scale).round_().clamp_(-128, 127).to(torch.int8)


def dequantize(codes, scale):
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    return codes.float() * scale
