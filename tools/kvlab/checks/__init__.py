"""What a test cell calls: compares an answer with its definition and names the mistake.

Called by the test cells of the notebooks (`from kvlab import checks`) and by the answer suites.
Never prints, never returns an expected value, and holds no function that would pass as an answer.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Wrong",
    "accepts",
    "expect",
    "is_scale",
    "number",
    "refuses",
    "tensor",
    "todo",
    "waits_for",
    "within",
]


class Wrong(AssertionError):
    """A wrong answer. A notebook shows the sentence alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@contextlib.contextmanager
def todo(number: int) -> Iterator[None]:
    """Around the tests of TODO `number`: the sentence of a failure starts with it.

    Warnings and anything the answer writes to stderr are swallowed, since nbgrader
    gives no points to a cell that has any. NotImplementedError passes through: the
    TODO was not attempted. So does every other exception of the student's own code.
    """
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        except Wrong as error:
            raise Wrong(f"TODO {number} wrong: {error}") from None


@contextlib.contextmanager
def waits_for(*numbers: int) -> Iterator[None]:
    """Around a demonstration that uses the student's answers to TODOs `numbers`.

    While one of them is missing or fails, it prints one line and the notebook goes on.
    """
    names = " and ".join(f"TODO {n}" for n in numbers)
    are = "is" if len(numbers) == 1 else "are"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except NotImplementedError:
            print(
                f"This appears when {names} {are} done. Go on, and run it again later."
            )
        except Exception as error:
            print(
                f"This needs a right {names}; it stopped with "
                f"{type(error).__name__}: {error}"
            )


def expect(condition: bool | Tensor, sentence: str) -> None:
    """Raises Wrong with the sentence unless the condition holds."""
    if not bool(condition):
        raise Wrong(sentence)


def tensor(
    value: Any,
    name: str,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The value, when it is a finite tensor of that shape and dtype; else Wrong.

    name  what the sentence calls it, for example "the scale"
    """
    expect(
        isinstance(value, Tensor),
        f"{name} is a {type(value).__name__}; a torch.Tensor is expected.",
    )
    if shape is not None:
        expect(
            tuple(value.shape) == tuple(shape),
            f"{name} has shape {tuple(value.shape)}; expected {tuple(shape)}.",
        )
    if dtype is not None:
        expect(
            value.dtype == dtype, f"{name} has dtype {value.dtype}; expected {dtype}."
        )
    if value.is_floating_point():
        expect(
            bool(torch.isfinite(value).all()),
            f"{name} holds inf or nan; every value must be finite.",
        )
    return value


def number(
    got: Any,
    expected: float,
    what: str,
    mistakes: Mapping[str, float] | None = None,
    rel: float = 1e-9,
    integer: bool = False,
) -> None:
    """Compares a plain number; when it equals a known mistake, says which one.

    got       what the answer returned
    what      the call as the reader knows it, for example "weight_bytes(7e9, 4)"
    mistakes  sentence that names the mistake -> the number this mistake gives
    rel       relative tolerance
    integer   whether the number counts things and must be whole
    """
    kinds = (int, float)
    if isinstance(got, Tensor) and got.ndim == 0:
        got = got.item()
    expect(
        isinstance(got, kinds) and not isinstance(got, bool),
        f"{what} gave {got!r}, a {type(got).__name__}; a number is expected.",
    )
    expect(math.isfinite(got), f"{what} gave {got}; a finite number is expected.")
    right = math.isclose(got, expected, rel_tol=rel, abs_tol=1e-12)
    if right and integer:
        expect(
            float(got).is_integer(), f"{what} gave {got!r}; a whole number is expected."
        )
    if right:
        return
    for sentence, wrong in (mistakes or {}).items():
        if math.isclose(got, wrong, rel_tol=rel, abs_tol=1e-12):
            raise Wrong(f"{what} gave {got:,}: {sentence}")
    raise Wrong(f"{what} gave {got:,}, which is not what the definition gives.")


def refuses(
    call: Callable[..., Any],
    *arguments: Any,
    names: str,
    because: str,
    given: Any = None,
    error: type[Exception] = ValueError,
    **named: Any,
) -> None:
    """The call must raise `error`, with a message that names the argument at fault.

    names    the argument at fault, for example "residual_length"
    because  what is wrong with it, for the sentence, for example "it is 0"
    given    what the message must also say: a number, a shape (tuple), a dtype or a
             text; a list of these when one of them is enough. None asks for nothing:
             some input, a tensor with a nan in it, is hard to put into a message
    """
    try:
        call(*arguments, **named)
    except NotImplementedError:
        raise
    except error as raised:
        message = str(raised)
        word = rf"\b{re.escape(names)}\b"
        missing = []
        if re.search(word, message, re.IGNORECASE) is None:
            missing.append(f"name {names}")
        wanted = given if isinstance(given, list) else [given]
        if given is not None and not any(_says(message, each) for each in wanted):
            missing.append(f"say what was given, {_word(wanted[0])}")
        expect(
            not missing,
            f"the {error.__name__} for {names} ({because}) says {message!r}; "
            f"its message must {' and '.join(missing)}.",
        )
    except Exception as raised:
        raise Wrong(
            f"{names} ({because}) must be refused with {error.__name__}; "
            f"{type(raised).__name__} was raised: {raised}"
        ) from None
    else:
        raise Wrong(
            f"{names} ({because}) was accepted; "
            f"it must be refused with {error.__name__}."
        )


def accepts(
    call: Callable[..., Any], *arguments: Any, because: str, **named: Any
) -> None:
    """The call must not refuse its input with ValueError; its result is not looked at.

    because  what the input is, for the sentence, for example "an empty cache"
    """
    try:
        call(*arguments, **named)
    except ValueError as error:
        raise Wrong(
            f"{because} was refused with ValueError: {error}. "
            "Expected: this input is right, so the function works on it."
        ) from None


def is_scale(scale: float, peak: float, qmax: int, eps: float, rel: float) -> bool:
    """Whether this is the symmetric scale of values up to `peak`, kept above 0 by eps.

    eps may be a floor of the scale or of the magnitude, or be added to either.
    rel  relative tolerance
    """
    exact = peak / qmax
    forms = (max(exact, eps), exact + eps, max(peak, eps) / qmax, (peak + eps) / qmax)
    return any(math.isclose(scale, form, rel_tol=rel) for form in forms)


def _says(message: str, given: Any) -> bool:
    """Whether a message says what was given, however it is written."""
    text = message.lower().replace("\N{MINUS SIGN}", "-")
    if isinstance(given, tuple):  # (2, 3), [2, 3], 2x3
        sizes = r"\D{1,3}".join(map(str, given))
        return re.search(rf"(?<!\d){sizes}(?!\d)", text) is not None
    if isinstance(given, int | float):
        if not math.isfinite(given):
            return str(given) in text
        whole = r"\d{1,3}(?:,\d{3})+|\d[\d_]*"
        found = re.findall(rf"-?(?:(?:{whole})(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?", text)
        numbers = [float(re.sub("[,_]", "", number)) for number in found]
        return any(math.isclose(number, given, rel_tol=1e-3) for number in numbers)
    return _word(given).lower() in text


def _word(given: Any) -> str:
    """What was given, as a sentence shows it."""
    return str(given).removeprefix("torch.")


def within(got: Tensor, wanted: Tensor, tolerance: float | Tensor) -> bool:
    """Whether every element differs by at most `tolerance`, computed in float64."""
    difference = (got.detach().double() - wanted.detach().double()).abs()
    return bool((difference <= tolerance).all())
