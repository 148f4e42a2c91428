# todo: 3
# loses: test_todo_3_errors
# hint: ZeroDivisionError was raised
def max_concurrent_requests(
    memory_bytes, weight_bytes, reserve_bytes, kv_bytes_per_request
):
    room = memory_bytes - weight_bytes - reserve_bytes
    return max(0, room // kv_bytes_per_request)
