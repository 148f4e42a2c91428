"""The cache a model is given: one `MixedAxisLayer` for each of its layers.

Called by `matrix`, `quality` and `cache_bench`. Refuses, when it is built, a model it could not serve.
"""

from __future__ import annotations

from typing import Any

from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from kvlab.cache.layer import MixedAxisLayer
from kvlab.cache.scratch import Scratch
from kvlab.cache.settings import CacheSettings


class MixedAxisCache(Cache):
    """A quantized KV cache: Keys per channel, Values per token, packed, append-only.

    Give it to `model.generate(..., cache=cache)` or to a forward call. Groups of `group_size`
    values share a float16 scale and minimum (KIVI, arXiv 2402.02750). The first `sink_tokens`
    tokens stay exact, and so do the last ones: between `window` and `window + group_size - 1`.
    Only whole groups are quantized, each once. The step that brings tokens sees them exact.

    model_config  the model's configuration
    others        see `CacheSettings`
    raises        ValueError for settings that cannot be, and for a model with sliding windows,
                  cross-attention, or layers that are not plain attention
    """

    def __init__(
        self,
        model_config: Any,
        key_bits: int = 4,
        value_bits: int = 4,
        group_size: int = 32,
        window: int = 32,
        sink_tokens: int = 4,
        key_axis: str = "channel",
        value_axis: str = "token",
        key_fits: int = 3,
    ) -> None:
        self.settings = CacheSettings(
            key_bits,
            value_bits,
            group_size,
            window,
            sink_tokens,
            key_axis,
            value_axis,
            key_fits,
        )
        self._scratch = Scratch()
        layers = _plain_layers(model_config)
        super().__init__(
            layers=[MixedAxisLayer(self.settings, self._scratch) for _ in range(layers)]
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens held: codes, scales, minima, window and sinks of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of the storage that belongs to tokens, its unused room included."""
        return sum(layer.allocated_nbytes for layer in self.layers)

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of the buffers all layers share to restore into: about one layer, unquantized."""
        return self._scratch.nbytes

    def reset(self) -> None:
        """Empties the cache and gives its memory back."""
        super().reset()
        self._scratch.clear()


def _plain_layers(model_config: Any) -> int:
    """How many layers a model has, when each is plain self-attention over all tokens.

    raises ValueError when one is not
    """
    config = model_config.get_text_config(decoder=True)
    if (
        getattr(config, "is_encoder_decoder", False)
        or getattr(config, "add_cross_attention", False)
        or getattr(config, "cross_attention_layers", None)
    ):
        raise ValueError(
            "MixedAxisCache cannot serve cross-attention: this model "
            f"({type(model_config).__name__}) attends to another sequence too"
        )
    # the library's own answer to which layers a model has
    kinds = [type(layer) for layer in DynamicCache(config=config).layers]
    others = sorted({kind.__name__ for kind in kinds if kind is not DynamicLayer})
    if others:
        raise ValueError(
            "MixedAxisCache serves layers that attend to all tokens; this model "
            f"({type(model_config).__name__}) also needs {', '.join(others)}. Take a model "
            "without sliding windows, or DynamicCache"
        )
    return len(kinds)
