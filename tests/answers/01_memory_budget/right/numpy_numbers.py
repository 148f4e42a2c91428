# todo: 1
import numpy as np


def weight_bytes(parameters, bits):
    if parameters <= 0:
        raise ValueError(f"parameters must be positive, got {parameters}")
    if bits <= 0:
        raise ValueError(f"bits must be positive, got {bits}")
    return np.int64(np.ceil(np.float64(parameters) * bits / 8))


# todo: 3
import numpy as np


def max_concurrent_requests(
    memory_bytes, weight_bytes, reserve_bytes, kv_bytes_per_request
):
    for name, size in list(locals().items()):
        if size < 0 or (size == 0 and name == "kv_bytes_per_request"):
            raise ValueError(f"{name}: {size} is not allowed")
    room = np.int64(memory_bytes) - weight_bytes - reserve_bytes
    return np.maximum(0, room // kv_bytes_per_request)


# todo: 4
import numpy as np


def decode_tokens_per_second(
    bandwidth_bytes_per_second, weight_bytes, kv_bytes, batch
):
    for name, size in list(locals().items()):
        if size < 0 or (size == 0 and name != "kv_bytes"):
            raise ValueError(f"{name}: {size} is not allowed")
    step = np.float64(weight_bytes) + np.float64(kv_bytes) * batch
    return np.float64(bandwidth_bytes_per_second) * batch / step
