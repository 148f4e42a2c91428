"""Feeds a text to the model through a cache and keeps what the model predicts.

Called by `run`. Never chooses settings and writes no files.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvlab.matrix.caches import BuiltCache, CacheFault, cache_argument
from kvlab.matrix.quality import Prefill
from kvlab.quality.build import exact_chunks, new_cache
from kvlab.quality.outliers import add_to_keys, constant_key_shift
from kvlab.quality.setting import Setting


@torch.inference_mode()
def predictions(
    model: Any,
    filled: Prefill,
    forced: Tensor,
    setting: Setting,
    chunks: list[int] | None = None,
) -> tuple[Tensor, BuiltCache]:
    """What a model predicts while it is fed fixed tokens after a prompt, and the cache at the end.

    filled  the prompt's exact Keys and Values: a cache uses these in the prompt's own step
    forced  int64 [1, fed]
    chunks  how many tokens to feed at once; by default as many as change nothing
    return  log-probabilities float32 [1, fed + 1, vocabulary]: position i is the prediction after
            i fed tokens
    raises  CacheFault when another cache ran than was asked for, or one that is not exact in the
            prompt's own step
    """
    prompt_tokens = filled.keys_values[0][0].shape[2]
    chunks = chunks or exact_chunks(setting, prompt_tokens, forced.shape[1])
    built = new_cache(model.config, setting)
    shift = None
    if setting.key_shift:
        shift = constant_key_shift(model.config, setting.key_shift)
        add_to_keys(built.cache, shift)
    for number, (keys, values) in enumerate(filled.keys_values):
        used = built.cache.update(keys, values, number)
        if shift is not None:
            keys = keys + shift[number].to(keys)
        if not all(map(torch.equal, used, (keys, values))):
            raise CacheFault("the cache is not exact in the prompt's own step")
    step = {cache_argument(model): built.cache, "use_cache": True}
    logits = [filled.logits]
    logits += [model(input_ids=part, **step).logits for part in forced.split(chunks, 1)]
    built.verify()
    return torch.log_softmax(torch.cat(logits, dim=1).float(), dim=-1), built
