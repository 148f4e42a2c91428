"""`kvlab.cache_bench`: what is counted and shown. How long anything takes is no test's business."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from kvlab import cache_bench
from kvlab.cache_bench import Cost
from kvlab.models import LoadedModel

CONTEXT, STEPS = 40, 33
NAMES = ("dynamic", "mixed 4 bits", "mixed 4 bits, decode attention")


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
    costs = cache_bench.measure(loaded, (CONTEXT, 50), NAMES, steps=STEPS, prompts=2)
    assert [(cost.context, cost.method) for cost in costs] == [
        (context, name) for context in (CONTEXT, 50) for name in NAMES
    ]
    by_name = {cost.method: cost for cost in costs if cost.context == CONTEXT}
    assert {name: cost.flushes for name, cost in by_name.items()} == {
        "dynamic": 0,
        "mixed 4 bits": 1,
        "mixed 4 bits, decode attention": 1,
    }
    held = 2 * 2 * 32 * 4 * (CONTEXT + STEPS)
    assert by_name["dynamic"].cache_bytes == held
    weights = sum(parameter.nbytes for parameter in loaded.model.parameters())
    assert by_name["dynamic"].step_bytes == weights + held
    # everything is as it was
    assert torch.get_num_threads() == threads
    assert loaded.model.config._attn_implementation == "sdpa"


def test_an_unknown_method_or_clock_is_named(loaded: LoadedModel) -> None:
    with pytest.raises(ValueError, match="unknown: static"):
        cache_bench.measure(loaded, (CONTEXT,), ("dynamic", "static"))
    with pytest.raises(ValueError, match="unknown: sun"):
        cache_bench.measure(loaded, (CONTEXT,), clock="sun")


def test_the_table_shows_ratios_to_the_dynamic_cache() -> None:
    costs = [
        Cost(1024, "dynamic", 2.0, 0.040, None, 0, 40_000_000, 500_000_000),
        Cost(1024, "mixed 4 bits", 2.2, 0.036, 0.05, 1, 8_000_000, 468_000_000),
    ]
    console = Console(width=200, record=True)
    console.print(cache_bench.table(costs))
    line = next(x for x in console.export_text().splitlines() if "mixed" in x)
    cells = [cell.strip() for cell in line.strip("│ ").split("│")]
    expected = ["1024", "mixed 4 bits", "2.20", "1.10", "36.0", "0.90", "0.94"]
    assert cells == [*expected, "50.0", "8.00"]


def test_a_table_needs_a_dynamic_cache_to_compare_with() -> None:
    with pytest.raises(ValueError, match="no dynamic was measured at 7 tokens"):
        cache_bench.table([Cost(7, "mixed 4 bits", 1.0, 1.0, None, 0, 1, 1)])
