"""The checks of lab 01: bytes of weights and cache, what fits, the decode bound.

Called by the lab's test cells as `checks.budget.weights(...)` and so on. Every check takes
a result, verifies it against the definition in exact fractions, and names the mistake;
none of them returns a number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from fractions import Fraction
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from kvlab.checks import Wrong, expect

__all__ = ["concurrency", "decode_rate", "kv_cache", "weights"]

# A result in GB or GiB may have been rounded to two or three digits; GB and GiB differ by
# 7 %, MB and MiB by 5 %, so half a percent still tells them apart.
ROUNDED = Fraction(1, 200)
# A rate is a handful of float operations. float32 keeps each within 6e-8 of its value.
FLOAT = Fraction(1, 10**6)

# What a number of bytes was multiplied by when it is not a number of bytes.
UNITS = [
    (Fraction(8), "that is the number of bits"),
    (Fraction(64), "the 8 bits of a byte were multiplied where they divide"),
    (Fraction(1, 8), "that is one eighth of the bytes: one division by 8 too many"),
    (Fraction(1, 10**9), "that is in GB"),
    (Fraction(1, 2**30), "that is in GiB"),
    (Fraction(1, 10**6), "that is in MB"),
    (Fraction(1, 2**20), "that is in MiB"),
    (Fraction(1, 10**3), "that is in kB"),
    (Fraction(1, 2**10), "that is in KiB"),
    (Fraction(2**30, 10**9), "a GB was taken for a GiB: it is 7 % too large"),
    (Fraction(10**9, 2**30), "a GiB was taken for a GB: it is 7 % too small"),
]
BYTES_WANTED = "Expected: whole bytes, as an int, in no larger unit."


def weights(got: Any, *, parameters: int, bits: float) -> None:
    """The bytes of `parameters` parameters of `bits` bits, the last byte filled up.

    raises Wrong with the sentence that names the mistake
    """
    what = f"weight_bytes({parameters:_}, {bits})"
    value, whole = _number(got, what)
    needed = parameters * Fraction(bits) / 8  # bytes, before the last one is filled up
    if 0 <= value - needed < 1:
        _whole_bytes(got, what, value, whole)
        return
    width = Fraction(bits)
    mistakes = [
        (
            value == needed - needed % 1,
            "you rounded down",
            "Expected: the bits that are left over take up one more byte.",
        ),
        (
            bits % 8 != 0 and value == parameters * (width // 8),
            "you rounded the bytes of one parameter down before you multiplied",
            "Expected: parameters share bytes; round once, at the end.",
        ),
        (
            bits % 8 != 0 and value == parameters * -(-width // 8),
            "you rounded the bytes of one parameter up before you multiplied",
            "Expected: parameters share bytes; round once, at the end.",
        ),
        (
            value in (parameters, 2 * parameters),
            "every parameter takes the same, so bits has no part in it",
            "Expected: a parameter takes as many bits as bits says.",
        ),
    ]
    _name_mistake(what, got, [*mistakes, *_unit_mistakes(value, needed)])
    _fail(what, got, value, needed, "Expected: the bits of all parameters, as bytes.")


def kv_cache(
    got: Any,
    *,
    batch: int,
    tokens: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    bytes_per_value: float,
    query_heads: int,
) -> None:
    """The bytes of all the Key and Value vectors that a cache of this shape holds.

    query_heads  of the same model; no part of the definition, but of a known mistake
    raises Wrong with the sentence that names the mistake, or the two mistakes
    """
    sizes = (batch, tokens, layers, kv_heads, head_dim, bytes_per_value)
    what = f"kv_cache_bytes({', '.join(f'{size:_}' for size in sizes)})"
    value, whole = _number(got, what)
    # The definition, counted on the tensors themselves; "meta" gives them no memory.
    stored = 0
    for _layer in range(layers):
        for _key_or_value in ("Key", "Value"):
            shape = (batch, kv_heads, tokens, head_dim)
            stored += torch.empty(shape, device="meta").numel()
    needed = stored * Fraction(bytes_per_value)
    if 0 <= value - needed < 1:
        _whole_bytes(got, what, value, whole)
        return
    if value == needed - needed % 1:
        raise Wrong(
            f"{what} gave {_shown(got)}: you rounded down. "
            "Expected: half a byte left over takes up one more byte."
        )
    group = Fraction(query_heads, kv_heads)
    slips = [
        (Fraction(1, 2), "Keys and Values are not both counted"),
        (Fraction(2), "something is counted twice (Keys and Values are two, not four)"),
        (Fraction(1, layers), "that is one layer: layers has no part in it"),
        (Fraction(1, batch), "that is one request: batch has no part in it"),
        (Fraction(1, tokens), "tokens has no part in it"),
        (Fraction(1, batch * tokens), "that is the cache of a single token"),
        (Fraction(1, kv_heads), "that is one head: kv_heads has no part in it"),
        (Fraction(1, head_dim), "head_dim has no part in it"),
        (1 / Fraction(bytes_per_value), "that is the number of values, not of bytes"),
        (group, "query heads are counted where KV heads belong"),
        (
            Fraction(tokens),
            "tokens is in it twice, as for attention scores, which are not kept",
        ),
    ]
    slips = [(factor, said) for factor, said in slips if factor != 1]
    wanted = (
        "Expected: one Key and one Value vector for every request, token, layer "
        "and KV head."
    )
    width = Fraction(bytes_per_value)
    if width % 1 and value in (stored * math.ceil(width), stored * math.floor(width)):
        way = "up" if value > needed else "down"
        raise Wrong(
            f"{what} gave {_shown(got)}: you rounded bytes_per_value {way}, before you "
            "multiplied. Expected: values share bytes; round once, at the end."
        )
    for name, parts in (("layer", layers), ("request", batch), ("KV head", kv_heads)):
        if needed % 1 and value == parts * math.ceil(needed / parts):
            raise Wrong(
                f"{what} gave {_shown(got)}: you rounded the bytes of each {name} up. "
                "Expected: they share bytes; round once, at the end."
            )
    single = [
        (abs(value - needed * factor) < 1, said, wanted) for factor, said in slips
    ]
    _name_mistake(what, got, [*single, *_unit_mistakes(value, needed)])
    double = [
        (abs(value - needed * first[0] * second[0]) < 1, first, second)
        for first, second in combinations([*slips, (Fraction(8), UNITS[0][1])], 2)
        if first[0] * second[0] != 1
    ]
    pairs = [(one, two) for matches, one, two in double if matches]
    if len(pairs) == 1:
        (_, said), (_, also) = pairs[0]
        raise Wrong(
            f"{what} gave {_shown(got)}: two things at once, {said}, and {also}. "
            f"{wanted}"
        )
    _fail(what, got, value, needed, wanted)


def concurrency(
    got: Any,
    *,
    memory_bytes: int,
    weight_bytes: int,
    reserve_bytes: int,
    kv_bytes_per_request: int,
) -> None:
    """So many requests fit beside weights and reserve, and one more does not.

    raises Wrong with the sentence that names the mistake
    """
    sizes = (memory_bytes, weight_bytes, reserve_bytes, kv_bytes_per_request)
    what = f"max_concurrent_requests({', '.join(f'{size:_}' for size in sizes)})"
    value, whole = _number(got, what)
    room, request = memory_bytes - weight_bytes - reserve_bytes, kv_bytes_per_request
    fits = value == 0 or value * request <= room
    if value >= 0 and value % 1 == 0 and fits and (value + 1) * request > room:
        expect(
            whole,
            f"{what} gave {_shown(got)}, a {type(got).__name__}. "
            "Expected: requests are counted, so an int.",
        )
        return
    share = Fraction(room, request)
    together = "Expected: weights and reserve once for the whole server."
    if value < 0:
        raise Wrong(
            f"{what} gave {_shown(got)}: a server cannot hold fewer than no requests. "
            "Expected: 0 when weights and reserve leave no room."
        )
    if value % 1 != 0 and abs(value - share) <= FLOAT * abs(share):
        raise Wrong(
            f"{what} gave {_shown(got)}: part of a request is counted. "
            "Expected: how many fit whole, as an int."
        )
    if value == 1 and room < request:
        raise Wrong(
            f"{what} gave 1: not even one request fits. Expected: 0 when nothing fits."
        )
    mistakes = [
        (
            value == math.ceil(share),
            "you rounded up, and the last request does not fit",
            "Expected: how many fit whole.",
        ),
        (
            value == math.ceil(share) - 1,
            "the last request fits exactly, and you left it out",
            "Expected: a request that fills the memory to the last byte fits.",
        ),
        (
            value == room,
            "that is how many bytes are left",
            "Expected: how many requests fit into them.",
        ),
    ]
    fixed = [
        (
            memory_bytes - weight_bytes,
            request,
            "the reserve is not taken off",
            "Expected: room is what weights and reserve leave.",
        ),
        (
            memory_bytes - reserve_bytes,
            request,
            "the weights are not taken off",
            "Expected: room is what weights and reserve leave.",
        ),
        (
            memory_bytes,
            request,
            "neither the weights nor the reserve is taken off",
            "Expected: room is what weights and reserve leave.",
        ),
        (
            memory_bytes - weight_bytes + reserve_bytes,
            request,
            "the reserve is added to the memory",
            "Expected: the reserve takes memory away.",
        ),
        (
            memory_bytes - reserve_bytes,
            weight_bytes + request,
            "every request has weights of its own",
            together,
        ),
        (
            memory_bytes - weight_bytes,
            reserve_bytes + request,
            "every request has a reserve of its own",
            together,
        ),
        (
            memory_bytes,
            weight_bytes + reserve_bytes + request,
            "every request has weights and a reserve of its own",
            together,
        ),
    ]
    for space, each, said, wanted in fixed:
        mistakes.append((value == space // each, said, wanted))
    if share % 1 != 0:
        mistakes.append(
            (
                value == round(share),
                "you rounded to the nearest whole number",
                "Expected: how many fit whole.",
            )
        )
    _name_mistake(what, got, mistakes)
    _fail(what, got, value, share, "Expected: how many fit beside weights and reserve.")


def decode_rate(
    got: Any,
    *,
    bandwidth_bytes_per_second: float,
    weight_bytes: int,
    kv_bytes: int,
    batch: int,
) -> None:
    """Tokens a second of the whole batch, when reading memory is all that takes time.

    kv_bytes  the cache of one request
    raises Wrong with the sentence that names the mistake
    """
    speed = bandwidth_bytes_per_second
    sizes = f"{speed:g}, {weight_bytes:_}, {kv_bytes:_}, {batch}"
    what = f"decode_tokens_per_second({sizes})"
    value, _ = _number(got, what)
    bandwidth = Fraction(speed)
    step = weight_bytes + batch * kv_bytes  # bytes that one step reads
    # In `batch / value` seconds, the time of one step, the memory delivers `step` bytes.
    if value > 0 and abs(bandwidth * batch - value * step) <= FLOAT * value * step:
        return
    rate = "Expected: tokens per second of the whole batch."
    reads = (
        "Expected: a step reads the weights once for the whole batch, "
        "and every request's cache once."
    )
    both = f"{reads[:-1]}; the answer is tokens per second of the whole batch."
    known = [
        (bandwidth / step, "that is steps per second, or tokens of one request", rate),
        (Fraction(step) / bandwidth, "those are the seconds of one step", rate),
        (Fraction(step) / bandwidth / batch, "those are the seconds for a token", rate),
        (
            bandwidth / (weight_bytes + kv_bytes),
            "the weights are read again for every request",
            reads,
        ),
        (
            bandwidth / (batch * (weight_bytes + kv_bytes)),
            "the weights are read again for every request, and steps are counted",
            both,
        ),
        (
            bandwidth * batch / (weight_bytes + kv_bytes),
            "the cache of one request only is read",
            reads,
        ),
        (bandwidth * batch / weight_bytes, "the cache is never read", reads),
        (bandwidth * 8 * batch / step, "the bytes are counted as bits", rate),
        (bandwidth / 8 * batch / step, "the bandwidth is taken for bits", rate),
    ]
    if kv_bytes > 0:
        known += [
            (bandwidth / kv_bytes, "the weights are never read", reads),
            (
                bandwidth * batch / kv_bytes,
                "the weights are never read, and the cache of one request only",
                reads,
            ),
        ]
    right = bandwidth * batch / step
    steps = bandwidth / step
    for whole in {math.floor(steps), round(steps), math.ceil(steps)} - {steps}:
        said = "you rounded the steps per second before you multiplied by batch"
        known.append((Fraction(whole * batch), said, "Expected: a float, not rounded."))
    mistakes = [
        (abs(value - wrong) <= FLOAT * wrong, said, wanted)
        for wrong, said, wanted in known
    ]
    mistakes.append(
        (
            value % 1 == 0 and abs(value - right) <= 1,
            "the rate was rounded to a whole number",
            "Expected: a float, not rounded.",
        )
    )
    _name_mistake(what, got, mistakes)
    _fail(what, got, value, right, both)


Mistake = tuple[bool, str, str]


def _number(got: Any, what: str) -> tuple[Fraction, bool]:
    """The result as an exact fraction, and whether it came as an integer."""
    expect(
        got is not None,
        f"{what} gave None: the function returns nothing. "
        "Expected: a number, with return.",
    )
    single: Any = got.item() if isinstance(got, Tensor) and got.ndim == 0 else got
    expect(
        not isinstance(single, bool | str | Tensor),
        f"{what} gave {got!r}, a {type(got).__name__}. Expected: a number.",
    )
    try:
        return Fraction(operator.index(single)), True
    except TypeError:
        pass
    try:
        number = single if isinstance(single, Fraction) else float(single)
    except (TypeError, ValueError):
        raise Wrong(
            f"{what} gave {got!r}, a {type(got).__name__}. Expected: a number."
        ) from None
    expect(math.isfinite(number), f"{what} gave {number}. Expected: a finite number.")
    return Fraction(number), False


def _whole_bytes(got: Any, what: str, value: Fraction, whole: bool) -> None:
    """A number of bytes that lies right must also be a whole number, as an int."""
    expect(
        value % 1 == 0,
        f"{what} gave {_shown(got)}: part of a byte is counted. "
        "Expected: the last byte counts as a whole one, and an int.",
    )
    expect(
        whole,
        f"{what} gave {_shown(got)}, a {type(got).__name__}: the amount is right, the "
        "type is not. Expected: bytes are counted, so an int.",
    )


def _unit_mistakes(value: Fraction, needed: Fraction) -> list[Mistake]:
    return [
        (abs(value - needed * factor) <= ROUNDED * needed * factor, said, BYTES_WANTED)
        for factor, said in UNITS
    ]


def _name_mistake(what: str, got: Any, mistakes: Iterable[Mistake]) -> None:
    """Raises Wrong when the result is that of a known mistake, or of two of them."""
    matching = [(said, wanted) for matches, said, wanted in mistakes if matches]
    if matching:
        said = "; or ".join(said for said, _ in matching[:3])
        raise Wrong(f"{what} gave {_shown(got)}: {said}. {matching[0][1]}")


def _fail(what: str, got: Any, value: Fraction, needed: Fraction, wanted: str) -> None:
    """Raises Wrong for a result that no known mistake gives."""
    size = "too large" if value > needed else "too small"
    if abs(value - needed) <= ROUNDED * abs(needed):
        size = f"a little {size}, so something was rounded on the way"
    raise Wrong(f"{what} gave {_shown(got)}, which is {size}. {wanted}")


def _shown(got: Any) -> str:
    """The result as a sentence shows it; a whole float keeps its point."""
    single = got.item() if isinstance(got, Tensor) else got
    if isinstance(single, float):
        return f"{single:,.1f}" if single.is_integer() else f"{single:,.8g}"
    return f"{single:,}"
