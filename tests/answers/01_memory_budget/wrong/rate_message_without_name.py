# todo: 4
# loses: test_todo_4_errors
# hint: must name batch
def decode_tokens_per_second(
    bandwidth_bytes_per_second, weight_bytes, kv_bytes, batch
):
    if min(bandwidth_bytes_per_second, weight_bytes, batch) <= 0 or kv_bytes < 0:
        raise ValueError("all sizes must be positive")
    return batch * bandwidth_bytes_per_second / (weight_bytes + batch * kv_bytes)
