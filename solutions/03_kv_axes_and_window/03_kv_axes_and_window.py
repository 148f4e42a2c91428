# %% [markdown] lang="en"
# # Lab 03 · Axes and window
#
# (opening)

# %% nbgrader={"grade_id": "setup", "locked": true}
# the builder puts kvlab/first_cell.py here

# %% [markdown] lang="en"
# ## TODO 1 · Keys: one scale per channel
#
# (prose)

# %% nbgrader={"grade_id": "todo_1", "solution": true} todo="TODO 1: quantize Keys per channel"
import torch
from torch import Tensor


def quantize_key_per_channel(
    key: Tensor, qmax: int = 7, eps: float = 1e-8
) -> tuple[Tensor, Tensor]:
    """One scale per channel: every token of a channel shares it.

    key     [batch, heads, tokens, head_dim], floating point
    return  codes int8, shaped like key, in [-qmax, qmax];
            scale float32 [batch, heads, 1, head_dim]
    raises  ValueError when key is not four-dimensional
    """
    # 1. refuse a key that is not four-dimensional
    # 2. the largest magnitude of each channel, over all tokens
    # 3. the scale: the step that takes this magnitude to qmax
    # 4. the codes: divide, round, clamp, int8
    ### BEGIN SOLUTION
    if key.ndim != 4:
        raise ValueError(f"key must have 4 dimensions, got {tuple(key.shape)}")
    peak = key.float().abs().amax(dim=2, keepdim=True)
    scale = (peak / qmax).clamp(min=eps)
    codes = torch.round(key.float() / scale).clamp(-qmax, qmax)
    return codes.to(torch.int8), scale
    ### END SOLUTION


# %% [markdown] lang="en"
# **Tested:** the shape of the scale. **Why:** a scale of another shape belongs to
# another axis. **Expected:** `(batch, heads, 1, head_dim)`.

# %% nbgrader={"grade_id": "test_todo_1", "grade": true, "points": 20}
def test_key_scale_shape():
    key = torch.randn(2, 3, 5, 8)
    codes, scale = quantize_key_per_channel(key)
    checks.tensor(scale, "the scale", shape=(2, 3, 1, 8))


with checks.todo(1):
    test_key_scale_shape()
    ### BEGIN HIDDEN TESTS
    checks.tensor(quantize_key_per_channel(torch.randn(1, 2, 7, 4))[0], "codes", dtype=torch.int8)
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# ## Written question
#
# Why?

# %% [markdown] nbgrader={"grade_id": "written_1", "grade": true, "solution": true, "points": 2} lang="en"
# <!-- BEGIN SOLUTION -->
# Rubric: one point for ..., one for ...
# <!-- END SOLUTION -->
