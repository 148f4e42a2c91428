# todo: 1
# loses: test_todo_1, test_todo_1_errors
# hint: parameters
def weight_bytes(parameters, bits):
    raise ValueError(f"parameters {parameters}, bits {bits}")
