"""Checks of lab 02: a scale, int8 codes, restored values, an error bound, clipping.

Called by the test cells of lab 02 (`checks.linear.codes(...)`) and by its tests.
Never returns an expected value: it reads an answer number by number and names the mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlab.checks import Wrong, expect, is_scale, number, tensor

__all__ = [
    "bound",
    "calibrated",
    "clipped",
    "codes",
    "one_scale",
    "output_channel_scale",
    "restored",
    "unchanged",
]

LOWEST, HIGHEST = -128, 127  # what an int8 can hold
# A float32 quotient near 128 is off by at most 128 * 2**-24 = 8e-6 steps. The slack
# also lets both ways of rounding an exact half pass: each is half a step away.
HALF_STEP = 0.5 + 1e-4
# One float32 division is off by 6e-8 of its value; a sum of n terms by about n times that.
RELATIVE = 1e-5
EPS = 1e-8  # the default of every function of the lab that takes an eps
FLOOR = "The argument eps is the floor: no scale may come out smaller."

Mistakes = Mapping[str, Sequence[float]]


def _flat(values: Tensor) -> list[float]:
    """Every value as a plain number, row after row."""
    return [float(v) for v in values.detach().flatten()]


def _close(got: Sequence[float], wanted: Sequence[float], rel: float) -> bool:
    return len(got) == len(wanted) and all(
        math.isclose(g, w, rel_tol=rel, abs_tol=1e-12)
        for g, w in zip(got, wanted, strict=True)
    )


def _recognise(got: Sequence[float], mistakes: Mistakes, rel: float) -> None:
    """Raises Wrong with the sentence of the first mistake that gives these numbers."""
    for sentence, wrong in mistakes.items():
        if _close(got, wrong, rel):
            raise Wrong(sentence)


def _precision(value: Any) -> float:
    """Relative tolerance: that of the arithmetic, or of the dtype the answer chose."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return max(RELATIVE, float(torch.finfo(value.dtype).eps))
    return RELATIVE


def _finite_scale(scale: Any, name: str) -> Tensor:
    """The scale as a tensor, when every value is finite and positive."""
    if isinstance(scale, float | int) and not isinstance(scale, bool):
        scale = torch.tensor(scale, dtype=torch.float64)
    expect(
        isinstance(scale, Tensor),
        f"{name} is a {type(scale).__name__}; a torch.Tensor is expected.",
    )
    for value in _flat(scale):
        expect(
            math.isfinite(value) and value > 0,
            f"{name} holds {value:g}. A scale must be positive and finite, also where "
            "every value is 0.",
        )
    tensor(scale, name)
    _fine(scale, name)
    return scale


def _fine(value: Tensor, name: str) -> None:
    """Half precision is too coarse for what follows."""
    coarse = value.is_floating_point() and value.element_size() < 4
    expect(
        not coarse,
        f"{name} has dtype {str(value.dtype).removeprefix('torch.')}, which keeps two "
        "or three digits. float32 is wanted.",
    )


def _scale_mistakes(rows: Sequence[Sequence[float]], qmax: int, name: str) -> Mistakes:
    """What each known mistake makes of the scale; one list entry per row of values."""
    peak = [max(abs(v) for v in row) for row in rows]
    top = [max(row) for row in rows]
    bottom = [-min(row) for row in rows]
    mean = [math.fsum(abs(v) for v in row) / len(row) for row in rows]
    squares = [math.fsum(v * v for v in row) for row in rows]
    return {
        f"{name} is upside down: it counts steps per unit. A scale is the size of one "
        "step, so that codes x scale gives the values back.": [
            qmax / p if p else math.inf for p in peak
        ],
        f"{name} divides by {qmax + 1}, so the largest magnitude lands on code "
        f"{qmax + 1}. It must land on qmax = {qmax}.": [p / (qmax + 1) for p in peak],
        f"{name} divides by {2 * qmax + 1}, as if all codes lay on one side of zero. "
        f"The largest magnitude must land on qmax = {qmax}.": [
            p / (2 * qmax + 1) for p in peak
        ],
        f"{name} divides by {2 * qmax + 2}, the number of codes. The largest magnitude "
        f"must land on qmax = {qmax}.": [p / (2 * qmax + 2) for p in peak],
        f"{name} spreads max - min over all codes, as an asymmetric scale does. Here "
        "zero keeps code 0: only the largest magnitude counts.": [
            (t + b) / (2 * qmax + 1) for t, b in zip(top, bottom, strict=True)
        ],
        f"{name} comes from the largest value, sign included. A negative value can lie "
        "farther from 0: the largest magnitude is wanted.": [
            abs(t) / qmax for t in top
        ],
        f"{name} comes from the smallest value alone. The largest magnitude, on either "
        "side of 0, is wanted.": [abs(b) / qmax for b in bottom],
        f"{name} comes from the mean magnitude. The largest magnitude is wanted, or "
        "everything above the mean is clipped.": [m / qmax for m in mean],
        f"{name} comes from the root of the sum of squares. The largest magnitude is "
        "wanted.": [math.sqrt(s) / qmax for s in squares],
        f"{name} is the largest magnitude itself. It must be shared out over qmax = "
        f"{qmax} steps.": peak,
        f"{name} divides by 127 although qmax is {qmax}. The argument qmax must count.": [
            p / 127 for p in peak
        ],
    }


def _judge_scales(
    scale: Tensor,
    rows: Sequence[Sequence[float]],
    qmax: int,
    eps: float,
    name: str,
    of: str,
) -> None:
    """Each scale times qmax must be the largest magnitude of its own values.

    Where eps is of any weight, the scale must be one of those that it allows.
    """
    got, rel = _flat(scale), _precision(scale)
    peaks = [max(abs(v) for v in row) for row in rows]
    wrong = [
        i for i, peak in enumerate(peaks) if not is_scale(got[i], peak, qmax, eps, rel)
    ]
    if not wrong:
        return
    told = [i for i, peak in enumerate(peaks) if peak / qmax > 100 * eps]
    i = next((i for i in wrong if i in told), wrong[0])
    if i not in told:
        raise Wrong(_eps_sentence(got[i], peaks[i], qmax, eps, rel, name))
    _recognise(
        [got[j] for j in told],
        _scale_mistakes([rows[j] for j in told], qmax, name),
        rel,
    )
    off = abs(got[i] * qmax / peaks[i] - 1)
    if off < 0.01:
        raise Wrong(
            f"{name} is off by {off:.2g} of its value. Compute it in float32 and "
            "add nothing to it: eps matters for tiny scales only."
        )
    raise Wrong(
        f"{name} x qmax is {got[i] * qmax:g}{of}, where the largest magnitude is "
        f"{peaks[i]:g}. The two must be equal."
    )


def _eps_sentence(
    got: float, peak: float, qmax: int, eps: float, rel: float, name: str
) -> str:
    """What went wrong where the values are so small that eps decides."""
    values = f"values up to {peak:.2g}" if peak else "values that are all 0"
    said = f"with eps = {eps:g}, {name} of {values} is {got:g}"
    if peak and is_scale(got, peak, qmax, 0.0, rel):
        return f"{said}: eps had no say, since they are not 0. {FLOOR}"
    if eps != EPS and is_scale(got, peak, qmax, EPS, rel):
        return f"{said}: your code has an eps of its own, {EPS:g}. {FLOOR}"
    if math.isclose(got * max(peak, eps), qmax, rel_tol=rel):
        return f"{said}: it is upside down. {FLOOR}"
    return f"{said}: eps had no say. {FLOOR}"


def one_scale(scale: Any, x: Tensor, qmax: int = 127, eps: float = EPS) -> None:
    """One scale for a whole tensor: scale x qmax is the largest magnitude in x.

    scale  what the answer gave for x: a tensor with one value, or a number
    """
    name = "the scale"
    if isinstance(scale, Tensor) and scale.numel() > 1:
        sizes = ", ".join(str(n) for n in scale.shape)
        raise Wrong(
            f"{name} has shape ({sizes}): one scale for each slice of x. One scale for "
            "the whole tensor is expected, shape ()."
        )
    _judge_scales(_finite_scale(scale, name), [_flat(x)], qmax, eps, name, of="")


def output_channel_scale(
    scale: Any, weight: Tensor, qmax: int = 127, eps: float = EPS
) -> None:
    """One scale per row of weight [out, in]: scale[o, 0] x qmax is the row's peak.

    scale  what the answer gave for weight; its shape must be [out, 1]
    """
    name = "the scale"
    out, inputs = weight.shape
    expect(
        isinstance(scale, Tensor),
        f"{name} is a {type(scale).__name__}; a torch.Tensor is expected.",
    )
    shape = tuple(scale.shape)
    wanted = f"Expected one scale per output channel (row), shape ({out}, 1)."
    if shape != (out, 1):
        if scale.numel() == 1:
            raise Wrong(
                f"{name} has shape {shape}: one scale for the whole weight. {wanted}"
            )
        if shape in ((inputs,), (1, inputs), (inputs, 1)):
            raise Wrong(
                f"{name} has shape {shape}: one scale per input channel (column), taken "
                f"over the outputs. {wanted}"
            )
        if shape in ((out,), (1, out)):
            raise Wrong(
                f"{name} has shape {shape}: the reduced dimension was not kept, so it "
                f"does not broadcast against rows of length {inputs}. {wanted}"
            )
        raise Wrong(f"{name} has shape {shape}. {wanted}")
    rows = [_flat(row) for row in weight]
    for o, row in enumerate(rows):
        value = float(scale[o, 0])
        expect(
            any(row) or (math.isfinite(value) and value > 0),
            f"{name} of row {o}, which is all zero, is {value:g}. An all-zero row "
            "needs a finite scale above 0 as well.",
        )
    scale = _finite_scale(scale, name)
    if len(set(_flat(scale))) == 1 and out > 1:
        peaks = [max(abs(v) for v in row) for row in rows]
        if math.isclose(float(scale[0, 0]) * qmax, max(peaks), rel_tol=RELATIVE):
            expect(
                min(peaks) == max(peaks),
                f"{name} is the same for every row: one peak was taken over the whole "
                "weight. Each row needs the scale of its own peak.",
            )
    _judge_scales(scale, rows, qmax, eps, name, of=" in one row")


def _steps(x: Tensor, scale: Tensor) -> list[float]:
    """How many steps each value of x is away from zero, not rounded."""
    steps = torch.as_tensor(scale).expand(x.shape)
    return [v / s for v, s in zip(_flat(x), _flat(steps), strict=True)]


def _is_code(steps: float, code: float) -> bool:
    """Whether code is the nearest int8 to that many steps."""
    if steps >= HIGHEST + 0.5:
        return code == HIGHEST
    if steps <= LOWEST - 0.5:
        return code == LOWEST
    return abs(steps - code) <= HALF_STEP


def _wrapped(steps: float) -> int:
    """What is left of that many steps when only the lowest eight bits are kept."""
    return (round(steps) - LOWEST) % 256 + LOWEST


def _inside(code: int) -> int:
    return min(max(code, LOWEST), HIGHEST)


def codes(codes: Any, x: Tensor, scale: Tensor) -> None:
    """Every code is the nearest int8 to x / scale; beyond the range, the range's end.

    codes  what the answer gave for x and scale
    scale  one value, or a tensor that broadcasts against x
    """
    name = "the codes tensor"
    tensor(codes, name, shape=tuple(x.shape))
    expect(
        codes.dtype == torch.int8,
        f"{name} has dtype {codes.dtype}. Whole numbers in one byte each are wanted: "
        "torch.int8.",
    )
    steps, got = _steps(x, scale), _flat(codes)
    bad = [
        i for i, (s, c) in enumerate(zip(steps, got, strict=True)) if not _is_code(s, c)
    ]
    if not bad:
        return
    seen = f"x / scale = {steps[bad[0]]:.4g} became code {got[bad[0]]:g}"
    if all(steps[i] < LOWEST + 0.5 and got[i] == LOWEST + 1 for i in bad):
        raise Wrong(
            f"{seen}: the clamp stops at -127. In this lab the codes go down to -128, "
            "the lowest int8."
        )
    beyond = [not LOWEST - 0.5 < s < HIGHEST + 0.5 for s in steps]
    wraps = any(beyond[i] and got[i] == _wrapped(steps[i]) for i in bad)
    if all(beyond[i] for i in bad) and wraps:
        raise Wrong(
            f"{seen}: it left the range of int8 and wrapped round. Values beyond the "
            "range must stop at its nearer end, before the conversion to int8."
        )
    # Without a clamp, values beyond the range say nothing about how they were rounded.
    told = [i for i in range(len(got)) if not (wraps and beyond[i])]
    if not any(got):
        raise Wrong(
            f"every code is 0, also where x / scale = {steps[bad[0]]:.4g}. A code counts "
            "how often the scale fits into x; check what happens to x before the rounding."
        )
    values = _flat(x)
    sizes = _flat(torch.as_tensor(scale).expand(x.shape))
    guesses: list[tuple[str, Callable[[float], int], list[float]]] = [
        (
            "the fraction was cut off (rounded toward 0). The nearest whole number is "
            "wanted.",
            math.trunc,
            steps,
        ),
        (
            "it was rounded down (floor). The nearest whole number is wanted.",
            math.floor,
            steps,
        ),
        (
            "it was rounded up (ceil). The nearest whole number is wanted.",
            math.ceil,
            steps,
        ),
        (
            "the sign was lost. Codes are negative where x is.",
            round,
            [abs(s) for s in steps],
        ),
        (
            "x was multiplied by the scale. A code counts how often the scale fits into "
            "x.",
            round,
            [v * s for v, s in zip(values, sizes, strict=True)],
        ),
        (
            "the first scale was used for all values. The scale must broadcast against "
            "x.",
            round,
            [v / sizes[0] for v in values],
        ),
        (
            "the largest scale was used for all values. The scale must broadcast against "
            "x.",
            round,
            [v / max(sizes) for v in values],
        ),
    ]
    for sentence, whole, exact in guesses:
        # A float32 quotient may fall on the other side of a whole number or a half.
        if all(
            got[i] in (_inside(whole(exact[i] - 1e-4)), _inside(whole(exact[i] + 1e-4)))
            for i in told
        ):
            raise Wrong(f"{seen}: {sentence}")
    i = min(bad, key=lambda index: beyond[index])
    if beyond[i]:
        raise Wrong(
            f"x / scale = {steps[i]:.4g} became code {got[i]:g}. Values beyond the range "
            "must stop at its nearer end."
        )
    raise Wrong(
        f"x / scale = {steps[i]:.4g} became code {got[i]:g}. The code must be the "
        "nearest whole number, at most half a step away."
    )


def restored(restored: Any, codes: Tensor, scale: Tensor) -> None:
    """Every restored value is its code times its scale, as a float.

    restored  what the answer gave for codes and scale
    """
    name = "the restored tensor"
    tensor(restored, name, shape=tuple(codes.shape))
    expect(
        restored.is_floating_point(),
        f"{name} has dtype {restored.dtype}. Floats in the unit of x are wanted.",
    )
    _fine(restored, name)
    got, c = _flat(restored), _flat(codes)
    s = _flat(torch.as_tensor(scale).expand(codes.shape))
    rel = _precision(restored)
    pairs = list(zip(c, s, strict=True))
    wrong_at = [
        i
        for i, (code, step) in enumerate(pairs)
        if not math.isclose(got[i], code * step, rel_tol=rel, abs_tol=1e-12)
    ]
    if not wrong_at:
        return
    _recognise(
        got,
        {
            f"{name} is codes divided by the scale. A code counts steps, and the scale "
            "is the size of a step.": [code / step for code, step in pairs],
            f"{name} holds the codes as floats. They still have to become values in the "
            "unit of x.": c,
            f"{name} uses the first scale for all codes. The scale must broadcast "
            "against the codes.": [code * s[0] for code in c],
            f"{name} counts codes from -128 up. Code 0 means the value 0.": [
                (code + 128) * step for code, step in pairs
            ],
            f"{name} is rounded to whole numbers. Floats in the unit of x are wanted.": [
                float(round(code * step)) for code, step in pairs
            ],
            f"{name} is 0 everywhere: the scale became a whole number on the way. "
            "Convert the codes to float, never the scale to int.": [0.0] * len(c),
        },
        rel,
    )
    i = wrong_at[0]
    raise Wrong(
        f"code {c[i]:g} with scale {s[i]:g} was restored as {got[i]:g}. It must be that "
        "many steps of that size."
    )


def bound(bound: Any, x: Tensor, scale: Tensor, weight: Tensor | None = None) -> None:
    """bound[b, o] is what rounding the weights can do to output o in row b at most.

    bound   what the answer gave for x [batch, in] and scale (one, or [out, 1])
    weight  a weight that stands in the notebook, to notice when it was used in x's place
    """
    name = "the bound"
    tensor(bound, name)
    _fine(bound, name)
    batch, inputs = x.shape
    s = _flat(torch.as_tensor(scale))
    out = len(s)
    shape = tuple(bound.shape)
    wanted = f"Expected ({batch}, {out}): one row per row of x, one column per scale."
    if shape != (batch, out):
        if shape in (
            (inputs,),
            (1, inputs),
            (inputs, 1),
            (out, inputs),
            (batch, inputs),
        ):
            kept = "it still has" if shape == (batch, inputs) else "the sum kept"
            raise Wrong(
                f"{name} has shape {shape}: {kept} the input channels. "
                f"An output adds up over its inputs. {wanted}"
            )
        if shape == (batch,):
            raise Wrong(
                f"{name} has shape {shape}: the reduced dimension was not kept. {wanted}"
            )
        if bound.numel() == 1:
            raise Wrong(
                f"{name} is one number: the sum ran over all rows of x. {wanted}"
            )
        if shape == (batch, 1):
            raise Wrong(
                f"{name} has shape {shape}: one column for all outputs, though each "
                f"output has a scale of its own. {wanted}"
            )
        if shape in ((out, batch), (out, 1)):
            raise Wrong(
                f"{name} has shape {shape}: a scale was paired with a row of x, but it "
                f"belongs to an output. {wanted}"
            )
        raise Wrong(f"{name} has shape {shape}. {wanted}")
    rows = [_flat(row) for row in x]
    size = [math.fsum(abs(v) for v in row) for row in rows]
    pairs = [(b, o) for b in range(batch) for o in range(out)]
    got = _flat(bound)

    def each(per_row: Sequence[float], factor: float = 0.5) -> list[float]:
        return [per_row[b] * s[o] * factor for b, o in pairs]

    if _close(got, each(size), RELATIVE):
        return
    signed = [math.fsum(row) for row in rows]
    mistakes: dict[str, Sequence[float]] = {
        f"{name} allows a whole step per weight. Rounding to the nearest code moves a "
        "weight by at most half a step.": each(size, 1.0),
        f"{name} lets positive and negative inputs cancel. The errors of the weights "
        "may have any sign, so every input counts with its magnitude.": each(signed),
        f"{name} takes the magnitude after the sum, so inputs cancel. Every input counts "
        "with its own magnitude.": each([abs(v) for v in signed]),
        f"{name} counts the largest input only. The errors of all inputs add up.": each(
            [max(abs(v) for v in row) for row in rows]
        ),
        f"{name} is the mean over the inputs. The errors of all inputs add up.": each(
            [v / inputs for v in size]
        ),
        f"{name} uses the root of the sum of squares, which is smaller. In the worst "
        "case the magnitudes themselves add up.": each(
            [math.sqrt(math.fsum(v * v for v in row)) for row in rows]
        ),
        f"{name} leaves the scale out. It grows with the size of a step.": [
            size[b] / 2 for b, _ in pairs
        ],
        f"{name} divides by the scale. It grows with the size of a step.": [
            size[b] / s[o] / 2 for b, o in pairs
        ],
        f"{name} uses the first scale for all outputs. Each output has its own.": [
            size[b] * s[0] / 2 for b, _ in pairs
        ],
    }
    _recognise(got, mistakes, RELATIVE)
    if weight is not None:
        of_weight = [math.fsum(abs(v) for v in _flat(row)) for row in weight]
        sentence = (
            f"{name} adds up the weights. The error of a weight is multiplied by an "
            "input, so the inputs count."
        )
        for grid in ([b for b, _ in pairs], [o for _, o in pairs]):
            if max(grid) < len(of_weight):
                wrong = [
                    of_weight[i] * s[o] / 2
                    for i, (_, o) in zip(grid, pairs, strict=True)
                ]
                _recognise(got, {sentence: wrong}, RELATIVE)
    for (b, o), value in zip(pairs, got, strict=True):
        right = size[b] * s[o] / 2
        if value < right * (1 - RELATIVE):
            raise Wrong(
                f"{name} for row {b} and output {o} is {value:g}, but rounding can do "
                "more than that. It must hold in the worst case."
            )
        if value > right * (1 + RELATIVE):
            raise Wrong(
                f"{name} for row {b} and output {o} is {value:g}, which rounding can "
                "never reach. The triangle inequality gives less."
            )


def clipped(fraction: Any, x: Tensor, scale: Tensor) -> None:
    """fraction is the share of values whose rounded code lies outside int8.

    fraction  what the answer gave for x and scale: a number, or a tensor with one value
    """
    if isinstance(fraction, Tensor):
        expect(
            fraction.numel() == 1,
            f"the clipped fraction has shape {tuple(fraction.shape)}. One number for "
            "all values of x is expected.",
        )
        expect(
            fraction.dtype != torch.bool,
            "the clipped fraction is a bool. A number between 0 and 1 is expected.",
        )
        fraction = fraction.reshape(()).item()
    steps = _steps(x, scale)
    count = len(steps)
    rounded = [round(s) for s in steps]
    above = sum(r > HIGHEST for r in rounded)
    below = sum(r < LOWEST for r in rounded)
    mistakes = {
        "it is the number of clipped values. Their share is wanted, between 0 and 1.": (
            above + below
        ),
        "values whose code is just -128 or 127 were counted too. They are still in "
        "range, which codes that were clamped do not show: compare before any clamp.": sum(
            r >= HIGHEST or r <= LOWEST for r in rounded
        )
        / count,
        "the code 127 was counted as clipped. It is the last code in range.": sum(
            r >= HIGHEST or r < LOWEST for r in rounded
        )
        / count,
        "the code -128 was counted as clipped. It is the last code in range.": sum(
            r > HIGHEST or r <= LOWEST for r in rounded
        )
        / count,
        "only values above the range were counted. The range has two ends.": (
            above / count
        ),
        "only values below the range were counted. The range has two ends.": (
            below / count
        ),
        "x / scale was compared before it was rounded. A value is clipped when its "
        "rounded code does not fit.": sum(s > HIGHEST or s < LOWEST for s in steps)
        / count,
        "x / scale was cut off and not rounded. A value is clipped when the nearest "
        "whole number does not fit.": sum(
            math.trunc(s) > HIGHEST or math.trunc(s) < LOWEST for s in steps
        )
        / count,
        "x / scale was rounded down or up. A value is clipped when the nearest whole "
        "number does not fit.": sum(
            math.floor(s) > HIGHEST or math.floor(s) < LOWEST for s in steps
        )
        / count,
        "x / scale was compared with -127 and 127, and before it was rounded. Codes "
        "from -128 to 127 are in range.": sum(abs(s) > HIGHEST for s in steps) / count,
        "codes from 127 and from -127 on were counted. Codes from -128 to 127 are in "
        "range.": sum(abs(r) >= HIGHEST for r in rounded) / count,
        "it is the number of clipped values per row. Their share of all values is "
        "wanted.": (above + below) / (x.shape[0] if x.ndim > 1 else 1),
        "it is the share of values in range. The share outside is wanted.": (
            1 - (above + below) / count
        ),
        "it is in percent. A share between 0 and 1 is wanted.": (
            100 * (above + below) / count
        ),
        "x was compared with the limits of the codes. Convert it to steps first.": sum(
            not LOWEST <= v <= HIGHEST for v in _flat(x)
        )
        / count,
    }
    number(
        fraction,
        (above + below) / count,
        f"clipped_fraction of {count} values",
        mistakes,
        rel=1e-6,  # a share may have been averaged in float32
    )


def calibrated(
    scale: Any,
    batches: Sequence[Tensor],
    qmax: int = 127,
    eps: float = EPS,
    test_batch: Tensor | None = None,
) -> None:
    """One scale for a calibration set: scale x qmax is its largest magnitude.

    scale       what the answer gave for batches
    test_batch  values that stand in the notebook and must have no say
    """
    name = "the calibrated scale"
    expect(
        not isinstance(scale, Tensor) or scale.numel() == 1,
        f"{name} has {getattr(scale, 'numel', int)()} values. One scale for the whole "
        "calibration set is expected.",
    )
    scale = _finite_scale(scale, name)
    got, rel = _flat(scale), _precision(scale)
    sets = [_flat(batch) for batch in batches]
    peaks = [max(abs(v) for v in values) for values in sets]
    if not is_scale(got[0], max(peaks), qmax, eps, rel):
        everything = [v for values in sets for v in values]
        mistakes: dict[str, Sequence[float]] = {
            f"{name} fits the last batch alone. The whole calibration set counts.": [
                peaks[-1] / qmax
            ],
            f"{name} fits the first batch alone. The whole calibration set counts.": [
                peaks[0] / qmax
            ],
            f"{name} leaves the last batch out. The whole calibration set counts.": [
                max(peaks[:-1], default=0.0) / qmax
            ],
            f"{name} averages the maxima of the batches. The largest magnitude of the "
            "whole set must land on qmax.": [sum(peaks) / len(peaks) / qmax],
            f"{name} takes the smallest maximum of the batches. The largest magnitude "
            "of the whole set must land on qmax.": [min(peaks) / qmax],
            f"{name} takes the median maximum of the batches. The largest magnitude of "
            "the whole set must land on qmax.": [sorted(peaks)[len(peaks) // 2] / qmax],
            f"{name} adds up the maxima of the batches. The largest magnitude of the "
            "whole set must land on qmax.": [sum(peaks) / qmax],
        }
        if max(peaks) / qmax <= 100 * eps:  # so small that eps decides
            mistakes = {}
        if test_batch is not None:
            seen = max(abs(v) for v in _flat(test_batch))
            mistakes[
                f"{name} fits the lab's test batch X. A test batch must have no say: "
                "calibrate on the batches that are given."
            ] = [max(seen, max(peaks)) / qmax]
            mistakes[
                f"{name} fits the lab's test batch X only. A test batch must have no "
                "say: calibrate on the batches that are given."
            ] = [seen / qmax]
        _recognise(got, mistakes, rel)
        _judge_scales(scale, [everything], qmax, eps, name, of="")


def unchanged(now: Tensor, before: Tensor, name: str) -> None:
    """The call left its argument alone.

    now, before  the argument after the call, and a clone made before it
    """
    expect(
        torch.equal(now, before),
        f"the call changed its argument {name}. Work on a new tensor: whoever called "
        "still needs the old values.",
    )
