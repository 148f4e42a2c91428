# todo: 2
def quantize_int8(x, scale):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    if not torch.all(scale > 0):
        raise ValueError(f"scale must be positive, got {scale}")
    codes = torch.zeros(x.shape, dtype=torch.int8)
    flat, steps = codes.view(-1), scale.expand(x.shape).reshape(-1)
    for i, value in enumerate(x.reshape(-1)):
        flat[i] = min(max(round(float(value / steps[i])), -128), 127)
    return codes


def dequantize(codes, scale):
    if not torch.all(scale > 0):
        raise ValueError(f"scale must be positive, got {scale}")
    return torch.mul(codes, scale)
