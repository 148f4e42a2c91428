# todo: 1
# loses: test_todo_1
# hint: you rounded down
def weight_bytes(parameters, bits):
    for name, size in list(locals().items()):
        if size <= 0:
            raise ValueError(f"{name} must be positive, got {size}")
    return int(parameters * bits / 8 + 0.999)
