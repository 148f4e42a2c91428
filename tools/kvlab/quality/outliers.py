"""Gives a model's Keys outlier channels without changing what the model says.

Called by `score` and by lab 05. Never touches the model: it stands between the model and a cache.

Adding one constant vector c to every Key, after the rotary embedding, adds q·c to every score of a
query q: the same number for every token. Softmax forgets a constant, so with exact Keys nothing
changes. A quantizer sees something else: Keys whose channels have very different sizes. Models
whose Keys have a bias look like this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvlab.quality.shape import head_dim, kv_heads


def constant_key_shift(
    model_config: Any, size: float, channels: int = 2, seed: int = 0
) -> Tensor:
    """One constant vector a layer and head: `size` in some channels, 0 in the others.

    size      added to the chosen channels, in the Keys' own unit
    channels  how many of a head's channels; which ones differ from head to head
    return    float32 [layers, kv_heads, 1, head_dim]
    raises    ValueError when a head has fewer channels
    """
    width = head_dim(model_config)
    if not 1 <= channels <= width:
        raise ValueError(
            f"channels must be from 1 to head_dim, {width}; got {channels}"
        )
    generator = torch.Generator().manual_seed(seed)
    places = (int(model_config.num_hidden_layers), kv_heads(model_config), 1, width)
    order = torch.rand(places, generator=generator).argsort(dim=-1)
    return torch.where(order < channels, float(size), 0.0)


def add_to_keys(cache: Any, shift: Tensor) -> Any:
    """Makes a cache add a constant to every Key before it stores it; returns the same cache.

    cache   any cache of transformers' interface, or the course's; still empty
    shift   [layers, kv_heads, 1, head_dim], as `constant_key_shift` makes it
    raises  ValueError when the cache holds tokens: theirs would lack the constant
    """
    if cache.get_seq_length():
        raise ValueError(
            f"the cache already holds {cache.get_seq_length()} tokens without the constant: "
            "give a new cache"
        )
    update = cache.update

    def shifted_update(
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        keys = key_states + shift[layer_idx].to(key_states)
        return update(keys, value_states, layer_idx, *args, **kwargs)

    cache.update = shifted_update
    return cache
