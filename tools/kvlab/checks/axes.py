"""Checks of lab 03: which values share a scale, and which tokens stand in the window.

Called by the test cells of lab 03 (`checks.axes`) and by its answer suite.
Never quantizes and never moves a token: it verifies an answer value by value, and names the mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from kvlab.checks import Wrong, expect, is_scale, refuses

__all__ = [
    "Recorder",
    "counts",
    "example",
    "key_scale_shape",
    "numbered",
    "pair",
    "quantizes_keys",
    "quantizes_values",
    "refuses_pair",
    "segments",
    "segments_hold",
    "value_scale_shape",
    "window",
    "window_holds",
]

State = dict[str, Any]
Quantizer = Callable[..., Any]
Mistake = tuple[str, float]
Seen = tuple[tuple[int, ...], float, float]  # where a scale stands, the scale, the peak

AXES = ("batch", "heads", "tokens", "head_dim")
TOKENS, HEAD_DIM = 2, 3
EPS = 1e-8  # the default of both quantizers
WANTED = {
    "key": "Keys share a scale along tokens",
    "value": "Values share a scale along head_dim, within one token",
}
BLOCK = {"key": "channel", "value": "token"}


# --- inputs ---------------------------------------------------------------------------


def example(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, zero: bool = False
) -> Tensor:
    """[batch, heads, tokens, head_dim] with a large channel and a large token.

    Every batch row and head has a magnitude of its own, so that a scale which is
    shared between them shows. zero=True empties channel 0 and token 0.
    """
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=random)
    for b in range(shape[0]):
        for h in range(shape[1]):
            values[b, h] *= 1 + 1.7 * b + 0.45 * h
    values[..., shape[3] // 2] *= 20
    values[:, :, shape[2] // 2] *= 3
    if zero:
        values[..., 0] = 0
        values[:, :, 0] = 0
    return values.to(dtype)


def numbered(
    first: int,
    count: int,
    batch: int = 2,
    heads: int = 3,
    head_dim: int = 4,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Key and Value of tokens first, first + 1, ...: whole numbers that fit int8.

    Channel 0 of token n holds n in its Key and -n in its Value (n at most 127), so
    a check can read off which token stands where; the other channels are random.
    """
    random = torch.Generator().manual_seed(1000 + first)
    both = torch.randint(-99, 100, (2, batch, heads, count, head_dim), generator=random)
    number = torch.arange(first, first + count)
    both[0, ..., 0] = number
    both[1, ..., 0] = -number
    key, value = both.to(dtype)
    return key, value


class Recorder:
    """A stand-in for a quantizer that loses nothing and remembers what it was given.

    Its codes are the tokens themselves. Its scale is a label: `sign` times the number
    of tokens of the call, so that a segment shows which call made it.
    """

    def __init__(self, sign: int, shared: int) -> None:
        self.sign, self.shared = sign, shared
        self.calls: list[Tensor] = []

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Codes shaped like tokens, and the label, which has 1 on the shared axis."""
        self.calls.append(tokens.detach().clone())
        shape = list(tokens.shape)
        shape[self.shared] = 1
        label = torch.full(shape, float(self.sign * tokens.shape[TOKENS]))
        return tokens.detach().round().to(torch.int8), label


def _exact(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """A stand-in for a quantizer: whole numbers become codes, the scale is one 1."""
    return tokens.detach().round().to(torch.int8), torch.ones(1)


# --- TODO 1 and 2: the scale and the codes --------------------------------------------


def pair(answer: Any) -> tuple[Any, Any]:
    """The answer of a quantizer, when it is a pair (codes, scale)."""
    if answer is None:
        raise Wrong("your function returned None. It must return (codes, scale).")
    expect(
        isinstance(answer, tuple | list) and len(answer) == 2,
        f"your function returned {_kind(answer)}; the pair (codes, scale) is expected.",
    )
    codes, scale = answer
    return codes, scale


def key_scale_shape(key: Tensor, scale: Any) -> None:
    """The scale of Keys must be [batch, heads, 1, head_dim]."""
    _scale_shape("key", key, scale, TOKENS)


def value_scale_shape(value: Tensor, scale: Any) -> None:
    """The scale of Values must be [batch, heads, tokens, 1]."""
    _scale_shape("value", value, scale, HEAD_DIM)


def quantizes_keys(quantize: Quantizer, key: Tensor, **settings: Any) -> None:
    """Codes and scale of `quantize(key, **settings)` must fulfil the definition."""
    answer = _call("key", quantize, key, settings)
    _quantized("key", key, answer, TOKENS, **settings)


def quantizes_values(quantize: Quantizer, value: Tensor, **settings: Any) -> None:
    """Codes and scale of `quantize(value, **settings)` must fulfil the definition."""
    answer = _call("value", quantize, value, settings)
    _quantized("value", value, answer, HEAD_DIM, **settings)


def _call(name: str, quantize: Quantizer, given: Tensor, settings: State) -> Any:
    before = given.clone()
    answer = quantize(given, **settings)
    expect(
        torch.equal(given, before),
        f"your function changed its argument {name}; it must leave it as it was.",
    )
    return answer


def _quantized(
    name: str,
    given: Tensor,
    answer: Any,
    shared: int,
    qmax: int = 7,
    eps: float = EPS,
) -> None:
    """Verifies one answer: shapes, dtypes, every scale, every code."""
    codes, scale = pair(answer)
    _scale_shape(name, given, scale, shared)
    _codes_form(given, codes, qmax)
    # Every value that is computed in a dtype is off by at most half its eps, relative.
    # An answer may compute in the dtype of the input or of its scale.
    coarse = max(torch.finfo(given.dtype).eps, torch.finfo(scale.dtype).eps)
    _scale_values(name, given, scale, shared, qmax, eps, 2 * coarse)
    _code_values(name, given, codes, scale, shared, qmax, coarse)


def _scale_shape(name: str, given: Tensor, scale: Any, shared: int) -> None:
    expect(
        isinstance(scale, Tensor),
        f"the scale is {_kind(scale)}; a torch.Tensor is expected.",
    )
    wanted = tuple(1 if axis == shared else n for axis, n in enumerate(given.shape))
    got = tuple(scale.shape)
    if scale.dtype == torch.int8 and got == tuple(given.shape):
        raise Wrong(
            "the second of the two results holds int8 codes. "
            "The order is (codes, scale)."
        )
    if got != wanted:
        done = _how_reduced(tuple(given.shape), got)
        said = f"the scale has shape {got}{done}."
        raise Wrong(f"{said} {WANTED[name]}: expected {wanted}.")
    expect(
        scale.is_floating_point(),
        f"the scale has dtype {_dtype(scale)}; a floating-point dtype is expected.",
    )


def _how_reduced(given: tuple[int, ...], got: tuple[int, ...]) -> str:
    """What an answer must have done to get a scale of this shape, in words."""
    if got == given:
        return ", so you reduced nothing: every value has a scale of its own"
    if math.prod(got) == 1:
        return ", so you reduced every axis: one scale for the whole tensor"
    for count in range(1, len(given)):
        for axes in combinations(range(len(given)), count):
            names = " and ".join(AXES[axis] for axis in axes)
            if got == tuple(1 if a in axes else n for a, n in enumerate(given)):
                return f", so you reduced {names}"
            if got == tuple(n for a, n in enumerate(given) if a not in axes):
                return (
                    f", so you reduced {names} and dropped the dimension"
                    f"{'s' if count > 1 else ''} (keep with size 1)"
                )
    return ""


def _codes_form(given: Tensor, codes: Any, qmax: int) -> None:
    expect(
        isinstance(codes, Tensor),
        f"the codes are {_kind(codes)}; a torch.Tensor is expected.",
    )
    if tuple(codes.shape) != tuple(given.shape):
        raise Wrong(
            f"the codes have shape {tuple(codes.shape)}; "
            f"one code for every value is expected: {tuple(given.shape)}."
        )
    expect(
        codes.dtype == torch.int8,
        f"the codes have dtype {_dtype(codes)}; they are held in int8.",
    )


def _blocks(
    given: Tensor, shared: int
) -> Iterator[tuple[tuple[int, ...], list[float]]]:
    """The position of every scale, and the values that share it."""
    values = given.double().tolist()
    batch, heads, tokens, head_dim = given.shape
    for b in range(batch):
        for h in range(heads):
            if shared == TOKENS:
                for d in range(head_dim):
                    yield (b, h, 0, d), [values[b][h][t][d] for t in range(tokens)]
            else:
                for t in range(tokens):
                    yield (b, h, t, 0), values[b][h][t]


def _scale_values(
    name: str,
    given: Tensor,
    scale: Tensor,
    shared: int,
    qmax: int,
    eps: float,
    slack: float,
) -> None:
    """scale x qmax is the largest magnitude of the block; never 0, inf or nan."""
    block_name = BLOCK[name]
    kind = str(given.dtype).removeprefix("torch.")
    wrong: Seen | None = None
    small: Seen | None = None  # a block so small that eps decides
    for where, block in _blocks(given, shared):
        got, peak = float(scale[where]), max(abs(v) for v in block)
        said = f"the scale of {_place(where, shared)} is {got:g}"
        if not peak:
            said = f"an all-zero {block_name} ({kind} input) has scale {got:g}"
        if not math.isfinite(got) or got < 0:
            raise Wrong(f"{said}; every scale must be finite and above 0.")
        if got == 0:
            vanishes = torch.tensor(eps, dtype=given.dtype) == 0
            why = f" In {kind} {eps:g} is 0: go to float32 first." if vanishes else ""
            raise Wrong(
                f"{said}, and dividing by it gives nan or inf. "
                f"Every scale must be above 0.{why}"
            )
        if is_scale(got, peak, qmax, eps, slack):
            continue
        if peak / qmax > 100 * eps:
            wrong = wrong or (where, got, peak)
        else:
            small = small or (where, got, peak)
    if wrong is None:
        if small is not None:
            raise Wrong(_eps_sentence(small, shared, qmax, eps, slack))
        return
    where, got, peak = wrong
    reason = _scale_mistake(name, given, scale, shared, qmax, eps)
    if abs(got * qmax / peak - 1) < 0.01:
        reason = ": a little off, as after rounding to half precision (use float32)"
    raise Wrong(
        f"the scale of {_place(where, shared)} is {got:.6g} where the largest "
        f"magnitude is {peak:.6g} and qmax is {qmax}{reason}. "
        f"{_capital(block_name)} by {block_name}, the scale is the step "
        f"that takes the largest magnitude to code qmax."
    )


def _eps_sentence(seen: Seen, shared: int, qmax: int, eps: float, slack: float) -> str:
    """What went wrong where a block is so small that eps decides."""
    where, got, peak = seen
    block = f"its largest magnitude is {peak:.2g}" if peak else "all its values are 0"
    if peak and is_scale(got, peak, qmax, 0.0, slack):
        reason = "eps had no say, since they are not 0"
    elif eps != EPS and is_scale(got, peak, qmax, EPS, slack):
        reason = f"your code has an eps of its own, {EPS:g}"
    elif math.isclose(got * max(peak, eps), qmax, rel_tol=slack):
        reason = "it is upside down"
    else:
        reason = "eps had no say"
    return (
        f"with eps = {eps:g}, the scale of {_place(where, shared)} is {got:g} "
        f"({block}): {reason}. "
        "The argument eps is the floor: no scale may come out smaller."
    )


def _scale_mistake(
    name: str, given: Tensor, scale: Tensor, shared: int, qmax: int, eps: float
) -> str:
    """The known mistake that explains every scale, as ": ...", or nothing."""
    explains: dict[int, str] = {}
    for where, block in _blocks(given, shared):
        if not any(block):
            continue
        got = float(scale[where])
        mistakes = _mistaken_scales(given, where, block, shared, qmax)
        explains = explains or {n: sentence for n, (sentence, _) in enumerate(mistakes)}
        for n, (_, value) in enumerate(mistakes):
            if not math.isclose(got, max(value, eps), rel_tol=0.02, abs_tol=2 * eps):
                explains[n] = ""
    # On a small example two mistakes can give the same scales: both are named.
    found = list(dict.fromkeys(sentence for sentence in explains.values() if sentence))
    said = ", or ".join(found[:2]).format(block=BLOCK[name])
    return f": {said}" if said else ""


def _mistaken_scales(
    given: Tensor, where: tuple[int, ...], block: list[float], shared: int, qmax: int
) -> list[Mistake]:
    """What each known mistake would give as the scale of one block."""
    low, high = min(block), max(block)
    peak = max(high, -low)
    size = len(block)
    mean = sum(abs(v) for v in block) / size
    b, h = where[0], where[1]
    row: list[Any] = [slice(None)] * 4
    row[5 - shared] = where[5 - shared]  # this channel (or token) in all rows and heads
    other = given.double()

    def peak_of(*index: Any) -> float:
        return float(other[index].abs().max())

    found: list[Mistake] = [
        ("it is upside down, qmax over the magnitude", qmax / peak if peak else 0.0),
        ("it is the magnitude itself, not divided by qmax", peak),
        ("you divided by qmax + 1", peak / (qmax + 1)),
        ("you divided by 2 x qmax", peak / (2 * qmax)),
        ("you divided by 2 x qmax + 1", peak / (2 * qmax + 1)),
        (
            "you took the range from smallest to largest, which needs a zero point",
            (high - low) / (2 * qmax),
        ),
        (
            "you took the range from smallest to largest, which needs a zero point",
            (high - low) / (2 * qmax + 1),
        ),
        ("you took the largest value, not the largest magnitude", high / qmax),
        ("you took the largest value, not the largest magnitude", abs(high) / qmax),
        ("you took the smallest magnitude", min(abs(v) for v in block) / qmax),
        ("you took the mean magnitude", mean / qmax),
        (
            "you took the root mean square",
            math.sqrt(sum(v * v for v in block) / size) / qmax,
        ),
        ("you wrote 7 where qmax stands", peak / 7),
        ("you wrote 127 where qmax stands", peak / 127),
        ("one magnitude for the whole tensor", peak_of(...) / qmax),
        ("one magnitude for a whole head", peak_of(b, h) / qmax),
        (
            "the magnitude is shared by all batch rows and heads",
            peak_of(*row) / qmax,
        ),
        (
            "the magnitude is shared by all batch rows",
            peak_of(slice(None), h, *row[2:]) / qmax,
        ),
        (
            "the magnitude is shared by all heads",
            peak_of(b, slice(None), *row[2:]) / qmax,
        ),
        ("you took the first value of the {block}", abs(block[0]) / qmax),
        ("you took the last value of the {block}", abs(block[-1]) / qmax),
    ]
    return found


def _code_values(
    name: str,
    given: Tensor,
    codes: Tensor,
    scale: Tensor,
    shared: int,
    qmax: int,
    coarse: float,
) -> None:
    """Every code is a whole number of steps in [-qmax, qmax], the nearest to its value."""
    low, high = int(codes.min()), int(codes.max())
    outside = high if high > qmax else low if low < -qmax else None
    # value / scale is at most about qmax, so computing it is off by qmax x eps.
    allowed = 0.5 + 2 * qmax * coarse
    wrong = None
    for where, block in _blocks(given, shared):
        step = float(scale[where])
        for n, value in enumerate(block):
            at = tuple(n if axis == shared else i for axis, i in enumerate(where))
            code = int(codes[at])
            if abs(value - code * step) > allowed * step and wrong is None:
                wrong = at, value, code, step
    if outside is not None:
        raise Wrong(
            f"with qmax = {qmax}, the codes reach {outside}"
            f"{_code_mistake(given, codes, scale, qmax)}. "
            f"The range is symmetric, from {-qmax} to {qmax}."
        )
    if wrong is None:
        return
    at, value, code, step = wrong
    reason = _code_mistake(given, codes, scale, qmax)
    raise Wrong(
        f"with qmax = {qmax}, {name}[{', '.join(map(str, at))}] = {value:.6g} has code {code} at scale "
        f"{step:.6g}, so it is restored as {code * step:.6g}{reason}. "
        "Every value must be restored within half a scale."
    )


def _code_mistake(given: Tensor, codes: Tensor, scale: Tensor, qmax: int) -> str:
    """The known mistake that explains the codes, as ": ...", or nothing."""
    value, step = given.double(), scale.double()
    steps, held = value / step, codes.double()
    # Near a half step two codes are right; near a whole one, cutting does no harm.
    half = ((steps % 1) - 0.5).abs() < 0.05
    whole = (steps - steps.round()).abs() < 0.05
    bound = float(held.abs().max())

    def explains(candidate: Tensor, unclear: Tensor) -> bool:
        clear = ~unclear.expand_as(held)
        return bool(clear.any()) and bool((held == candidate)[clear].all())

    if not bool(held.any()):
        return ": every code is 0"
    high = int(held.max())
    for bottom, top in ((-high - 1, high), (-high, high), (-qmax, high)):
        cut = steps.round().clamp(bottom, top)
        if 0 < top < qmax and explains(cut, half):
            return f": your clamp stops at {top} and not at qmax"
    if explains(steps.round().abs(), half):
        return ": the sign is lost"
    if explains(-steps.round(), half):
        return ": the sign is turned"
    if explains(steps.trunc(), whole):
        return ": you cut toward zero and did not round to the nearest"
    if explains(steps.floor(), whole):
        return ": you rounded down, not to the nearest"
    if explains(steps.ceil(), whole):
        return ": you rounded up, not to the nearest"
    for made, mistake in (
        (value * step, ": you multiplied by the scale and did not divide by it"),
        (value, ": you rounded the value itself and did not divide by the scale"),
    ):
        unclear = ((made % 1) - 0.5).abs() < 0.05
        if explains(made.round().clamp(-bound, bound), unclear):
            return mistake
    return ""


# --- TODO 3: the window ---------------------------------------------------------------

TENSORS = ("key_residual", "value_residual")
SEGMENTS = (
    "key_q_segments",
    "key_scale_segments",
    "value_q_segments",
    "value_scale_segments",
)
COUNTERS = ("flushed_tokens", "quantized_tokens", "total_tokens")


def counts(state: Any, flushed: int, quantized: int, total: int) -> None:
    """The three counters of a state."""
    _form(state)
    got = {name: int(state[name]) for name in COUNTERS}
    wanted = dict(zip(COUNTERS, (flushed, quantized, total), strict=True))
    meaning = {
        "flushed_tokens": "the tokens that this call moved out of the window",
        "quantized_tokens": "all tokens in segments, of this call and earlier ones",
        "total_tokens": "all tokens, in segments and in the window",
    }
    confused = {
        ("flushed_tokens", quantized): ": that is the number in all segments",
        ("quantized_tokens", flushed): ": that is the number of this call only",
        ("quantized_tokens", total): ": that counts the window too",
        ("total_tokens", total - quantized): ": that counts the window only",
        ("total_tokens", quantized): ": that counts the segments only",
    }
    for name in COUNTERS:
        if got[name] != wanted[name]:
            reason = confused.get((name, got[name]), "")
            raise Wrong(
                f"{name} is {got[name]}{reason}. "
                f"It counts {meaning[name]}: expected {wanted[name]}."
            )


def window_holds(
    state: Any, tokens: Sequence[int], residual_length: int | None = None
) -> None:
    """The residual window of a state made of numbered tokens holds these, in order.

    residual_length  of the call; without it one mistake is not told from another
    """
    _form(state)
    wanted = list(tokens)
    newest = wanted[-1]
    free = max(0, (residual_length or 0) - len(wanted))
    for side, sign in (("key", 1), ("value", -1)):
        name = f"{side}_residual"
        got = _numbers(state[name], sign, name)
        if got == wanted:
            continue
        said = f"{name} holds {_tokens(got)}"
        should = (
            f"The window keeps the newest, oldest first: expected {_tokens(wanted)}."
        )
        if sign < 0 and [-n for n in got] == wanted:
            raise Wrong(f"{name} holds Keys. It must hold the Values of the window.")
        if sign > 0 and [-n for n in got] == wanted:
            raise Wrong(f"{name} holds Values. It must hold the Keys of the window.")
        if 0 < free < len(wanted) and got == wanted[-free:]:
            raise Wrong(
                f"{said}: a slice began at {len(wanted)} - {residual_length} = {-free}, "
                "and a negative number counts from the end. While the window has free "
                f"places, nothing leaves it: expected {_tokens(wanted)}."
            )
        if not got:
            reason = ": you flushed the whole window"
        elif got != sorted(got):
            reason = (
                ", which is not the order of their arrival "
                "(new tokens stand behind those of the window)"
            )
        elif got == list(range(1, newest + 1)):
            more = len(got) - len(wanted)
            many = "one token" if more == 1 else f"{more} tokens"
            reason = f": nothing left the window, {many} too many"
        elif got == wanted[1:]:
            reason = ": one token too few"
        elif got[1:] == wanted:
            reason = ": one token too many"
        elif got == list(range(1, len(wanted) + 1)):
            reason = ": you kept the oldest and flushed the newest"
        elif set(got) < set(wanted) and got == wanted[-len(got) :]:
            reason = ": the tokens that were in the window before are lost"
        elif len(got) == len(wanted):
            reason = ": these are not the newest"
        else:
            reason = f": {len(got)} where the window has {len(wanted)}"
        raise Wrong(f"{said}{reason}. {should}")


def segments_hold(state: Any, tokens: Sequence[Sequence[int]]) -> None:
    """The segments of a state made of numbered tokens and a stand-in hold these."""
    _form(state)
    wanted = [list(segment) for segment in tokens]
    for side, sign in (("key", 1), ("value", -1)):
        name = f"{side}_q_segments"
        got = [_numbers(codes, sign, name) for codes in state[name]]
        if got == wanted:
            continue
        if any(number < 0 for segment in got for number in segment):
            raise Wrong(f"{name} holds {_other(side)}. It must hold {_capital(side)}s.")
        if [] in got:
            raise Wrong(
                f"{name} has an empty segment. "
                "When no token leaves the window, no segment is appended."
            )
        joined = [number for segment in wanted for number in segment]
        if len(wanted) > 1 and got == [joined]:
            raise Wrong(
                f"{name} is one segment that holds {_tokens(got[0])}: you joined the "
                "segments or quantized earlier tokens again. Each flush appends a "
                "segment of its own and leaves the earlier ones alone."
            )
        said, should = _listed(got), _listed(wanted)
        reason = ""
        if got == [[number] for number in joined]:
            reason = ": every token is a segment of its own"
        raise Wrong(
            f"{name} holds {said}{reason}. The tokens that leave the window in one "
            f"call are one segment together: expected {should}."
        )


def window(
    append: Callable[..., Any],
    arrivals: Sequence[int],
    residual_length: int,
    dtype: torch.dtype = torch.float32,
    **sizes: int,
) -> None:
    """Feeds tokens, `arrivals` a call, and checks where every one of them is.

    After each call: the window holds the newest, the segments the others, all in order,
    value by value, and the counters agree. It does not ask how the segments are cut.
    """
    state: Any = None
    keys: list[Tensor] = []
    values: list[Tensor] = []
    total = 0
    for count in arrivals:
        key, value = numbered(total + 1, count, dtype=dtype, **sizes)
        keys.append(key)
        values.append(value)
        before, total = total, total + count
        state = append(
            state, key.clone(), value.clone(), residual_length, _exact, _exact
        )
        done = _story(arrivals, total, residual_length)
        kept = min(residual_length, total)
        was_quantized = before - min(residual_length, before)
        try:
            held = range(total - kept + 1, total + 1)
            window_holds(state, held, residual_length)
            _whole("key", torch.cat(keys, dim=TOKENS), state, kept)
            _whole("value", torch.cat(values, dim=TOKENS), state, kept)
            counts(state, total - kept - was_quantized, total - kept, total)
        except Wrong as error:
            raise Wrong(f"{done}{error}") from None


def segments(
    append: Callable[..., Any],
    arrivals: Sequence[int],
    residual_length: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Feeds tokens, `arrivals` a call, and checks how the segments come about.

    Each flush appends one segment; earlier ones stay bit by bit; the quantizers get the
    flushed tokens, once; the state passed in stays; the caller may reuse its buffers.
    """
    state: Any = None
    total = 0
    made = 0
    quantizers = {"key": Recorder(1, TOKENS), "value": Recorder(-1, HEAD_DIM)}
    for count in arrivals:
        key, value = numbered(total + 1, count, dtype=dtype)
        was_quantized = total - min(residual_length, total)
        total += count
        quantized = total - min(residual_length, total)
        done = _story(arrivals, total, residual_length)
        before = None if state is None else _copy(state)
        for recorder in quantizers.values():
            recorder.calls.clear()
        earlier = state
        state = append(
            earlier,
            key,
            value,
            residual_length,
            quantizers["key"],
            quantizers["value"],
        )
        try:
            _form(state)
            if before is not None:
                _unchanged(before, earlier)
            flushed = range(was_quantized + 1, quantized + 1)
            for side in ("key", "value"):
                _new_segment(side, before, state, flushed, made, quantizers)
            made += bool(flushed)
            _survives_reuse(state, key, value)
        except Wrong as error:
            raise Wrong(f"{done}{error}") from None


def refuses_pair(
    call: Callable[..., Any], *arguments: Any, because: str, **named: Any
) -> None:
    """Like checks.refuses, when either new_key or new_value may be named."""
    try:
        refuses(call, *arguments, names="new_key", because=because, **named)
    except Wrong as first:
        try:
            refuses(call, *arguments, names="new_value", because=because, **named)
        except Wrong:
            raise first from None


def _form(state: Any) -> None:
    """The state is a dict with the agreed keys, lists and tensors."""
    expect(
        isinstance(state, dict),
        f"append_and_partition returned {_kind(state)}; a dict is expected.",
    )
    names = SEGMENTS + TENSORS + COUNTERS
    missing = [name for name in names if name not in state]
    if missing:
        raise Wrong(
            f"the state lacks {', '.join(missing)}; it needs {len(names)} keys."
        )
    for name in TENSORS:
        expect(
            isinstance(state[name], Tensor) and state[name].ndim == 4,
            f"{name} is {_kind(state[name])}; a tensor "
            "[batch, heads, tokens, head_dim] is expected.",
        )
    for name in SEGMENTS:
        expect(
            isinstance(state[name], list | tuple)
            and all(isinstance(part, Tensor) for part in state[name]),
            f"{name} is {_kind(state[name])}; a list of tensors is expected.",
        )
    for name in COUNTERS:
        whole = state[name]
        if isinstance(whole, Tensor) and whole.ndim == 0:
            whole = whole.item()
        expect(
            isinstance(whole, int) and not isinstance(whole, bool),
            f"{name} is {_kind(state[name])}; a whole number is expected.",
        )
        expect(
            whole >= 0,
            f"{name} is {whole}, and a number of tokens is never negative. "
            "While the window has free places, nothing leaves it.",
        )
    lengths = {name: len(state[name]) for name in SEGMENTS}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} {count}" for name, count in lengths.items())
        raise Wrong(
            f"the lists of segments differ in length: {said}. "
            "A flush appends to all four of them."
        )


def _whole(side: str, history: Tensor, state: State, kept: int) -> None:
    """Window and segments of one side, against every token that ever arrived."""
    residual = state[f"{side}_residual"]
    total = history.shape[TOKENS]
    expect(
        residual.dtype == history.dtype,
        f"{side}_residual has dtype {_dtype(residual)}; "
        f"the window keeps the dtype it was given: {_dtype(history)}.",
    )
    expect(
        torch.equal(residual, history[:, :, total - kept :]),
        f"{side}_residual has the right tokens, but other values than arrived. "
        "The window keeps them as they are.",
    )
    name = f"{side}_q_segments"
    parts = [part for part in state[name] if part.numel()]
    wanted = list(range(1, total - kept + 1))
    sign = 1 if side == "key" else -1
    got = [n for part in parts for n in _numbers(part, sign, name)]
    if any(n < 0 for n in got):
        raise Wrong(f"{name} holds {_other(side)}. It must hold {_capital(side)}s.")
    if got != wanted:
        if sorted(got) == wanted:
            reason = ": the order is not that of their arrival"
        elif len(got) < len(wanted):
            lost = [n for n in wanted if n not in got]
            reason = f": {_tokens(lost)} left the window and are nowhere"
        else:
            reason = ""
        raise Wrong(
            f"the segments of {name} hold {_tokens(got)}{reason}. "
            f"They must hold the oldest, in order: expected {_tokens(wanted)}."
        )
    if parts:
        codes = torch.cat([part.double() for part in parts], dim=TOKENS)
        expect(
            torch.equal(codes, history[:, :, : total - kept].double()),
            f"the codes in {name} are not those that the quantizer returned "
            "for the flushed tokens.",
        )


def _new_segment(
    side: str,
    before: State | None,
    state: State,
    flushed: range,
    made: int,
    quantizers: dict[str, Recorder],
) -> None:
    """Earlier segments are as they were, and the flushed tokens are one new one."""
    name, scales = f"{side}_q_segments", f"{side}_scale_segments"
    sign = 1 if side == "key" else -1
    quantize = f"quantize_{side}"
    calls = [_numbers(call, sign, quantize) for call in quantizers[side].calls]
    if any(n < 0 for call in calls for n in call):
        raise Wrong(
            f"{quantize} was given {_other(side)}. "
            f"{_capital(side)}s go through quantize_{side}, and only they."
        )
    old = sorted({n for call in calls for n in call if n < flushed.start})
    if old:
        raise Wrong(
            f"{quantize} was given {_tokens(old)} again, which were in a segment "
            "already. Only the tokens that leave the window now are quantized."
        )
    got = len(state[name])
    if not flushed:
        expect(
            got == made,
            f"no token left the window, but {name} has {got} segments "
            f"where it had {made}. Without a flush, no segment is appended.",
        )
        expect(
            not calls,
            f"no token left the window, but {quantize} was called. "
            "Without a flush there is nothing to quantize.",
        )
    wanted = made + bool(flushed)
    if got == 0 and wanted:
        raise Wrong(
            f"{_tokens(list(flushed))} left the window, but {name} has no segment. "
            "Each flush appends one."
        )
    if got < wanted:
        raise Wrong(
            f"{name} has {got} {'segment' if got == 1 else 'segments'} after {wanted} "
            f"{'flush' if wanted == 1 else 'flushes'}: you joined or replaced earlier ones. "
            "Each flush appends a segment of its own."
        )
    if got > wanted and got - made == len(flushed):
        raise Wrong(
            f"{name} got {len(flushed)} segments from one call: one for every token "
            "that left the window. In one call they are one segment together."
        )
    if got > wanted:
        raise Wrong(
            f"{name} has {got} segments after {wanted} "
            f"{'flush' if wanted == 1 else 'flushes'}. The tokens that leave the "
            "window in one call are one segment."
        )
    for number in range(made):
        assert before is not None
        for part in (name, scales):
            expect(
                torch.equal(before[part][number], state[part][number])
                and before[part][number].dtype == state[part][number].dtype,
                f"{part}[{number}] is no longer what it was before this call. "
                "A segment is written once and never changed.",
            )
    if not flushed:
        return
    codes, label = state[name][-1], state[scales][-1]
    tokens = _numbers(codes, sign, name)
    if tokens != list(flushed):
        raise Wrong(
            f"the new segment of {name} holds {_tokens(tokens)}. "
            f"The tokens that left the window are {_tokens(list(flushed))}."
        )
    if len(calls) > 1:
        raise Wrong(
            f"{quantize} was called {len(calls)} times for one flush. "
            "All flushed tokens go through it in one call."
        )
    if calls and calls[0] != list(flushed):
        raise Wrong(
            f"{quantize} was given {_tokens(calls[0])}. "
            f"It gets exactly those that leave the window: {_tokens(list(flushed))}."
        )
    # The label says which stand-in made the segment, and from how many tokens.
    shape = list(codes.shape)
    shape[quantizers[side].shared] = 1
    wanted_label = torch.full(shape, float(sign * len(flushed)))
    if label.shape == wanted_label.shape and torch.equal(label.float(), wanted_label):
        return
    if label.numel() and bool((label * sign < 0).all()):
        raise Wrong(
            f"{scales} holds what the other quantizer returned. "
            f"{_capital(side)}s go through {quantize}."
        )
    raise Wrong(
        f"{scales}[-1] is not the scale that {quantize} returned for the "
        "flushed tokens. It is stored as it came, next to its codes."
    )


def _copy(state: State) -> State:
    """The state as it is now, independent of later changes."""
    copied: State = {}
    for name, held in state.items():
        if isinstance(held, Tensor):
            copied[name] = held.detach().clone()
        elif isinstance(held, list | tuple):
            copied[name] = [p.clone() if isinstance(p, Tensor) else p for p in held]
        else:
            copied[name] = held
    return copied


def _unchanged(before: State, after: State) -> None:
    """The state that was passed in is what it was."""
    for name in SEGMENTS:
        was, now = len(before[name]), len(after[name])
        expect(
            was == now,
            f"the state passed in was changed: its {name} had the length {was} and "
            f"now has {now}. Return a new state with new lists.",
        )
    same = [torch.equal(before[n], after[n]) for n in TENSORS]
    same += [int(before[n]) == int(after[n]) for n in COUNTERS]
    same += [all(map(torch.equal, before[n], after[n])) for n in SEGMENTS]
    for name, kept in zip(TENSORS + COUNTERS + SEGMENTS, same, strict=True):
        expect(
            kept,
            f"the state passed in was changed: its {name} is no longer what it was. "
            "Return a new state.",
        )


def _survives_reuse(state: State, key: Tensor, value: Tensor) -> None:
    """Callers reuse their buffers: what is in the state must not change with them."""
    before = _copy(state)
    key.fill_(99)
    value.fill_(99)
    for name, buffer in zip(TENSORS, ("new_key", "new_value"), strict=True):
        expect(
            torch.equal(before[name], state[name]),
            f"{name} changed when the caller wrote other numbers into its {buffer} "
            "afterwards: it is a view of the caller's memory. The window needs a copy.",
        )
    for name in SEGMENTS:
        expect(
            all(map(torch.equal, before[name], state[name])),
            f"{name} changed when the caller reused its buffers. "
            "A segment needs memory of its own.",
        )


# --- words ----------------------------------------------------------------------------


def _numbers(held: Tensor, sign: int, name: str) -> list[int]:
    """Which numbered tokens a tensor holds, read from its first entries."""
    expect(
        held.ndim == 4,
        f"an entry of {name} has shape {tuple(held.shape)}; "
        "[batch, heads, tokens, head_dim] is expected.",
    )
    return [int(sign * number) for number in held[0, 0, :, 0].tolist()]


def _tokens(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 -> "tokens 1 to 3, 7"."""
    if not numbers:
        return "no tokens"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [
        f"{r[0]} to {r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs
    ]
    return f"token{'' if len(numbers) == 1 else 's'} {', '.join(words)}"


def _listed(segments: Sequence[Sequence[int]]) -> str:
    """Segments as the table of the lab shows them: tokens [1] [2, 3]."""
    shown = " ".join(str(list(segment)) for segment in segments)
    return f"tokens {shown}" if shown else "no segment"


def _story(arrivals: Sequence[int], total: int, residual_length: int) -> str:
    """ "window 2, after 3 + 2 tokens: "."""
    seen: list[int] = []
    for count in arrivals:
        seen.append(count)
        if sum(seen) == total:
            break
    calls = " + ".join(map(str, seen))
    if len(seen) > 4:
        calls = f"{len(seen)} calls and {total}"
    return (
        f"residual_length {residual_length}, after {calls} "
        f"token{'' if total == 1 else 's'}: "
    )


def _place(where: tuple[int, ...], shared: int) -> str:
    """Where a scale belongs: "channel 3 (batch 0, head 1)"."""
    b, h, t, d = where
    block = f"channel {d}" if shared == TOKENS else f"token {t}"
    return f"{block} (batch {b}, head {h})"


def _kind(thing: Any) -> str:
    if isinstance(thing, Tensor):
        return f"a tensor of shape {tuple(thing.shape)}"
    return f"a {type(thing).__name__}"


def _dtype(held: Tensor) -> str:
    return str(held.dtype).removeprefix("torch.")


def _other(side: str) -> str:
    return "Values" if side == "key" else "Keys"


def _capital(word: str) -> str:
    return word[:1].upper() + word[1:]
