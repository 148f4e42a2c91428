"""What a setting's cache holds, by arithmetic, and which settings hold as much as another.

Called by `run`, before anything is fed to the model. Builds caches of one layer only, to learn what
a token costs; `run` compares the arithmetic with the bytes counted at the end.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from kvlab.matrix import shapes
from kvlab.quality.build import held_bytes, library_family, new_cache, tokens_held
from kvlab.quality.plan import EqualBytes, Workload
from kvlab.quality.setting import Setting
from kvlab.quality.shape import head_dim, kv_heads

GROUPS = (16, 32, 64, 128)
LEAST_WINDOW = 32  # below, hqq and quanto quantize so often that it costs quality
NEAR = 0.02


@dataclass(frozen=True)
class TokenCost:
    """Bytes of all layers. A cache of n exact and m quantized tokens holds exact n + quantized m + fixed."""

    exact: float
    quantized: float
    fixed: float = 0.0

    def of(self, exact_tokens: float, quantized_tokens: float) -> float:
        return (
            self.exact * exact_tokens + self.quantized * quantized_tokens + self.fixed
        )


@dataclass(frozen=True)
class Held:
    """Bytes at the end of the run, and on average over its steps after the prompt."""

    end: int
    mean: float


class Impossible(ValueError):
    """A setting that its library refuses or fails at. The message says why."""


class ByteCounts:
    """What settings hold in one model, under one workload.

    dtype  of Keys and Values: float32 as in the run, or a 16-bit one as on most GPUs
    """

    def __init__(
        self,
        model_config: Any,
        workload: Workload,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = copy.deepcopy(model_config)
        self.layers = int(self.config.num_hidden_layers)
        self.config.num_hidden_layers = 1
        if getattr(self.config, "layer_types", None):
            self.config.layer_types = self.config.layer_types[:1]
        self.workload = workload
        self.dtype = dtype
        self._costs: dict[Setting, TokenCost] = {}

    @cached_property
    def shape(self) -> shapes.KVShape:
        """Keys of one layer, a batch of one."""
        return shapes.KVShape(1, kv_heads(self.config), head_dim(self.config))

    def held(self, setting: Setting) -> Held:
        """raises Impossible when the library refuses the setting for this workload"""
        return Held(self.end(setting), self.mean(setting))

    def end(self, setting: Setting) -> int:
        """Bytes after the last fed token."""
        return round(self._after(setting, self.workload.fed_tokens))

    def mean(self, setting: Setting) -> float:
        """Bytes on average over the fed tokens."""
        fed = self.workload.fed_tokens
        return sum(self._after(setting, step) for step in range(1, fed + 1)) / fed

    def _after(self, setting: Setting, step: int) -> float:
        """Bytes after a number of fed tokens."""
        exact, quantized = tokens_held(setting, self.workload.prompt_tokens, step)
        filling = self._filling(setting, quantized)
        return self.token_cost(setting).of(exact, quantized) + filling

    def _filling(self, setting: Setting, quantized: int) -> int:
        """Bytes that quanto adds, on its axis 0, so that groups can share bytes.

        It packs the codes of 2 groups (of 4 bits) or 4 (of 2) into the same bytes.
        """
        if setting.method != "quanto":
            return 0
        groups = self.shape.kv_heads * self.shape.head_dim * quantized // setting.group
        filling = 0
        for axis, bits in (
            (setting.key_axis, setting.key_bits),
            (setting.value_axis, setting.value_bits),
        ):
            missing = -groups % (8 // bits) if axis == "0" else 0
            filling += missing * setting.group * bits // 8
        return self.layers * filling

    def token_cost(self, setting: Setting) -> TokenCost:
        """What a token costs, learned from a cache of one layer."""
        if why := self.refusal(setting):
            raise Impossible(why)
        # neither the window nor a shift changes what one token costs
        key = replace(setting, window=0, sinks=0, key_shift=0.0)
        if key not in self._costs:
            self._costs[key] = self._learned(setting)
        return self._costs[key]

    def refusal(self, setting: Setting) -> str | None:
        """What `matrix.shapes` knows against it, or None."""
        if (family := library_family(setting)) is None:
            return None
        return shapes.first_refusal(
            family,
            self.shape,
            self.workload.prompt_tokens,
            self.workload.fed_tokens,
            setting.window,
        )

    def _learned(self, setting: Setting) -> TokenCost:
        kv_heads, width = self.shape.kv_heads, self.shape.head_dim
        exact = self.layers * 2 * kv_heads * width * self.dtype.itemsize
        if setting.method == "dynamic":
            return TokenCost(exact, 0.0)
        if setting.method == "course":
            setting = replace(setting, window=0, sinks=0)
        unit = max(setting.group, 64)
        small, large = (self._of_a_prompt(setting, n * unit) for n in (4, 8))
        quantized = (large - small) / (4 * unit)
        return TokenCost(exact, quantized, small - 4 * unit * quantized)

    def _of_a_prompt(self, setting: Setting, tokens: int) -> int:
        """Bytes, of all layers, of a cache that has quantized a prompt."""
        generator = torch.Generator().manual_seed(0)
        shape = (1, self.shape.kv_heads, tokens, self.shape.head_dim)
        states = torch.randn(shape, generator=generator).to(self.dtype)
        try:
            cache = new_cache(self.config, setting).cache
            cache.update(states, states, 0)
            # only the next step restores what was quantized, and may fail at it
            held = held_bytes(cache)
            cache.update(states[:, :, :1], states[:, :, :1], 0)
        except Exception as error:
            # the libraries fail in their own ways; the course's cache refuses with a ValueError
            if setting.method == "course" and not isinstance(error, ValueError):
                raise
            raise Impossible(f"{setting.method}: {error}") from error
        return self.layers * held

    def like(self, wanted: EqualBytes) -> list[Setting]:
        """The rivals' settings that hold what the target holds, within 2 %.

        At the end of the run the bytes are within 2 % of the target's, and on average over the
        run at most 2 % above, since a window that happens to be nearly empty at the end would
        have given exact tokens for nothing. Of what is left, each group size gives the setting
        with the largest mean, and each rival as many of these as are to be measured.
        """
        target = self.held(wanted.target)
        found = []
        for rival, most in wanted.rivals:
            best: list[tuple[float, Setting]] = []
            for group in GROUPS:
                alike = list(self._alike(rival, group, target))
                best += [max(alike, key=lambda pair: pair[0])] if alike else []
            best.sort(key=lambda pair: -pair[0])
            found += [setting for _, setting in best[:most]]
        return found

    def _alike(
        self, rival: Setting, group: int, target: Held
    ) -> Iterable[tuple[float, Setting]]:
        for window in range(LEAST_WINDOW, self.workload.fed_tokens + 1):
            setting = replace(rival, group=group, window=window)
            try:
                near = abs(self.end(setting) - target.end) <= NEAR * target.end
            except Impossible:
                continue
            if near and (mean := self.mean(setting)) <= (1 + NEAR) * target.mean:
                yield mean, setting
