# todo: 1
import torch


def weight_bytes(parameters, bits):
    if parameters <= 0:
        raise ValueError(f"parameters must be positive, got {parameters}")
    if bits <= 0:
        raise ValueError(f"bits must be positive, got {bits}")
    return torch.tensor(parameters * bits / 8, dtype=torch.float64).ceil().long()


# todo: 3
import torch


def max_concurrent_requests(
    memory_bytes, weight_bytes, reserve_bytes, kv_bytes_per_request
):
    for name, size in list(locals().items()):
        if size < 0 or (size == 0 and name == "kv_bytes_per_request"):
            raise ValueError(f"{name}: {size} is not allowed")
    room = torch.tensor(memory_bytes - weight_bytes - reserve_bytes)
    return (room // kv_bytes_per_request).clamp(min=0)


# todo: 4
import torch


def decode_tokens_per_second(
    bandwidth_bytes_per_second, weight_bytes, kv_bytes, batch
):
    for name, size in list(locals().items()):
        if size < 0 or (size == 0 and name != "kv_bytes"):
            raise ValueError(f"{name}: {size} is not allowed")
    sizes = torch.tensor([weight_bytes, kv_bytes * batch, 0.0])
    return batch * bandwidth_bytes_per_second / sizes.sum()
