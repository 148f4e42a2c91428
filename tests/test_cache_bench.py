"""`kvlab.cache_bench`: what is counted and shown. How long anything takes is no test's business."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from kvlab import cache_bench
from kvlab.cache import MixedAxisCache
from kvlab.cache_bench import BASELINE, Cost
from kvlab.matrix import caches
from kvlab.models import LoadedModel

CONTEXT, STEPS = 40, 33
NAMES = (BASELINE, "mixed 4 bits", "hqq axis 1")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
    )

    def tokenizer(text: str, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(letter) % 50 for letter in text])

    model = LlamaForCausalLM(config).eval()
    return LoadedModel(model, tokenizer, "tiny", "none", "given")  # type: ignore[arg-type]


def test_every_method_is_measured_at_every_context(loaded: LoadedModel) -> None:
    threads = torch.get_num_threads()
    costs = cache_bench.measure(loaded, (CONTEXT, 48), NAMES, steps=STEPS, prompts=2)
    assert [(cost.context, cost.method) for cost in costs] == [
        (context, name) for context in (CONTEXT, 48) for name in NAMES
    ]
    by_name = {cost.method: cost for cost in costs if cost.context == CONTEXT}
    assert {name: cost.flushes for name, cost in by_name.items()} == {
        BASELINE: 0,
        "mixed 4 bits": 1,
        "hqq axis 1": 0,
    }
    held = 2 * 2 * 32 * 4 * (CONTEXT + STEPS)
    assert by_name[BASELINE].cache_bytes == held
    weights = sum(parameter.nbytes for parameter in loaded.model.parameters())
    assert by_name[BASELINE].step_bytes == weights + held
    # everything is as it was
    assert torch.get_num_threads() == threads


def test_an_unknown_method_is_named(loaded: LoadedModel) -> None:
    with pytest.raises(ValueError, match="unknown: static"):
        cache_bench.measure(loaded, (CONTEXT,), (BASELINE, "static"))


def test_the_course_s_cache_is_measured_as_it_comes(loaded: LoadedModel) -> None:
    family, window = cache_bench.METHODS["mixed 4 bits"]
    built = caches.build(loaded.model.config, family, window).cache
    assert built.settings == MixedAxisCache(loaded.model.config).settings


def test_the_table_shows_ratios_to_the_dynamic_cache() -> None:
    costs = [
        Cost(1024, BASELINE, 2.0, 0.040, None, 0, 40_000_000, 500_000_000),
        Cost(1024, "mixed 4 bits", 2.2, 0.036, 0.05, 1, 8_000_000, 468_000_000),
    ]
    console = Console(width=200, record=True)
    console.print(cache_bench.table(costs))
    lines = {
        name: [cell.strip() for cell in line.strip("│ ").split("│")]
        for line in console.export_text().splitlines()
        for name in (BASELINE, "mixed 4 bits")
        if f"│ {name} " in line
    }
    own, mixed = lines[BASELINE], lines["mixed 4 bits"]
    assert own[1:] == [BASELINE, "2.00 s", "40.0 ms", "1.00", "", "40.00"]
    assert mixed[1:] == ["mixed 4 bits", "1.10", "0.90", "0.94", "1.25", "8.00"]


def test_a_table_needs_a_dynamic_cache_to_compare_with() -> None:
    with pytest.raises(ValueError, match=f"no {BASELINE} was measured at 7 tokens"):
        cache_bench.table([Cost(7, "mixed 4 bits", 1.0, 1.0, None, 0, 1, 1)])
