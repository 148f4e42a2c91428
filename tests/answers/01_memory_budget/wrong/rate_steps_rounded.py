# todo: 4
# loses: test_todo_4
# hint: you rounded the steps per second
def decode_tokens_per_second(
    bandwidth_bytes_per_second, weight_bytes, kv_bytes, batch
):
    for name, size in list(locals().items()):
        if size < 0 or (size == 0 and name != "kv_bytes"):
            raise ValueError(f"{name}: {size} is not allowed")
    read = weight_bytes + batch * kv_bytes
    return round(bandwidth_bytes_per_second / read) * batch
