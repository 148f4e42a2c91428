# todo: 3
# loses: test_todo_3, test_todo_3_errors
# hint: is too large
def max_concurrent_requests(
    memory_bytes, weight_bytes, reserve_bytes, kv_bytes_per_request
):
    for name, size in list(locals().items()):
        if size < 0 or (size == 0 and name == "kv_bytes_per_request"):
            raise ValueError(f"{name}: {size} is not allowed")
    if weight_bytes + reserve_bytes > memory_bytes:
        raise ValueError(f"weight_bytes {weight_bytes} is too large")
    room = memory_bytes - weight_bytes - reserve_bytes
    return room // kv_bytes_per_request
