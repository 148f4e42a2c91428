# todo: 4
# loses: test_todo_4_errors
# hint: must say what was given
def decode_tokens_per_second(
    bandwidth_bytes_per_second, weight_bytes, kv_bytes, batch
):
    for name, size in list(locals().items()):
        if size < 0 or (size == 0 and name != "kv_bytes"):
            raise ValueError(f"{name} is not allowed")
    return batch * bandwidth_bytes_per_second / (weight_bytes + batch * kv_bytes)
