# todo: 2
# loses: test_todo_2_errors
# hint: x (it holds nan) was accepted
def quantize_int8(x, scale):
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    return torch.round(x / scale).clamp(-128, 127).to(torch.int8)


def dequantize(codes, scale):
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    return codes.float() * scale
