"""One greedy generation through one cache, timed token by token, with its memory.

Called by `run`. The same code for CPU and CUDA: `Device` holds all that differs. Never decides
anything and never writes a file.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from kvlab.matrix.caches import BuiltCache, cache_argument, cache_bytes

DECODE_MARK = "kvlab: decode begins"


@dataclass(frozen=True)
class Memory:
    """What an allocator says about one generation; None where it says nothing.

    base    allocated before the prompt was fed
    peak    largest over the whole generation
    decode  largest after the prefill
    """

    base_allocated: int
    peak_allocated: int
    decode_peak_allocated: int
    base_reserved: int | None = None
    peak_reserved: int | None = None
    decode_peak_reserved: int | None = None


@dataclass(frozen=True)
class Generation:
    """One generation: tokens, times in milliseconds, and the cache as it was at the end.

    token_ids       [batch][new tokens], the prompt left out
    ttft_ms         from the start to the first new token: the prefill
    tpot_ms         (latency - ttft) / (new tokens - 1)
    largest_gap_ms  the longest wait between two tokens
    overflows       how often the window was emptied into the quantized part
    """

    token_ids: list[list[int]]
    latency_ms: float
    ttft_ms: float
    tpot_ms: float
    largest_gap_ms: float
    overflows: int
    cached_tokens: int
    cache_bytes: dict[str, int]
    layer_class: str
    cache_config: dict[str, Any] | None
    cache_config_unchanged: bool
    memory: Memory | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Device:
    """What differs between a CPU and a CUDA device.

    synchronize   waits until everything that was started is done
    memory_watch  context manager: gives a probe with `mark_decode()` and, after it, `result()`
    every_run     whether watching costs nothing, so that every run is watched
    source        where the memory figures come from, in words
    """

    name: str
    synchronize: Callable[[], None]
    memory_watch: Callable[[torch.nn.Module], Any]
    every_run: bool
    source: str


def generate(
    model: Any,
    input_ids: torch.Tensor,
    new_tokens: int,
    build: Callable[[], BuiltCache],
    device: Device,
    watch_memory: bool,
) -> Generation:
    """Prefill and greedy decoding to exactly `new_tokens` tokens, through a cache made here.

    input_ids  int64 [batch, tokens], on the model's device
    raises CacheFault when another layer class ran or the call changed the cache config
    """
    with (
        _no_collection(),
        device.memory_watch(model) if watch_memory else _no_watch() as probe,
    ):
        built = build()
        tokens, stamps, overflows = _decode_greedily(
            model, input_ids, new_tokens, built, device, probe
        )
        held = cache_bytes(built.cache)
    built.verify()
    gaps = [(after - before) * 1e3 for before, after in pairwise(stamps)]
    return Generation(
        token_ids=tokens.tolist(),
        latency_ms=(stamps[-1] - stamps[0]) * 1e3,
        ttft_ms=gaps[0],
        tpot_ms=sum(gaps[1:]) / (new_tokens - 1),
        largest_gap_ms=max(gaps[1:]),
        overflows=overflows,
        cached_tokens=int(built.cache.get_seq_length()),
        cache_bytes=held,
        layer_class=built.layer_class,
        cache_config=built.config,
        cache_config_unchanged=built.config == built.config_before,
        memory=probe.result() if watch_memory else None,
    )


@torch.inference_mode()
def _decode_greedily(
    model: Any,
    input_ids: torch.Tensor,
    new_tokens: int,
    built: BuiltCache,
    device: Device,
    probe: Any,
) -> tuple[torch.Tensor, list[float], int]:
    """The new tokens [batch, new tokens], the time before and after each, the overflows."""
    if new_tokens < 2:
        raise ValueError(f"new_tokens must be 2 or more, got {new_tokens}")
    # only the last position's logits: those of a whole prompt would dwarf the cache
    step = {cache_argument(model): built.cache, "use_cache": True, "logits_to_keep": 1}
    fed, chosen, overflows = input_ids, [], 0
    device.synchronize()
    stamps = [time.perf_counter()]
    for number in range(new_tokens):
        if number == 1:
            probe.mark_decode()
        before = built.window_tokens() if number else 0
        logits = model(input_ids=fed, **step).logits
        fed = logits[:, -1:].argmax(dim=-1)
        device.synchronize()
        stamps.append(time.perf_counter())
        chosen.append(fed)
        # the prompt is quantized as it comes; an overflow is what empties a window later
        overflows += number > 0 and built.window_tokens() < before + 1
    return torch.cat(chosen, dim=1), stamps, overflows


# ---- devices ------------------------------------------------------------------------------------


class _NoProbe:
    def mark_decode(self) -> None:
        pass

    def result(self) -> None:
        return None


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage of earlier runs in the memory figures, no collection in the times."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _no_watch() -> Iterator[_NoProbe]:
    yield _NoProbe()


def cpu_device() -> Device:
    """Peaks come from torch.profiler's memory events, which slow a run down: warm-up only."""
    return Device(
        name="cpu",
        synchronize=lambda: None,
        memory_watch=_profiled,
        every_run=False,
        source="torch.profiler memory events of the warm-up run; base is the model's parameters "
        "and buffers, the peak is base plus the largest sum of what was allocated and not yet "
        "freed; the CPU has no reserving allocator, so the reserved figures are null",
    )


def cuda_device() -> Device:
    """Peaks come from CUDA's caching allocator, which counts all the time."""
    return Device(
        name="cuda",
        synchronize=torch.cuda.synchronize,
        memory_watch=_counted,
        every_run=True,
        source="torch.cuda allocator statistics, reset before the prompt and again after the "
        "prefill; the largest of the measured repeats; hqq empties the allocator's store at every "
        "overflow, which distorts the reserved figures: judge by the allocated ones",
    )


class _ProfilerProbe:
    """Reads allocations off a profile; see torch.profiler's `profile_memory`."""

    def __init__(self, base: int) -> None:
        self._base = base
        # below this level it writes a line to stderr at every start and stop
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )

    def __enter__(self) -> _ProfilerProbe:
        with _no_operator_events():
            self._profile.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.stop()

    def mark_decode(self) -> None:
        with torch.profiler.record_function(DECODE_MARK):
            pass

    def result(self) -> Memory:
        # its tables take minutes at this number of events, its raw list does not
        profiler: Any = self._profile.profiler
        events = profiler.kineto_results.events()
        begins = next(e.start_ns() for e in events if e.name() == DECODE_MARK)
        changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        changes.sort(key=lambda change: change[0])
        held = peak = decode_peak = 0
        for when, change in changes:
            if when >= begins:
                # what is held as the decoding begins counts as well
                decode_peak = max(decode_peak, held, held + change)
            held += change
            peak = max(peak, held)
        return Memory(self._base, self._base + peak, self._base + decode_peak)


@contextmanager
def _no_operator_events() -> Iterator[None]:
    """A profile started here holds no operators: theirs are most of its events and its cost.

    torch's C++ can be told so, its Python has no argument for it. Where that call is another one,
    the profile is slower and the figures are the same.
    """
    module: Any = torch.autograd.profiler
    real = module._enable_profiler

    def enable(config: Any, activities: Any) -> None:
        try:
            scopes = {torch._C._profiler.RecordScope.USER_SCOPE}
            real(config, activities, scopes)
        except (AttributeError, TypeError):
            real(config, activities)

    module._enable_profiler = enable
    try:
        yield
    finally:
        module._enable_profiler = real


def _profiled(model: torch.nn.Module) -> _ProfilerProbe:
    weights = [*model.parameters(), *model.buffers()]
    return _ProfilerProbe(sum({w.data_ptr(): w.nbytes for w in weights}.values()))


class _CudaProbe:
    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._base = torch.cuda.memory_allocated()
        self._base_reserved = torch.cuda.memory_reserved()
        self._prefill = (0, 0)

    @staticmethod
    def _peaks() -> tuple[int, int]:
        allocated = torch.cuda.max_memory_allocated()
        return allocated, torch.cuda.max_memory_reserved()

    def mark_decode(self) -> None:
        self._prefill = self._peaks()
        torch.cuda.reset_peak_memory_stats()

    def finish(self) -> None:
        self._decode = self._peaks()

    def result(self) -> Memory:
        return Memory(
            base_allocated=self._base,
            peak_allocated=max(self._prefill[0], self._decode[0]),
            decode_peak_allocated=self._decode[0],
            base_reserved=self._base_reserved,
            peak_reserved=max(self._prefill[1], self._decode[1]),
            decode_peak_reserved=self._decode[1],
        )


@contextmanager
def _counted(model: torch.nn.Module) -> Iterator[_CudaProbe]:
    probe = _CudaProbe()
    yield probe
    probe.finish()
