# todo: 3
# loses: test_todo_3_errors
# hint: memory_bytes (it is -1) was accepted
def max_concurrent_requests(
    memory_bytes, weight_bytes, reserve_bytes, kv_bytes_per_request
):
    if kv_bytes_per_request <= 0:
        raise ValueError(f"kv_bytes_per_request is {kv_bytes_per_request}")
    room = memory_bytes - weight_bytes - reserve_bytes
    return max(0, room // kv_bytes_per_request)
