# todo: 4
# loses: test_todo_4, test_todo_4_errors
# hint: bad input
def decode_tokens_per_second(
    bandwidth_bytes_per_second, weight_bytes, kv_bytes, batch
):
    raise ValueError(f"bad input: {locals()}")
