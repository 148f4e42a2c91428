# todo: 3
# loses: test_todo_3_errors
# hint: must say what was given
def max_concurrent_requests(
    memory_bytes, weight_bytes, reserve_bytes, kv_bytes_per_request
):
    for name, size in list(locals().items()):
        if size < 0 or (size == 0 and name == "kv_bytes_per_request"):
            raise ValueError(f"{name} is not allowed")
    room = memory_bytes - weight_bytes - reserve_bytes
    return max(0, room // kv_bytes_per_request)
