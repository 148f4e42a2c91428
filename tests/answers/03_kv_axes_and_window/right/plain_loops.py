# todo: 1
import torch


def quantize_key_per_channel(key, qmax=7, eps=1e-8):
    if len(key.shape) != 4:
        raise ValueError(f"key: expected 4 dimensions, got {list(key.shape)}")
    batch, heads, tokens, head_dim = key.shape
    codes = torch.zeros(key.shape, dtype=torch.int8)
    scale = torch.zeros(batch, heads, 1, head_dim, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for d in range(head_dim):
                column = [float(key[b, h, t, d]) for t in range(tokens)]
                step = max(max(abs(x) for x in column) / qmax, eps)
                scale[b, h, 0, d] = step
                for t, x in enumerate(column):
                    code = int(abs(x) / step + 0.5)  # half away from zero
                    codes[b, h, t, d] = min(code, qmax) * (1 if x >= 0 else -1)
    return codes, scale


# todo: 2
import torch


def quantize_value_per_token(value, qmax=7, eps=1e-8):
    if len(value.shape) != 4:
        raise ValueError(f"value: expected 4 dimensions, got {list(value.shape)}")
    rows = value.to(torch.float64).reshape(-1, value.shape[3])
    steps, codes = [], []
    for row in rows.tolist():
        step = max(max(map(abs, row)) / qmax, eps)
        steps.append(step)
        codes.append([round(x / step) for x in row])
    scale = torch.tensor(steps, dtype=torch.float32)
    codes = torch.tensor(codes, dtype=torch.int8)
    return codes.reshape(value.shape), scale.reshape(*value.shape[:3], 1)
