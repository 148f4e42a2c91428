# todo: 3
# loses: test_todo_3_errors
# hint: reserve_bytes is 0
def max_concurrent_requests(
    memory_bytes, weight_bytes, reserve_bytes, kv_bytes_per_request
):
    for name, size in list(locals().items()):
        if size < 0 or (size == 0 and name == "kv_bytes_per_request"):
            raise ValueError(f"{name}: {size} is not allowed")
    if reserve_bytes == 0:
        raise ValueError("reserve_bytes is 0")
    room = memory_bytes - weight_bytes - reserve_bytes
    return max(0, room // kv_bytes_per_request)
