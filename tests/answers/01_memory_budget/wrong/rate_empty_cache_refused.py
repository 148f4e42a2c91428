# todo: 4
# loses: test_todo_4_errors
# hint: kv_bytes must be positive, got 0
def decode_tokens_per_second(
    bandwidth_bytes_per_second, weight_bytes, kv_bytes, batch
):
    for name, size in list(locals().items()):
        if size < 0 or (size == 0 and name != "kv_bytes"):
            raise ValueError(f"{name}: {size} is not allowed")
    if kv_bytes == 0:
        raise ValueError("kv_bytes must be positive, got 0")
    return batch * bandwidth_bytes_per_second / (weight_bytes + batch * kv_bytes)
