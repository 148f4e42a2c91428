"""What all checks share: what must be refused, what must not, and what a message says.

Run by pytest, in this process. Knows no lab.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvlab.checks as checks
from kvlab.checks import Wrong


def raises(message: str, error: type[Exception] = ValueError) -> Callable[..., None]:
    """A function that refuses everything with this message."""

    def refuse(*arguments: Any, **named: Any) -> None:
        raise error(message)

    return refuse


def told(message: str, **known: Any) -> str:
    """What an answer that raises this message for argument `bits` is told."""
    with pytest.raises(Wrong) as caught:
        checks.refuses(raises(message), names="bits", because="it is bad", **known)
    return str(caught.value)


# --- refuses --------------------------------------------------------------------------

SAID = [
    (0, "bits must be above 1, got 0"),
    (-4, "bits: -4"),
    (-4, "bits is \N{MINUS SIGN}4"),
    (-0.5, "bits=-.5"),
    (-0.1, "bits must be positive, got tensor(-0.1000)"),
    (-7_000_000_000, "bits -7,000,000,000"),
    (-7_000_000_000, "bits -7_000_000_000"),
    (-7_000_000_000, "bits -7e+09"),
    (2, "bits has (2,2,4)"),
    (math.nan, "bits holds tensor([1., nan])"),
    ((3, 5, 8), "bits has shape (3, 5, 8)"),
    ((3, 5, 8), "bits has shape torch.Size([3, 5, 8])"),
    ((3, 5, 8), "bits is 3x5x8"),
    ((6,), "bits has shape (6,)"),
    (torch.float16, "bits has dtype torch.float16"),
    ("nothing", "bits holds nothing"),
    ([(3, 5, 8), 3], "bits has 3 dimensions"),
]


@pytest.mark.parametrize(("given", "message"), SAID, ids=[m for _, m in SAID])
def test_a_message_may_say_what_was_given_in_many_forms(
    given: Any, message: str
) -> None:
    checks.refuses(raises(message), names="bits", because="it is bad", given=given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "bits must be positive"),
        (-4, "bits must be above 4"),
        (-4, "bits is -40"),
        (math.nan, "bits is not finite"),
        ((3, 5, 8), "bits has shape (13, 5, 8)"),
        ((3, 5, 8), "bits has 3 dimensions"),
        (torch.float16, "bits has dtype torch.float32"),
        ([(3, 5, 8), 3], "bits must have 4 dimensions"),
    ],
)
def test_a_message_that_does_not_say_what_was_given_is_wrong(
    given: Any, message: str
) -> None:
    assert "its message must say what was given" in told(message, given=given)


def test_a_message_is_told_all_that_it_lacks_and_no_more() -> None:
    assert told("no", given=0).endswith("must name bits and say what was given, 0.")
    assert told("no").endswith("must name bits.")
    assert told("two bits", given=0).endswith("must say what was given, 0.")
    assert told("rabbits 0", given=0).endswith("must name bits.")


def test_an_input_that_is_not_refused_or_refused_otherwise_is_wrong() -> None:
    known = {"names": "bits", "because": "it is 0"}
    with pytest.raises(Wrong, match=r"bits \(it is 0\) was accepted"):
        checks.refuses(dict, **known)
    with pytest.raises(Wrong, match="TypeError was raised: no"):
        checks.refuses(raises("no", TypeError), **known)
    with pytest.raises(NotImplementedError):
        checks.refuses(raises("TODO 1", NotImplementedError), **known)


# --- accepts --------------------------------------------------------------------------


def test_accepts_names_an_input_that_was_refused() -> None:
    picky = raises("kv_bytes must be positive, got 0")
    with pytest.raises(Wrong, match="an empty cache was refused with ValueError: kv_b"):
        checks.accepts(picky, 1, because="an empty cache", kv_bytes=0)
    checks.accepts(dict, [(1, 2)], because="an empty cache", kv_bytes=0)


def test_accepts_lets_other_errors_through() -> None:
    for error in (NotImplementedError, KeyError):
        with pytest.raises(error):
            checks.accepts(raises("TODO 1", error), because="anything")


# --- a scale and its eps --------------------------------------------------------------


@pytest.mark.parametrize("peak", [0.0, 1e-9, 1e-3, 0.5])
@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_eps_may_be_a_floor_or_an_addend_of_scale_or_magnitude(
    peak: float, eps: float
) -> None:
    for scale in (
        max(peak / 7, eps),
        max(peak, eps) / 7,
        peak / 7 + eps,
        (peak + eps) / 7,
    ):
        assert checks.is_scale(scale, peak, 7, eps, 1e-6)
    for scale in (0.0, 1.0, 7 / eps, math.nan, math.inf, -eps):
        assert not checks.is_scale(scale, peak, 7, eps, 1e-6)
