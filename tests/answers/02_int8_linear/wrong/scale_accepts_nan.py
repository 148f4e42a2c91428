# todo: 1
# loses: test_todo_1_errors
# hint: was accepted
def absmax_scale(x, qmax=127, eps=1e-8):
    return torch.nan_to_num(x.abs().max() / qmax).clamp(min=eps)
