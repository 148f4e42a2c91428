# todo: 3
# loses: test_todo_3_errors
# hint: it is -0.1
def linear_error_bound(x, scale):
    if not torch.isfinite(x).all():
        raise ValueError(f"x must be finite, got {x}")
    return x.abs().sum(dim=1, keepdim=True) * scale.reshape(1, -1) / 2
