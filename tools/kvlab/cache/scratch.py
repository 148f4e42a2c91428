"""One set of working buffers for all layers of a cache, so that restoring allocates nothing.

Used by `kvlab.cache.segment` and `kvlab.cache.layer`. Holds no token: what stands in a buffer is valid
until the next layer asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SPARE = 1.25


class Scratch:
    """Buffers by name, dtype and device, each as large as the largest tensor asked for.

    version  another number whenever a buffer was made: views made before are then out of date
    """

    def __init__(self) -> None:
        self.version = 0
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """A contiguous tensor with undefined content; the next call with its name reuses it."""
        size = math.prod(shape)
        return self._buffer(name, size, dtype, device)[:size].view(shape)

    def rows(self, name: str, like: Tensor, tokens: int) -> Tensor:
        """Like `tensor`, with room for at least some tokens; the same one until it is too small.

        like    [batch, heads, any, head_dim]
        return  [batch, heads, tokens or more, head_dim]
        """
        batch, heads, _, head_dim = like.shape
        token = batch * heads * head_dim
        buffer = self._buffer(name, token * tokens, like.dtype, like.device)
        room = buffer.numel() // token
        return buffer[: token * room].view(batch, heads, room, head_dim)

    def _buffer(
        self, name: str, size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        key = (name, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            # the smaller one goes before the larger one comes
            self._buffers.pop(key, None)
            # a buffer made in inference mode could not be written to outside of it
            with torch.inference_mode(False):
                buffer = torch.empty(int(size * SPARE), dtype=dtype, device=device)
            self._buffers[key] = buffer
            self.version += 1
        return buffer

    def clear(self) -> None:
        self._buffers.clear()
        self.version += 1

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())
