"""The fit of the Keys' scale and minimum, against a slow one in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from kvlab.cache import MixedAxisCache

ONE_LAYER = LlamaConfig(num_hidden_layers=1)
TOKENS, CHANNELS = 64, 5


def keys(seed: int = 0) -> torch.Tensor:
    """[1, 2, tokens, channels]: channels of unequal size and offset, one of them constant."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 2, TOKENS, CHANNELS, generator=random)
    x = x * torch.tensor([0.1, 1.0, 20.0, 1.0, 1.0]) + torch.tensor([3.0, 0, 5, 0, 0])
    x[..., 4] = 0.3
    return x


def restored(x: torch.Tensor, bits: int, fits: int, pieces: int = 1) -> torch.Tensor:
    """The Keys that come back from a cache that has quantized them all."""
    cache = MixedAxisCache(
        ONE_LAYER,
        key_bits=bits,
        group_size=32,
        window=0,
        sink_tokens=0,
        value_axis="channel",
        key_fits=fits,
    )
    for part in x.chunk(pieces, dim=2):
        cache.update(part, part, 0)
    assert cache.layers[0].quantized_tokens == TOKENS
    return cache.layers[0].restored()[0]


def slowly(x: torch.Tensor, bits: int, fits: int) -> np.ndarray:
    """The same by the definition, one group after the other."""
    out = np.empty(x.shape)
    top = 2**bits - 1
    for head in range(x.shape[1]):
        for channel in range(CHANNELS):
            for start in range(0, TOKENS, 32):
                values = x[0, head, start : start + 32, channel].double().numpy()
                low, scale = values.min(), (values.max() - values.min()) / top

                def codes(low: float, scale: float, values: np.ndarray) -> np.ndarray:
                    return np.clip(np.rint((values - low) / (scale or 1.0)), 0, top)

                for _ in range(fits):
                    now = codes(low, scale, values)
                    if len(set(now)) > 1:
                        scale, low = np.polyfit(now, values, 1)
                    else:
                        low = values.mean() - scale * now.mean()
                low, scale = float(np.float16(low)), float(np.float16(max(scale, 0)))
                place = (0, head, slice(start, start + 32), channel)
                out[place] = codes(low, scale, values) * scale + low
    return out


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_fit_is_least_squares_repeated(bits: int) -> None:
    x = keys()
    got, wanted = restored(x, bits, 3).numpy(), slowly(x, bits, 3)
    step = np.abs(x.numpy()).max(axis=2, keepdims=True) / 100
    # now and then a value lies between two codes, where the last digit decides
    assert np.mean(np.abs(got - wanted) > step) < 0.01
    error, least = np.square(got - x.numpy()).sum(), np.square(wanted - x.numpy()).sum()
    assert error == pytest.approx(least, rel=0.02)


@pytest.mark.parametrize(("bits", "at_most"), [(2, 0.85), (3, 0.95), (4, 0.99)])
def test_a_fit_lowers_the_squared_error(bits: int, at_most: float) -> None:
    x = keys(1)[..., 1:2]
    error = {f: (restored(x, bits, f) - x).square().mean() for f in (0, 1, 3)}
    assert error[3] <= error[1] < error[0]
    assert error[3] < at_most * error[0]


def test_a_constant_channel_comes_back_as_float16_holds_it() -> None:
    x = keys()
    back = restored(x, 2, 3)[..., 4]
    assert torch.equal(back, x[..., 4].half().float())


def test_a_fit_does_not_depend_on_how_tokens_came() -> None:
    x = keys(2)
    assert torch.equal(restored(x, 4, 3, pieces=8), restored(x, 4, 3))


def test_values_are_never_fitted() -> None:
    x = keys(3)
    caches = [
        MixedAxisCache(
            ONE_LAYER,
            value_bits=2,
            group_size=32,
            window=0,
            sink_tokens=0,
            value_axis="channel",
            key_fits=fits,
        )
        for fits in (0, 3)
    ]
    for cache in caches:
        cache.update(x, x, 0)
    without, with_fit = (cache.layers[0].restored() for cache in caches)
    assert torch.equal(without[1], with_fit[1])
    assert not torch.equal(without[0], with_fit[0])
