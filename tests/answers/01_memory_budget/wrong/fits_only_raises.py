# todo: 3
# loses: test_todo_3, test_todo_3_errors
# hint: bad input
def max_concurrent_requests(
    memory_bytes, weight_bytes, reserve_bytes, kv_bytes_per_request
):
    raise ValueError(f"bad input: {locals()}")
