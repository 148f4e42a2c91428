"""The cache against a plain model of it, on random sequences of what can happen to a cache.

The plain model keeps a list of tokens. It quantizes a group by the definition, and gives every
token of it the value that this token is to have from then on.
"""

import random

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from kvlab.cache import AXES, BITS, CacheSettings, MixedAxisCache

SEQUENCES = 2000
CHUNK = 250
HEADS = 2
ONE_LAYER = LlamaConfig(num_hidden_layers=1)


def restored(values: np.ndarray, axis: int, bits: int) -> np.ndarray:
    """Values after they were quantized, float32; those along an axis share a scale."""
    minimum = np.float32(np.float16(values.min(axis, keepdims=True)))
    # rounded to float16, the minimum may end above every value of a nearly constant group
    reach = np.maximum(values.max(axis, keepdims=True) - minimum, 0)
    scale = np.float32(np.float16(reach / np.float32(2**bits - 1)))
    codes = np.rint((values - minimum) / np.where(scale > 0, scale, np.float32(1)))
    return np.clip(codes, 0, 2**bits - 1) * scale + minimum


def restored_tokens(tokens: list[Tensor], bits: int, axis: str, size: int) -> list:
    """One flushed group of tokens, [batch, heads, head_dim] each."""
    block = torch.stack(tokens, dim=2)
    exact = block.float().numpy()
    if axis == "channel":
        new = restored(exact, 2, bits)
    else:
        parts = np.split(exact, exact.shape[-1] // size, axis=3)
        new = np.concatenate([restored(part, 3, bits) for part in parts], axis=3)
    return list(torch.from_numpy(new).to(block.dtype).unbind(2))


class PlainCache:
    """A list of tokens: the value each has now, and whether that is its exact one."""

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.quantized: list[bool] = []

    def joined(self) -> tuple[Tensor, Tensor]:
        return torch.stack(self.keys, dim=2), torch.stack(self.values, dim=2)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys += keys.unbind(2)
        self.values += values.unbind(2)
        self.quantized += [False] * keys.shape[2]
        seen = self.joined()
        s = self.settings
        while True:
            window = [
                i
                for i, done in enumerate(self.quantized)
                if i >= s.sink_tokens and not done
            ]
            if len(window) < s.window + s.group_size:
                return seen
            oldest = window[: s.group_size]
            for held, bits, axis in (
                (self.keys, s.key_bits, s.key_axis),
                (self.values, s.value_bits, s.value_axis),
            ):
                group = [held[i] for i in oldest]
                new = restored_tokens(group, bits, axis, s.group_size)
                for i, value in zip(oldest, new, strict=True):
                    held[i] = value
            for i in oldest:
                self.quantized[i] = True

    def crop(self, count: int) -> None:
        kept = max(len(self.keys) - count, 0)
        del self.keys[kept:], self.values[kept:], self.quantized[kept:]

    def on_batch(self, rows: Tensor) -> None:
        self.keys = [token[rows] for token in self.keys]
        self.values = [token[rows] for token in self.values]

    def reset(self) -> None:
        self.crop(len(self.keys))


class Pair:
    """A cache and the plain model of it; every step is done to both and compared."""

    def __init__(
        self,
        settings: CacheSettings,
        key_dim: int,
        value_dim: int,
        batch: int,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.cache = MixedAxisCache(ONE_LAYER, **vars(settings))
        self.layer = self.cache.layers[0]
        self.plain = PlainCache(settings)
        self.dims, self.batch, self.dtype = (key_dim, value_dim), batch, dtype
        self.random = torch.Generator().manual_seed(seed)

    def new_tokens(self, count: int) -> tuple[Tensor, Tensor]:
        """Keys and Values with a large channel, an offset, and now and then a constant."""
        made = []
        for dim in self.dims:
            x = torch.randn(self.batch, HEADS, count, dim, generator=self.random)
            x[..., 0] = x[..., 0] * 20 + 5
            x[..., -1] = 0.3
            made.append(x.to(self.dtype))
        return made[0], made[1]

    def append(self, count: int) -> None:
        keys, values = self.new_tokens(count)
        seen = self.cache.update(keys, values, 0)
        expected = self.plain.append(keys, values)
        for got, wanted in zip(seen, expected, strict=True):
            assert torch.equal(got, wanted)
        self.compare()

    def crop(self, count: int) -> None:
        self.cache.crop(-count)
        self.plain.crop(count)
        self.compare()

    def reorder(self, rows: list[int]) -> None:
        self.cache.reorder_cache(torch.tensor(rows))
        self.plain.on_batch(torch.tensor(rows))
        self.batch = len(rows)
        self.compare()

    def reset(self) -> None:
        self.cache.reset()
        self.plain.reset()
        self.compare()

    def compare(self) -> None:
        tokens, done = len(self.plain.keys), sum(self.plain.quantized)
        sinks = min(self.plain.settings.sink_tokens, tokens)
        assert self.cache.get_seq_length() == tokens
        assert self.cache.get_mask_sizes(1, 0) == (tokens + 1, 0)
        assert self.layer.quantized_tokens == done
        assert self.layer.sink_tokens == sinks
        assert self.layer.window_tokens == tokens - done - sinks
        if tokens:
            for got, wanted in zip(
                self.layer.restored(), self.plain.joined(), strict=True
            ):
                assert torch.equal(got, wanted)


def random_pair(rng: random.Random, seed: int) -> Pair:
    axes = rng.choice(AXES), rng.choice(AXES)
    settings = CacheSettings(
        key_bits=rng.choice(BITS),
        value_bits=rng.choice(BITS),
        group_size=8,
        window=rng.choice((0, 1, 3, 8, 13)),
        sink_tokens=rng.choice((0, 1, 4, 5)),
        key_axis=axes[0],
        value_axis=axes[1],
        key_fits=0,  # bit for bit: see test_cache_fit for what a fit changes
    )
    dims = [8 if axis == "token" else rng.choice((3, 5)) for axis in axes]
    return Pair(settings, *dims, batch=rng.choice((1, 2)), seed=seed)


def random_step(rng: random.Random, pair: Pair) -> None:
    kind = rng.choices(("append", "crop", "reorder", "reset"), (60, 25, 10, 5))[0]
    if kind == "append":
        pair.append(rng.choice((1, 1, 1, 2, 5, 9, 20)))
    elif kind == "crop":
        pair.crop(rng.choice((0, 1, 2, 6, 9, 30)))
    elif kind == "reorder":
        pair.reorder([rng.randrange(pair.batch) for _ in range(rng.choice((1, 2)))])
    else:
        pair.reset()


@pytest.mark.parametrize("first", range(0, SEQUENCES, CHUNK))
def test_cache_is_what_the_plain_model_is_after_any_sequence(first: int) -> None:
    for seed in range(first, first + CHUNK):
        rng = random.Random(seed)
        pair = random_pair(rng, seed)
        pair.append(rng.choice((1, 7, 25)))
        for _ in range(rng.randrange(2, 7)):
            random_step(rng, pair)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axes", [("channel", "token"), ("token", "channel")])
def test_every_dtype_is_restored_by_the_definition_and_rounded_once(
    dtype: torch.dtype, bits: int, axes: tuple[str, str]
) -> None:
    settings = CacheSettings(bits, bits, 16, 5, 3, *axes, key_fits=0)
    pair = Pair(settings, 32, 16, batch=2, dtype=dtype)
    pair.append(41)
    pair.append(13)
    assert pair.layer.quantized_tokens == 32  # of 54: 3 sinks, 19 in the window
