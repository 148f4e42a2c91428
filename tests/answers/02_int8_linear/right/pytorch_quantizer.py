# todo: 2
def quantize_int8(x, scale):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    one, zero = torch.tensor(1.0), torch.tensor(0, dtype=torch.int32)
    codes = torch.fake_quantize_per_tensor_affine(x / scale, one, zero, -128, 127)
    return codes.to(torch.int8)


def dequantize(codes, scale):
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    return (codes * scale).contiguous()
