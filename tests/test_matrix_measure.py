"""`kvlab.matrix.caches` and `measure`, on a tiny model with grouped heads; and transformers itself.

What is asserted about the libraries here is what the measurement rests on: when one of these tests
fails after an update, the library has moved.
"""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache

from kvlab.matrix import caches, measure
from kvlab.matrix.caches import BuiltCache, CacheFault, cache_bytes
from kvlab.matrix.measure import Generation, cpu_device
from kvlab.matrix.shapes import KVShape, first_refusal, refusal
from kvlab.matrix.workload import FURTHER, HQQ, CandidateFamily

HQQ_AXIS0 = replace(HQQ, id="hqq_axis0", axis_key=0, axis_value=0)
QUANTO = FURTHER[0]
QUANTO_00 = replace(QUANTO, id="quanto_axis0", axis_key=0, axis_value=0)
MIXED = replace(FURTHER[1], q_group_size=32)
OF_THE_LIBRARY = [HQQ, HQQ_AXIS0, QUANTO, QUANTO_00]
FAMILIES = [*OF_THE_LIBRARY, MIXED]
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 32
EVERY_CACHE = [None, *FAMILIES]


def name_of(family: CandidateFamily | None) -> str:
    return family.id if family else "dynamic_cache"


def tiny_model(dtype: torch.dtype = torch.float32, kv_heads: int = KV_HEADS) -> Any:
    """A llama of two layers with random weights, the same at every call."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=48 * kv_heads,
        intermediate_size=112,
        num_hidden_layers=LAYERS,
        num_attention_heads=3 * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        # larger than the default spread: else every token predicts the same
        config.initializer_range = 0.2
        return LlamaForCausalLM(config).to(dtype).eval()


def prompt(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, tokens), generator=generator)


def generate(
    model: Any,
    ids: torch.Tensor,
    new_tokens: int,
    family: CandidateFamily | None,
    window: int | None,
    watch: bool = False,
) -> Generation:
    build = partial(caches.build, model.config, family, window)
    return measure.generate(model, ids, new_tokens, build, cpu_device(), watch)


@contextmanager
def nothing_said(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Fails on a Python warning, on a line of transformers' logger and on anything printed."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    capfd.readouterr()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        logger.removeHandler(handler)
    printed = capfd.readouterr()
    assert not said
    assert not printed.out and not printed.err


# ---- generation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", EVERY_CACHE, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_are_those_of_transformers_own_generate_and_nothing_warns(
    family: CandidateFamily | None,
    dtype: torch.dtype,
    batch: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    # a context longer than the window, and two overflows
    model, ids, new, window = tiny_model(dtype), prompt(batch, 96), 70, 32
    with nothing_said(capfd):
        ours = generate(model, ids, new, family, window if family else None)
    options: dict[str, Any] = {}
    if family is MIXED:
        options = {"cache": caches.build(model.config, family, window).cache}
    elif family:
        options = {
            "cache_implementation": "quantized",
            "cache_config": family.cache_config(window),
        }
    theirs = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new,
        max_new_tokens=new,
        pad_token_id=0,
        eos_token_id=None,
        **options,
    )
    assert ours.token_ids == theirs[:, ids.shape[1] :].tolist()
    # a library's window starts empty after the prompt; the mixed axes' holds 60 of 96 tokens
    expected = {None: 0, MIXED: 3}
    assert ours.overflows == expected.get(family, 2)
    assert ours.cached_tokens == ids.shape[1] + new - 1
    assert ours.cache_config_unchanged
    assert ours.cache_config == (family.cache_config(window) if family else None)


@pytest.mark.parametrize("family", [HQQ, QUANTO], ids=name_of)
@pytest.mark.parametrize(
    ("fed", "overflows"), [(31, 0), (32, 1), (33, 1), (63, 1), (64, 2)]
)
def test_overflows_are_counted_at_the_edges_of_the_window(
    family: CandidateFamily, fed: int, overflows: int
) -> None:
    model = tiny_model()
    made = generate(model, prompt(1, 64), fed + 1, family, 32)
    assert made.overflows == overflows
    held = fed - 32 * overflows
    row = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
    assert made.cache_bytes["window"] == held * row


def feed(model: Any, ids: torch.Tensor, cache: Any) -> Any:
    """The model's output for these tokens, after those that the cache holds."""
    return model(input_ids=ids, use_cache=True, **{caches.cache_argument(model): cache})


def test_window_of_one_overflows_at_every_token() -> None:
    made = generate(tiny_model(), prompt(2, 64), 5, HQQ, 1)
    assert (made.overflows, made.cache_bytes["window"]) == (4, 0)


def test_times_add_up() -> None:
    made = generate(tiny_model(), prompt(1, 40), 9, None, None)
    assert made.latency_ms == pytest.approx(made.ttft_ms + 8 * made.tpot_ms)
    assert made.tpot_ms <= made.largest_gap_ms < made.latency_ms
    assert min(made.ttft_ms, made.tpot_ms) > 0


def test_time_to_first_token_covers_the_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = iter([0.0, 1.0, 1.5, 2.75, 3.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(ticks))
    made = generate(tiny_model(), prompt(1, 8), 4, None, None)
    assert (made.latency_ms, made.ttft_ms) == (3000.0, 1000.0)
    assert made.tpot_ms == pytest.approx(2000 / 3)
    assert made.largest_gap_ms == 1250.0


def test_only_the_last_positions_logits_are_made() -> None:
    model, shapes = tiny_model(), []
    model.lm_head.register_forward_hook(
        lambda module, args, output: shapes.append(tuple(output.shape))
    )
    generate(model, prompt(3, 40), 4, None, None)
    assert shapes == [(3, 1, 256)] * 4


def test_device_is_synchronised_on_both_sides_of_every_token() -> None:
    model, calls = tiny_model(), []
    device = replace(cpu_device(), synchronize=lambda: calls.append(1))
    build = partial(caches.build, model.config, None, None)
    measure.generate(model, prompt(1, 8), 5, build, device, False)
    assert len(calls) == 6


def test_one_new_token_has_no_time_per_token() -> None:
    with pytest.raises(ValueError, match="2 or more"):
        generate(tiny_model(), prompt(1, 8), 1, None, None)


# ---- what the cache is --------------------------------------------------------------------------


def test_changed_cache_config_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def pops(config: Any, cache_config: dict[str, Any]) -> Any:
        backend = cache_config.pop("backend")  # as versions 5.0 to 5.15 did
        return QuantizedCache(backend, config, **cache_config)

    changing = replace(caches.BACKENDS["hqq"], build=pops)
    monkeypatch.setitem(caches.BACKENDS, "hqq", changing)
    with pytest.raises(CacheFault, match="changed its cache config"):
        generate(tiny_model(), prompt(1, 64), 3, HQQ, 16)


def test_another_layer_class_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def quanto(config: Any, cache_config: dict[str, Any]) -> Any:
        options = cache_config | {"backend": "quanto", "axis_key": 0, "axis_value": 0}
        return QuantizedCache(config=config, **options)

    wrong = replace(caches.BACKENDS["hqq"], build=quanto)
    monkeypatch.setitem(caches.BACKENDS, "hqq", wrong)
    with pytest.raises(CacheFault, match="HQQQuantizedLayer, but QuantoQuantizedLayer"):
        generate(tiny_model(), prompt(1, 64), 3, HQQ, 16)


@pytest.mark.parametrize("family", EVERY_CACHE, ids=name_of)
def test_layer_class_is_the_one_that_ran(family: CandidateFamily | None) -> None:
    made = generate(tiny_model(), prompt(1, 64), 3, family, 16 if family else None)
    expected = {
        "hqq": "HQQQuantizedLayer",
        "quanto": "QuantoQuantizedLayer",
        "kvlab": "MixedAxisLayer",
    }
    assert made.layer_class == (expected[family.backend] if family else "DynamicLayer")


@pytest.mark.parametrize("family", OF_THE_LIBRARY, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_bytes_of_a_quantized_cache_by_hand(
    family: CandidateFamily, dtype: torch.dtype, batch: int
) -> None:
    made = generate(tiny_model(dtype), prompt(batch, 64), 3 + 32, family, 32)
    # 96 tokens are quantized, two are in the window
    each = 2 * LAYERS * batch * KV_HEADS * HEAD_DIM
    values, width = each * 96, dtype.itemsize
    assert made.cache_bytes == {
        "codes": values // 2,
        "scales": values // 64 * width,
        "zeros": values // 64 * width,
        "window": each * 2 * width,
        "other": 0,
        "total": values // 2 + 2 * (values // 64 * width) + each * 2 * width,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_bytes_of_the_mixed_axis_cache_by_hand(dtype: torch.dtype, batch: int) -> None:
    made = generate(tiny_model(dtype), prompt(batch, 64), 3 + 32, MIXED, 32)
    # of 98 tokens 4 are sinks, 64 are quantized and 30 in the window; the exact ones' storage
    # has room for the most that can be: one token less than another group
    each = 2 * LAYERS * batch * KV_HEADS * HEAD_DIM
    values, exact, fp16 = each * 64, each * (4 + 32 + 31) * dtype.itemsize, 2
    assert made.cache_bytes == {
        "codes": values // 2,
        "scales": values // 32 * fp16,
        "zeros": values // 32 * fp16,
        "window": exact,
        "other": 0,
        "total": values // 2 + 2 * (values // 32 * fp16) + exact,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_of_a_dynamic_cache_by_hand(dtype: torch.dtype) -> None:
    made = generate(tiny_model(dtype), prompt(3, 40), 5, None, None)
    total = 2 * LAYERS * 3 * KV_HEADS * HEAD_DIM * 44 * dtype.itemsize
    assert made.cache_bytes["total"] == made.cache_bytes["window"] == total


def test_bytes_equal_the_sum_over_the_librarys_own_tensors() -> None:
    model = tiny_model()
    built = caches.build(model.config, HQQ, 16)
    with torch.inference_mode():
        feed(model, prompt(1, 64), built.cache)
        feed(model, prompt(1, 5), built.cache)
    by_hand = 0
    for layer in built.cache.layers:
        for codes, meta in (layer._quantized_keys, layer._quantized_values):
            by_hand += codes.nbytes + meta["scale"].nbytes + meta["zero"].nbytes
        by_hand += layer.keys.nbytes + layer.values.nbytes
    assert cache_bytes(built.cache)["total"] == by_hand


def test_view_counts_as_the_storage_it_keeps_alive() -> None:
    big = torch.zeros(1000)
    layer = SimpleNamespace(keys=big[:10], values=big[10:30], codes=[torch.zeros(3)])
    assert cache_bytes(SimpleNamespace(layers=[layer])) == {
        "total": 4012,
        "codes": 12,
        "scales": 0,
        "zeros": 0,
        "window": 4000,
        "other": 0,
    }


@pytest.mark.parametrize(
    ("family", "nbits"),
    [(f, n) for f in FAMILIES for n in (2, 4)] + [(HQQ, 3), (HQQ, 8), (HQQ_AXIS0, 8)],
    ids=lambda value: str(value) if isinstance(value, int) else name_of(value),
)
@pytest.mark.parametrize("batch", [1, 2])
def test_refused_token_counts_are_those_the_library_cannot_hold(
    family: CandidateFamily, nbits: int, batch: int
) -> None:
    family, shape = replace(family, nbits=nbits), KVShape(batch, 3, 16)
    config = tiny_model(kv_heads=3).config
    differ = []
    for tokens in (1, 2, 3, 4, 5, 8, 12, 16, 20, 21, 32, 48, 64, 67):
        built = caches.build(config, family, 16)
        kv = torch.randn(batch, 3, tokens, 16, generator=torch.Generator())
        new = torch.randn(batch, 3, 1, 16)
        layer = built.cache.layers[0]
        try:
            layer.update(kv, kv)
            works = layer.update(new, new)[0].shape == (batch, 3, tokens + 1, 16)
        except Exception:
            works = False
        if works == bool(refusal(family, shape, tokens)):
            differ.append(tokens)
    assert not differ


def test_refusal_of_a_run_comes_true_at_the_overflow() -> None:
    # 64 tokens fit, 80 do not: the run would die in the middle
    assert first_refusal(QUANTO, KVShape(1, KV_HEADS, HEAD_DIM), 64, 15, 16) is None
    assert first_refusal(QUANTO, KVShape(1, KV_HEADS, HEAD_DIM), 64, 16, 16)
    generate(tiny_model(), prompt(1, 64), 16, QUANTO, 16)
    with pytest.raises(ValueError, match="Group size"):
        generate(tiny_model(), prompt(1, 64), 17, QUANTO, 16)


MARK_LEFT = """
from pathlib import Path
from optimum.quanto.library.extensions import extension

for one in extension._extensions.values():
    Path(one.build_directory).mkdir(exist_ok=True)
    Path(one.build_directory, "lock").touch()
from kvlab.matrix import quanto

quanto.ready()
"""


def test_mark_of_a_killed_process_does_not_stop_quanto() -> None:
    pytest.importorskip("optimum.quanto")
    command = [sys.executable, "-c", MARK_LEFT]
    subprocess.run(command, check=True, timeout=300, capture_output=True)


# ---- memory -------------------------------------------------------------------------------------


def test_peaks_on_a_cpu_are_the_allocations_of_both_phases() -> None:
    device, weights = cpu_device(), torch.nn.Linear(10, 6)
    with device.memory_watch(weights) as probe:
        held = torch.empty(1000, dtype=torch.uint8)
        prefill = torch.empty(50_000, dtype=torch.uint8)
        del prefill
        probe.mark_decode()
        token = torch.empty(7_000, dtype=torch.uint8)
        del token
    memory = probe.result()
    assert memory.base_allocated == (10 * 6 + 6) * 4
    assert memory.peak_allocated == memory.base_allocated + 51_000
    assert memory.decode_peak_allocated == memory.base_allocated + 8_000
    assert memory.peak_reserved is None and held is not None


def test_profile_without_operators_counts_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = tiny_model(), prompt(1, 128)
    device, names = cpu_device(), []
    real = measure._ProfilerProbe.result

    def result(self: Any) -> Any:
        events = self._profile.profiler.kineto_results.events()
        names.append({event.name() for event in events})
        return real(self)

    monkeypatch.setattr(measure._ProfilerProbe, "result", result)
    build = partial(caches.build, model.config, HQQ, 16)
    quiet = measure.generate(model, ids, 4, build, device, True).memory
    # a torch whose profiler cannot be told which scopes to record
    enable = torch.autograd.profiler._enable_profiler
    monkeypatch.setattr(
        torch.autograd.profiler, "_enable_profiler", lambda c, a: enable(c, a)
    )
    whole = measure.generate(model, ids, 4, build, device, True).memory
    assert names[0] == {"[memory]", measure.DECODE_MARK}
    assert "aten::cat" in names[1]
    assert quiet == whole


@pytest.mark.parametrize("family", EVERY_CACHE, ids=name_of)
def test_peak_of_a_generation_holds_its_cache_at_least(
    family: CandidateFamily | None, capfd: pytest.CaptureFixture[str]
) -> None:
    model, ids = tiny_model(), prompt(1, 256)
    with nothing_said(capfd):
        made = generate(model, ids, 4, family, 16 if family else None, watch=True)
    assert made.memory is not None
    base = made.memory.base_allocated
    assert base == sum(weight.nbytes for weight in model.parameters()) + sum(
        buffer.nbytes for buffer in model.buffers()
    )
    held = made.memory.decode_peak_allocated - base
    assert held > made.cache_bytes["total"]
    if family is None:  # the old tensors of a layer go as the longer ones come
        assert held < 1.8 * made.cache_bytes["total"]
    assert made.memory.peak_allocated >= made.memory.decode_peak_allocated


def test_quantized_cache_lowers_the_decode_peak() -> None:
    peaks = []
    for family in (None, HQQ):
        made = generate(
            tiny_model(), prompt(1, 512), 4, family, 16 if family else None, watch=True
        )
        assert made.memory is not None
        peaks.append(made.memory.decode_peak_allocated - made.memory.base_allocated)
    assert peaks[1] < peaks[0]


def test_unwatched_generation_has_no_memory_figures() -> None:
    assert generate(tiny_model(), prompt(1, 8), 3, None, None).memory is None


def test_cuda_peaks_are_reset_after_the_prefill_and_both_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the allocator is a stand-in; what is tested is the order of the calls
    state = {"now": 100, "peak": 100, "reserved": 400, "emptied": 0, "synced": 0}

    def reset() -> None:
        state["peak"] = state["now"]

    def emptied() -> None:
        state["emptied"] += 1

    def synchronized() -> None:
        state["synced"] += 1

    for name, stand_in in {
        "synchronize": synchronized,
        "empty_cache": emptied,
        "reset_peak_memory_stats": reset,
        "memory_allocated": lambda: state["now"],
        "memory_reserved": lambda: state["reserved"],
        "max_memory_allocated": lambda: state["peak"],
        "max_memory_reserved": lambda: state["peak"] + 300,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    device = measure.cuda_device()
    with device.memory_watch(torch.nn.Linear(1, 1)) as probe:
        state["peak"], state["now"] = 900, 250
        probe.mark_decode()
        state["peak"] = 310
    memory = probe.result()
    assert device.every_run and state["emptied"] == 1
    assert (memory.base_allocated, memory.base_reserved) == (100, 400)
    assert (memory.peak_allocated, memory.decode_peak_allocated) == (900, 310)
    assert (memory.peak_reserved, memory.decode_peak_reserved) == (1200, 610)


# ---- transformers moves -------------------------------------------------------------------------


def test_cache_goes_in_by_the_name_that_does_not_warn() -> None:
    model = tiny_model()
    name = caches.cache_argument(model)
    assert name in inspect.signature(model.forward).parameters
    assert name == "cache"


def test_older_transformers_gets_the_older_name() -> None:
    def forward(input_ids: Any = None, past_key_values: Any = None) -> None: ...

    assert caches.cache_argument(SimpleNamespace(forward=forward)) == "past_key_values"


def test_the_older_name_still_warns_here(capfd: pytest.CaptureFixture[str]) -> None:
    # when this fails, `cache_argument` may have become unnecessary
    model = tiny_model()
    cache = DynamicCache(config=model.config)
    with pytest.raises((AssertionError, FutureWarning)), nothing_said(capfd):
        model(input_ids=prompt(1, 4), past_key_values=cache, use_cache=True)


def test_prefill_of_a_quantized_cache_returns_exact_tensors() -> None:
    model, ids = tiny_model(), prompt(1, 64)
    with torch.inference_mode():
        exact = model(input_ids=ids).logits
        cache = caches.build(model.config, HQQ, 16).cache
        assert torch.equal(feed(model, ids, cache).logits, exact)


def test_layers_that_overflow_late_are_fed_token_by_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import cache_utils

    config = tiny_model().config
    assert caches.build(config, HQQ, 32).room() == 32

    class Late(cache_utils.QuantizedLayer):  # type: ignore[misc]
        """Overflows by the tokens it holds already, as version 5.15 does."""

        def update(self, keys: Any, values: Any, *args: Any, **rest: Any) -> Any:
            window = self.residual_length
            held = (
                self.keys.shape[-2]
                if self.is_initialized and self.keys.dim() == 4
                else 0
            )
            self.residual_length = 0 if held and held + 1 >= window else 10**9
            made = super().update(keys, values, *args, **rest)
            self.residual_length = window
            return made

    monkeypatch.setattr(cache_utils, "QuantizedLayer", Late)
    caches._whole_window_is_exact.cache_clear()
    try:
        for family in (HQQ, QUANTO):
            assert caches.build(config, family, 64).room() == 1
    finally:
        caches._whole_window_is_exact.cache_clear()


def test_built_cache_reports_its_window() -> None:
    model = tiny_model()
    built: BuiltCache = caches.build(model.config, HQQ, 16)
    with torch.inference_mode():
        feed(model, prompt(1, 64), built.cache)
        assert built.window_tokens() == 0
        feed(model, prompt(1, 5), built.cache)
        assert built.window_tokens() == 5
