"""A run of quantized tokens of one layer: Keys and Values that left the window, oldest first.

Used by `kvlab.cache.layer`. Groups are appended to a segment, never changed in it; it has room for a fixed
number of groups and is never copied into a larger one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvlab.cache.packing import PackedGroups, Step
from kvlab.cache.scratch import Scratch
from kvlab.cache.settings import CacheSettings


@dataclass
class Segment:
    """Quantized tokens and the room for more.

    keys, values  the storage; both have room for the same number of groups
    groups        groups in use
    tokens        tokens in use: fewer than the groups hold when a crop cut into the last one
    """

    keys: PackedGroups
    values: PackedGroups
    groups: int = 0
    tokens: int = 0

    @classmethod
    def empty(
        cls, keys: Tensor, values: Tensor, groups: int, settings: CacheSettings
    ) -> Segment:
        """keys, values [batch, heads, any, head_dim]: for the sizes and the device."""
        size = settings.group_size
        return cls(
            PackedGroups.empty(
                keys,
                groups,
                size,
                settings.key_bits,
                settings.key_axis,
                settings.key_fits,
            ),
            PackedGroups.empty(
                values, groups, size, settings.value_bits, settings.value_axis, fits=0
            ),
        )

    def has_room_for(self, groups: int) -> bool:
        """Whether groups can be appended. A group that a crop cut takes no further tokens."""
        cut = self.tokens < self.groups * self.keys.group
        return not cut and self.groups + groups <= self.keys.codes.shape[2]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Quantizes whole groups: [batch, heads, groups x group, head_dim] each."""
        self.keys.write(self.groups, keys)
        self.values.write(self.groups, values)
        self.groups += keys.shape[2] // self.keys.group
        self.tokens += keys.shape[2]

    def restoring(self, keys: Tensor, values: Tensor, scratch: Scratch) -> list[Step]:
        """The operations that write every token: [batch, heads, tokens, head_dim] each."""
        steps: list[Step] = []
        for packed, out in ((self.keys, keys), (self.values, values)):
            whole = self.tokens // packed.group
            cut = self.tokens - whole * packed.group
            if whole:
                target = out[:, :, : whole * packed.group]
                steps += packed.restoring(0, whole, target, scratch)
            if cut:
                shape = (*out.shape[:2], packed.group, out.shape[-1])
                group = scratch.tensor("cut", shape, out.dtype, out.device)
                steps += packed.restoring(whole, whole + 1, group, scratch)
                rest = out[:, :, whole * packed.group :]
                steps.append(partial(rest.copy_, group[:, :, :cut]))
        return steps

    def keep(self, tokens: int) -> None:
        """Forgets the tokens after the first ones."""
        self.tokens = tokens
        self.groups = -(-tokens // self.keys.group)

    def on_batch(self, choose: Callable[[Tensor], Tensor]) -> Segment:
        """The same tokens with other batch rows. choose [batch, ...] -> [other batch, ...]"""
        return replace(
            self, keys=_chosen(self.keys, choose), values=_chosen(self.values, choose)
        )

    @property
    def nbytes(self) -> int:
        """Codes, scales and minima of the groups in use; a cut group counts as a whole."""
        return self.groups * (
            self.keys.bytes_per_group() + self.values.bytes_per_group()
        )

    @property
    def allocated_nbytes(self) -> int:
        tensors = (*self.keys.tensors(), *self.values.tensors())
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _chosen(packed: PackedGroups, choose: Callable[[Tensor], Tensor]) -> PackedGroups:
    with torch.inference_mode(False):
        codes, scale, minimum = map(choose, packed.tensors())
    return replace(packed, codes=codes, scale=scale, minimum=minimum)
