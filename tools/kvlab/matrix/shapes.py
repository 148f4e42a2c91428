"""Which token counts a quantizing library can hold, and why it refuses the others.

Called before anything is measured and by the preflight. Arithmetic only: it never builds a cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.matrix.workload import CandidateFamily


@dataclass(frozen=True)
class KVShape:
    """One layer's Keys (or Values), the number of tokens apart."""

    batch_size: int
    kv_heads: int
    head_dim: int


def quantized_lengths(
    context_length: int, tokens_fed: int, residual_length: int
) -> list[int]:
    """The token counts that get quantized: the prompt, then everything at each overflow."""
    overflows = tokens_fed // residual_length
    return [context_length + residual_length * i for i in range(overflows + 1)]


def refusal(family: CandidateFamily, shape: KVShape, tokens: int) -> str | None:
    """Why the library cannot quantize this many tokens, or None when it can."""
    if family.backend == "hqq":
        axes = {family.axis_key, family.axis_value}
        return next(filter(None, (_hqq(family, shape, tokens, a) for a in axes)), None)
    if family.backend == "quanto":
        axes = {family.axis_key, family.axis_value}
        return next(
            filter(None, (_quanto(family, shape, tokens, a) for a in axes)), None
        )
    if family.backend == "kvlab" and -1 in (family.axis_key, family.axis_value):
        return _kvlab(family, shape)
    return None


def first_refusal(
    family: CandidateFamily,
    shape: KVShape,
    context_length: int,
    tokens_fed: int,
    residual_length: int,
) -> str | None:
    """The first quantization of a whole run that would fail, or None."""
    for tokens in quantized_lengths(context_length, tokens_fed, residual_length):
        if why := refusal(family, shape, tokens):
            return why
    return None


def nearest_length(
    family: CandidateFamily,
    shape: KVShape,
    context_length: int,
    tokens_fed: int = 0,
    residual_length: int = 1 << 30,
) -> int | None:
    """The context length nearest to the wanted one at which a whole run works (None: none).

    Of two at the same distance the longer one.
    """
    for distance in range(family.q_group_size * 8):
        for length in (context_length + distance, context_length - distance):
            if length >= 1 and not first_refusal(
                family, shape, length, tokens_fed, residual_length
            ):
                return length
    return None


def _hqq(family: CandidateFamily, shape: KVShape, tokens: int, axis: int) -> str | None:
    group, bits = family.q_group_size, family.nbits
    values = shape.batch_size * shape.kv_heads * tokens * shape.head_dim
    what = f"{shape.batch_size} x {shape.kv_heads} x {tokens} x {shape.head_dim} values"
    if values % group:
        return f"hqq: {what} do not fill whole groups of {group}"
    if bits == 3 and axis == 1:
        return "hqq: 3 bits on axis 1 cannot be restored"
    # codes are packed by laying equal parts of the rows over each other
    parts = {8: 1, 4: 2, 3: 1, 2: 4, 1: 8}[bits]
    if axis == 1 and (groups := values // group) % parts:
        return (
            f"hqq: {what} make {groups} groups of {group}, and at {bits} bits their "
            f"number must be a multiple of {parts}"
        )
    if axis == 0 and group % parts:
        return (
            f"hqq: on axis 0 at {bits} bits the group must be a multiple of {parts}, "
            f"not {group}"
        )
    return None


def _kvlab(family: CandidateFamily, shape: KVShape) -> str | None:
    if shape.head_dim % family.q_group_size:
        return (
            f"kvlab: groups of {family.q_group_size} along head_dim do not divide "
            f"its {shape.head_dim} channels"
        )
    return None


def _quanto(
    family: CandidateFamily, shape: KVShape, tokens: int, axis: int
) -> str | None:
    group = family.q_group_size
    if axis == 0:
        values = shape.kv_heads * tokens * shape.head_dim
        what = f"{shape.kv_heads} heads x {tokens} tokens x {shape.head_dim} channels"
    else:
        values = shape.batch_size * shape.kv_heads * tokens
        what = f"{shape.batch_size} rows x {shape.kv_heads} heads x {tokens} tokens"
    if values % group:
        return f"quanto: {what} = {values} values are no multiple of the group, {group}"
    return None
