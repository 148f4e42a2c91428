# todo: 2
def quantize_int8(x, scale):
    if (~x.isfinite()).any():
        raise ValueError(f"x must be finite, got {x}")
    if (~(scale > 0)).any():
        raise ValueError(f"scale must be positive, got {scale}")
    steps = x.double() / scale.double()
    steps.add_(0.5).floor_()
    steps[steps > 127] = 127
    steps[steps < -128] = -128
    return steps.char()


def dequantize(codes, scale):
    if (~(scale > 0)).any():
        raise ValueError(f"scale must be positive, got {scale}")
    return codes.double() * scale
