"""The cache inside a transformer: generation, beams, batches, and what it says no to."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    Cache,
    DynamicCache,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
)

from kvlab.cache import CacheSettings, MixedAxisCache

LONGER_THAN_THE_TEXT = 10_000
PROMPT = 37


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Grouped queries: six heads share two of Keys and Values."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=89,
        hidden_size=48,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def prompt(batch: int = 2, tokens: int = PROMPT) -> Tensor:
    random = torch.Generator().manual_seed(batch)
    return torch.randint(1, 89, (batch, tokens), generator=random)


def small_cache(model: Any, **changes: Any) -> MixedAxisCache:
    return MixedAxisCache(model.config, **{"group_size": 8, "window": 11, **changes})


def logits_of(model: Any, ids: Tensor, cache: Cache, parts: list[int]) -> Tensor:
    """[batch, tokens, vocabulary], fed in parts of these lengths."""
    with torch.inference_mode():
        return torch.cat(
            [
                model(input_ids=part, cache=cache, use_cache=True).logits
                for part in ids.split(parts, dim=1)
            ],
            dim=1,
        )


def generated(model: Any, cache: Cache, batch: int = 2, **options: Any) -> Tensor:
    ids = prompt(batch)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=20,
        do_sample=False,
        **options,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sinks", [0, 4])
def test_a_window_longer_than_the_text_is_a_dynamic_cache_bit_for_bit(
    model: Any, dtype: torch.dtype, sinks: int
) -> None:
    converted = copy.deepcopy(model).to(dtype)
    cache = small_cache(converted, window=LONGER_THAN_THE_TEXT, sink_tokens=sinks)
    parts = [PROMPT - 12, 5, *[1] * 7]
    mine = logits_of(converted, prompt(), cache, parts)
    theirs = logits_of(
        converted, prompt(), DynamicCache(config=converted.config), parts
    )
    assert torch.equal(mine, theirs)


def test_the_prompt_sees_itself_exact(model: Any) -> None:
    cache = small_cache(model, window=0, key_bits=2, value_bits=2)
    mine = logits_of(model, prompt(), cache, [PROMPT])
    assert cache.layers[0].quantized_tokens == 32
    theirs = logits_of(model, prompt(), DynamicCache(config=model.config), [PROMPT])
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("first", [1, 3, 20, PROMPT - 2])
def test_eight_bits_are_close_and_two_bits_are_not(model: Any, first: int) -> None:
    parts = [first, *[1] * (PROMPT - first)]
    exact = logits_of(model, prompt(), DynamicCache(config=model.config), parts)
    errors = []
    for bits in (8, 4, 2):
        cache = small_cache(model, key_bits=bits, value_bits=bits, window=0)
        mine = logits_of(model, prompt(), cache, parts)
        errors.append((mine - exact).abs().mean().item())
    assert errors[0] < 0.02 * exact.std()
    assert errors[0] < errors[1] / 4 < errors[2] / 8


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2}])
@pytest.mark.parametrize("batch", [1, 2])
def test_generate_gives_what_a_dynamic_cache_gives_while_nothing_is_quantized(
    model: Any, options: dict[str, int], batch: int
) -> None:
    if "num_return_sequences" in options:
        options = {**options, "num_beams": 3}
    cache = small_cache(model, window=LONGER_THAN_THE_TEXT)
    mine = generated(model, cache, batch, **options)
    theirs = generated(model, DynamicCache(config=model.config), batch, **options)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
def test_generate_fills_the_cache_with_quantized_tokens(
    model: Any, options: dict[str, int]
) -> None:
    cache = small_cache(model)
    assert generated(model, cache, **options).shape == (2, PROMPT + 20)
    # of 56: 4 sinks, and 12 in a window of 11 to 18
    assert [layer.quantized_tokens for layer in cache.layers] == [40, 40, 40]


def test_a_beam_carries_its_own_tokens(model: Any) -> None:
    """Rows exchanged in the cache and in the input: the same logits, exchanged."""
    swap = torch.tensor([1, 0, 0])
    straight, swapped = small_cache(model), small_cache(model)
    for cache in (straight, swapped):
        logits_of(model, prompt(), cache, [PROMPT])
    swapped.reorder_cache(swap)
    more = prompt(tokens=20)
    expected = logits_of(model, more, straight, [1] * 20)
    got = logits_of(model, more[swap], swapped, [1] * 20)
    torch.testing.assert_close(got, expected[swap], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
    ],
)
def test_batch_changes_move_whole_rows(
    model: Any, change: Callable[[MixedAxisCache], None], rows: list[int]
) -> None:
    cache = small_cache(model)
    logits_of(model, prompt(), cache, [PROMPT])
    before = [layer.restored() for layer in cache.layers]
    change(cache)
    for layer, held in zip(cache.layers, before, strict=True):
        for got, was in zip(layer.restored(), held, strict=True):
            assert torch.equal(got, was[rows])


def test_a_padded_batch_gives_what_each_row_gives_alone(model: Any) -> None:
    ids = prompt(2)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    together = model.generate(
        ids,
        attention_mask=mask,
        cache=small_cache(model, key_bits=8, value_bits=8, sink_tokens=0),
        max_new_tokens=12,
        do_sample=False,
    )
    alone = model.generate(
        ids[1:, 9:],
        attention_mask=torch.ones_like(ids[1:, 9:]),
        cache=small_cache(model, key_bits=8, value_bits=8, sink_tokens=0),
        max_new_tokens=12,
        do_sample=False,
    )
    assert torch.equal(together[1, PROMPT:], alone[0, PROMPT - 9 :])


def test_eager_attention_works_too(model: Any) -> None:
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    parts = [20, *[1] * (PROMPT - 20)]
    torch.testing.assert_close(
        logits_of(eager, prompt(), small_cache(eager), parts),
        logits_of(model, prompt(), small_cache(model), parts),
        atol=1e-3,
        rtol=1e-3,
    )


@pytest.mark.parametrize("window", [0, LONGER_THAN_THE_TEXT])
def test_assisted_generation_crops_the_cache(model: Any, window: int) -> None:
    cache = small_cache(model, window=window)
    got = generated(model, cache, batch=1, prompt_lookup_num_tokens=4)
    assert got.shape == (1, PROMPT + 20)
    assert cache.get_seq_length() == PROMPT + 19
    if window:
        expected = generated(model, DynamicCache(config=model.config), batch=1)
        assert torch.equal(got, expected)


def test_generation_goes_on_where_a_cache_stands(model: Any) -> None:
    """Twenty tokens and then twenty more are what forty are at once."""
    halves, whole = small_cache(model), small_cache(model)
    ids = generated(model, halves, batch=1)
    for cache, given, count in ((halves, ids, 20), (whole, prompt(1), 40)):
        ids = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            cache=cache,
            max_new_tokens=count,
            do_sample=False,
        )
        if cache is halves:
            twice = ids
    assert torch.equal(twice, ids)
    assert halves.nbytes == whole.nbytes


def test_a_copy_lives_its_own_life(model: Any) -> None:
    cache = small_cache(model)
    logits_of(model, prompt(), cache, [30, 7])
    held = [layer.restored() for layer in cache.layers]
    twin = copy.deepcopy(cache)
    more = prompt(tokens=20)
    expected = logits_of(model, more, twin, [1] * 20)
    for layer, was in zip(cache.layers, held, strict=True):
        assert all(map(torch.equal, layer.restored(), was))
    assert torch.equal(logits_of(model, more, cache, [1] * 20), expected)


def test_inference_mode_and_plain_calls_can_take_turns(model: Any) -> None:
    cache = small_cache(model)
    logits_of(model, prompt(), cache, [30, 7])
    out = model(input_ids=prompt(tokens=1), cache=cache, use_cache=True)
    assert out.logits.shape == (2, 1, 89)
    generated_ids = model(input_ids=prompt(tokens=12), cache=cache, use_cache=True)
    generated_ids.logits.sum().backward()
    model.zero_grad()
    cache.reorder_cache(torch.tensor([1, 0]))
    logits_of(model, prompt(tokens=12), cache, [1] * 12)
    assert cache.get_seq_length() == PROMPT + 1 + 12 + 12


def test_a_reset_cache_is_a_new_one(model: Any) -> None:
    cache = small_cache(model)
    first = logits_of(model, prompt(), cache, [30, 7])
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes, cache.allocated_nbytes) == (0, 0, 0)
    assert torch.equal(logits_of(model, prompt(), cache, [30, 7]), first)


def test_early_initialization_is_possible(model: Any) -> None:
    cache = small_cache(model)
    cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    expected = logits_of(model, prompt(), small_cache(model), [30, 7])
    assert torch.equal(logits_of(model, prompt(), cache, [30, 7]), expected)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MistralConfig(sliding_window=16), "sliding windows"),
        (
            Qwen2Config(
                num_hidden_layers=2,
                use_sliding_window=True,
                sliding_window=8,
                max_window_layers=1,
            ),
            "sliding windows",
        ),
        (BartConfig(), "cross-attention"),
        (GPT2Config(add_cross_attention=True), "cross-attention"),
    ],
)
def test_models_it_cannot_serve_are_refused_when_it_is_built(
    config: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        MixedAxisCache(config)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"key_bits": 5}, "key_bits must be one of"),
        ({"value_bits": 16}, "value_bits must be one of"),
        ({"key_axis": "row"}, "key_axis must be one of"),
        ({"group_size": 0}, "group_size must be a whole number, 1 or more"),
        ({"window": -1}, "window must be a whole number, 0 or more"),
        ({"window": 1.5}, "window must be a whole number"),
        ({"sink_tokens": True}, "sink_tokens must be a whole number"),
        ({"group_size": 6, "key_bits": 2}, "multiple of 4"),
        ({"group_size": 4, "value_bits": 3}, "multiple of 8"),
    ],
)
def test_wrong_settings_say_what_was_wrong(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MixedAxisCache(LlamaConfig(), **wrong)


def test_settings_are_what_was_asked_for(model: Any) -> None:
    cache = MixedAxisCache(model.config, 2, 8, 16, 5, 1, "token", "channel")
    expected = CacheSettings(2, 8, 16, 5, 1, "token", "channel")
    assert cache.settings == expected


def test_a_head_dim_that_no_group_divides_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="head_dim is 8, no multiple"):
        logits_of(model, prompt(), small_cache(model, group_size=16), [PROMPT])


def test_another_batch_than_the_cache_holds_is_refused(model: Any) -> None:
    cache = small_cache(model)
    logits_of(model, prompt(2), cache, [PROMPT])
    with pytest.raises(ValueError, match="one cache for one batch"):
        cache.update(torch.zeros(3, 2, 1, 8), torch.zeros(3, 2, 1, 8), 0)


def test_crop_wants_a_negative_number(model: Any) -> None:
    with pytest.raises(ValueError, match="negative"):
        small_cache(model).crop(3)


def test_an_empty_cache_has_nothing_to_restore_and_can_be_cropped(model: Any) -> None:
    cache = small_cache(model)
    cache.crop(-5)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="empty"):
        cache.layers[0].restored()


def test_offloading_is_refused(model: Any) -> None:
    with pytest.raises(NotImplementedError, match="offloaded"):
        small_cache(model).offload(0)
