"""What the cache holds, counted: every byte, and what one flush touches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from kvlab.cache import AXES, BITS, MixedAxisCache
from kvlab.matrix.caches import cache_bytes

BATCH, HEADS, HEAD_DIM, LAYERS = 2, 3, 64, 2
CONFIG = LlamaConfig(num_hidden_layers=LAYERS)


def filled(tokens: int, steps: int = 0, **settings: Any) -> MixedAxisCache:
    cache = MixedAxisCache(CONFIG, **settings)
    random = torch.Generator().manual_seed(0)
    for count in (tokens, *[1] * steps):
        for number in range(LAYERS):
            shape = (BATCH, HEADS, count, HEAD_DIM)
            cache.update(
                torch.randn(shape, generator=random),
                torch.randn(shape, generator=random),
                number,
            )
    return cache


def tensors_within(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that an object leads to."""
    if id(value) in seen or isinstance(value, (type, str)):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_within(item, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_within(item, seen)
    elif hasattr(value, "__dict__"):
        yield from tensors_within(vars(value), seen)


def storage_bytes(cache: MixedAxisCache) -> int:
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors_within(cache, set())
    }
    return sum(storages.values())


@pytest.mark.parametrize("steps", [0, 1, 200])
def test_no_byte_is_left_out(steps: int) -> None:
    cache = filled(100, steps)
    assert cache.allocated_nbytes + cache.scratch_nbytes == storage_bytes(cache)
    assert cache.nbytes <= cache.allocated_nbytes


def test_the_matrix_counts_the_same_storage() -> None:
    cache = filled(100, 70)
    parts = cache_bytes(cache)
    assert parts["total"] == cache.allocated_nbytes
    assert parts["other"] == 0
    assert parts["codes"] > parts["scales"] == parts["zeros"] > 0


@pytest.mark.parametrize("key_axis", AXES)
@pytest.mark.parametrize("value_axis", AXES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [32, 64])
def test_a_quantized_value_takes_its_bits_and_its_share_of_scale_and_minimum(
    key_axis: str, value_axis: str, bits: int, group: int
) -> None:
    cache = filled(
        1000,
        key_bits=bits,
        value_bits=bits,
        group_size=group,
        window=17,
        key_axis=key_axis,
        value_axis=value_axis,
    )
    layer = cache.layers[0]
    assert layer.quantized_tokens == (1000 - 4 - 17) // group * group
    a_token = 2 * BATCH * HEADS * HEAD_DIM * LAYERS
    exact = 4 * a_token * (layer.window_tokens + layer.sink_tokens)
    quantized = a_token * layer.quantized_tokens * (bits + 2 * 16 / group) / 8
    assert cache.nbytes == exact + quantized


def test_keys_and_values_have_their_own_bits() -> None:
    both = [filled(1000, key_bits=k, value_bits=v).nbytes for k, v in ((2, 2), (8, 8))]
    mixed = filled(1000, key_bits=2, value_bits=8).nbytes
    assert mixed == sum(both) / 2


def test_a_long_prompt_leaves_room_for_an_eighth_of_its_groups() -> None:
    cache = filled(2000)
    layer = cache.layers[0]
    a_token = 2 * BATCH * HEADS * HEAD_DIM * LAYERS
    groups = layer.quantized_tokens // 32
    spare = -(-groups // 8) * 32 * a_token * (4 + 1) / 8
    window = 4 * a_token * (32 + 31 - layer.window_tokens)
    assert cache.allocated_nbytes == cache.nbytes + spare + window


def test_room_is_at_most_half_more_than_what_is_held() -> None:
    cache = filled(300, 400)
    assert cache.allocated_nbytes < 1.5 * cache.nbytes


def test_scratch_is_one_layer_whatever_their_number() -> None:
    cache = filled(500, 1)
    one_layer = 2 * BATCH * HEADS * HEAD_DIM * 501 * 4
    # restored Keys and Values; codes and scales of one of the two; a quarter more to grow into
    assert cache.scratch_nbytes < 1.25 * one_layer * (1 + 1 / 8 + 1 / 16)


def test_a_cut_group_counts_as_a_whole() -> None:
    cache = filled(4 + 64 + 32)
    whole = cache.nbytes
    a_token = 2 * BATCH * HEADS * HEAD_DIM * LAYERS
    cache.crop(-32)
    assert cache.nbytes == whole - 32 * 4 * a_token
    before = cache.nbytes
    cache.crop(-1)
    assert cache.nbytes == before
    cache.crop(-31)
    assert cache.nbytes == before - 32 * a_token * (4 + 1) / 8


class Written(TorchDispatchMode):
    """Counts the operations inside, and the elements that they write.

    Making storage writes nothing; it is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        if isinstance(out, Tensor) and not (func.is_view or "empty" in func.name()):
            self.elements += out.numel()
        return out


def cost_of_a_flush(context: int) -> tuple[int, int]:
    """Operations and elements of the step that flushes, less those of the step before it."""
    cache = filled(context)
    layer = cache.layers[0]
    costs = []
    new = torch.randn(BATCH, HEADS, 1, HEAD_DIM)
    while True:
        held = layer.quantized_tokens
        with Written() as written:
            cache.update(new, new, 0)
        costs.append((written.operations, written.elements))
        if layer.quantized_tokens > held and len(costs) > 1:
            break
    (operations, elements), (before, elements_before) = costs[-1], costs[-2]
    return operations - before, elements - elements_before


def test_a_flush_costs_the_same_at_any_context() -> None:
    short, long = cost_of_a_flush(200), cost_of_a_flush(3000)
    assert short == long


def test_a_flush_leaves_every_quantized_byte_as_it_was() -> None:
    cache = filled(300)
    segments = cache.layers[0].segments
    before = [
        [
            tensor[:, :, : s.groups].clone()
            for tensor in (*s.keys.tensors(), *s.values.tensors())
        ]
        for s in segments
    ]
    storages = [s.keys.codes.data_ptr() for s in segments]
    new = torch.randn(BATCH, HEADS, 1, HEAD_DIM)
    for _ in range(400):
        cache.update(new, new, 0)
    assert cache.layers[0].quantized_tokens > 600
    for segment, tensors, storage in zip(segments, before, storages, strict=False):
        assert segment.keys.codes.data_ptr() == storage
        now = (*segment.keys.tensors(), *segment.values.tensors())
        for tensor, was in zip(now, tensors, strict=True):
            assert torch.equal(tensor[:, :, : was.shape[2]], was)
