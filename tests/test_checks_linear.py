"""Lab 02: a mistake gets the hint that names it, a right answer passes, the numbers hold."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlab import course
from kvlab.checks import Wrong, linear

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "solutions" / "02_int8_linear" / "02_int8_linear.py"

X = torch.tensor(
    [[0.5, -0.25, 0.75, -1.0], [2.0, -2.5, 0.5, -0.5], [0.1, 0.2, 0.3, 0.4]]
)
W = torch.tensor([[0.02, -0.06, 0.04, 0.05], [2.2, -3.1, 4.2, -5.3]])
STEP = torch.tensor(0.5)
STEPS = torch.tensor([[0.4], [0.03]])  # one per output, or per row of W


def rejects(
    check: Callable[..., None], *arguments: Any, hint: str, **named: Any
) -> None:
    """The check refuses the answer with one sentence that holds the hint."""
    with pytest.raises(Wrong) as caught:
        check(*arguments, **named)
    assert hint in str(caught.value)


# --- one scale ------------------------------------------------------------------------


def peak_over(divisor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x.abs().max() / divisor


SCALE_MISTAKES: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("upside down", lambda x: 127 / x.abs().max()),
    ("divides by 128", peak_over(128)),
    ("divides by 255", peak_over(255)),
    ("divides by 256", peak_over(256)),
    ("positive and finite", lambda x: x.abs().max() * 0),
    ("positive and finite", lambda x: x.max() * float("nan")),
    ("positive and finite", lambda x: x.max() / -127),
    ("sign included", lambda x: x.max() / 127),
    ("smallest value alone", lambda x: -x.min() / 127),
    ("mean magnitude", lambda x: x.abs().mean() / 127),
    ("root of the sum of squares", lambda x: x.norm() / 127),
    ("max - min", lambda x: (x.max() - x.min()) / 255),
    ("shared out over qmax", lambda x: x.abs().max()),
    ("one scale for each slice", lambda x: x.abs().amax(dim=1) / 127),
    ("add nothing to it", lambda x: x.abs().max() / 127 + 1e-6),
    ("The two must be equal", lambda x: x.abs().max() / 99),
    ("float32 is wanted", lambda x: (x.abs().max() / 127).half()),
    ("float32 is wanted", lambda x: (x.abs().max() / 127).bfloat16()),
    ("is a NoneType", lambda x: None),
]


@pytest.mark.parametrize(("hint", "answer"), SCALE_MISTAKES)
def test_wrong_scale_gets_its_hint(hint: str, answer: Callable[[Tensor], Any]) -> None:
    x = X.clone()
    if hint.startswith("smallest"):
        x[0, 0] = 9.0  # the peak is positive, so that the other side shows
    rejects(linear.one_scale, answer(x), x, hint=hint)


def test_scale_that_ignores_qmax_is_told_so() -> None:
    rejects(linear.one_scale, peak_over(127)(X), X, 7, hint="qmax must count")


@pytest.mark.parametrize(
    "answer",
    [
        peak_over(127),
        lambda x: float(x.abs().max()) / 127,
        lambda x: x.abs().max().double() / 127,
        lambda x: x.abs().amax(dim=(0, 1), keepdim=True) / 127,
    ],
)
def test_right_scale_passes_in_any_form(answer: Callable[[Tensor], Any]) -> None:
    linear.one_scale(answer(X), X)


TINY = torch.tensor([2e-5, -3e-5])
FORMS: list[Callable[[float, float], float]] = [
    lambda peak, eps: max(peak / 127, eps),
    lambda peak, eps: peak / 127 + eps,
    lambda peak, eps: max(peak, eps) / 127,
    lambda peak, eps: (peak + eps) / 127,
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_eps_may_be_a_floor_or_an_addend(
    form: Callable[[float, float], float], eps: float
) -> None:
    for x in (torch.zeros(2, 3), TINY, X):
        scale = torch.tensor(form(float(x.abs().max()), eps))
        linear.one_scale(scale, x, eps=eps)
        linear.calibrated(scale, [x, x / 2], eps=eps)
        linear.output_channel_scale(scale.reshape(1, 1), x.reshape(1, -1), eps=eps)


EPS_MISTAKES = [
    (torch.zeros(2), 0.0, "positive and finite"),
    (torch.zeros(2), 1e-8, "an eps of its own, 1e-08"),
    (torch.zeros(2), 1e-8 / 127, "an eps of its own, 1e-08"),
    (torch.zeros(2), 1.0, "eps had no say"),
    (torch.zeros(2), 127 / 1e-3, "upside down"),
    (TINY, 3e-5 / 127, "eps had no say, since they are not 0"),
    (TINY, 3e-5 / 127 + 1e-8, "an eps of its own, 1e-08"),
]


@pytest.mark.parametrize(("x", "scale", "hint"), EPS_MISTAKES)
def test_an_eps_without_a_say_is_named(x: Tensor, scale: float, hint: str) -> None:
    got = torch.tensor(scale)
    rejects(linear.one_scale, got, x, eps=1e-3, hint=hint)
    rejects(linear.calibrated, got, [x, x], eps=1e-3, hint=hint)
    if scale:
        weight = torch.stack([x, torch.tensor([254.0, 1.0])])
        each = torch.tensor([[scale], [2.0]])
        rejects(linear.output_channel_scale, each, weight, eps=1e-3, hint=hint)


# --- codes and restored values --------------------------------------------------------

VALUES = torch.tensor(
    [[0.9, -1.1, 63.4, 70.0, 900.0], [-0.8, 0.2, -63.9, -70.0, -900.0]]
)

CODE_MISTAKES: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("wrapped round", lambda q: q.round().to(torch.int32).to(torch.int8)),
    ("stops at -127", lambda q: q.round().clamp(-127, 127).to(torch.int8)),
    ("cut off", lambda q: q.clamp(-128, 127).trunc().to(torch.int8)),
    ("rounded down", lambda q: q.floor().clamp(-128, 127).to(torch.int8)),
    ("rounded up", lambda q: q.ceil().clamp(-128, 127).to(torch.int8)),
    ("sign was lost", lambda q: q.round().abs().clamp(-128, 127).to(torch.int8)),
    ("every code is 0", lambda q: (q * 0).to(torch.int8)),
    ("multiplied", lambda q: (q / 4).round().clamp(-128, 127).to(torch.int8)),
    ("at most half a step", lambda q: (q + 2).clamp(-128, 127).to(torch.int8)),
    ("dtype torch.float32", lambda q: q.round().clamp(-128, 127)),
    ("dtype torch.int64", lambda q: q.round().clamp(-128, 127).to(torch.int64)),
    ("has shape (5, 2)", lambda q: q.round().clamp(-128, 127).to(torch.int8).T),
    ("is a list", lambda q: q.round().tolist()),
]


@pytest.mark.parametrize(("hint", "answer"), CODE_MISTAKES)
def test_wrong_codes_get_their_hint(hint: str, answer: Callable[[Tensor], Any]) -> None:
    rejects(linear.codes, answer(VALUES / STEP), VALUES, STEP, hint=hint)


def test_codes_of_one_scale_for_all_rows_are_named() -> None:
    for scale, hint in ((STEPS[0], "first scale"), (STEPS.flip(0)[1], "largest scale")):
        steps = STEPS if hint == "first scale" else STEPS.flip(0)
        codes = (W * 8 / scale).round().clamp(-128, 127).to(torch.int8)
        rejects(linear.codes, codes, W * 8, steps, hint=hint)


def test_both_ways_of_rounding_a_half_pass() -> None:
    x = torch.tensor([0.25, 0.75, -0.25, -1.25, 63.75])
    for codes in ([0, 2, 0, -2, 127], [1, 1, -1, -3, 127], [0, 1, -1, -3, 127]):
        linear.codes(torch.tensor(codes, dtype=torch.int8), x, STEP)


RESTORED_MISTAKES: list[tuple[str, Callable[[Tensor, Tensor], Any]]] = [
    ("divided by the scale", lambda c, s: c / s),
    ("holds the codes", lambda c, s: c.float()),
    ("first scale", lambda c, s: c * s[0]),
    ("from -128 up", lambda c, s: (c.float() + 128) * s),
    ("rounded to whole numbers", lambda c, s: (c * s).round()),
    ("0 everywhere", lambda c, s: (c * s.to(torch.int8)).float()),
    ("dtype torch.int8", lambda c, s: c),
    ("steps of that size", lambda c, s: c * s * 1.01),
    ("float32 is wanted", lambda c, s: (c * s).half()),
]


@pytest.mark.parametrize(("hint", "answer"), RESTORED_MISTAKES)
def test_wrong_restored_values_get_their_hint(
    hint: str, answer: Callable[[Tensor, Tensor], Any]
) -> None:
    codes = torch.tensor([[0, -128, 5], [127, -1, 44]], dtype=torch.int8)
    rejects(linear.restored, answer(codes, STEPS), codes, STEPS, hint=hint)
    linear.restored(codes * STEPS, codes, STEPS)
    linear.restored(codes.double() * STEPS.double(), codes, STEPS)


# --- the bound ------------------------------------------------------------------------


def right_bound(x: Tensor, scale: Tensor) -> Tensor:
    return x.abs().sum(dim=1, keepdim=True) * scale.reshape(1, -1) / 2


BOUND_MISTAKES: list[tuple[str, Callable[[Tensor, Tensor], Any]]] = [
    ("whole step", lambda x, s: 2 * right_bound(x, s)),
    ("inputs cancel", lambda x, s: x.sum(dim=1, keepdim=True) * s.T / 2),
    ("after the sum", lambda x, s: x.sum(dim=1, keepdim=True).abs() * s.T / 2),
    ("largest input only", lambda x, s: x.abs().amax(dim=1, keepdim=True) * s.T / 2),
    ("mean over the inputs", lambda x, s: right_bound(x, s) / x.shape[1]),
    ("root of the sum", lambda x, s: x.norm(dim=1, keepdim=True) * s.T / 2),
    ("leaves the scale out", lambda x, s: right_bound(x, s * 0 + 1)),
    ("divides by the scale", lambda x, s: right_bound(x, 1 / s)),
    ("uses the first scale", lambda x, s: right_bound(x, s * 0 + s[0])),
    ("kept the input channels", lambda x, s: x.abs().sum(dim=0, keepdim=True)),
    ("still has the input", lambda x, s: x.abs() * s[0] / 2),
    ("not kept", lambda x, s: right_bound(x, s)[:, 0]),
    ("ran over all rows", lambda x, s: x.abs().sum()),
    ("one column for all", lambda x, s: right_bound(x, s)[:, :1]),
    ("belongs to an output", lambda x, s: right_bound(x, s).T),
    ("do more than that", lambda x, s: 0.9 * right_bound(x, s)),
    ("never reach", lambda x, s: 1.1 * right_bound(x, s)),
    ("holds inf or nan", lambda x, s: right_bound(x, s) / 0),
    ("float32 is wanted", lambda x, s: right_bound(x, s).half()),
]


@pytest.mark.parametrize(("hint", "answer"), BOUND_MISTAKES)
def test_wrong_bound_gets_its_hint(
    hint: str, answer: Callable[[Tensor, Tensor], Any]
) -> None:
    rejects(linear.bound, answer(X, STEPS), X, STEPS, hint=hint)


def test_bound_of_the_weights_is_named() -> None:
    x = X[:2]
    of_rows = W.abs().sum(dim=1, keepdim=True) * STEP / 2
    rejects(linear.bound, of_rows, x, STEP, weight=W, hint="adds up the weights")
    of_outputs = (W.abs().sum(dim=1) * STEPS[:, 0] / 2).expand(2, 2)
    rejects(linear.bound, of_outputs, x, STEPS, weight=W, hint="adds up the weights")


def test_right_bound_passes() -> None:
    linear.bound(right_bound(X, STEPS), X, STEPS, weight=W)
    linear.bound(right_bound(X, STEP).double(), X, STEP)


# --- one scale per output -------------------------------------------------------------

CHANNEL_MISTAKES: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("per input channel", lambda w: w.abs().amax(dim=0, keepdim=True) / 127),
    ("not kept", lambda w: w.abs().amax(dim=1) / 127),
    ("whole weight", lambda w: w.abs().max() / 127),
    ("same for every row", lambda w: (w.abs().max() / 127).expand(2, 1)),
    ("sign included", lambda w: w.amax(dim=1, keepdim=True) / 127),
    ("upside down", lambda w: 127 / w.abs().amax(dim=1, keepdim=True)),
    ("divides by 128", lambda w: w.abs().amax(dim=1, keepdim=True) / 128),
    ("divides by 255", lambda w: w.abs().amax(dim=1, keepdim=True) / 255),
    ("has shape (2, 4)", lambda w: w.abs() / 127),
    ("The two must be equal", lambda w: w.abs().flip(0).amax(1, keepdim=True) / 127),
]


@pytest.mark.parametrize(("hint", "answer"), CHANNEL_MISTAKES)
def test_wrong_channel_scale_gets_its_hint(
    hint: str, answer: Callable[[Tensor], Any]
) -> None:
    rejects(linear.output_channel_scale, answer(W), W, hint=hint)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
def test_zero_row_without_a_finite_scale_is_named(value: float) -> None:
    weight = torch.tensor([[0.0, 0.0, 0.0], [127.0, 1.0, 2.0]])
    scale = torch.tensor([[value], [1.0]])
    rejects(linear.output_channel_scale, scale, weight, hint="row 0, which is all zero")
    linear.output_channel_scale(torch.tensor([[1e-8], [1.0]]), weight)


# --- clipping and calibration ---------------------------------------------------------

IN_STEPS = torch.tensor(
    [
        *[-300, -270, -129, -128.7, -128.7, -128.3, -128.3, -128, -127, -60, 0, 60],
        *[127, 127.3, 127.3, 127.3, 127.7, 128, 140, 300],
    ]
)


@pytest.mark.parametrize(
    ("count", "hint"),
    [
        (9 * 20, "number of clipped"),
        (16, "just -128 or 127"),
        (13, "code 127 was counted"),
        (12, "code -128 was counted"),
        (4, "above the range"),
        (5, "below the range"),
        (14, "before it was rounded"),
        (6, "cut off and not rounded"),
        (10, "rounded down or up"),
        (15, "with -127 and 127, and before"),
        (17, "from 127 and from -127 on"),
        (11, "in range. The share outside"),
        (900, "in percent"),
        (3, "with the limits of the codes"),
        (8, "not what the definition gives"),
    ],
)
def test_wrong_clipped_fraction_gets_its_hint(count: int, hint: str) -> None:
    rejects(linear.clipped, count / 20, IN_STEPS / 2, STEP, hint=hint)


def test_clipped_values_per_row_are_named() -> None:
    x = torch.tensor([[200.0, 1.0], [1.0, 2.0], [-200.0, 300.0]])
    rejects(linear.clipped, 1.0, x, torch.tensor(1.0), hint="per row")


def test_clipped_fraction_may_be_a_number_or_a_tensor() -> None:
    for right in (0.45, torch.tensor(0.45), torch.tensor([0.45], dtype=torch.float64)):
        linear.clipped(right, IN_STEPS / 2, STEP)
    rejects(linear.clipped, torch.zeros(2), IN_STEPS / 2, STEP, hint="One number")
    rejects(linear.clipped, None, IN_STEPS / 2, STEP, hint="a number is expected")


BATCHES = [
    torch.tensor([0.2, -0.3]),
    torch.tensor([[-1.6, 0.5], [0.7, 0.1]]),
    torch.tensor([0.4, 0.6, -1.1]),
    torch.tensor([[0.5]]),
]


@pytest.mark.parametrize(
    ("peak", "hint"),
    [
        (0.3, "first batch alone"),
        (0.5, "last batch alone"),
        ((0.3 + 1.6 + 1.1 + 0.5) / 4, "averages the maxima"),
        (0.3 + 1.6 + 1.1 + 0.5, "adds up the maxima"),
        (1.1, "median maximum"),
        (0.7, "sign included"),
        (2.5, "test batch X"),
        (1.6 * 127 / 128, "divides by 128"),
        (0.0, "positive and finite"),
        (1.5, "The two must be equal"),
    ],
)
def test_wrong_calibration_gets_its_hint(peak: float, hint: str) -> None:
    scale = torch.tensor(peak / 127)
    rejects(linear.calibrated, scale, BATCHES, test_batch=X, hint=hint)


def test_a_calibration_without_its_last_batch_is_named() -> None:
    batches = [torch.tensor([peak]) for peak in (0.2, 0.5, 0.3, 1.0)]
    scale = torch.tensor(0.5 / 127)
    rejects(linear.calibrated, scale, batches, hint="leaves the last batch out")


def test_right_calibration_passes() -> None:
    for scale in (1.6 / 127, torch.tensor(1.6 / 127), torch.tensor([[1.6 / 127]])):
        linear.calibrated(scale, BATCHES, test_batch=X)
    several = torch.tensor([1.6, 0.3]) / 127
    rejects(linear.calibrated, several, BATCHES, hint="has 2 values")


def test_changed_argument_is_named() -> None:
    linear.unchanged(X, X.clone(), "x")
    rejects(linear.unchanged, X + 1, X, "x", hint="changed its argument x")


# --- the lab's numbers ----------------------------------------------------------------


@pytest.fixture(scope="module")
def lab() -> dict[str, Any]:
    """The names that are left when the solved notebook has run from top to bottom."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in course.read_source(SOURCE).cells:
            if cell.cell_type == "code":
                exec(compile(cell.source, cell.id, "exec"), names)
    return names


def near(got: Any, wanted: Any, tolerance: float = 1e-6) -> bool:
    wanted = torch.tensor(wanted, dtype=torch.float64)
    return torch.allclose(torch.as_tensor(got).double(), wanted, rtol=0, atol=tolerance)


def test_lab_weights_only(lab: dict[str, Any]) -> None:
    assert near(lab["scale_w"], 0.0417323, 1e-7)
    codes = lab["quantize_int8"](lab["W"], lab["scale_w"])
    assert codes.tolist() == [[0, -1, 1, 1], [53, -74, 101, -127]]
    assert (lab["W"].nbytes, codes.nbytes) == (32, 8)
    assert near(lab["y"][0], [0.1975, -0.4750])
    assert near(lab["y_weights"][0], [0.183465, -0.460827])
    assert near(lab["error_weights"].max(), 0.0232677)
    assert near(lab["bound_weights"], [[0.0521654], [0.0834646]])
    assert (lab["error_weights"] <= lab["bound_weights"]).all()
    assert lab["held"] == lab["W"].nbytes + 8 + lab["scale_w"].nbytes == 44


def test_lab_outlier(lab: dict[str, Any]) -> None:
    assert near(lab["scale_one"], 0.629921)
    assert lab["codes_one"][0].tolist() == [0, 0, 0, 0]
    assert near(lab["scale_rows"], [[0.000393701], [0.629921]])
    one, rows = lab["outlier_errors"].values()
    # outputs near 80 carry a float32 rounding of a few 1e-6
    assert near(one, [0.0975, 0.466141], 5e-6)
    assert near(rows, [0.000157, 0.466141], 5e-6)


def test_lab_activations(lab: dict[str, Any]) -> None:
    tame, _, oracle = lab["cases"]
    assert (tame[2], oracle[2]) == (1.0, 0.0)
    assert near(tame[3], 10.7619, 5e-5)
    assert near(oracle[3], 0.081069)
    assert near(lab["scale_new"], 0.00393701, 1e-8)
    assert lab["codes_new"].tolist() == [[-128, 64, 0, 127]]
    assert near(lab["restored_new"], [[-0.503937, 0.251969, 0.0, 0.5]])
    assert lab["share_new"] * lab["x_new"].numel() == 1
    assert near(lab["error_new"], [[0.029862, 3.285237]])


def test_lab_integers_give_what_floats_give(lab: dict[str, Any]) -> None:
    assert lab["sums"].dtype == torch.int32
    assert lab["gap"] < 1e-5


def test_lab_bound_holds_for_every_width(lab: dict[str, Any]) -> None:
    assert sorted(lab["shares"]) == [4, 16, 64, 256, 1024]
    assert all(float(share.max()) <= 1 for share in lab["shares"].values())
