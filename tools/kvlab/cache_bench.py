"""Measures what a cache costs in time: prompt and decode step, beside a DynamicCache's.

Called by `kvlab bench --cache`. Never judges, and never compares times that were not taken in turns in
the same process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from kvlab import models
from kvlab.cache import MixedAxisCache
from kvlab.matrix import caches
from kvlab.matrix.caches import cache_argument, cache_bytes
from kvlab.matrix.workload import CandidateFamily

BASELINE = "DynamicCache"
CONTEXTS = (256, 1024, 2048, 4096)
LIBRARY_WINDOW = 128


def _mixed(bits: int) -> CandidateFamily:
    """The course's cache, as it comes where nothing but the bits is said."""
    return CandidateFamily(f"mixed {bits}", "", "kvlab", bits, 32, -2, -1, 4)


def _library(backend: str, axis_key: int, axis_value: int) -> CandidateFamily:
    return CandidateFamily(backend, "", backend, 4, 64, axis_key, axis_value)


# what is measured: the family, and its window; None is the baseline
METHODS: dict[str, tuple[CandidateFamily | None, int]] = {
    BASELINE: (None, 0),
    "mixed 4 bits": (_mixed(4), 32),
    "mixed 2 bits": (_mixed(2), 32),
    "hqq axis 0": (_library("hqq", 0, 0), LIBRARY_WINDOW),
    "hqq axis 1": (_library("hqq", 1, 1), LIBRARY_WINDOW),
    "quanto 0/0": (_library("quanto", 0, 0), LIBRARY_WINDOW),
    "quanto -1/0": (_library("quanto", -1, 0), LIBRARY_WINDOW),
}


@dataclass(frozen=True)
class Cost:
    """What one method took at one context.

    prefill_seconds  median over the prompts
    decode_seconds   median over the steps that flushed nothing
    flush_seconds    median over the steps that flushed; None when none did
    cache_bytes      storage that the cache held after the last step
    step_bytes       what a step has to read at least: the weights, and the cache
    """

    context: int
    method: str
    prefill_seconds: float
    decode_seconds: float
    flush_seconds: float | None
    flushes: int
    cache_bytes: int
    step_bytes: int


@dataclass
class _Taken:
    """A method at work: its cache, and the times so far."""

    cache: Any = None
    prefill: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    flush: list[float] = field(default_factory=list)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def measure(
    loaded: models.LoadedModel,
    contexts: Sequence[int] = CONTEXTS,
    methods: Sequence[str] = tuple(METHODS),
    *,
    steps: int = 40,
    prompts: int = 2,
    threads: int = 1,
    progress: Callable[[str], object] = lambda line: None,
) -> list[Cost]:
    """The costs of some methods at some contexts, methods taking turns at every prompt and step.

    steps    decode steps of each method; 40 hold one flush of each window, or none
    prompts  how often each prompt is taken in
    raises   ValueError for a method nobody knows
    """
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise ValueError(
            f"unknown: {', '.join(unknown)}. Methods: {', '.join(METHODS)}"
        )
    costs: list[Cost] = []
    with _threads(threads):
        for context in contexts:
            progress(f"{context} tokens")
            costs += _at_context(loaded, context, methods, steps, prompts)
    return costs


def _at_context(
    loaded: models.LoadedModel,
    context: int,
    methods: Sequence[str],
    steps: int,
    prompts: int,
) -> list[Cost]:
    model = loaded.model
    text = "\n".join(map(models.natural_text, models.TEXTS))
    ids = models.exact_length_input(loaded.tokenizer, text, context + steps)
    taken = {name: _Taken() for name in methods}
    for turn in range(prompts):
        for name in _turned(methods, turn):
            mine = taken[name]
            mine.cache = None  # its memory goes before the next one comes
            family, residual = METHODS[name]
            cache = caches.build(model.config, family, residual).cache
            seconds = _step(model, ids[:, :context], cache)
            mine.cache = cache
            mine.prefill.append(seconds)
    for turn in range(steps):
        token = ids[:, context + turn : context + turn + 1]
        for name in _turned(methods, turn):
            mine = taken[name]
            window = _window(mine.cache)
            seconds = _step(model, token, mine.cache)
            flushed = _window(mine.cache) <= window
            (mine.flush if flushed else mine.plain).append(seconds)
    return [_cost(model, context, name, taken[name]) for name in methods]


def _turned(methods: Sequence[str], turn: int) -> list[str]:
    """The methods from another one on at each turn, so that none always follows the same."""
    first = turn % len(methods)
    return [*methods[first:], *methods[:first]]


def _step(model: Any, ids: Tensor, cache: Any) -> float:
    given = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
    started = time.perf_counter()
    model(input_ids=ids, **given)
    return time.perf_counter() - started


def _window(cache: Any) -> int:
    """Tokens held exact in the first layer: they only get fewer in a flush."""
    layer = cache.layers[0]
    if isinstance(cache, MixedAxisCache):
        return int(layer.exact_tokens)
    keys = layer.keys
    return int(keys.shape[-2]) if keys.dim() == 4 else 0


def _cost(model: Any, context: int, name: str, taken: _Taken) -> Cost:
    held = cache_bytes(taken.cache)["total"]
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return Cost(
        context,
        name,
        statistics.median(taken.prefill),
        statistics.median(taken.plain),
        statistics.median(taken.flush) if taken.flush else None,
        len(taken.flush),
        held,
        weights + held,
    )


def table(costs: Sequence[Cost]) -> Table:
    """Times as ratios to the DynamicCache's at the same context, beside what bytes allow.

    raises ValueError when a context was measured without a DynamicCache
    """
    shown = Table(title=f"Times over those of {BASELINE}")
    for name in ("context", "cache", "prefill", "decode", "floor", "flush", "MB"):
        shown.add_column(name, justify="left" if name == "cache" else "right")
    baselines = {cost.context: cost for cost in costs if cost.method == BASELINE}
    for cost in costs:
        base = baselines.get(cost.context)
        if base is None:
            raise ValueError(f"no {BASELINE} was measured at {cost.context} tokens")
        flush = cost.flush_seconds
        own = cost is base
        decode = f"{1000 * cost.decode_seconds:.1f} ms"
        shown.add_row(
            str(cost.context),
            cost.method,
            f"{cost.prefill_seconds:.2f} s" if own else _ratio(cost, base, "prefill"),
            decode if own else _ratio(cost, base, "decode"),
            f"{cost.step_bytes / base.step_bytes:.2f}",
            "" if flush is None else f"{flush / base.decode_seconds:.2f}",
            f"{cost.cache_bytes / 1e6:.2f}",
            end_section=cost.method == costs[-1].method,
        )
    shown.caption = (
        f"{BASELINE}'s own rows are times. decode: a step that flushes nothing; flush: one that "
        "does, over the same step. floor: bytes of weights and cache that a step must read, over "
        f"{BASELINE}'s. MB: storage of the cache after the last step. Medians."
    )
    return shown


def _ratio(cost: Cost, base: Cost, what: str) -> str:
    name = f"{what}_seconds"
    return f"{getattr(cost, name) / getattr(base, name):.2f}"
