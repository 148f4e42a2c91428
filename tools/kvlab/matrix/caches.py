"""Builds the caches, and says exactly what they hold: bytes, layer class, window.

Called by `measure` and `quality`. Never changes a cache and never copies a tensor.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvlab.matrix import quanto
from kvlab.matrix.workload import CandidateFamily

ANY_NUMBER = 1 << 30


class CacheFault(RuntimeError):
    """A cache is not what was asked for; its figures would be about something else."""


@dataclass(frozen=True)
class Backend:
    """How one kind of cache is built and read.

    build          (model config, cache config) -> the cache
    layer_class    the class that each of its layers must have
    window_tokens  (cache) -> tokens in high precision, of the first layer
    room           (cache, residual_length) -> how many tokens can be fed at once now, with every
                   token seeing what it sees when they are fed one by one
    """

    build: Callable[[Any, dict[str, Any]], Any]
    layer_class: str
    window_tokens: Callable[[Any], int]
    room: Callable[[Any, int], int]


def _transformers_cache(config: Any, cache_config: dict[str, Any]) -> Any:
    from transformers import QuantizedCache

    if cache_config["backend"] == "quanto":
        quanto.ready()
    return QuantizedCache(config=config, **cache_config)


def _window_of_quantized_layer(cache: Any) -> int:
    keys = cache.layers[0].keys
    # an empty window is a tensor of one dimension
    return keys.shape[-2] if keys is not None and keys.dim() == 4 else 0


def _room_of_quantized_layer(cache: Any, residual_length: int) -> int:
    if not _whole_window_is_exact():
        return 1
    return max(residual_length - _window_of_quantized_layer(cache), 1)


@lru_cache
def _whole_window_is_exact() -> bool:
    """Whether a window's tokens may be fed at once: asked of the installed transformers.

    A layer overflows at the update that fills its window, and that update still returns the
    window as it was. So a whole window fed at once is what its tokens see one by one, unless the
    layer looks at the tokens it holds before the update only, as older versions do.
    """
    from transformers.cache_utils import QuantizedLayer

    class Exact(QuantizedLayer):
        def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
            return tensor

        def _dequantize(self, qtensor: torch.Tensor) -> torch.Tensor:
            return qtensor

    left = []
    for fed in ([1, 1, 1, 1], [4]):
        layer = Exact(residual_length=4)
        for tokens in (2, *fed):
            layer.update(torch.ones(1, 1, tokens, 1), torch.ones(1, 1, tokens, 1))
        left.append(layer.keys.numel())
    return left == [0, 0]


def _mixed_axis_cache(config: Any, cache_config: dict[str, Any]) -> Any:
    from kvlab.cache import MixedAxisCache

    axis = {-2: "channel", -1: "token"}
    return MixedAxisCache(
        config,
        key_bits=cache_config["nbits"],
        value_bits=cache_config["nbits"],
        group_size=cache_config["q_group_size"],
        window=cache_config["residual_length"],
        sink_tokens=cache_config.get("sink_tokens", 0),
        key_axis=axis[cache_config["axis_key"]],
        value_axis=axis[cache_config["axis_value"]],
    )


def _window_of_mixed_axis_layer(cache: Any) -> int:
    return int(cache.layers[0].window_tokens)


def _room_of_mixed_axis_layer(cache: Any, residual_length: int) -> int:
    """Up to the token that makes a whole group leave: its own step sees the group exact."""
    settings = cache.settings
    most = settings.sink_tokens + residual_length + settings.group_size
    return int(most - cache.layers[0].exact_tokens)


BACKENDS: dict[str, Backend] = {
    "hqq": Backend(
        _transformers_cache,
        "HQQQuantizedLayer",
        _window_of_quantized_layer,
        _room_of_quantized_layer,
    ),
    "quanto": Backend(
        _transformers_cache,
        "QuantoQuantizedLayer",
        _window_of_quantized_layer,
        _room_of_quantized_layer,
    ),
    "kvlab": Backend(
        _mixed_axis_cache,
        "MixedAxisLayer",
        _window_of_mixed_axis_layer,
        _room_of_mixed_axis_layer,
    ),
}


@dataclass(frozen=True)
class BuiltCache:
    """A new cache, and the dict it was built from with a copy made before."""

    cache: Any
    config: dict[str, Any] | None
    config_before: dict[str, Any] | None
    layer_class: str
    family: CandidateFamily | None

    def verify(self) -> None:
        """raises CacheFault when another layer class ran or the config was changed."""
        ran = layer_classes(self.cache)
        if ran != [self.layer_class]:
            raise CacheFault(
                f"asked for layers of class {self.layer_class}, but {', '.join(ran)} ran"
            )
        if self.config != self.config_before:
            raise CacheFault(
                f"the call changed its cache config from {self.config_before} "
                f"to {self.config}"
            )

    def window_tokens(self) -> int:
        """Tokens held in high precision; all of them in a DynamicCache."""
        if self.family is None:
            return int(self.cache.get_seq_length())
        return BACKENDS[self.family.backend].window_tokens(self.cache)

    def room(self) -> int:
        """See `Backend.room`; a DynamicCache takes any number of tokens at once."""
        if self.family is None or self.config is None:
            return ANY_NUMBER
        backend = BACKENDS[self.family.backend]
        return backend.room(self.cache, self.config["residual_length"])


def build(
    model_config: Any, family: CandidateFamily | None, window: int | None
) -> BuiltCache:
    """A new cache of a family (None: the baseline), from a config dict made for this call."""
    if family is None or window is None:
        from transformers import DynamicCache

        cache = DynamicCache(config=model_config)
        return BuiltCache(cache, None, None, "DynamicLayer", None)
    backend = BACKENDS[family.backend]
    config = family.cache_config(window)
    before = copy.deepcopy(config)
    cache = backend.build(model_config, config)
    return BuiltCache(cache, config, before, backend.layer_class, family)


def exact_chunk(family: CandidateFamily | None, window: int | None) -> int:
    """How many tokens an empty window of a library's cache takes at once: `Backend.room`."""
    if family is None or window is None:
        return ANY_NUMBER
    return window if _whole_window_is_exact() else 1


def layer_classes(cache: Any) -> list[str]:
    """The classes of the layers that ran, each once."""
    return sorted({type(layer).__name__ for layer in cache.layers})


def cache_argument(model: Any) -> str:
    """What this version of transformers calls the cache in a forward call.

    Newer ones say `cache` and warn about the older name; older ones know only that.
    """
    known = inspect.signature(model.forward).parameters
    return "cache" if "cache" in known else "past_key_values"


PARTS = ("codes", "scales", "zeros", "window", "other")


def cache_bytes(cache: Any) -> dict[str, int]:
    """The bytes a cache holds, by part, and their total.

    codes   quantized values; `scales`, `zeros`: what restores them
    window  tokens in high precision (in a DynamicCache all of them)
    other   any further tensor
    A storage that several tensors share counts once and in full, so a small view that keeps a
    large tensor alive is not taken for a small one.
    """
    sizes = dict.fromkeys(PARTS, 0)
    seen: set[int] = set()
    for layer in cache.layers:
        for part, tensor in _tensors(vars(layer), ""):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sizes[part] += storage.nbytes()
    return {"total": sum(sizes.values()), **sizes}


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every plain tensor inside, with the part it belongs to."""
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            for inner in value.__tensor_flatten__()[0]:
                yield from _tensors(getattr(value, inner), f"{name}.{inner}")
        else:
            yield _part(name, value), value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, name)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name), f"{name}.{field.name}")


def _part(name: str, tensor: torch.Tensor) -> str:
    last = name.rsplit(".", 1)[-1].strip("_")
    if last in ("keys", "values"):
        return "window"
    if last.startswith("scale"):
        return "scales"
    if last.startswith(("zero", "shift", "minimum")):
        return "zeros"
    if "quantized" in name or last in ("codes", "key_codes", "value_codes"):
        return "codes"
    return "other"
