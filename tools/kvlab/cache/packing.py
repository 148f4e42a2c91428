"""Holds groups of quantized tokens as bits in bytes, and gives them back as floats.

Used by `kvlab.cache.segment`. Never decides when tokens are quantized, never rewrites a group.

A number of bits is kept as planes whose widths divide a byte: 3 bits are a plane of 2 and one of 1.
In a plane, byte row j of a group holds the codes of the tokens j, j + rows, j + 2 rows, ...: unpacking
is one shift and one mask for a whole run of tokens, and what it writes is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvlab.cache.scratch import Scratch

Step = Callable[[], Any]
AXES = ("channel", "token")
_PLANES: dict[int, tuple[int, ...]] = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
BITS = tuple(_PLANES)
_LARGEST_FP16 = torch.finfo(torch.float16).max


def tokens_multiple(bits: int) -> int:
    """A group must hold a multiple of this many tokens to fill whole bytes."""
    return 8 // min(_PLANES[bits])


@dataclass
class PackedGroups:
    """Storage for groups of tokens of one layer's Keys, or Values.

    A value is restored as codes x scale + minimum, computed in float32.

    codes    uint8 [batch, heads, groups, group x bits / 8, head_dim]
    scale    float16 [batch, heads, groups, 1 or group, head_dim or head_dim / group size]
    minimum  like scale
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    bits: int
    axis: str
    fits: int

    @classmethod
    def empty(
        cls, like: Tensor, groups: int, group: int, bits: int, axis: str, fits: int
    ) -> PackedGroups:
        """Room for a number of groups.

        like  [batch, heads, any, head_dim]: where the batch, the heads and the device come from
        fits  how often scale and minimum are fitted to the codes; 0: they span the range
        """
        batch, heads, _, head_dim = like.shape
        along = (1, head_dim) if axis == "channel" else (group, head_dim // group)
        rows = group * bits // 8
        return cls(
            like.new_empty((batch, heads, groups, rows, head_dim), dtype=torch.uint8),
            like.new_empty((batch, heads, groups, *along), dtype=torch.float16),
            like.new_empty((batch, heads, groups, *along), dtype=torch.float16),
            bits,
            axis,
            fits,
        )

    @property
    def group(self) -> int:
        """Tokens in a group."""
        return self.codes.shape[3] * 8 // self.bits

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.codes, self.scale, self.minimum

    def bytes_per_group(self) -> int:
        """Of all batch rows and heads together."""
        groups = max(self.codes.shape[2], 1)
        return sum(tensor.nbytes for tensor in self.tensors()) // groups

    def write(self, start: int, tokens: Tensor) -> None:
        """Quantizes whole groups into storage nobody has written to yet.

        start   the first group to fill
        tokens  [batch, heads, groups x group, head_dim], floating point
        """
        grouped = tokens.float().unflatten(2, (-1, self.group))
        end = start + grouped.shape[2]
        if self.axis == "token":
            # [..., group, head_dim / size, size]: the values that share a scale come last
            grouped = grouped.unflatten(-1, (-1, self.group))
        dim = -1 if self.axis == "token" else -2
        low, high = grouped.amin(dim, keepdim=True), grouped.amax(dim, keepdim=True)
        scale = (high - low) / (2**self.bits - 1)
        for _ in range(self.fits):
            codes = _codes(grouped, low, scale, self.bits)
            low, scale = _fitted(grouped, codes, scale, dim)
        minimum = low.clamp_(-_LARGEST_FP16, _LARGEST_FP16).half()
        if not self.fits:
            # from the minimum as it is stored, so that its rounding costs no code
            scale = (high - minimum) / (2**self.bits - 1)
        scale = scale.clamp_(0, _LARGEST_FP16).half()
        codes = _codes(grouped, minimum, scale.float(), self.bits).to(torch.uint8)
        if self.axis == "token":
            codes, scale, minimum = codes.flatten(-2), scale[..., 0], minimum[..., 0]
        _pack(codes, self.bits, self.codes[:, :, start:end])
        self.scale[:, :, start:end] = scale
        self.minimum[:, :, start:end] = minimum

    def restoring(
        self, start: int, end: int, out: Tensor, scratch: Scratch
    ) -> list[Step]:
        """The operations that write the values of some groups, ready to be called in turn.

        Every view and buffer is made here, once, and not at each of the many calls.

        out  [batch, heads, (end - start) x group, head_dim], in the dtype that is wanted
        """
        shape = (*out.shape[:2], end - start, self.group, out.shape[-1])
        target = out.view(shape)
        codes = packed = self.codes[:, :, start:end]
        steps: list[Step] = []
        if self.bits < 8:
            codes = scratch.tensor("codes", shape, torch.uint8, out.device)
            steps += _unpacking(packed, self.bits, codes)
        # bfloat16 has fewer digits than the scales: restore in float32, then round once
        values = target
        if out.dtype != torch.float32:
            values = scratch.tensor("values", shape, torch.float32, out.device)
        steps.append(partial(values.copy_, codes))
        scale, minimum = (
            scratch.tensor(name, x.shape, torch.float32, out.device)
            for name, x in (
                ("scale", self.scale[:, :, start:end]),
                ("minimum", self.minimum[:, :, start:end]),
            )
        )
        steps.append(partial(scale.copy_, self.scale[:, :, start:end]))
        steps.append(partial(minimum.copy_, self.minimum[:, :, start:end]))
        if self.axis == "channel":
            steps.append(partial(torch.addcmul, minimum, values, scale, out=values))
        else:
            # one operation is slower than two here: torch has no fast loop for two operands
            # that are constant along the innermost dimension
            grouped = values.unflatten(-1, (-1, self.group))
            steps.append(partial(grouped.mul_, scale.unsqueeze(-1)))
            steps.append(partial(grouped.add_, minimum.unsqueeze(-1)))
        if values is not target:
            steps.append(partial(target.copy_, values))
        return steps


def _codes(values: Tensor, minimum: Tensor, scale: Tensor, bits: int) -> Tensor:
    # a constant group has scale 0: any divisor gives code 0
    divisor = torch.where(scale > 0, scale, 1)
    return ((values - minimum) / divisor).round_().clamp_(0, 2**bits - 1)


def _fitted(
    values: Tensor, codes: Tensor, scale: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """Minimum and scale that restore these codes with the least squared error.

    A straight line through the points (code, value) of each group. A group of one code keeps
    its scale.
    """
    mean = codes.mean(dim, keepdim=True)
    centred = codes - mean
    spread = centred.square().mean(dim, keepdim=True)
    slope = (centred * values).mean(dim, keepdim=True) / spread.clamp(min=1e-8)
    scale = torch.where(spread > 1e-8, slope, scale)
    return values.mean(dim, keepdim=True) - scale * mean, scale


def _pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """codes uint8 [..., group, head_dim] into out uint8 [..., group x bits / 8, head_dim]."""
    row, shift = 0, 0
    for width in _PLANES[bits]:
        rows = codes.shape[-2] * width // 8
        plane = out[..., row : row + rows, :]
        plane.zero_()
        for place, part in enumerate(codes.split(rows, dim=-2)):
            plane |= ((part >> shift) & (2**width - 1)) << (place * width)
        row, shift = row + rows, shift + width


def _unpacking(packed: Tensor, bits: int, out: Tensor) -> list[Step]:
    """The operations that undo `_pack`."""
    steps: list[Step] = []
    row, shift = 0, 0
    for width in _PLANES[bits]:
        rows = out.shape[-2] * width // 8
        plane, mask = packed[..., row : row + rows, :], _tensor(2**width - 1, out)
        for place, part in enumerate(out.split(rows, dim=-2)):
            at = _tensor(place * width, out)
            if shift:
                steps.append(partial(_add_bits, part, plane, at, mask, shift))
            elif place == 0:
                steps.append(partial(torch.bitwise_and, plane, mask, out=part))
            else:
                steps.append(partial(torch.bitwise_right_shift, plane, at, out=part))
                if (place + 1) * width < 8:
                    steps.append(partial(part.bitwise_and_, mask))
        row, shift = row + rows, shift + width
    return steps


def _tensor(number: int, like: Tensor) -> Tensor:
    """A tensor for a number: torch makes one of a plain number at each call, which costs more."""
    return torch.tensor(number, dtype=like.dtype, device=like.device)


def _add_bits(
    part: Tensor, plane: Tensor, at: Tensor, mask: Tensor, shift: int
) -> None:
    part |= ((plane >> at) & mask) << shift
