"""Checks of lab 04: the bits of a byte, groups with a minimum, whole groups that leave, bytes.

Called by the test cells of lab 04 (`checks.groups`) and by its answer suite.
Never packs, quantizes or moves a token: it verifies an answer code by code, and names the mistake.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlab.checks import Wrong, axes, expect
from kvlab.checks.axes import (
    _capital,
    _copy,
    _dtype,
    _kind,
    _numbers,
    _other,
    _survives_reuse,
    _tokens,
    _whole,
)

__all__ = [
    "Recorder",
    "counts",
    "example",
    "ledger",
    "made_state",
    "nearest_keys",
    "nearest_values",
    "packs",
    "quantizes_keys",
    "quantizes_values",
    "round_trip",
    "segments",
    "segments_hold",
    "smaller",
    "some_codes",
    "unpacks",
    "window",
    "window_holds",
]

State = dict[str, Any]
Answer = Callable[..., Any]
Mistake = tuple[str, float]

TOKENS, HEAD_DIM = 2, 3
ALONG = {TOKENS: "tokens", HEAD_DIM: "head_dim"}


# --- inputs ---------------------------------------------------------------------------


def some_codes(*shape: int, bits: int, seed: int) -> Tensor:
    """Random uint8 codes of that shape, each below 2**bits; the first is the largest."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, shape, generator=random)
    codes.view(-1)[0] = 2**bits - 1
    return codes.to(torch.uint8)


def example(*shape: int, seed: int) -> Tensor:
    """[batch, heads, tokens, head_dim] whose groups lie in many places.

    One channel lies far above 0 and one token far below it, so that a minimum matters;
    every batch row and head has a size of its own, so that a shared scale shows.
    """
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=random)
    for b in range(shape[0]):
        for h in range(shape[1]):
            values[b, h] *= 1 + 1.7 * b + 0.45 * h
    values[..., shape[3] // 2] += 15
    values[:, :, shape[2] // 3] -= 12
    return values


def made_state(
    segment_tokens: Sequence[int],
    window_tokens: int,
    window_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    seed: int,
) -> State:
    """A state as TODO 3 returns it, made of random tensors; no two parts of it weigh the same.

    segment_tokens  tokens of each segment, even numbers
    """
    batch, heads, head_dim = [(2, 3, 8), (1, 4, 6), (3, 2, 4), (1, 2, 10)][seed % 4]
    random = torch.Generator().manual_seed(seed)
    minimum_dtype = torch.float16 if scale_dtype.itemsize > 2 else torch.float32
    state: State = {name: [] for name in LISTS}
    for tokens in segment_tokens:
        packed = batch, heads, tokens, head_dim // 2
        per_channel = batch, heads, 1, head_dim
        for side, scales in (("key", per_channel), ("value", packed)):
            codes = torch.randint(0, 256, packed, generator=random)
            state[f"{side}_q_segments"].append(codes.to(torch.uint8))
            for part, dtype in (("scale", scale_dtype), ("minimum", minimum_dtype)):
                made = torch.rand(scales, generator=random).to(dtype)
                state[f"{side}_{part}_segments"].append(made)
    for name in TENSORS:
        made = torch.rand(batch, heads, window_tokens, head_dim, generator=random)
        state[name] = made.to(window_dtype)
    quantized = sum(segment_tokens)
    return state | {
        "flushed_tokens": segment_tokens[-1] if segment_tokens else 0,
        "quantized_tokens": quantized,
        "total_tokens": quantized + window_tokens,
    }


# --- TODO 1: the bits of a byte -------------------------------------------------------

ORDER = "the first code of a byte takes its lowest bits, the next one the bits above"


def packs(pack: Answer, codes: Tensor, bits: int) -> None:
    """Every byte of `pack(codes, bits)` must hold the right codes in the right bits."""
    packed = _call("codes", pack, codes, bits)
    per_byte = 8 // bits
    size = math.ceil(codes.shape[-1] / per_byte)
    shape = tuple(codes.shape)
    what = f"pack of shape {shape} at {bits} bits"
    _uint8(packed, what)
    _packed_shape(tuple(packed.shape), shape, size, bits, what)
    rows = codes.reshape(-1, shape[-1]).tolist()
    bytes_of_rows = packed.reshape(-1, size).tolist()
    for row, found in zip(rows, bytes_of_rows, strict=True):
        filled = row + [0] * (size * per_byte - len(row))
        for place, byte in enumerate(found):
            part = filled[place * per_byte : (place + 1) * per_byte]
            held = [byte // 2 ** (bits * i) % 2**bits for i in range(per_byte)]
            if held != part:
                last = place == size - 1 and len(row) % per_byte != 0
                reason = _pack_mistake(rows, bytes_of_rows, bits)
                if last and held[: len(row) % per_byte] == part[: len(row) % per_byte]:
                    reason = ": the part that is left over is not filled up with 0"
                raise Wrong(
                    f"the codes {_listed(part)} at {bits} bits became the byte {byte}, "
                    f"which holds {_listed(held)}{reason}. Expected: {ORDER}."
                )


def _packed_shape(
    got: tuple[int, ...], shape: tuple[int, ...], size: int, bits: int, what: str
) -> None:
    wanted = (*shape[:-1], size)
    if got == wanted:
        return
    if got == shape:
        reason = ", one byte for every code"
    elif got == (*shape[:-1], shape[-1] * bits // 8):
        reason = ": the codes that do not fill a byte are lost"
    elif len(got) == 1 and len(shape) > 1:
        reason = ": the dimensions before the last are gone"
    elif sorted(got) == sorted(wanted) or got[-1] == shape[-1]:
        reason = ": you packed along another dimension"
    else:
        reason = ""
    raise Wrong(
        f"the {what} has shape {got}{reason}. "
        f"{8 // bits} codes share a byte, along the last dimension: expected {wanted}."
    )


def _pack_mistake(
    rows: list[list[int]], bytes_of_rows: list[list[int]], bits: int
) -> str:
    """The known mistake that explains all bytes, as ": ...", or nothing."""
    per_byte = 8 // bits
    size = len(bytes_of_rows[0])

    def joined(part: Sequence[int], shifts: Sequence[int]) -> int:
        made = 0
        for code, shift in zip(part, shifts, strict=True):
            made |= code << shift
        return made % 256

    up = [bits * i for i in range(per_byte)]
    explanations: dict[str, Callable[[list[int], int], int]] = {
        "the first code is in the highest bits": lambda row, at: joined(
            row[at * per_byte : (at + 1) * per_byte], up[::-1]
        ),
        "codes that are not neighbours share a byte": lambda row, at: joined(
            row[at::size], up
        ),
        "codes that are not neighbours share a byte, the first in the highest "
        "bits": lambda row, at: joined(row[at::size], up[::-1]),
        "no code was moved, all lie in the lowest bits": lambda row, at: joined(
            row[at * per_byte : (at + 1) * per_byte], [0] * per_byte
        ),
        "the i-th code was moved by i bits, not by i codes": lambda row, at: joined(
            row[at * per_byte : (at + 1) * per_byte], range(per_byte)
        ),
        "only the first code of the byte is there": lambda row, at: row[at * per_byte],
        "only the last code of the byte is there": lambda row, at: (
            row[(at + 1) * per_byte - 1] << up[-1]
        ),
    }
    return _said(
        sentence
        for sentence, byte_of in explanations.items()
        if all(
            byte_of(row + [0] * (size * per_byte - len(row)), at) == byte
            for row, found in zip(rows, bytes_of_rows, strict=True)
            for at, byte in enumerate(found)
        )
    )


def unpacks(unpack: Answer, packed: Tensor, bits: int, length: int) -> None:
    """`unpack(packed, bits, length)` must give the codes that these bytes hold.

    packed  uint8; the bits beyond the last code may be anything
    """
    codes = _call("packed", unpack, packed, bits, length)
    per_byte = 8 // bits
    size = packed.shape[-1]
    what = f"unpack of {size} bytes at {bits} bits, length {length}"
    _uint8_or_sign(codes, what)
    wanted = (*packed.shape[:-1], length)
    if tuple(codes.shape) != wanted:
        reason = ""
        if tuple(codes.shape) == (*packed.shape[:-1], size * per_byte):
            reason = ": length is not looked at, the codes that filled up are there too"
        elif tuple(codes.shape) == (*packed.shape[:-1], size, per_byte):
            reason = ": the codes of each byte are not joined"
        elif codes.ndim == 1 and packed.ndim > 1:
            reason = ": the dimensions before the last are gone"
        raise Wrong(
            f"the {what} has shape {tuple(codes.shape)}{reason}. Expected {wanted}."
        )
    bytes_of_rows = packed.reshape(-1, size).tolist()
    rows = codes.reshape(-1, length).tolist()
    for row, held in zip(rows, bytes_of_rows, strict=True):
        for n, code in enumerate(row):
            byte, place = held[n // per_byte], n % per_byte
            right = byte // 2 ** (bits * place) % 2**bits
            if code != right:
                raise Wrong(
                    f"code {n} of {_listed(held[:4])}{' ...' if size > 4 else ''} at "
                    f"{bits} bits came out as {code}"
                    f"{_unpack_mistake(rows, bytes_of_rows, bits)}. "
                    f"It stands in bits {bits * place} to {bits * place + bits - 1} "
                    f"of byte {n // per_byte}: {ORDER}."
                )


def _unpack_mistake(
    rows: list[list[int]], bytes_of_rows: list[list[int]], bits: int
) -> str:
    """The known mistake that explains all codes, as ": ...", or nothing."""
    per_byte, size = 8 // bits, len(bytes_of_rows[0])

    def cut(byte: int, place: int) -> int:
        return byte // 2 ** (bits * place) % 2**bits

    def signed(byte: int, place: int) -> int:
        return (byte - 256 if byte > 127 else byte) >> (bits * place)

    def negative(code: int) -> int:
        return code - 2**bits if code >= 2 ** (bits - 1) else code

    explanations: dict[str, Callable[[list[int], int], int]] = {
        "you began with the highest bits": lambda held, n: cut(
            held[n // per_byte], per_byte - 1 - n % per_byte
        ),
        "you read the first code of every byte, then the second": lambda held, n: cut(
            held[n % size], n // size
        ),
        "the higher bits are not cut off": lambda held, n: (
            held[n // per_byte] >> (bits * (n % per_byte))
        ),
        "the byte was not moved down": lambda held, n: held[n // per_byte] % 2**bits,
        "the code stands where it stood in the byte, not moved down": lambda held, n: (
            held[n // per_byte] & ((2**bits - 1) << (bits * (n % per_byte)))
        ),
        "it was moved down by one bit for each code, not by one code": lambda held, n: (
            (held[n // per_byte] >> (n % per_byte)) % 2**bits
        ),
        "a signed shift filled up with the sign": lambda held, n: (
            signed(held[n // per_byte], n % per_byte)
            if n % per_byte == per_byte - 1
            else cut(held[n // per_byte], n % per_byte)
        ),
        "a signed shift filled up with the sign, and nothing was cut off": (
            lambda held, n: signed(held[n // per_byte], n % per_byte)
        ),
        "the highest bit of a code was taken for a sign": lambda held, n: negative(
            cut(held[n // per_byte], n % per_byte)
        ),
    }
    return _said(
        sentence
        for sentence, code_of in explanations.items()
        if all(
            code % 256 == code_of(held, n) % 256
            for row, held in zip(rows, bytes_of_rows, strict=True)
            for n, code in enumerate(row)
        )
    )


def round_trip(pack: Answer, unpack: Answer, codes: Tensor, bits: int) -> None:
    """What goes into pack must come out of unpack; each of the two is right by itself."""
    packs(pack, codes, bits)
    unpacks(unpack, pack(codes.clone(), bits), bits, codes.shape[-1])


def _uint8(got: Any, what: str) -> None:
    expect(got is not None, f"the {what} is None. It must return a tensor.")
    expect(
        isinstance(got, Tensor),
        f"the {what} is {_kind(got)}; a torch.Tensor is expected.",
    )
    expect(
        got.dtype == torch.uint8,
        f"the {what} has dtype {_dtype(got)}; bytes and codes are held in uint8.",
    )


def _uint8_or_sign(got: Any, what: str) -> None:
    if isinstance(got, Tensor) and not got.is_floating_point() and got.numel():
        expect(
            int(got.min()) >= 0,
            f"the {what} holds {int(got.min())}: the highest bit of a code was "
            "taken for a sign. Codes are never negative.",
        )
    _uint8(got, what)


# --- TODO 2: groups -------------------------------------------------------------------


def quantizes_keys(
    quantize: Answer, key: Tensor, bits: int, group_size: int, **settings: float
) -> None:
    """Minimum, scale and codes of every group along tokens must fulfil the definition."""
    _quantized("key", quantize, key, TOKENS, bits, group_size, _moved_ends, settings)


def quantizes_values(
    quantize: Answer, value: Tensor, bits: int, group_size: int, **settings: float
) -> None:
    """Minimum, scale and codes of every group along head_dim must fulfil the definition."""
    _quantized(
        "value", quantize, value, HEAD_DIM, bits, group_size, _moved_ends, settings
    )


def nearest_keys(quantize: Answer, key: Tensor, bits: int, group_size: int) -> None:
    """Like quantizes_keys, and each code is the nearest under what is returned with it."""
    _quantized("key", quantize, key, TOKENS, bits, group_size, _nothing, {})


def nearest_values(quantize: Answer, value: Tensor, bits: int, group_size: int) -> None:
    """Like quantizes_values, and each code is the nearest under what is returned with it."""
    _quantized("value", quantize, value, HEAD_DIM, bits, group_size, _nothing, {})


def _half(number: float) -> float:
    """How far float16 may move a number, in either direction of rounding.

    It keeps 11 significant bits, so its steps are at most 2**-10 of the number, and
    2**-24 below the normal numbers. Rounding to the nearest moves by half a step.
    """
    return abs(number) * 2**-10 + 2**-24


def _moved_ends(minimum: float, scale: float, largest: int) -> float:
    """Codes may have been computed before m and s were rounded: both ends have moved."""
    return _half(minimum) + largest * _half(scale)


def _nothing(minimum: float, scale: float, largest: int) -> float:
    """Codes were computed from what is stored: no rounding comes on top."""
    return 0.0


def _quantized(
    name: str,
    quantize: Answer,
    given: Tensor,
    axis: int,
    bits: int,
    group_size: int,
    allowed: Callable[[float, float, int], float],
    settings: dict[str, float],
) -> None:
    """Verifies one answer: shapes, dtypes, every minimum, scale and code."""
    answer = _call(name, quantize, given, bits, group_size, **settings)
    expect(
        answer is not None,
        "your function returned None. It must return (codes, scale, minimum).",
    )
    expect(
        isinstance(answer, tuple | list) and len(answer) == 3,
        f"your function returned {_kind(answer)}"
        f"{f' of {len(answer)}' if isinstance(answer, tuple | list) else ''}; "
        "the three tensors (codes, scale, minimum) are expected.",
    )
    codes, scale, minimum = answer
    _form(name, given, codes, scale, minimum, axis, group_size)
    largest = 2**bits - 1
    _minimum_values(given, minimum, axis, group_size)
    _scale_values(given, scale, axis, group_size, largest, settings.get("eps", 1e-5))
    _code_values(name, given, (codes, scale, minimum), axis, group_size, bits, allowed)


def _form(
    name: str,
    given: Tensor,
    codes: Any,
    scale: Any,
    minimum: Any,
    axis: int,
    group_size: int,
) -> None:
    """Shapes and dtypes of the three tensors."""
    for held, what in ((codes, "codes"), (scale, "scale"), (minimum, "minimum")):
        expect(
            isinstance(held, Tensor),
            f"the {what} is {_kind(held)}; a torch.Tensor is expected.",
        )
    shape = tuple(given.shape)
    if scale.dtype == torch.uint8 and codes.dtype != torch.uint8:
        raise Wrong(
            "the second of the three results holds uint8 codes. "
            "The order is (codes, scale, minimum)."
        )
    wanted = list(shape)
    wanted[axis] //= group_size
    for held, what in ((scale, "scale"), (minimum, "minimum")):
        if tuple(held.shape) != tuple(wanted):
            said = f"the {what} has shape {tuple(held.shape)}"
            done = _how_grouped(shape, tuple(held.shape), axis, group_size)
            raise Wrong(
                f"{said}{done}. {_capital(name)}s are grouped along {ALONG[axis]}, "
                f"{group_size} to a group: expected {tuple(wanted)}."
            )
    expect(
        tuple(codes.shape) == shape,
        f"the codes have shape {tuple(codes.shape)}; "
        f"one code for every value is expected: {shape}.",
    )
    expect(
        codes.dtype == torch.uint8,
        f"the codes have dtype {_dtype(codes)}; they are held in uint8.",
    )
    for held, what in ((scale, "scale"), (minimum, "minimum")):
        bytes_each = held.element_size()
        size = f", {bytes_each} bytes each" if bytes_each != 2 else ""
        expect(
            held.dtype == torch.float16,
            f"the {what} has dtype {_dtype(held)}{size}; it is stored in float16.",
        )


def _how_grouped(
    shape: tuple[int, ...], got: tuple[int, ...], axis: int, group_size: int
) -> str:
    """What an answer must have done to get a scale of this shape, in words."""
    if got == shape:
        return ": every value has its own"
    if math.prod(got) == 1:
        return ": there is one for the whole tensor"
    other = HEAD_DIM if axis == TOKENS else TOKENS
    swapped = [-(-n // group_size) if a == other else n for a, n in enumerate(shape)]
    if got == tuple(swapped):
        return f", so you grouped along {ALONG[other]}"
    one = [1 if a == axis else n for a, n in enumerate(shape)]
    if got == tuple(one):
        return (
            f", one for all {shape[axis]} {ALONG[axis]}: group_size has no part in it"
        )
    if got == tuple(1 if a == other else n for a, n in enumerate(shape)):
        return f", one for all {shape[other]} {ALONG[other]}, as in lab 03"
    right = [n // group_size if a == axis else n for a, n in enumerate(shape)]
    kept = right[:]
    kept.insert(axis + 1, 1)
    if got == tuple(kept):
        return ": the dimension you reduced is still there, with size 1"
    if len(got) < len(shape):
        return ": a dimension is missing"
    return ""


def _groups(
    given: Tensor, axis: int, group_size: int
) -> Iterator[tuple[tuple[int, ...], list[tuple[int, ...]], list[float]]]:
    """Where the scale of a group stands, where its values stand, and the values."""
    values = given.double().tolist()
    sizes = [range(n) for n in given.shape]
    sizes[axis] = range(given.shape[axis] // group_size)
    for where in itertools.product(*sizes):
        first = where[axis] * group_size
        places = [
            (*where[:axis], n, *where[axis + 1 :])
            for n in range(first, first + group_size)
        ]
        yield where, places, [values[b][h][t][d] for b, h, t, d in places]


def _minimum_values(given: Tensor, minimum: Tensor, axis: int, group_size: int) -> None:
    """Every minimum is the smallest value of its group, as near as float16 comes."""
    found = list(_groups(given, axis, group_size))
    stored = minimum.tolist()
    for where, _, group in found:
        got = _at(stored, where)
        if math.isfinite(got) and abs(got - min(group)) <= _half(min(group)):
            continue
        blocks = [(w, group) for w, _, group in found]
        reason = _explained(
            minimum, blocks, lambda w, g: _mistaken_minima(given, w, g, axis)
        )
        raise Wrong(
            f"the minimum of {_place(where, axis)} is {got:.6g}{reason}. "
            f"The values of this group go from {min(group):.6g} to {max(group):.6g}, "
            "and code 0 stands for the smallest."
        )


def _scale_values(
    given: Tensor,
    scale: Tensor,
    axis: int,
    group_size: int,
    largest: int,
    eps: float,
) -> None:
    """scale x largest is the range of the group; never below eps, inf or nan."""
    found = list(_groups(given, axis, group_size))
    # eps itself is rounded to float16.
    floor = eps - _half(eps)
    stored = scale.tolist()
    for where, _, group in found:
        got, low, high = _at(stored, where), min(group), max(group)
        wanted = (high - low) / largest
        said = f"the scale of {_place(where, axis)} is {got:.6g}"
        if low == high:
            said = f"a group of {group_size} equal values has scale {got:.6g}"
        if not math.isfinite(got) or got <= 0:
            why = ", and dividing by it gives nan or inf" if got == 0 else ""
            raise Wrong(f"{said}{why}. Every scale must be finite and at least eps.")
        if got < floor and (low == high or abs(got - wanted) <= _half(wanted) + eps):
            raise Wrong(
                f"{said} where eps is {eps:g}{_floor_mistake(got, eps, largest)}. "
                "eps is the smallest scale: no stored scale is below it."
            )
        # eps may be a floor or be added. Equal values come back with any scale.
        if low == high or -_half(wanted) <= got - wanted <= _half(wanted) + eps * 1.01:
            continue
        blocks = [(w, g) for w, _, g in found if min(g) < max(g)]
        reason = _explained(
            scale, blocks, lambda w, g: _mistaken_scales(given, w, g, axis, largest)
        )
        raise Wrong(
            f"{said} where the values go from {low:.6g} to {high:.6g} and the largest "
            f"code is {largest}{reason}. Group by group, the scale is the step that "
            "takes the smallest value to code 0 and the largest to the largest code."
        )


def _floor_mistake(got: float, eps: float, largest: int) -> str:
    if abs(got - 1e-5) <= _half(1e-5):
        return ": you wrote 1e-5 where eps stands"
    if abs(got - eps / largest) <= 2 * _half(eps / largest):
        return ": eps was put under the range, before the division"
    return ""


def _explained(
    held: Tensor,
    blocks: list[tuple[tuple[int, ...], list[float]]],
    mistakes: Callable[[tuple[int, ...], list[float]], list[Mistake]],
) -> str:
    """The known mistake that explains every scale or minimum, as ": ...", or nothing."""
    left: dict[int, str] = {}
    for number, (where, group) in enumerate(blocks):
        got = float(held[where])
        for n, (sentence, value) in enumerate(mistakes(where, group)):
            if number == 0:
                left[n] = sentence
            # 2 % tells the mistakes apart, and half precision on the way is nearer.
            if not math.isclose(got, value, rel_tol=0.02, abs_tol=2e-5):
                left.pop(n, None)
    return _said(left.values())


def _mistaken_minima(
    given: Tensor, where: tuple[int, ...], group: list[float], axis: int
) -> list[Mistake]:
    """What each known mistake would give as the minimum of one group."""
    b, h = where[0], where[1]
    low, high = min(group), max(group)
    return [
        ("it is 0 everywhere, so it was left out", 0.0),
        ("it is the largest value", high),
        ("its sign is turned", -low),
        ("it is the middle of the range", (low + high) / 2),
        ("it is the mean", sum(group) / len(group)),
        ("it is the smallest magnitude", min(abs(v) for v in group)),
        ("it is the largest magnitude, turned negative", -max(map(abs, group))),
        ("it is the smallest value of the whole tensor", float(given.min())),
        ("it is the smallest value of a whole head", float(given[b, h].min())),
        *_other_groups(given, where, group, axis, lambda g: min(g)),
        ("it is the first value of the group", group[0]),
        ("it is the last value of the group", group[-1]),
    ]


def _mistaken_scales(
    given: Tensor, where: tuple[int, ...], group: list[float], axis: int, largest: int
) -> list[Mistake]:
    """What each known mistake would give as the scale of one group."""
    b, h = where[0], where[1]
    low, high = min(group), max(group)
    size = high - low
    peak = max(abs(low), abs(high))
    whole, head = given.double(), given[b, h].double()
    levels = largest + 1
    low_precision: list[Mistake] = []
    if given.dtype != torch.float32:
        ends = torch.tensor([low, high], dtype=given.dtype)
        low_precision = [
            (
                f"it was computed in {_dtype(given)}; go to float32 first",
                float((ends[1] - ends[0]) / largest),
            )
        ]
    return [
        ("it is upside down, the largest code over the range", largest / size),
        ("it is the whole range, not divided", size),
        (f"you divided by {levels}, the number of codes", size / levels),
        (f"you divided by {largest - 1}", size / (largest - 1)),
        ("the range is symmetric, without a minimum", peak / max(1, levels // 2 - 1)),
        ("the range is symmetric, without a minimum", peak / (levels // 2)),
        ("the range is symmetric, without a minimum", 2 * peak / largest),
        ("it is the largest magnitude, without the minimum", peak / largest),
        ("it is the largest value, without the minimum", abs(high) / largest),
        ("you wrote 15 where 2**bits - 1 stands", size / 15),
        ("you wrote 255 where 2**bits - 1 stands", size / 255),
        ("the range is that of the whole tensor", _range(whole) / largest),
        ("the range is that of a whole head", _range(head) / largest),
        *_other_groups(
            given, where, group, axis, lambda g: (max(g) - min(g)) / largest
        ),
        *low_precision,
    ]


def _other_groups(
    given: Tensor,
    where: tuple[int, ...],
    group: list[float],
    axis: int,
    measure: Callable[[list[float]], float],
) -> list[Mistake]:
    """The same measure on wrong groups: strided, cut from the flat memory, shared."""
    size = len(group)
    parts = given.shape[axis] // size
    row: list[Any] = list(where)
    row[axis] = slice(None)
    line = given.double()[tuple(row)].tolist()
    strided = line[where[axis] :: parts]
    flat = given.double().flatten().tolist()
    shape = list(given.shape)
    shape[axis] //= size
    at = 0
    for n, length in zip(where, shape, strict=True):
        at = at * length + n
    place = slice(where[axis] * size, (where[axis] + 1) * size)
    rows: list[Any] = [slice(None), slice(None), where[2], where[3]]
    rows[axis] = place
    heads = given.double()[tuple([where[0], *rows[1:]])].flatten().tolist()
    batch = given.double()[tuple([rows[0], where[1], *rows[2:]])].flatten().tolist()
    return [
        ("the values of a group are not neighbours", measure(strided)),
        (
            f"the values of a group do not lie along {ALONG[axis]}: "
            "a reshape has mixed the dimensions",
            measure(flat[at * size : (at + 1) * size]),
        ),
        (f"it is that of all {ALONG[axis]}, not of a group", measure(line)),
        ("it is shared by all heads", measure(heads)),
        ("it is shared by all batch rows", measure(batch)),
    ]


def _range(held: Tensor) -> float:
    return float(held.max() - held.min())


def _code_values(
    name: str,
    given: Tensor,
    answer: tuple[Tensor, Tensor, Tensor],
    axis: int,
    group_size: int,
    bits: int,
    allowed: Callable[[float, float, int], float],
) -> None:
    """Every code is in range and restores its value within half a scale, and what is allowed.

    Beyond an end of the range the code of that end is the nearest.
    """
    largest = 2**bits - 1
    high = int(answer[0].max())
    held, scales, minima = (part.tolist() for part in answer)
    for where, places, group in _groups(given, axis, group_size):
        step, low = _at(scales, where), _at(minima, where)
        # Subtracting, dividing and multiplying in float32 is off by its rounding.
        slack = 2**-21 * (abs(low) + largest * step) + allowed(low, step, largest)
        for place, value in zip(places, group, strict=True):
            code = int(_at(held, place))
            restored = code * step + low
            beyond = (code == 0 and value < low) or (
                code == largest and value > low + largest * step
            )
            if code <= largest and (
                beyond or abs(value - restored) <= step / 2 + slack
            ):
                continue
            reason = _code_mistake(given, answer, axis, group_size, bits)
            if high > largest:
                raise Wrong(
                    f"the codes reach {high}{reason}. "
                    f"At {bits} bits they go from 0 to {largest}."
                )
            raise Wrong(
                f"{name}[{', '.join(map(str, place))}] = {value:.6g} has code {code} at "
                f"scale {step:.6g} and minimum {low:.6g}, so it is restored as "
                f"{restored:.6g}{reason}. Every value gets the code that restores it "
                "best, within half a scale."
            )


def _code_mistake(
    given: Tensor,
    answer: tuple[Tensor, Tensor, Tensor],
    axis: int,
    group_size: int,
    bits: int,
) -> str:
    """The known mistake that explains all codes, as ": ...", or nothing."""
    codes, scale, minimum = answer
    largest = 2**bits - 1
    held = codes.double()
    value = given.double()
    step, low = (
        part.double().repeat_interleave(group_size, dim=axis)
        for part in (scale, minimum)
    )
    steps = (value - low) / step

    def explains(made: Tensor, unclear: Tensor | None = None) -> bool:
        clear = torch.ones_like(held) > 0 if unclear is None else ~unclear
        same = held == made.remainder(256)
        return bool(clear.any()) and bool(same[clear].all())

    def near(made: Tensor, place: float) -> Tensor:
        """Where rounding could go either way: in steps, near whole or half numbers."""
        return ((made - place + 0.5) % 1 - 0.5).abs() < 0.05

    if not bool(held.any()):
        return ": every code is 0"
    clamped = {
        ": you cut and did not round to the nearest": (steps.floor(), 0.0),
        ": you rounded up, not to the nearest": (steps.ceil(), 0.0),
        ": the minimum was not subtracted": ((value / step).round(), 0.5),
        ": they count down from the largest value": (largest - steps.round(), 0.5),
        ": you multiplied by the scale and did not divide": (
            ((value - low) * step).round(),
            None,
        ),
        ": they were not divided by the scale": ((value - low).round(), None),
        ": they are moved by half of the codes, as signed codes are": (
            steps.round() - 2 ** (bits - 1),
            0.5,
        ),
    }
    for sentence, (made, place) in clamped.items():
        unclear = None if place is None else near(steps, place)
        if explains(made.clamp(0, largest), unclear) or explains(made, unclear):
            return sentence
    zero_point = (value / step).round() - (low / step).round()
    if explains(zero_point.clamp(0, largest), near(value / step, 0.5)):
        return ": the minimum was rounded to a whole number of steps"
    outside = (steps.round() < 0) | (steps.round() > largest)
    if bool(outside.any()) and explains(steps.round(), near(steps, 0.5)):
        return ": they are not clamped"
    if given.dtype != torch.float32:
        coarse = (given - low.to(given.dtype)) / step.to(given.dtype)
        if explains(coarse.round().clamp(0, largest).double()):
            return f": they were computed in {_dtype(given)}; go to float32 first"
    ends = given.float().unflatten(axis, (-1, group_size))
    lows, highs = (
        end.repeat_interleave(group_size, dim=axis)
        for end in (ends.amin(axis + 1), ends.amax(axis + 1))
    )
    before = (given.float() - lows) / ((highs - lows) / largest)
    if explains(before.double().round().clamp(0, largest), near(before.double(), 0.5)):
        return ": they belong to the scale and minimum before rounding to float16"
    return ""


def _at(nested: Any, where: tuple[int, ...]) -> float:
    """An entry of nested lists: many times faster than one of a tensor."""
    for n in where:
        nested = nested[n]
    return float(nested)


def _place(where: tuple[int, ...], axis: int) -> str:
    """Where a group is: "group 1 of channel 3 (batch 0, head 1)"."""
    b, h, t, d = where
    block = f"group {t} of channel {d}" if axis == TOKENS else f"group {d} of token {t}"
    return f"{block} (batch {b}, head {h})"


# --- TODO 3: whole groups leave the window --------------------------------------------

TENSORS = ("key_residual", "value_residual")
PARTS = ("q", "scale", "minimum")
LISTS = tuple(f"{side}_{part}_segments" for side in ("key", "value") for part in PARTS)
COUNTERS = ("flushed_tokens", "quantized_tokens", "total_tokens")


class Recorder:
    """A stand-in for a quantizer that loses nothing and remembers what it was given.

    Its codes are the tokens themselves. Scale and minimum are labels: `sign` times the
    number of tokens of the call, and half a token more, so that a segment shows its call.
    """

    def __init__(self, sign: int) -> None:
        self.sign = sign
        self.calls: list[Tensor] = []

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes shaped like tokens, and the two labels, one number each."""
        self.calls.append(tokens.detach().clone())
        return (tokens.detach().to(torch.int16), *self.labels(tokens.shape[TOKENS]))

    def labels(self, count: int) -> tuple[Tensor, Tensor]:
        """Scale and minimum of a call with so many tokens."""
        return (
            torch.full((1,), float(self.sign * count)),
            torch.full((1,), self.sign * (count + 0.5)),
        )


def _exact(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A stand-in for a quantizer: whole numbers become codes, scale 1, minimum 0."""
    return tokens.detach().to(torch.int16), torch.ones(1), torch.zeros(1)


def counts(state: Any, flushed: int, quantized: int, total: int) -> None:
    """The three counters of a state."""
    _state_form(state)
    axes.counts(state, flushed, quantized, total)


def window_holds(
    state: Any, tokens: Sequence[int], residual_length: int, group_size: int
) -> None:
    """The window of a state made of numbered tokens holds these, in order."""
    _state_form(state)
    wanted = list(tokens)
    for side, sign in (("key", 1), ("value", -1)):
        name = f"{side}_residual"
        got = _numbers(state[name], sign, name)
        if got == wanted:
            continue
        if [-n for n in got] == wanted:
            raise Wrong(f"{name} holds {_other(side)}. It must hold {_capital(side)}s.")
        lists = state[f"{side}_q_segments"]
        kept = {n for codes in lists for n in _numbers(codes, sign, name)} | set(got)
        gone = [n for n in range(1, wanted[-1] + 1) if n not in kept]
        raise Wrong(
            f"{name} holds {_tokens(got)}"
            f"{_window_mistake(got, wanted, gone, residual_length, group_size)}. "
            f"Only whole groups of {group_size} leave, the oldest ones, and at least "
            f"{residual_length} stay: expected {_tokens(wanted)}."
        )


def _window_mistake(
    got: list[int],
    wanted: list[int],
    gone: list[int],
    residual_length: int,
    group_size: int,
) -> str:
    """How this window came about, as ": ...", or nothing."""
    newest, more = wanted[-1], len(got) - len(wanted)
    if not got:
        return ": you flushed the whole window"
    if got != sorted(got):
        return (
            ", which is not the order of their arrival "
            "(new tokens stand behind those of the window)"
        )
    if got[0] == 1 and got == list(range(1, len(wanted) + 1)):
        return ": you kept the oldest and flushed the newest"
    if gone:
        are = "is" if len(gone) == 1 else "are"
        return f": {_tokens(gone)} {are} neither in the window nor in a segment"
    if got[-1] != newest:
        return (
            f": token {newest} is the newest and is not there "
            "(new tokens stand behind those of the window)"
        )
    if got[0] == 1 and more > 0:
        return f": nothing left the window, {_some(more)} too many"
    if more > 0:
        whole = f", {_groups_of(more, group_size)}" if more % group_size == 0 else ""
        return f": {_some(more)} too many{whole}"
    if len(got) == residual_length:
        return ": you flushed every token beyond residual_length, not whole groups"
    if len(got) < residual_length:
        return f": {_some(-more)} too few, fewer than residual_length"
    return f": {_some(-more)} too few"


def _groups_of(tokens: int, group_size: int) -> str:
    whole = tokens // group_size
    return "a whole group" if whole == 1 else f"{whole} whole groups"


def _some(count: int) -> str:
    return "one token" if count == 1 else f"{count} tokens"


def segments_hold(state: Any, tokens: Sequence[Sequence[int]]) -> None:
    """The segments of a state made of numbered tokens and a stand-in hold these."""
    _state_form(state)
    axes.segments_hold(state, tokens)


def _kept(total: int, residual_length: int, group_size: int) -> int:
    """How many tokens the window holds: all, or the fewest that whole groups leave."""
    if total < residual_length:
        return total
    return residual_length + (total - residual_length) % group_size


def window(
    append: Answer,
    arrivals: Sequence[int],
    residual_length: int,
    group_size: int,
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
        key, value = axes.numbered(total + 1, count, dtype=dtype, **sizes)
        keys.append(key)
        values.append(value)
        before, total = total, total + count
        state = append(
            *(state, key.clone(), value.clone(), residual_length, group_size),
            *(_exact, _exact),
        )
        kept = _kept(total, residual_length, group_size)
        earlier = before - _kept(before, residual_length, group_size)
        try:
            window_holds(
                state, range(total - kept + 1, total + 1), residual_length, group_size
            )
            _whole("key", torch.cat(keys, dim=TOKENS), state, kept)
            _whole("value", torch.cat(values, dim=TOKENS), state, kept)
            counts(state, total - kept - earlier, total - kept, total)
        except Wrong as error:
            done = _story(arrivals, total, residual_length, group_size)
            raise Wrong(f"{done}{error}") from None


def segments(
    append: Answer, arrivals: Sequence[int], residual_length: int, group_size: int
) -> None:
    """Feeds tokens, `arrivals` a call, and checks how the segments come about.

    Each flush appends one segment of whole groups; earlier ones stay bit by bit; the
    quantizers get the flushed tokens, once; the state passed in stays; the caller may
    reuse its buffers.
    """
    state: Any = None
    total = made = 0
    quantizers = {"key": Recorder(1), "value": Recorder(-1)}
    for count in arrivals:
        key, value = axes.numbered(total + 1, count)
        first = total - _kept(total, residual_length, group_size) + 1
        total += count
        flushed = range(first, total - _kept(total, residual_length, group_size) + 1)
        before = None if state is None else _copy(state)
        for recorder in quantizers.values():
            recorder.calls.clear()
        earlier = state
        state = append(
            *(earlier, key, value, residual_length, group_size),
            *(quantizers["key"], quantizers["value"]),
        )
        try:
            _state_form(state)
            if before is not None:
                _unchanged(before, earlier)
            for side in ("key", "value"):
                _new_segment(side, before, state, flushed, made, quantizers[side])
            made += bool(flushed)
            _survives_reuse(state, key, value)
        except Wrong as error:
            done = _story(arrivals, total, residual_length, group_size)
            raise Wrong(f"{done}{error}") from None


def _state_form(state: Any) -> None:
    """The state is a dict with the agreed keys, lists and tensors."""
    expect(
        isinstance(state, dict),
        f"append_by_groups returned {_kind(state)}; a dict is expected.",
    )
    names = LISTS + TENSORS + COUNTERS
    missing = [name for name in names if name not in state]
    if missing:
        raise Wrong(
            f"the state lacks {', '.join(missing)}; it needs {len(names)} entries."
        )
    for name in TENSORS:
        expect(
            isinstance(state[name], Tensor) and state[name].ndim == 4,
            f"{name} is {_kind(state[name])}; a tensor "
            "[batch, heads, tokens, head_dim] is expected.",
        )
    for name in LISTS:
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
    lengths = {name: len(state[name]) for name in LISTS}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} {count}" for name, count in lengths.items())
        raise Wrong(
            f"the lists of segments differ in length: {said}. "
            "A flush appends to all six of them."
        )


def _new_segment(
    side: str,
    before: State | None,
    state: State,
    flushed: range,
    made: int,
    recorder: Recorder,
) -> None:
    """Earlier segments are as they were, and the flushed tokens are one new one."""
    name, quantize, sign = f"{side}_q_segments", f"quantize_{side}", recorder.sign
    calls = [_numbers(call, sign, quantize) for call in recorder.calls]
    if any(n < 0 for call in calls for n in call):
        raise Wrong(
            f"{quantize} was given {_other(side)}. "
            f"{_capital(side)}s go through {quantize}, and only they."
        )
    old = sorted({n for call in calls for n in call if n < flushed.start})
    if old:
        raise Wrong(
            f"{quantize} was given {_tokens(old)} again, which were in a segment "
            "already. Only the tokens that leave the window now are quantized."
        )
    got, wanted = len(state[name]), made + bool(flushed)
    if not flushed:
        expect(
            got <= made,
            f"no group left the window, but {name} has {got} segments "
            f"where it had {made}. Without a flush, no segment is appended.",
        )
        expect(
            not calls,
            f"no group left the window, but {quantize} was called. "
            "Without a flush there is nothing to quantize.",
        )
    if got < wanted:
        raise Wrong(
            f"{name} has {got} {'segment' if got == 1 else 'segments'} after {wanted} "
            "flushes: you joined or replaced earlier ones. "
            "Each flush appends a segment of its own."
        )
    if got > wanted:
        raise Wrong(
            f"{name} has {got} segments after {wanted} "
            f"{'flush' if wanted == 1 else 'flushes'}. The tokens that leave the "
            "window in one call are one segment, however many groups they are."
        )
    for number in range(made):
        assert before is not None
        for part in (f"{side}_{part}_segments" for part in PARTS):
            expect(
                torch.equal(before[part][number], state[part][number])
                and before[part][number].dtype == state[part][number].dtype,
                f"{part}[{number}] is no longer what it was before this call. "
                "A segment is written once and never changed.",
            )
    if flushed:
        _new_parts(side, state, flushed, calls, recorder)


def _new_parts(
    side: str,
    state: State,
    flushed: range,
    calls: list[list[int]],
    recorder: Recorder,
) -> None:
    """The new segment is what the quantizer returned for the flushed tokens."""
    name, quantize = f"{side}_q_segments", f"quantize_{side}"
    tokens = _numbers(state[name][-1], recorder.sign, name)
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
    labels = dict(zip(PARTS[1:], recorder.labels(len(flushed)), strict=True))
    for part, label in labels.items():
        held = state[f"{side}_{part}_segments"][-1]
        if held.shape == label.shape and torch.equal(held.float(), label):
            continue
        reason = ""
        other = labels["minimum" if part == "scale" else "scale"]
        if held.numel() and bool((held * recorder.sign < 0).all()):
            reason = ": it is what the other quantizer returned"
        elif held.shape == other.shape and torch.equal(held.float(), other):
            reason = ": scale and minimum have changed places"
        raise Wrong(
            f"{side}_{part}_segments[-1] is not the {part} that {quantize} returned "
            f"for the flushed tokens{reason}. It is stored as it came."
        )


def _unchanged(before: State, after: State) -> None:
    """The state that was passed in is what it was."""
    for name in LISTS:
        was, now = len(before[name]), len(after[name])
        expect(
            was == now,
            f"the state passed in was changed: its {name} had the length {was} and "
            f"now has {now}. Return a new state with new lists.",
        )
    same = [torch.equal(before[n], after[n]) for n in TENSORS]
    same += [int(before[n]) == int(after[n]) for n in COUNTERS]
    same += [all(map(torch.equal, before[n], after[n])) for n in LISTS]
    for name, kept in zip(TENSORS + COUNTERS + LISTS, same, strict=True):
        expect(
            kept,
            f"the state passed in was changed: its {name} is no longer what it was. "
            "Return a new state.",
        )


def _story(
    arrivals: Sequence[int], total: int, residual_length: int, group_size: int
) -> str:
    """ "window 2, groups of 3, after 4 + 1 tokens: "."""
    seen: list[int] = []
    for count in arrivals:
        seen.append(count)
        if sum(seen) == total:
            break
    calls = " + ".join(map(str, seen))
    if len(seen) > 4:
        calls = f"{len(seen)} calls and {total}"
    return (
        f"residual_length {residual_length}, group_size {group_size}, after {calls} "
        f"token{'' if total == 1 else 's'}: "
    )


# --- TODO 4: the ledger ---------------------------------------------------------------

LEDGER = {"codes": "q", "scales": "scale", "minima": "minimum"}


def ledger(got: Any, state: State) -> None:
    """The four parts of `stored_bytes(state)`, each the bytes of its tensors."""
    expect(got is not None, "stored_bytes returned None. It must return a dict.")
    expect(
        isinstance(got, dict),
        f"stored_bytes returned {_kind(got)}; a dict of four parts is expected.",
    )
    names = (*LEDGER, "window")
    if set(got) != set(names):
        missing = [name for name in names if name not in got]
        more = [str(name) for name in got if name not in names]
        said = f"lacks {', '.join(missing)}" if missing else f"also has {more[0]}"
        raise Wrong(
            f"the dict of stored_bytes {said}. It has exactly four names: "
            f"{', '.join(names)}."
        )
    for name in names:
        tensors = _tensors_of(state, name)
        size, whole = _whole_number(got[name], name)
        right = sum(t.numel() * t.element_size() for _, t in tensors)
        if size == right:
            expect(
                whole,
                f'stored_bytes()["{name}"] is {got[name]!r}, a '
                f"{type(got[name]).__name__}: the amount is right, the type is not. "
                "Bytes are counted, so an int is expected.",
            )
            continue
        reason = _ledger_mistake(size, name, tensors, state)
        kinds = {_dtype(t) for _, t in tensors}
        raise Wrong(
            f'stored_bytes()["{name}"] is {size:,}{reason}. It must be the bytes of '
            f"all {len(tensors)} tensors of this part, Keys and Values "
            f"({' and '.join(sorted(kinds)) or 'there are none'} here), as they are "
            "stored."
        )


def _tensors_of(state: State, name: str) -> list[tuple[str, Tensor]]:
    """The tensors of one part of the ledger, each with "key" or "value"."""
    if name == "window":
        return [("key", state["key_residual"]), ("value", state["value_residual"])]
    return [
        (side, tensor)
        for side in ("key", "value")
        for tensor in state[f"{side}_{LEDGER[name]}_segments"]
    ]


def _ledger_mistake(
    size: float, name: str, tensors: list[tuple[str, Tensor]], state: State
) -> str:
    """The known mistake that gives this number of bytes, as ": ...", or nothing."""
    held = {
        part: sum(t.numel() * t.element_size() for _, t in _tensors_of(state, part))
        for part in (*LEDGER, "window")
    }
    right = held[name]
    values = sum(t.numel() for _, t in tensors)
    by_side = {
        side: [t.numel() * t.element_size() for s, t in tensors if s == side]
        for side in ("key", "value")
    }
    first = sum(sizes[0] for sizes in by_side.values() if sizes)
    last = sum(sizes[-1] for sizes in by_side.values() if sizes)
    batch, heads, _, head_dim = state["key_residual"].shape
    quantized = 2 * batch * heads * state["quantized_tokens"] * head_dim
    known: list[Mistake] = [("it was left out", 0)]
    if name == "codes":
        known += [
            ("that is one byte for every code, as if not packed", quantized),
            ("that is half of it, packed a second time", right / 2),
        ]
    if name in ("scales", "minima"):
        known += [
            ("scales and minima are together in it", held["scales"] + held["minima"])
        ]
    known += [
        ("those are bits, not bytes", 8 * right),
        ("that is the number of values, not of bytes", values),
        ("that is every value with 4 bytes, as in float32", 4 * values),
        ("that is every value with 2 bytes, as in float16", 2 * values),
        ("those are the Keys only", sum(by_side["key"])),
        ("those are the Values only", sum(by_side["value"])),
        ("everything is counted twice", 2 * right),
        ("that is one eighth of the bytes", right / 8),
        ("that is the number of tensors", len(tensors)),
    ]
    if name != "window":
        known += [
            ("that is the first segment only", first),
            ("that is the last segment only", last),
            ("those are all parts together", sum(held.values())),
        ]
    known += [(f"that is the part {part!r}", n) for part, n in held.items()]
    return _said(sentence for sentence, value in known if size == value)


def smaller(got: Any, state: State) -> None:
    """The ratio of `times_smaller(state)`: float16 bytes of all tokens over stored bytes."""
    what = "times_smaller"
    value, _ = _whole_number(got, what)
    parts = {
        part: sum(t.numel() * t.element_size() for _, t in _tensors_of(state, part))
        for part in (*LEDGER, "window")
    }
    stored = sum(parts.values())
    batch, heads, _, head_dim = state["key_residual"].shape
    per_token = 2 * batch * heads * head_dim  # values: a Key and a Value in every head
    tokens = state["total_tokens"]
    half = 2 * per_token * tokens
    # A division of whole numbers; one in float32 is off by 1e-7.
    if abs(value - half / stored) <= 1e-6 * half / stored:
        return
    everything = "the tokens are those in segments and in the window"
    known: list[Mistake] = [
        ("it is upside down, stored over float16", stored / half),
        ("it is a percentage", 100 * half / stored),
        ("it is a percentage", 100 * stored / half),
        ("it is the share that was saved", 1 - stored / half),
        ("the float16 side counts one byte a value", half / 2 / stored),
        ("the float16 side counts Keys or Values, not both", half / 2 / stored),
        ("the float16 side counts four bytes a value, as float32", 2 * half / stored),
        ("it was rounded", round(half / stored)),
        ("it was rounded", round(half / stored, 1)),
        ("it was rounded", round(half / stored, 2)),
        ("heads has no part in it", half / heads / stored),
        ("batch has no part in it", half / batch / stored),
        ("head_dim has no part in it", half / head_dim / stored),
        (
            f"only the tokens in segments are counted on the float16 side; {everything}",
            2 * per_token * state["quantized_tokens"] / stored,
        ),
        (
            "only the tokens of the window are counted on the float16 side",
            2 * per_token * state["key_residual"].shape[TOKENS] / stored,
        ),
        (
            "only the tokens that the last call flushed are counted",
            2 * per_token * state["flushed_tokens"] / stored,
        ),
        ("that is the closed form of 4 bits in groups of 64", 16 / 4.5),
    ]
    for part, size in parts.items():
        if 0 < size < stored:
            verb = "is" if part == "window" else "are"
            known.append((f"the {part} {verb} left out", half / (stored - size)))
    left = stored - parts["window"]
    if left and state["quantized_tokens"]:
        known.append(
            (
                "the window is left out on both sides",
                2 * per_token * state["quantized_tokens"] / left,
            )
        )
    reasons = (said for said, wrong in known if abs(value - wrong) <= 1e-6 * abs(wrong))
    raise Wrong(
        f"{what} gave {value:.6g}{_said(reasons)}. Expected: the bytes of {tokens} Keys and "
        f"Values in float16, over the {stored:,} bytes that this state stores."
    )


def _whole_number(got: Any, what: str) -> tuple[float, bool]:
    """A result as a number, and whether it came as an integer."""
    single: Any = got.item() if isinstance(got, Tensor) and got.ndim == 0 else got
    expect(
        single is not None and not isinstance(single, bool | str | Tensor),
        f"{what} is {_kind(got)}; a number is expected.",
    )
    try:
        return operator.index(single), True
    except TypeError:
        pass
    try:
        number = float(single)
    except (TypeError, ValueError):
        raise Wrong(f"{what} is {_kind(got)}; a number is expected.") from None
    expect(math.isfinite(number), f"{what} is {number}; a finite number is expected.")
    return number, False


# --- calls and words ------------------------------------------------------------------


def _call(
    name: str, function: Answer, given: Tensor, *others: Any, **named: Any
) -> Any:
    """The answer of a function that must leave its first argument as it was."""
    before = given.clone()
    answer = function(given, *others, **named)
    expect(
        torch.equal(given, before),
        f"your function changed its argument {name}; it must leave it as it was.",
    )
    return answer


def _said(reasons: Iterable[str]) -> str:
    """Mistakes that explain an answer, as ": ... , or ...". Small examples have several."""
    found = list(dict.fromkeys(reasons))
    return f": {', or '.join(found[:3])}" if found else ""


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
