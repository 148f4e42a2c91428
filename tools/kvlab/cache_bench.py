"""Measures what a cache costs in time: prompt and decode step, beside a DynamicCache's.

Called by `kvlab bench --cache` and as `python -m kvlab.cache_bench`. Never judges, and never compares
times that were not taken in turns in the same process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvlab import models
from kvlab.cache import MixedAxisCache, use_decode_attention
from kvlab.matrix.caches import cache_argument, cache_bytes

BASELINE = "dynamic"
CONTEXTS = (256, 512, 1024, 2048, 4096)
CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    # counts this process alone: for a machine that others use too
    "cpu": time.process_time,
}


@dataclass(frozen=True)
class Method:
    """A kind of cache, and the attention it is used with.

    make       (model config) -> an empty cache
    attention  "" for the model's own, "decode" for `kvlab.cache.use_decode_attention`
    """

    make: Callable[[Any], Any]
    attention: str = ""


def _library(backend: str, axis_key: int, axis_value: int) -> Callable[[Any], Any]:
    def make(config: Any) -> Any:
        from transformers import QuantizedCache

        return QuantizedCache(
            backend,
            config,
            nbits=4,
            axis_key=axis_key,
            axis_value=axis_value,
            q_group_size=64,
            residual_length=128,
        )

    return make


def _dynamic(config: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=config)


METHODS: dict[str, Method] = {
    BASELINE: Method(_dynamic),
    "dynamic, decode attention": Method(_dynamic, "decode"),
    "mixed 4 bits": Method(MixedAxisCache),
    "mixed 4 bits, decode attention": Method(MixedAxisCache, "decode"),
    "mixed 2 bits": Method(lambda config: MixedAxisCache(config, 2, 2)),
    "mixed 2 bits, decode attention": Method(
        lambda config: MixedAxisCache(config, 2, 2), "decode"
    ),
    "hqq axis 0": Method(_library("hqq", 0, 0)),
    "hqq axis 1": Method(_library("hqq", 1, 1)),
    "quanto": Method(_library("quanto", 0, 0)),
    "quanto, KIVI's axes": Method(_library("quanto", -1, 0)),
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
    prompts: int = 3,
    threads: int = 1,
    clock: str = "wall",
    progress: Callable[[str], object] = lambda line: None,
) -> list[Cost]:
    """The costs of some methods at some contexts, methods taking turns at every prompt and step.

    steps    decode steps of each method; 40 hold one flush of each window, or none
    prompts  how often each prompt is taken in
    clock    "wall", or "cpu" for the process's own time
    raises   ValueError for a method or a clock nobody knows
    """
    unknown = [name for name in methods if name not in METHODS]
    if unknown or clock not in CLOCKS:
        raise ValueError(
            f"unknown: {', '.join(unknown) or clock}. Methods: {', '.join(METHODS)}; "
            f"clocks: {', '.join(CLOCKS)}"
        )
    costs: list[Cost] = []
    implementation = loaded.model.config._attn_implementation
    with _threads(threads):
        try:
            for context in contexts:
                progress(f"{context} tokens")
                costs += _at_context(
                    loaded, context, methods, steps, prompts, CLOCKS[clock]
                )
        finally:
            loaded.model.set_attn_implementation(implementation)
    return costs


def _at_context(
    loaded: models.LoadedModel,
    context: int,
    methods: Sequence[str],
    steps: int,
    prompts: int,
    now: Callable[[], float],
) -> list[Cost]:
    model = loaded.model
    text = "\n".join(map(models.natural_text, models.TEXTS))
    ids = models.exact_length_input(loaded.tokenizer, text, context + steps)
    taken = {name: _Taken() for name in methods}
    for turn in range(prompts):
        for name in _turned(methods, turn):
            mine = taken[name]
            mine.cache = None  # its memory goes before the next one comes
            cache = METHODS[name].make(model.config)
            seconds = _step(model, name, ids[:, :context], cache, now)
            mine.cache = cache
            mine.prefill.append(seconds)
    for turn in range(steps):
        token = ids[:, context + turn : context + turn + 1]
        for name in _turned(methods, turn):
            mine = taken[name]
            window = _window(mine.cache)
            seconds = _step(model, name, token, mine.cache, now)
            flushed = _window(mine.cache) <= window
            (mine.flush if flushed else mine.plain).append(seconds)
    return [_cost(model, context, name, taken[name]) for name in methods]


def _turned(methods: Sequence[str], turn: int) -> list[str]:
    """The methods from another one on at each turn, so that none always follows the same."""
    first = turn % len(methods)
    return [*methods[first:], *methods[:first]]


def _step(
    model: Any, name: str, ids: Tensor, cache: Any, now: Callable[[], float]
) -> float:
    if METHODS[name].attention:
        use_decode_attention(model)
    else:
        model.set_attn_implementation("sdpa")
    given = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
    started = now()
    model(input_ids=ids, **given)
    return now() - started


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
    shown = Table(title="Times over DynamicCache's")
    for name, justify in (
        ("context", "right"),
        ("cache", "left"),
        ("prefill s", "right"),
        ("ratio", "right"),
        ("decode ms", "right"),
        ("ratio", "right"),
        ("floor", "right"),
        ("flush step ms", "right"),
        ("cache MB", "right"),
    ):
        shown.add_column(name, justify=justify)  # type: ignore[arg-type]
    baselines = {cost.context: cost for cost in costs if cost.method == BASELINE}
    for cost in costs:
        base = baselines.get(cost.context)
        if base is None:
            raise ValueError(f"no {BASELINE} was measured at {cost.context} tokens")
        flush = cost.flush_seconds
        shown.add_row(
            str(cost.context),
            cost.method,
            f"{cost.prefill_seconds:.2f}",
            f"{cost.prefill_seconds / base.prefill_seconds:.2f}",
            f"{1000 * cost.decode_seconds:.1f}",
            f"{cost.decode_seconds / base.decode_seconds:.2f}",
            f"{cost.step_bytes / base.step_bytes:.2f}",
            "" if flush is None else f"{1000 * flush:.1f}",
            f"{cost.cache_bytes / 1e6:.2f}",
            end_section=cost.method == costs[-1].method,
        )
    shown.caption = (
        "floor: bytes of weights and cache that a step must read, over DynamicCache's. "
        "A decode step is one that flushes nothing; medians."
    )
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the embedded model and prints the table."""
    parser = argparse.ArgumentParser(prog="kvlab.cache_bench", description=main.__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--methods", nargs="+", default=tuple(METHODS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    given = parser.parse_args(arguments)
    console = Console()
    costs = measure(models.load(), progress=console.print, **vars(given))
    console.print(table(costs))


if __name__ == "__main__":
    main()
