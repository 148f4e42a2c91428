# todo: 4
# loses: test_todo_4_errors
# hint: batch (it is 0) was accepted
def decode_tokens_per_second(
    bandwidth_bytes_per_second, weight_bytes, kv_bytes, batch
):
    return batch * bandwidth_bytes_per_second / (weight_bytes + batch * kv_bytes)
