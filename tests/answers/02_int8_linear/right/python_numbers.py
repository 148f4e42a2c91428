# todo: 1
import math


def absmax_scale(x, qmax=127, eps=1e-8):
    values = x.flatten().tolist()
    if not all(math.isfinite(v) for v in values):
        raise ValueError(f"x holds a value that is not finite: {values}")
    return max(max(abs(v) for v in values) / qmax, eps)
