# %% [markdown] lang="en"
# # Lab 02 · An INT8 linear layer: from codes to output error
#
# Lab 01 counted bytes. This lab makes them fewer, in a case as small as can be:
# one linear layer with four inputs and two outputs. You can check every number
# on paper. You turn floats into 8-bit codes, turn the codes back into floats,
# and follow the error from a weight to the output of the layer.
#
# **After this lab you can**
#
# - choose a scale for a tensor, and quantize and restore it;
# - prove how far an output can be off, and check the proof;
# - say what one outlier does to everybody who shares its scale, and when a
#   scale per output channel helps;
# - choose a range for activations from a calibration set, and see what happens
#   when the data later leaves this range.
#
# **You need** PyTorch tensors, broadcasting and reductions (`dim`, `keepdim`),
# and what a linear layer computes. You need no knowledge of quantization.
#
# **Time** 90 to 120 minutes. **Difficulty** 2 of 5. **Points** 20, for the five
# TODOs. The two written questions are outside these points: a person reads your
# answers.
#
# Run the cell below first.

# %% nbgrader={"grade_id": "setup", "locked": true}
# the builder puts kvlab/first_cell.py here

# %% [markdown] lang="en"
# ## 1 · The layer
#
# A linear layer computes
#
# ```text
# y = X Wᵀ + bias        y[b, o] = Σᵢ X[b, i] · W[o, i] + bias[o]
# ```
#
# | symbol | shape | meaning |
# |---|---|---|
# | `X` | `[batch, in]` = `[2, 4]` | the inputs, also called *activations*: they arrive at run time |
# | `W` | `[out, in]` = `[2, 4]` | the weights: known before the first request. **One row per output** |
# | `bias` | `[out]` = `[2]` | added to each output; it stays a float in this lab |
# | `y` | `[batch, out]` = `[2, 2]` | the outputs |
#
# PyTorch stores a weight as `[out, in]`. Keep this in mind: it decides later
# which dimension you reduce.
#
# Look at the two rows of `W`. The weights of row 0 are about a hundred times
# smaller than those of row 1. Almost everything below follows from that.

# %% nbgrader={"grade_id": "given_layer", "locked": true}
import torch
import torch.nn.functional as F
from torch import Tensor

import kvlab.checks.linear
import kvlab.plots.linear

torch.set_printoptions(precision=6, sci_mode=False)


def lab_weight():
    """A fresh copy each time, so that no cell can spoil another's data."""
    return torch.tensor([[0.02, -0.03, 0.04, 0.05], [2.2, -3.1, 4.2, -5.3]])


def lab_inputs():
    """A fresh copy of the batch."""
    return torch.tensor([[0.5, -0.25, 0.75, 1.0], [2.0, -1.0, 0.5, -0.5]])


W, X, bias = lab_weight(), lab_inputs(), torch.tensor([0.1, -0.2])
y = F.linear(X, W, bias)
print("float output y:")
print(y)

# %% [markdown] lang="en"
# ## 2 · The scale: how large is one step?
#
# An `int8` holds a whole number from -128 to 127 in one byte. A `float32` takes
# four. To store a float as an `int8` you choose a step size and count steps:
#
# ```text
# scale = max |x| / qmax          (symmetric, zero point 0)
# ```
#
# - `max |x|` is the largest magnitude in the tensor, in the unit of `x`.
# - `qmax` is the code on which this magnitude lands: 127, a plain number.
# - `scale` is the size of one step, in the unit of `x` per step. It is a float
#   and has to be stored beside the codes.
#
# *Symmetric* means: the range reaches equally far on both sides, and the value
# 0 gets the code 0. No second number (a *zero point*) is needed.
#
# One case needs care. If every value is 0, then so is the formula's scale, and
# a later division by it gives `nan`. A floor for the scale, `eps`, prevents
# this. (You may give the floor to `max |x|` instead, or add `eps` to one of the
# two. All of these keep the scale above 0, and none changes a scale that is much
# larger than `eps`.) And a `nan` or `inf` among the values must not pass: it would become a
# code that looks like any other.


# %% nbgrader={"grade_id": "todo_1", "solution": true} todo="TODO 1: the scale of a whole tensor"
def absmax_scale(x: Tensor, qmax: int = 127, eps: float = 1e-8) -> Tensor:
    """One symmetric scale for all values of a tensor.

    x       any shape, float32, not empty
    qmax    the code on which the largest magnitude lands
    eps     the floor: no scale may come out smaller, so that zeros get one
    return  float32, shape (): size of one step, in the unit of x
    raises  ValueError that names x when x holds nan or inf
    """
    # 1. refuse x when a value is not finite; say how many are not
    # 2. the largest magnitude
    # 3. the step that takes this magnitude to qmax, but never less than eps
    ### BEGIN SOLUTION
    if not torch.isfinite(x).all():
        bad = int((~torch.isfinite(x)).sum())
        raise ValueError(f"x must be finite, got {bad} values of nan or inf")
    return (x.abs().max() / qmax).clamp(min=eps)
    ### END SOLUTION


# %% [markdown] lang="en"
# **Tested:** the scale of `W` and of other tensors, with other `qmax`.
#
# **Why:** every code is counted in this step. If it is off, so is everything
# after it.
#
# **Expected:** `scale * qmax` equals the largest magnitude. For `W`: 0.0417323.


# %% nbgrader={"grade_id": "test_todo_1", "grade": true, "points": 2}
def test_scale_of_the_weight():
    scale = absmax_scale(lab_weight())
    checks.linear.one_scale(scale, lab_weight())
    off = abs(float(scale) - 0.0417323)
    checks.expect(off < 1e-6, "the scale of W must be 0.0417323.")


def test_magnitude_of_either_sign_counts():
    for x in (lab_inputs(), -lab_inputs()):
        checks.linear.one_scale(absmax_scale(x.clone()), x)


with checks.todo(1):
    test_scale_of_the_weight()
    test_magnitude_of_either_sign_counts()

    ### BEGIN HIDDEN TESTS
    def test_scale_on_other_shapes_seeds_and_qmax():
        for seed, qmax in ((11, 127), (12, 7), (13, 1), (14, 127)):
            g = torch.Generator().manual_seed(seed)
            values = torch.randn(3, 5, 7, generator=g)
            values.view(-1)[37 * seed % 105] = 9.5 * (-1) ** seed
            before = values.clone()
            scale = absmax_scale(values, qmax=qmax)
            checks.linear.unchanged(values, before, "x")
            checks.linear.one_scale(scale, values, qmax)
        alone = torch.tensor([-0.003])
        checks.linear.one_scale(absmax_scale(alone), alone)

    test_scale_on_other_shapes_seeds_and_qmax()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** an all-zero tensor, a tiny one, and values that are `nan` or `inf`.
#
# **Why:** they occur (padding, an overflow in half precision), and none
# announces itself.
#
# **Expected:** for zeros and for tiny values the scale that `eps` allows;
# `ValueError` that names `x`.


# %% nbgrader={"grade_id": "test_todo_1_errors", "grade": true, "points": 1}
def test_zeros_get_a_scale_above_zero():
    zeros = torch.zeros(2, 3)
    checks.linear.one_scale(absmax_scale(zeros), zeros)


def test_eps_is_the_floor():
    for x in (torch.zeros(2, 3), torch.tensor([2e-5, -3e-5])):
        scale = absmax_scale(x.clone(), eps=1e-3)
        checks.linear.one_scale(scale, x, eps=1e-3)


def test_scale_refuses_nan():
    x = torch.tensor([1.0, float("nan"), 2.0])
    checks.refuses(absmax_scale, x, names="x", because="it holds nan")


with checks.todo(1):
    test_zeros_get_a_scale_above_zero()
    test_eps_is_the_floor()
    test_scale_refuses_nan()

    ### BEGIN HIDDEN TESTS
    def test_scale_refuses_both_infinities():
        for bad in (float("inf"), -float("inf")):
            x = torch.tensor([[0.5, -0.5], [bad, 0.0]])
            why = f"it holds {bad}"
            checks.refuses(absmax_scale, x, names="x", because=why)
        zeros = torch.zeros(1)
        checks.linear.one_scale(absmax_scale(zeros, qmax=7), zeros, 7)

    def test_other_floors():
        for values, eps in (([0.0], 0.25), ([1e-7, -1e-7], 1e-4)):
            x = torch.tensor(values)
            scale = absmax_scale(x.clone(), eps=eps)
            checks.linear.one_scale(scale, x, eps=eps)

    test_scale_refuses_both_infinities()
    test_other_floors()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# ## 3 · Codes, and back
#
# With a scale, quantizing is counting and restoring is multiplying:
#
# ```text
# codes    = clamp(round(x / scale), -128, 127)      whole numbers, int8
# restored = codes × scale                           floats again
# ```
#
# This course says *restore* for the way back. PyTorch and most libraries call it
# *dequantize*, and so does the function that you will write. The two words mean
# the same.
#
# Do one by hand. The weight 2.2 is 2.2 / 0.0417323 = 52.72 steps long. The
# nearest whole number is 53, and 53 steps are 2.2118. The error is 0.0118, less
# than half a step (0.0209). The weight 0.02 is 0.48 steps long. *What is its
# code? What comes back?* Decide before you go on.
#
# Why the clamp? See what a conversion to `int8` does with a number that does
# not fit:

# %%
too_large = torch.tensor([126, 127, 128, 130, 300])
print(too_large.tolist(), "as int8:", too_large.to(torch.int8).tolist())

# %% [markdown] lang="en"
# It wraps round: 128 becomes -128. A large positive value would come back as a
# large negative one. With the clamp it comes back as the end of the range.
# Still an error, but not an error of the wrong sign.
#
# **About -128.** When the scale comes from the tensor itself, its largest
# magnitude lands on 127 or -127, so the code -128 stays unused. Some algorithms
# therefore clamp to [-127, 127], so that the codes are symmetric too. This lab
# clamps to what `int8` can hold, [-128, 127]. The two differ only when a value
# lies *beyond* the range that the scale was made for. In section 6 this happens.


# %% nbgrader={"grade_id": "todo_2", "solution": true} todo="TODO 2: quantize to int8, and restore"
def quantize_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Counts steps: the nearest int8 code of every value.

    x       any shape, float32
    scale   float32, positive, broadcasts against x: shape () for one scale,
            [out, 1] for one scale per row of a weight
    return  int8, shaped like x, in [-128, 127]
    raises  ValueError that names x when x holds nan or inf, and one that
            names scale and says its value when a scale is not positive
            (nan is not positive)
    """
    # 1. refuse x when a value is not finite
    # 2. refuse scale unless every scale is above 0
    # 3. steps: x in units of the scale; nearest whole number
    # 4. stop at both ends of int8, then convert
    ### BEGIN SOLUTION
    if not torch.isfinite(x).all():
        bad = int((~torch.isfinite(x)).sum())
        raise ValueError(f"x must be finite, got {bad} values of nan or inf")
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    return torch.round(x / scale).clamp(-128, 127).to(torch.int8)
    ### END SOLUTION


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Restores floats: as many steps as the code says.

    codes   int8, any shape
    scale   float32, positive, broadcasts against codes
    return  float32, shaped like codes, in the unit of the scale
    raises  ValueError that names scale and says its value when a scale is
            not positive
    """
    # 1. refuse scale unless every scale is above 0
    # 2. the value of each code
    ### BEGIN SOLUTION
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    return codes.to(torch.float32) * scale
    ### END SOLUTION


# %% [markdown] lang="en"
# **Tested:** the codes: nearest whole number, both ends, `int8`, one scale or
# many.
#
# **Why:** truncating instead of rounding doubles the largest error, and a
# missing clamp flips signs.
#
# **Expected:** no code is more than half a step from its value, except beyond
# the range. `W` gives `[[0, -1, 1, 1], [53, -74, 101, -127]]`.


# %% nbgrader={"grade_id": "test_todo_2", "grade": true, "points": 3}
def test_codes_of_the_weight():
    scale = torch.tensor(5.3 / 127)
    codes = quantize_int8(lab_weight(), scale)
    checks.linear.codes(codes, lab_weight(), scale)
    known = [[0, -1, 1, 1], [53, -74, 101, -127]]
    checks.expect(codes.tolist() == known, f"the codes of W must be {known}.")


def test_values_beyond_the_range_stop_at_its_end():
    x = torch.tensor([0.9, -1.1, 126.6, 140.0, 1e3, -127.8, -140.0, -1e3])
    scale = torch.tensor(1.0)
    checks.linear.codes(quantize_int8(x.clone(), scale), x, scale)


def test_each_row_may_have_its_own_scale():
    scale = torch.tensor([[0.0004], [0.05]])
    codes = quantize_int8(lab_weight(), scale)
    checks.linear.codes(codes, lab_weight(), scale)


with checks.todo(2):
    test_codes_of_the_weight()
    test_values_beyond_the_range_stop_at_its_end()
    test_each_row_may_have_its_own_scale()

    ### BEGIN HIDDEN TESTS
    def test_codes_on_other_shapes_and_seeds():
        for seed in (21, 22, 23):
            g = torch.Generator().manual_seed(seed)
            x = torch.randn(3, 5, 7, generator=g)
            x[2, 4, 1] = 40.0
            for shape in ((), (1, 5, 1), (3, 1, 7)):
                scale = 0.01 + 0.02 * torch.rand(shape, generator=g)
                kept, kept_scale = x.clone(), scale.clone()
                codes = quantize_int8(x, scale)
                checks.linear.unchanged(x, kept, "x")
                checks.linear.unchanged(scale, kept_scale, "scale")
                checks.linear.codes(codes, x, scale)

    def test_every_code_is_reached():
        steps = torch.arange(-131, 131, dtype=torch.float32)
        for shift in (-0.3, 0.0, 0.3):
            x, scale = (steps + shift) * 0.25, torch.tensor(0.25)
            checks.linear.codes(quantize_int8(x, scale), x, scale)

    test_codes_on_other_shapes_and_seeds()
    test_every_code_is_reached()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** what `dequantize` gives back.
#
# **Why:** the layer computes with these numbers; they need the right unit.
#
# **Expected:** code × scale, as floats, for every code from -128 to 127.


# %% nbgrader={"grade_id": "test_todo_2_restore", "grade": true, "points": 1}
def test_restored_values_are_steps_of_the_scale():
    known = [[0, -1, 1, 1], [53, -74, 101, -127]]
    codes = torch.tensor(known, dtype=torch.int8)
    scale = torch.tensor(5.3 / 127)
    checks.linear.restored(dequantize(codes, scale), codes, scale)


with checks.todo(2):
    test_restored_values_are_steps_of_the_scale()

    ### BEGIN HIDDEN TESTS
    def test_every_code_comes_back_and_scales_broadcast():
        codes = torch.arange(-128, 128).to(torch.int8)
        for value in (0.003, 2.5):
            scale = torch.tensor(value)
            checks.linear.restored(dequantize(codes, scale), codes, scale)
        g = torch.Generator().manual_seed(31)
        codes = torch.randint(-128, 128, (3, 5, 7), generator=g).to(torch.int8)
        for shape in ((3, 1, 1), (1, 5, 1), (5, 7)):
            scale = 0.01 + torch.rand(shape, generator=g)
            kept = codes.clone()
            restored = dequantize(codes, scale)
            checks.linear.unchanged(codes, kept, "codes")
            checks.linear.restored(restored, codes, scale)

    test_every_code_comes_back_and_scales_broadcast()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** values that are not finite, scales that are not positive.
#
# **Why:** `nan` has no nearest code, and a step of size 0 leads nowhere.
#
# **Expected:** `ValueError` that names `x`, or `scale` and its value. Right input
# is not refused.


# %% nbgrader={"grade_id": "test_todo_2_errors", "grade": true, "points": 1}
def test_quantize_refuses_a_scale_that_is_not_positive():
    x = torch.tensor([1.0, -2.0])
    for value in (0.0, -0.1):
        checks.refuses(
            quantize_int8,
            *(x, torch.tensor(value)),
            names="scale",
            because=f"it is {value}",
            given=value,
        )


def test_quantize_refuses_nan():
    x, one = torch.tensor([1.0, float("nan")]), torch.tensor(1.0)
    checks.refuses(quantize_int8, x, one, names="x", because="it holds nan")


def test_right_input_is_not_refused():
    x, scale = torch.tensor([[1.0, -2.0], [0.0, 3.0]]), torch.tensor(0.5)
    codes = torch.tensor([[2, -4], [0, 6]], dtype=torch.int8)
    why = "a finite x and a scale of 0.5"
    checks.accepts(quantize_int8, x, scale, because=why)
    why = "codes and a scale of 0.5"
    checks.accepts(dequantize, codes, scale, because=why)


with checks.todo(2):
    test_quantize_refuses_a_scale_that_is_not_positive()
    test_quantize_refuses_nan()
    test_right_input_is_not_refused()

    ### BEGIN HIDDEN TESTS
    def test_one_bad_scale_or_value_is_enough():
        x = torch.ones(2, 3)
        codes = torch.ones(2, 3, dtype=torch.int8)
        for value in (0.0, -0.5, float("nan")):
            s = torch.tensor([[0.5], [value]])
            known = {"names": "scale", "because": f"one scale is {value}"}
            checks.refuses(quantize_int8, x, s, given=value, **known)
            checks.refuses(dequantize, codes, s, given=value, **known)
        x[1, 2] = -float("inf")
        one, why = torch.tensor(1.0), "it holds -inf"
        checks.refuses(quantize_int8, x, one, names="x", because=why)

    test_one_bad_scale_or_value_is_enough()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# ### What one scale does to the two rows
#
# From here on the lab often goes there and back at once. This function calls
# yours:


# %% nbgrader={"grade_id": "given_round_trip", "locked": true}
def round_trip(x, scale):
    """What is left of x after quantizing and restoring it."""
    return dequantize(quantize_int8(x, scale), scale)


# %%
with checks.waits_for(1, 2):
    scale_w = torch.as_tensor(absmax_scale(W))
    codes_w = quantize_int8(W, scale_w)
    restored_w = dequantize(codes_w, scale_w)
    print(f"scale    {float(scale_w):.7f}")
    print(f"codes    {codes_w.tolist()}")
    rounded = [[round(v, 4) for v in row] for row in restored_w.tolist()]
    print(f"restored {rounded}")
    plots.show(
        plots.linear.weights_on_grid(W, codes_w, restored_w),
        alt="Two number lines with arrows from each float weight to its "
        "restored value. In row 0, 0.02 moves to 0 and the others to one step "
        "of 0.0417. In row 1 the arrows are vertical: the error is too small "
        "to see.",
    )

# %% [markdown] lang="en"
# **What to see.** The same half step is nothing to row 1 and nearly everything to
# row 0. The
# weight 0.02 became 0: it is gone. The weights 0.04 and 0.05 became the same
# number. The scale belongs to the largest weight, and the small ones have to
# live with it.
#
# Now let a value rise slowly through the whole range and watch what comes back:

# %%
with checks.waits_for(2):
    step = 5.3 / 127
    sweep = torch.linspace(-132 * step, 132 * step, 60001)
    swept = round_trip(sweep, torch.tensor(step))
    plots.show(
        plots.linear.staircase(sweep, swept, step),
        alt="Left: the restored value is a staircase around the line of x, "
        "and the error stays within half a step. Right: beyond code 127 the "
        "restored value stays flat, and the error grows with x.",
    )

# %% [markdown] lang="en"
# **What to see.** There are two kinds of error. **Rounding** costs at most half a step, for
# every value in the range. **Clipping** has no such limit: beyond the end of the
# range the error is the whole distance to it. Keep the two apart. Section 4 is
# about the first kind, section 6 about the second.
#
# ### Does PyTorch agree?
#
# PyTorch has its own quantizer for training: it quantizes and restores in one
# call and returns floats. The codes are those floats divided by the scale.

# %%
with checks.waits_for(1, 2):
    scale_w = torch.as_tensor(absmax_scale(W))
    yours = quantize_int8(W, scale_w)
    theirs = torch.fake_quantize_per_tensor_affine(
        W,
        scale=float(scale_w),
        zero_point=0,
        quant_min=-128,
        quant_max=127,
    )
    their_codes = torch.round(theirs / scale_w).to(torch.int8)
    print("same codes:   ", torch.equal(their_codes, yours))
    print("same restored:", torch.equal(theirs, dequantize(yours, scale_w)))

# %% [markdown] lang="en"
# ## 4 · From the weights to the output
#
# How far off is the output of the layer when only its weights are rounded? The
# inputs and the bias are still exact. Write `Ŵ` for the restored weights:
#
# ```text
# ŷ[b, o] - y[b, o] = Σᵢ X[b, i] · (Ŵ[o, i] - W[o, i])
# ```
#
# As long as nothing is clipped, rounding moves each weight by at most half a
# step, up or down. You do not know which way. The *triangle inequality* says:
# the magnitude of a sum is at most the sum of the magnitudes. Put the two
# together and you have a limit that no rounding to the nearest code can break:
#
# ```text
# |ŷ[b, o] - y[b, o]|  ≤  Σᵢ |X[b, i]| · scale / 2
# ```
#
# - `X[b, i]` is an input, in the unit of the inputs.
# - `scale` is the step of the weights of output `o`, in the unit of the weights.
# - The bound is in the unit of the outputs. It differs from row to row of `X`.
#
# Notice what is *not* in it: `W`. The bound knows the weights only through
# their step. You can compute it before you quantize anything.
#
# In this section all outputs share one scale. In the next one each output has
# its own, stored as `[out, 1]`. Write the function for both.


# %% nbgrader={"grade_id": "todo_3", "solution": true} todo="TODO 3: bound the error of the output"
def linear_error_bound(x: Tensor, scale: Tensor) -> Tensor:
    """The most that rounding the weights can change each output.

    x       [batch, in], float32: the inputs of the layer
    scale   float32, positive: the step of the weights, shape () for one step,
            [out, 1] for one per output
    return  float32 [batch, 1] for one step, [batch, out] for one per output
    raises  ValueError that names x when x holds nan or inf, and one that
            names scale and says its value when a scale is not positive
    """
    # 1. refuse x when a value is not finite, scale unless it is above 0
    # 2. how strongly each row of x can pass errors on: one number per row,
    #    shape [batch, 1]
    # 3. times half a step; the scales become columns, one per output
    ### BEGIN SOLUTION
    if not torch.isfinite(x).all():
        bad = int((~torch.isfinite(x)).sum())
        raise ValueError(f"x must be finite, got {bad} values of nan or inf")
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    magnitude = x.abs().sum(dim=1, keepdim=True)
    return magnitude * scale.reshape(1, -1) / 2
    ### END SOLUTION


# %% [markdown] lang="en"
# **Tested:** the bound for every row of `X` and every output.
#
# **Why:** a bound that can be broken is worse than none, and one that is twice
# too large hides a mistake.
#
# **Expected:** exactly the sum above; shape `[batch, 1]` or `[batch, out]`.


# %% nbgrader={"grade_id": "test_todo_3", "grade": true, "points": 3}
def test_bound_with_one_scale():
    scale = torch.tensor(5.3 / 127)
    bound = linear_error_bound(lab_inputs(), scale)
    checks.linear.bound(bound, lab_inputs(), scale, weight=lab_weight())


def test_bound_with_a_scale_per_output():
    scale = torch.tensor([[0.0004], [0.63]])
    bound = linear_error_bound(lab_inputs(), scale)
    checks.linear.bound(bound, lab_inputs(), scale, weight=lab_weight())


with checks.todo(3):
    test_bound_with_one_scale()
    test_bound_with_a_scale_per_output()

    ### BEGIN HIDDEN TESTS
    def test_bound_on_other_shapes_and_seeds():
        cases = ((41, 3, 5, 2), (42, 1, 9, 4), (43, 6, 2, 1))
        for seed, batch, inputs, out in cases:
            g = torch.Generator().manual_seed(seed)
            x = torch.randn(batch, inputs, generator=g)
            x[0, 1] = -30.0
            kept = x.clone()
            one = 0.01 + torch.rand((), generator=g)
            checks.linear.bound(linear_error_bound(x, one), x, one)
            each = 0.01 + torch.rand(out, 1, generator=g)
            checks.linear.bound(linear_error_bound(x, each), x, each)
            checks.linear.unchanged(x, kept, "x")

    def test_worst_case_reaches_the_bound():
        # Every weight lies half a step above a code, or below, as hurts most.
        x = torch.tensor([[1.5, -2.0, 0.25]])
        scale = torch.tensor(0.5)
        hurt = float((x * (x.sign() * scale / 2)).sum())
        got = float(linear_error_bound(x, scale))
        checks.expect(
            abs(got - hurt) < 1e-6,
            f"the bound is {got:g}, but weights half a step off make an error "
            f"of {hurt:g}. The worst case must just reach the bound.",
        )

    test_bound_on_other_shapes_and_seeds()
    test_worst_case_reaches_the_bound()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** inputs that are not finite, scales that are not positive.
#
# **Why:** a negative scale would give a negative bound, which no error can meet.
#
# **Expected:** `ValueError` that names `x`, or `scale` and its value. Right input
# is not refused.


# %% nbgrader={"grade_id": "test_todo_3_errors", "grade": true, "points": 1}
def test_bound_refuses_a_negative_scale():
    checks.refuses(
        linear_error_bound,
        lab_inputs(),
        torch.tensor(-0.1),
        names="scale",
        because="it is -0.1",
        given=-0.1,
    )


def test_bound_of_right_input_is_not_refused():
    for scale in (torch.tensor(0.5), torch.tensor([[0.5], [2.0]])):
        why = f"a finite x with a scale of shape {tuple(scale.shape)}"
        checks.accepts(linear_error_bound, lab_inputs(), scale, because=why)


with checks.todo(3):
    test_bound_refuses_a_negative_scale()
    test_bound_of_right_input_is_not_refused()

    ### BEGIN HIDDEN TESTS
    def test_bound_refuses_each_bad_value():
        x = torch.ones(3, 2)
        for value in (0.0, -1.0, float("nan")):
            s = torch.tensor([[0.5], [value], [0.5], [0.5]])
            known = {"names": "scale", "because": f"one scale is {value}"}
            checks.refuses(linear_error_bound, x, s, given=value, **known)
        for value in (float("nan"), float("inf")):
            x[2, 1] = value
            why = f"it holds {value}"
            one = torch.tensor(1.0)
            checks.refuses(linear_error_bound, x, one, names="x", because=why)

    test_bound_refuses_each_bad_value()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# ### The error of this layer, under its bound

# %%
with checks.waits_for(1, 2, 3):
    scale_w = torch.as_tensor(absmax_scale(W))
    y_weights = F.linear(X, round_trip(W, scale_w), bias)
    error_weights = (y_weights - y).abs()
    bound_weights = linear_error_bound(X, scale_w)
    for label, values in (
        ("first row, float weights:   ", y[0]),
        ("first row, restored weights:", y_weights[0]),
        ("bound of each row:          ", bound_weights[:, 0]),
    ):
        print(label, [f"{v:.6f}" for v in values.tolist()])
    print(f"largest error:               {float(error_weights.max()):.7f}")
    plots.show(
        plots.linear.errors_against_bound(error_weights, bound_weights),
        alt="Bars of the error of each output in each row of X. All lie "
        "between 0.014 and 0.023; the bound is 0.052 in row 0 and 0.083 in "
        "row 1.",
    )

# %% [markdown] lang="en"
# **What to see.** All four errors lie well below their bound. A bound says what cannot happen.
# It does not say what is typical. The errors of the weights have different signs
# and partly cancel. How much, and does that depend on the size of the layer? The
# next cell quantizes random layers of growing width:

# %%
with checks.waits_for(1, 2, 3):
    g = torch.Generator().manual_seed(2)
    shares = {}
    for inputs in (4, 16, 64, 256, 1024):
        w = torch.randn(400, inputs, generator=g)
        x = torch.randn(8, inputs, generator=g)
        s = torch.as_tensor(absmax_scale(w))
        moved = round_trip(w, s) - w
        share = F.linear(x, moved).abs() / linear_error_bound(x, s)
        shares[inputs] = share.flatten()
        print(
            f"{inputs:5} inputs: median {float(share.median()):.3f} of the "
            f"bound, largest {float(share.max()):.3f}"
        )
    plots.show(
        plots.linear.error_share_of_bound(shares),
        alt="Error divided by bound, for 4 to 1024 inputs, on log axes. The "
        "median falls from about 0.2 to about 0.015, along a line of one over "
        "the square root of the number of inputs. Nothing reaches 1.",
    )

# %% [markdown] lang="en"
# **What to see.** The bound holds for every output, but the wider the layer, the
# less it says.
# The bound adds magnitudes, so it grows like the number of inputs. The errors
# themselves have random signs here, and such a sum grows like the square root.
# So use a bound to catch bugs and to promise a worst case. Use a measurement to
# say what really happens.
#
# ### What was saved, and what was not

# %%
with checks.waits_for(1, 2):
    scale_w = torch.as_tensor(absmax_scale(W))
    codes_w = quantize_int8(W, scale_w)
    print(f"float32 weights  {W.nbytes:3} B")
    print(f"int8 codes       {codes_w.nbytes:3} B   <- the payload")
    print(f"scale            {scale_w.nbytes:3} B")
    held = W.nbytes + codes_w.nbytes + scale_w.nbytes
    print(f"held right now   {held:3} B   (float copy, codes and scale)")

# %% [markdown] lang="en"
# The payload shrinks from 32 B to 8 B. That is the only thing that shrank:
#
# - Scales come on top. So do tensor objects and the allocator's alignment, which
#   weigh more than these 8 bytes and vanish beside a real weight.
# - This notebook keeps the float copy of `W` to compare with. So the process
#   holds *more* memory than before, not less.
# - `F.linear` still computes in float32, on restored weights. So nothing became
#   faster; restoring is extra work. The next cell measures it.

# %%
import time


def median_ms(work, repeats=15):
    """Median time of a call in milliseconds, after one call to warm up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - start))
    return sorted(times)[repeats // 2]


with checks.waits_for(1, 2):
    g = torch.Generator().manual_seed(3)
    big_w = torch.randn(1024, 1024, generator=g)
    big_x = torch.randn(4, 1024, generator=g)
    big_s = torch.as_tensor(absmax_scale(big_w))
    big_codes = quantize_int8(big_w, big_s)
    plain = median_ms(lambda: F.linear(big_x, big_w))
    again = median_ms(lambda: F.linear(big_x, dequantize(big_codes, big_s)))
    print(f"1024 x 1024 layer, float32 weights:      {plain:6.3f} ms")
    print(f"same layer, restored from int8 each time: {again:5.3f} ms")

# %% [markdown] lang="en"
# The times depend on your machine; which one is longer should not. A layer
# becomes faster when a kernel reads the codes themselves. Section 6 shows the
# arithmetic of such a kernel.
#
# ## 5 · One outlier, and a scale for each output
#
# Set a single weight to 80: `W[1, 3] = 80`. One scale for the tensor must now
# reach 80. *Before you read on: which codes will row 0 get?*
#
# One step is now 80 / 127 = 0.63. The largest weight of row 0 is 0.05, less than
# a tenth of a step. The whole row rounds to 0: output 0 no longer depends on its
# input at all, because of a weight that it never uses.
#
# The remedy is to give each output a step of its own, from the largest magnitude
# *in its own row*:
#
# ```text
# scale[o] = maxᵢ |W[o, i]| / qmax            shape [out, 1]
# ```
#
# This is called *per channel*, or *per output channel*. It costs one more float
# per output, here 8 B instead of 4 B.
#
# **Why per output and not per input?** Look at the sum once more. The step of
# output `o` is the same for every term, so it can wait until the sum is done:
#
# ```text
# Σᵢ X[b, i] · (codes[o, i] · scale[o])  =  scale[o] · Σᵢ X[b, i] · codes[o, i]
# ```
#
# A step that depends on the input `i` cannot leave the sum. It would have to be
# multiplied in at every term, and then a kernel could not add up codes.


# %% nbgrader={"grade_id": "todo_4", "solution": true} todo="TODO 4: one scale per output channel"
def absmax_scale_per_output_channel(
    weight: Tensor, qmax: int = 127, eps: float = 1e-8
) -> Tensor:
    """One symmetric scale per output: each row of the weight has its own step.

    weight  [out, in], float32
    qmax    the code on which the largest magnitude of a row lands
    eps     the floor: no scale may come out smaller, so zero rows get one
    return  float32 [out, 1], so that it broadcasts against weight
    raises  ValueError that names weight when it holds nan or inf, and one
            that names weight and says its shape, or how many dimensions
            it has, when these are not two
    """
    # 1. refuse a weight that is not [out, in] or not finite
    # 2. the largest magnitude of each row (keep the dimension)
    # 3. the step that takes it to qmax, but never less than eps
    ### BEGIN SOLUTION
    if weight.ndim != 2:
        shape = tuple(weight.shape)
        raise ValueError(f"weight must be [out, in], got shape {shape}")
    if not torch.isfinite(weight).all():
        bad = int((~torch.isfinite(weight)).sum())
        raise ValueError(f"weight must be finite, got {bad} nan or inf")
    peak = weight.abs().amax(dim=1, keepdim=True)
    return (peak / qmax).clamp(min=eps)
    ### END SOLUTION


# %% [markdown] lang="en"
# **Tested:** the scale of each row, and its shape.
#
# **Why:** a scale over the wrong dimension still broadcasts without an error in
# a square layer. Only its values and its shape tell.
#
# **Expected:** shape `[out, 1]`; `scale[o] * qmax` is the largest magnitude of
# row `o`.


# %% nbgrader={"grade_id": "test_todo_4", "grade": true, "points": 3}
def test_each_row_has_its_own_scale():
    weight = lab_weight()
    weight[1, 3] = 80.0
    scale = absmax_scale_per_output_channel(weight.clone())
    checks.linear.output_channel_scale(scale, weight)
    known = torch.tensor([[0.000393701], [0.629921]])
    checks.expect(
        checks.within(scale, known, 1e-6),
        "the scales with W[1, 3] = 80 must be [[0.000393701], [0.629921]].",
    )


with checks.todo(4):
    test_each_row_has_its_own_scale()

    ### BEGIN HIDDEN TESTS
    def test_rows_on_other_shapes_seeds_and_qmax():
        cases = ((51, 3, 5, 127), (52, 7, 2, 7), (53, 4, 4, 9), (54, 1, 6, 9))
        for seed, out, inputs, qmax in cases:
            g = torch.Generator().manual_seed(seed)
            weight = torch.randn(out, inputs, generator=g)
            weight[0, 1] = -25.0
            weight[out - 1, 0] = 12.0 if out > 1 else 3.0
            kept = weight.clone()
            scale = absmax_scale_per_output_channel(weight, qmax=qmax)
            checks.linear.unchanged(weight, kept, "weight")
            checks.linear.output_channel_scale(scale, weight, qmax)

    test_rows_on_other_shapes_seeds_and_qmax()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** all-zero and tiny rows, a weight of another rank, values not finite.
#
# **Why:** pruned layers have all-zero rows, and one `nan` would spoil a channel.
#
# **Expected:** for zero and tiny rows the scale that `eps` allows; `ValueError`
# that names `weight`, and says its shape or its number of dimensions where that
# is wrong.


# %% nbgrader={"grade_id": "test_todo_4_errors", "grade": true, "points": 1}
def test_zero_row_keeps_a_finite_scale():
    weight = torch.tensor([[0.0, 0.0, 0.0], [0.5, 2.0, -1.0]])
    scale = absmax_scale_per_output_channel(weight)
    checks.linear.output_channel_scale(scale, weight)


def test_eps_is_the_floor_of_every_row():
    weight = torch.tensor([[0.0, 0.0], [2e-5, -3e-5]])
    scale = absmax_scale_per_output_channel(weight.clone(), eps=1e-3)
    checks.linear.output_channel_scale(scale, weight, eps=1e-3)


def test_weight_needs_two_dimensions():
    for shape in ((6,), (3, 5, 4)):
        checks.refuses(
            absmax_scale_per_output_channel,
            torch.ones(shape),
            names="weight",
            because=f"its shape is {shape}",
            given=[shape, len(shape)],
        )


with checks.todo(4):
    test_zero_row_keeps_a_finite_scale()
    test_eps_is_the_floor_of_every_row()
    test_weight_needs_two_dimensions()

    ### BEGIN HIDDEN TESTS
    def test_weight_refused_when_not_finite_or_not_a_matrix():
        for value in (float("nan"), float("inf"), -float("inf")):
            weight = torch.ones(3, 2)
            weight[2, 0] = value
            checks.refuses(
                absmax_scale_per_output_channel,
                weight,
                names="weight",
                because=f"it holds {value}",
            )
        weight = torch.zeros(3, 5)
        scale = absmax_scale_per_output_channel(weight, qmax=7)
        checks.linear.output_channel_scale(scale, weight, 7)
        weight = torch.tensor([[1e-7, -1e-7], [0.0, 0.0], [-1e-6, 0.0]])
        scale = absmax_scale_per_output_channel(weight, eps=0.25)
        checks.linear.output_channel_scale(scale, weight, eps=0.25)

    test_weight_refused_when_not_finite_or_not_a_matrix()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# ### The outlier, with one scale and with two

# %%
W_out = W.clone()
W_out[1, 3] = 80.0
y_out = F.linear(X, W_out, bias)

with checks.waits_for(1, 2, 4):
    scale_one = torch.as_tensor(absmax_scale(W_out))
    scale_rows = absmax_scale_per_output_channel(W_out)
    codes_one = quantize_int8(W_out, scale_one)
    codes_rows = quantize_int8(W_out, scale_rows)
    outlier_errors = {}
    for label, codes, scale in (
        ("one scale for the tensor", codes_one, scale_one),
        ("one scale per output", codes_rows, scale_rows),
    ):
        off = F.linear(X, dequantize(codes, scale), bias) - y_out
        outlier_errors[label] = off.abs().amax(dim=0)
        print(label)
        steps = [f"{v:.6g}" for v in scale.flatten().tolist()]
        worst = [f"{v:.6f}" for v in outlier_errors[label].tolist()]
        print("  scale                   ", steps)
        print("  codes                   ", codes.tolist())
        print("  largest error per output", worst)
    plots.show(
        plots.linear.outlier_codes(codes_one, codes_rows, outlier_errors),
        alt="With one scale the codes of row 0 are all 0; with a scale per "
        "output they are 51, -76, 102 and 127. The error of output 0 falls "
        "from 0.0975 to 0.000157; that of output 1 stays 0.466.",
    )

# %% [markdown] lang="en"
# **What to see.** A scale per output rescues output 0: its error falls by a factor
# of about 600. Output 1 gains nothing. Its own row holds the outlier, so its step is as large
# as before, and 2.2, -3.1 and 4.2 are 3, -5 and 7 steps. One of the written
# questions below asks you to explain this.
#
# PyTorch's quantizer has a form with one scale per channel. Its argument `axis`
# names the dimension that *keeps* its scales:

# %%
with checks.waits_for(2, 4):
    scale_rows = absmax_scale_per_output_channel(W_out)
    yours = quantize_int8(W_out, scale_rows)
    theirs = torch.fake_quantize_per_channel_affine(
        W_out,
        scale=scale_rows.flatten(),
        zero_point=torch.zeros(2, dtype=torch.int32),
        axis=0,
        quant_min=-128,
        quant_max=127,
    )
    their_codes = torch.round(theirs / scale_rows).to(torch.int8)
    print("same codes:   ", torch.equal(their_codes, yours))
    print("same restored:", torch.equal(theirs, dequantize(yours, scale_rows)))

# %% [markdown] lang="en"
# ## 6 · Activations: choose the range before the data comes
#
# Weights do not change. You know all of them, so their largest magnitude is a fact.
# Activations arrive with each request. If their scale is fixed in advance, it
# must come from *other* data: a **calibration set**, a sample of inputs you hope
# is like the real ones.
#
# Suppose the calibration set is too tame. The data that comes later leaves the
# range, and its codes stop at the end. The share of values that this happens to
# is the *clipped fraction*:
#
# ```text
# clipped: round(x / scale) < -128   or   round(x / scale) > 127
# ```
#
# A value whose code is just 127 or -128 is **not** clipped. It is where it
# belongs.
#
# For clipped values half a step is no limit any more: the bound of section 4
# silently needs "nothing is clipped". So a clipped fraction above zero is what
# you look at first when a quantized layer misbehaves.


# %% nbgrader={"grade_id": "todo_5", "solution": true} todo="TODO 5: the clipped fraction, and a scale from a calibration set"
def clipped_fraction(x: Tensor, scale: Tensor) -> float:
    """The share of values whose rounded code does not fit into int8.

    x       any shape, float32, not empty
    scale   float32, positive, broadcasts against x
    return  a number from 0 (all in range) to 1 (all clipped)
    raises  ValueError that names x when x holds nan or inf, and one that
            names scale and says its value when a scale is not positive
    """
    # 1. refuse x when a value is not finite, scale unless it is above 0
    # 2. the codes before any clamp, still as floats
    # 3. which of them lie outside [-128, 127], on either side; their share
    ### BEGIN SOLUTION
    if not torch.isfinite(x).all():
        bad = int((~torch.isfinite(x)).sum())
        raise ValueError(f"x must be finite, got {bad} values of nan or inf")
    if not (scale > 0).all():
        raise ValueError(f"scale must be positive, got {scale}")
    wanted = torch.round(x / scale)
    outside = (wanted < -128) | (wanted > 127)
    return int(outside.sum()) / outside.numel()
    ### END SOLUTION


def calibrate_scale(
    batches: list[Tensor], qmax: int = 127, eps: float = 1e-8
) -> Tensor:
    """One symmetric scale for data to come, from a calibration set.

    batches  the calibration set: tensors of any shapes, float32. The batch
             that will be tested is not among them, and must have no say
    qmax     the code on which the largest magnitude of the whole set lands
    eps      the floor: no scale may come out smaller
    return   float32, shape (): size of one step
    raises   ValueError that names batches when there is none, or when one
             holds nan or inf
    """
    # 1. refuse an empty set and values that are not finite
    # 2. the largest magnitude over all batches
    # 3. the step that takes it to qmax, but never less than eps
    ### BEGIN SOLUTION
    if len(batches) == 0:
        raise ValueError("batches must hold at least one tensor, got none")
    for number, batch in enumerate(batches):
        if not torch.isfinite(batch).all():
            raise ValueError(f"batches must be finite, number {number} is not")
    peak = torch.stack([batch.abs().max() for batch in batches]).max()
    return (peak / qmax).clamp(min=eps)
    ### END SOLUTION


# %% [markdown] lang="en"
# **Tested:** the share of clipped values, on both sides and right at the ends.
#
# **Why:** a count that includes the last code in range raises a false alarm; one
# that looks at one side only misses half of the trouble.
#
# **Expected:** 1.0 for `X` with a range of ±0.1, 0.25 for `[-2, 0.25, 0, 0.5]`
# with a range of ±0.5.


# %% nbgrader={"grade_id": "test_todo_5", "grade": true, "points": 1}
def test_last_codes_are_not_clipped():
    steps = [-300, -270, -129, -128.7, -128.7, -128.3, -128.3, -128]
    steps += [-127, -60, 0, 60, 127]
    steps += [127.3, 127.3, 127.3, 127.7, 128, 140, 300]
    x, scale = 0.5 * torch.tensor(steps), torch.tensor(0.5)
    checks.linear.clipped(clipped_fraction(x.clone(), scale), x, scale)


def test_share_of_clipped_values():
    tame = torch.tensor(0.1 / 127)
    share = clipped_fraction(lab_inputs(), tame)
    checks.linear.clipped(share, lab_inputs(), tame)
    x = torch.tensor([[-2.0, 0.25, 0.0, 0.5]])
    scale = torch.tensor(0.5 / 127)
    checks.linear.clipped(clipped_fraction(x.clone(), scale), x, scale)


with checks.todo(5):
    test_last_codes_are_not_clipped()
    test_share_of_clipped_values()

    ### BEGIN HIDDEN TESTS
    def test_share_on_other_shapes_and_seeds():
        for seed in (61, 62, 63):
            g = torch.Generator().manual_seed(seed)
            x = torch.randn(3, 5, 7, generator=g) + 0.4
            kept = x.clone()
            for shape in ((), (1, 5, 1), (3, 1, 1)):
                scale = 0.004 + 0.008 * torch.rand(shape, generator=g)
                checks.linear.clipped(clipped_fraction(x, scale), x, scale)
            wide = torch.tensor(1.0)
            checks.linear.clipped(clipped_fraction(x, wide), x, wide)
            checks.linear.unchanged(x, kept, "x")

    test_share_on_other_shapes_and_seeds()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** the scale from a calibration set of several batches.
#
# **Why:** a scale from the last batch, or from an average, clips the batch that
# mattered. A scale from the test batch reports an error you will not see again.
#
# **Expected:** `scale * qmax` is the largest magnitude of the whole set.


# %% nbgrader={"grade_id": "test_todo_5_calibration", "grade": true, "points": 2}
def test_whole_calibration_set_counts():
    batches = [
        torch.tensor([[0.2, -0.3]]),
        torch.tensor([[-1.6, 0.5], [0.7, 0.1]]),
        torch.tensor([0.4, 0.6, -1.1]),
    ]
    scale = calibrate_scale([batch.clone() for batch in batches])
    checks.linear.calibrated(scale, batches, test_batch=lab_inputs())


with checks.todo(5):
    test_whole_calibration_set_counts()

    ### BEGIN HIDDEN TESTS
    def test_calibration_on_other_shapes_and_seeds():
        for seed, where, qmax in ((71, 0, 127), (72, 2, 7), (73, 3, 127)):
            g = torch.Generator().manual_seed(seed)
            sizes = ((4, 3), (2, 5), (6,), (1, 2, 3))
            batches = [torch.rand(size, generator=g) - 0.5 for size in sizes]
            batches[1].view(-1)[0] = 0.75  # so that no two batches pass for one
            batches[where].view(-1)[1] = -1.25 * (-1) ** seed
            kept = [batch.clone() for batch in batches]
            scale = calibrate_scale(batches, qmax=qmax)
            for now, before in zip(batches, kept, strict=True):
                checks.linear.unchanged(now, before, "batches")
            checks.linear.calibrated(scale, batches, qmax)
        alone = [torch.tensor([-0.1, 0.0, 0.1])]
        checks.linear.calibrated(calibrate_scale(alone), alone)

    test_calibration_on_other_shapes_and_seeds()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** an empty calibration set, an all-zero and a tiny one, bad values and
# scales.
#
# **Why:** no data is no reason to invent a range.
#
# **Expected:** `ValueError` that names `batches` or `x`, or `scale` and its value;
# for zeros and tiny values the scale that `eps` allows.


# %% nbgrader={"grade_id": "test_todo_5_errors", "grade": true, "points": 1}
def test_calibration_refuses_an_empty_set():
    why = "there is none"
    checks.refuses(calibrate_scale, [], names="batches", because=why)


def test_clipping_refuses_a_scale_that_is_not_positive():
    for value in (0.0, -0.1):
        checks.refuses(
            clipped_fraction,
            *(lab_inputs(), torch.tensor(value)),
            names="scale",
            because=f"it is {value}",
            given=value,
        )


def test_eps_is_the_floor_of_a_calibration():
    for batches in (
        [torch.zeros(2), torch.zeros(1, 3)],
        [torch.tensor([2e-5]), torch.tensor([-3e-5, 1e-5])],
    ):
        scale = calibrate_scale(batches, eps=1e-3)
        checks.linear.calibrated(
            scale, batches, eps=1e-3, test_batch=lab_inputs()
        )


def test_right_data_is_not_refused():
    x, scale = lab_inputs(), torch.tensor(0.5)
    why = "a finite x and a scale of 0.5"
    checks.accepts(clipped_fraction, x, scale, because=why)
    checks.accepts(calibrate_scale, [x], because="one batch of finite values")


with checks.todo(5):
    test_calibration_refuses_an_empty_set()
    test_clipping_refuses_a_scale_that_is_not_positive()
    test_eps_is_the_floor_of_a_calibration()
    test_right_data_is_not_refused()

    ### BEGIN HIDDEN TESTS
    def test_each_bad_value_is_refused():
        one = torch.tensor(1.0)
        for value in (float("nan"), float("inf")):
            x = torch.tensor([0.0, value])
            why = f"it holds {value}"
            checks.refuses(clipped_fraction, x, one, names="x", because=why)
            some = [torch.ones(2), x, torch.ones(3)]
            checks.refuses(calibrate_scale, some, names="batches", because=why)
        for value in (-1.0, float("nan")):
            s = torch.tensor([1.0, value])
            known = {"names": "scale", "because": f"one scale is {value}"}
            x = torch.ones(3, 2)
            checks.refuses(clipped_fraction, x, s, given=value, **known)
        zeros = [torch.zeros(2), torch.zeros(1, 3)]
        checks.linear.calibrated(calibrate_scale(zeros), zeros)
        tiny = [torch.tensor([1e-7]), torch.tensor([-1e-7, 0.0])]
        scale = calibrate_scale(tiny, eps=1e-4)
        checks.linear.calibrated(scale, tiny, eps=1e-4)

    test_each_bad_value_is_refused()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# ### Three ranges for the same batch
#
# Now the inputs are quantized as well as the weights. The batch is `X`, and its
# range comes from
#
# 1. a calibration set that is far too tame, `[-0.1, 0, 0.1]`;
# 2. a calibration set that is like the batch;
# 3. the largest magnitude of `X` itself. This is **an oracle, not a
#    calibration**: nobody who fixes a scale in advance has seen the batch it
#    will meet. It is the smallest range that clips nothing.

# %%
with checks.waits_for(1, 2, 5):
    choices = {
        "too tame: [-0.1, 0, 0.1]": [torch.tensor([-0.1, 0.0, 0.1])],
        "alike: up to 2.2": [
            torch.tensor([0.9, -1.4, 0.3]),
            torch.tensor([-0.2, 2.2, -1.1]),
        ],
        "oracle: X itself": [X],
    }
    restored_w = round_trip(W, torch.as_tensor(absmax_scale(W)))
    cases = []
    for label, batches in choices.items():
        scale_x = torch.as_tensor(calibrate_scale(batches))
        y_both = F.linear(round_trip(X, scale_x), restored_w, bias)
        off = float((y_both - y).abs().max())
        share = float(clipped_fraction(X, scale_x))
        cases.append((label, float(scale_x), share, off))
        count = round(share * X.numel())
        print(f"{label:26} scale {float(scale_x):.6f}, {count} of 8 clipped")
        print(f"{'':26} largest output error {off:.6f}")
    plots.show(
        plots.linear.calibration_ranges(X, cases),
        alt="Three ranges on one axis with the eight activations. The range "
        "of 0.1 holds none of them, and the output error is 10.8. The ranges "
        "of 2.2 and 2.0 hold all, and the error is below 0.1.",
    )

# %% [markdown] lang="en"
# **What to see.** The tame calibration clips all eight values, and its output error
# is more than a hundred times larger than the other two. Half a step of it is 0.0004; a bound
# made from that would have promised a far smaller error.
#
# The order of the other two means little. The oracle has the smaller
# step, yet here the larger error: with eight values, chance decides how they
# fall between the steps. Only the limit, half a step, is smaller for it.
#
# One more case, small enough to read code by code. The layer keeps its float
# weights, the calibration set is `[-0.5, 0.25, 0.5]`, the new input is
# `[-2, 0.25, 0, 0.5]`:

# %%
with checks.waits_for(2, 5):
    x_new = torch.tensor([[-2.0, 0.25, 0.0, 0.5]])
    known = [torch.tensor([-0.5, 0.25, 0.5])]
    scale_new = torch.as_tensor(calibrate_scale(known))
    codes_new = quantize_int8(x_new, scale_new)
    restored_new = dequantize(codes_new, scale_new)
    share_new = float(clipped_fraction(x_new, scale_new))
    off = F.linear(restored_new, W, bias) - F.linear(x_new, W, bias)
    error_new = off.abs()
    print(f"scale        {float(scale_new):.8f}")
    print(f"codes        {codes_new[0].tolist()}")
    print(f"restored     {[round(v, 6) for v in restored_new[0].tolist()]}")
    print(f"clipped      {share_new * x_new.numel():.0f} of {x_new.numel()}")
    print(f"output error {[round(v, 6) for v in error_new[0].tolist()]}")

# %% [markdown] lang="en"
# Here is the code -128 that section 3 promised. The value -2 lies beyond the
# range, so it stops at the lowest code, -128. The value 0.5 sits on code 127 and
# is not clipped. The restored range is a little longer on its negative side:
# -0.503937 against 0.5. An algorithm that clamps to [-127, 127] would have given
# -0.5.
#
# **Is the largest magnitude of the batch always forbidden?** No. *Dynamic*
# quantization measures each batch when it arrives and uses its own scale. That
# costs a pass over the data at run time. A KV-cache quantizer does just this
# with the tokens that it stores, as you will see in Lab 03. What is not allowed
# is to fix a scale with the help of the test batch, and to report the error as
# if the scale had been known before.
#
# ### When the data drifts
#
# A larger example: a layer with 64 inputs and 32 outputs, calibrated on eight
# batches, then used on data that becomes wider and wider.

# %%
with checks.waits_for(2, 4, 5):
    g = torch.Generator().manual_seed(5)
    w = torch.randn(32, 64, generator=g)
    w_scale = absmax_scale_per_output_channel(w)
    w_hat = round_trip(w, w_scale)
    x_scale = torch.as_tensor(
        calibrate_scale([torch.randn(16, 64, generator=g) for _ in range(8)])
    )
    print("spread of the data   clipped   error, share of the output's size")
    for spread in (0.25, 1.0, 1.5, 2.0, 4.0):
        x = spread * torch.randn(256, 64, generator=g)
        exact = F.linear(x, w)
        off = F.linear(round_trip(x, x_scale), w_hat) - exact
        share = float(clipped_fraction(x, x_scale))
        size = exact.pow(2).mean().sqrt()
        error = float(off.pow(2).mean().sqrt() / size)
        print(f"{spread:10.2f}          {share:8.3%}   {error:8.2%}")

# %% [markdown] lang="en"
# Data like the calibration set (spread 1) is clipped hardly ever. Wider data is
# clipped more and more, and the error rises steeply. Data that is *narrower* than
# the calibration set suffers too, in the other way: its values use few of the
# codes, so rounding weighs more. A range can be too small and too large.
#
# ### What an INT8 kernel would do
#
# Nothing so far computed with integers. But with codes for both the inputs and
# the weights, it is possible: multiply codes, add them up in `int32`, and scale
# once at the end. This is the arithmetic that INT8 hardware speeds up.
#
# ```text
# y[b, o] ≈ scale_x · scale_w[o] · Σᵢ codes_x[b, i] · codes_w[o, i] + bias[o]
# ```

# %%
with checks.waits_for(2, 4, 5):
    g = torch.Generator().manual_seed(6)
    w = torch.randn(32, 64, generator=g)
    x = torch.randn(16, 64, generator=g)
    w_scale = absmax_scale_per_output_channel(w)
    # Only the sums matter here, so the batch may calibrate itself.
    x_scale = torch.as_tensor(calibrate_scale([x]))
    w_codes, x_codes = quantize_int8(w, w_scale), quantize_int8(x, x_scale)
    sums = x_codes.to(torch.int32) @ w_codes.to(torch.int32).T
    by_integers = sums * x_scale * w_scale.T
    x_hat, w_hat = dequantize(x_codes, x_scale), dequantize(w_codes, w_scale)
    by_floats = F.linear(x_hat, w_hat)
    gap = float((by_integers - by_floats).abs().max() / by_floats.abs().max())
    largest = int(sums.abs().max())
    print(f"sums of codes: {sums.dtype}, largest magnitude {largest}")
    print(f"integers and restored floats differ by {gap:.0e} of the output")

# %% [markdown] lang="en"
# Both ways give the same output, up to the rounding of float32. That is why you
# may study quantization with floats, as this course does, and still learn what an
# integer kernel would return. It tells you nothing about speed.
#
# ## 7 · A wider range, or more bits?
#
# The next picture takes 20,000 values with heavy tails: most are small, a few are
# very large. It tries many ranges for them, with 4, 6 and 8 bits, and splits the
# mean squared error into its two kinds. A value counts as clipped when it is more
# than half a step off. Here PyTorch's quantizer does the work, because it can
# take fewer bits than your `int8` functions.

# %%
g = torch.Generator().manual_seed(7)
normal = torch.randn(5, 20000, generator=g)
values = normal[0] / normal[1:].pow(2).mean(dim=0).sqrt()
ranges = torch.logspace(-0.6, 1.5, 90).tolist()
curves = {}
for bits in (4, 6, 8):
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    rounding, clipping = [], []
    for end in ranges:
        step = end / high
        back = torch.fake_quantize_per_tensor_affine(
            values, step, zero_point=0, quant_min=low, quant_max=high
        )
        off = (back - values).abs()
        cut = off > 0.5001 * step
        rounding.append(float((off * ~cut).pow(2).mean()))
        clipping.append(float((off * cut).pow(2).mean()))
    curves[bits] = (torch.tensor(rounding), torch.tensor(clipping))
    total = curves[bits][0] + curves[bits][1]
    best = int(total.argmin())
    print(
        f"{bits} bits: best range ±{ranges[best]:.1f}, mean squared error "
        f"{float(total[best]):.6f}"
    )
peak = float(values.abs().max())
print(f"largest magnitude: {peak:.1f}")
plots.show(
    plots.linear.range_tradeoff(ranges, curves, peak),
    alt="Mean squared error against the end of the range, log axes, for 4, 6 "
    "and 8 bits. Each curve falls along the common clipping curve, reaches a "
    "minimum and rises along its own rounding line. With more bits the "
    "minimum lies lower and at a wider range.",
)

# %% [markdown] lang="en"
# **What to see.** Far left of its minimum a curve is nearly all clipping, far right
# of it nearly all rounding: at half the best range clipping makes over 90 % of the
# error, at twice the best range about 2 % or less. Near the minimum both count. Follow one
# curve to the right: a wider range clips less, but makes every step larger.
# Now compare curves at one range: two more bits lower the rounding error by a
# factor of about 16, and leave the clipping error where it was. With 8 bits the
# best range nearly reaches the largest magnitude (grey line). With 4 bits it is
# a third of it: there it pays to clip a few values on purpose, so that all the
# others get a finer step.

# %% [markdown] lang="en"
# ## 8 · All results in one place
#
# These are the numbers of this lab. Compare them with what you see above.
#
# | case | result |
# |---|---|
# | `W`, one scale | 0.0417323; codes `[[0, -1, 1, 1], [53, -74, 101, -127]]` |
# | first row of the output, float / restored weights | `[0.1975, -0.4750]` / `[0.183465, -0.460827]` |
# | largest output error, only weights quantized | 0.0232677 (bounds per row: 0.0522, 0.0835) |
# | payload of the weights | 32 B to 8 B |
# | inputs too, calibrated on `[-0.1, 0, 0.1]` | 8 of 8 clipped, largest output error 10.7619 |
# | inputs too, range of the batch itself (oracle) | 0 clipped, largest output error 0.081069 |
# | `W[1, 3] = 80`, one scale | 0.629921; largest error per output 0.0975, 0.4661; row 0 all zero |
# | `W[1, 3] = 80`, one scale per output | 0.000393701, 0.629921; largest error per output 0.000157, 0.4661 |
# | inputs only, calibrated on `[-0.5, 0.25, 0.5]` | codes `[-128, 64, 0, 127]`, 1 of 4 clipped, output error 0.029862, 3.285237 |

# %% [markdown] lang="en"
# ## Written question 1
#
# With `W[1, 3] = 80`, a scale per output channel lowered the error of output 0
# about 600 times and that of output 1 not at all. **Why does a scale per channel
# help across rows, but not inside one?** Name what two weights must share for an
# outlier in one to harm the other, and name one change that would help output 1.
# (3 to 5 sentences)

# %% [markdown] lang="en" nbgrader={"grade_id": "written_1", "grade": true, "solution": true, "points": 2}
# <!-- BEGIN SOLUTION -->
# **Model answer.** An outlier harms exactly those weights that share its scale,
# because the scale is set by the largest magnitude among them. With one scale per
# row, row 0 has its own largest magnitude, 0.05, so its step no longer depends on
# the 80 in row 1. Inside row 1 all four weights still share one step, 80 / 127 =
# 0.63, so 2.2, -3.1 and 4.2 are rounded to 3, -5 and 7 steps as before. To help
# output 1, fewer weights must share a scale with the outlier (smaller groups
# inside a row), or the outlier must be treated apart (kept in higher precision,
# or clipped on purpose), or the step must shrink through more bits.
#
# **Rubric (2 points)**
#
# - 1 point: says that all weights of a row share one scale and that the largest
#   magnitude in the row sets it. So row 0 is freed from the outlier and row 1 is
#   not.
# - 1 point: names one change that works inside a row, for example groups within
#   the row, keeping the outlier in float, clipping it, more bits. A scale per
#   input channel counts if the answer says what it costs: the scale no longer
#   leaves the sum.
# <!-- END SOLUTION -->

# %% [markdown] lang="en"
# ## Written question 2
#
# A quantized layer is not accurate enough. One colleague says "widen the range",
# another says "add a bit". **Why are these different decisions?** Say for each
# which of the two kinds of error it changes, in which direction, and what it
# costs. Which measurement from this lab would you look at before you decide?
# (4 to 6 sentences)

# %% [markdown] lang="en" nbgrader={"grade_id": "written_2", "grade": true, "solution": true, "points": 2}
# <!-- BEGIN SOLUTION -->
# **Model answer.** Widening the range with the same number of codes makes every
# step larger: fewer values are clipped, but each value in range is rounded more
# coarsely. It costs no memory; it trades one kind of error for the other. Adding a
# bit at the same range doubles the number of codes: each step is half as large, so
# the rounding error is halved (its square falls to a quarter). Values beyond the
# range are still clipped just as far, and every code takes more memory. So look at
# the clipped fraction first. If values are clipped and they matter, the range is
# the problem, and bits alone will not help. If nothing is clipped, rounding is the
# problem: more bits help, or a *narrower* range, or fewer values per scale.
#
# **Rubric (2 points)**
#
# - 1 point: range: less clipping, more rounding, no more memory. Bits: less
#   rounding, same clipping, more memory. All of it is needed for the point; half
#   for one of the two.
# - 1 point: looks at the clipped fraction (or the split of the error) and draws
#   the right conclusion from it in both cases.
# <!-- END SOLUTION -->

# %% [markdown] lang="en"
# ## What this shows, and what it does not
#
# **It shows**
#
# - A scale belongs to the largest value that shares it. Who shares a scale with
#   whom decides where the error goes. That choice is called the *axis*.
# - Rounding has a limit of half a step, and with it the output has a bound.
#   Clipping has none.
# - A range for activations is a guess about data to come. Check the clipped
#   fraction.
#
# **It does not show**
#
# - What quantization saves. Nothing here became faster or took less memory: the
#   float copy is kept, and `F.linear` computes in float32.
# - How a model fares. Two outputs and four inputs are not a model, and an output
#   error of 0.08 says nothing about the text that a language model writes.
# - What real layers do. The random layers have normal weights and inputs. Real
#   ones have outliers in certain channels. Lab 03 looks at those of a real model, and at the question
#   that follows from this lab: which axis should share a scale, for Keys and for
#   Values?
