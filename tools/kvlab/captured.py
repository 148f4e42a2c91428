"""Real Keys, Values and queries of the embedded model, small enough to travel with the package.

Called by labs 03 and 04 and their figures (`load`) and by `kvlab capture` (`capture`). `load` needs torch
and numpy only; transformers is imported by `capture` alone. Never quantizes anything.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FILE_NAME = "smollm2_keys_values.npz"
TEXT = "lighthouse"
TOKENS = 96  # a multiple of 16 and 32, so whole groups and windows can be cut from it


@dataclass(frozen=True)
class Captured:
    """What one attention layer holds for a short English text.

    keys           float32 [1, 3, tokens, 64], after the rotary embedding, as a cache stores them
    values         float32 [1, 3, tokens, 64]
    queries        float32 [1, 9, tokens, 64], after the rotary embedding; query head h reads
                   KV head h // 3, scores are queries @ keys / sqrt(64), causal
    layer          which of the model's 30 layers (counted from 0)
    layers         all layers in the file: the one whose Keys have the largest channel ratio comes
                   first, then the one with the median ratio
    channel_ratio  of this layer: largest over median magnitude of its 3 * 64 Key channels, where
                   a channel's magnitude is its largest |key| over the tokens
    text, tokens   the text, and the same text as a list of one string a token
    source         one sentence that says how the tensors were made
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    layer: int
    layers: tuple[int, ...]
    channel_ratio: float
    text: str
    tokens: list[str]
    source: str


def load(layer: int | None = None, path: Path | None = None) -> Captured:
    """One layer of the captured tensors (stored as float16, returned as float32).

    layer  one of `Captured.layers`; by default the one with the marked Key outlier channels
    path   another file than the one in the package
    raises ValueError when the file has no such layer
    """
    shipped = resources.files("kvlab") / "data" / FILE_NAME
    content = path.read_bytes() if path else shipped.read_bytes()
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        about: dict[str, Any] = json.loads(str(file["about"]))
        layers = tuple(about["layers"])
        layer = layers[0] if layer is None else layer
        if layer not in layers:
            raise ValueError(f"layer {layer} was not captured; there are {layers}")
        keys, values, queries = (
            torch.from_numpy(file[f"{name}_{layer}"].astype(np.float32))
            for name in ("keys", "values", "queries")
        )
    return Captured(
        keys=keys,
        values=values,
        queries=queries,
        layer=layer,
        layers=layers,
        channel_ratio=about["channel_ratios"][layers.index(layer)],
        text="".join(about["tokens"]),
        tokens=about["tokens"],
        source=about["source"],
    )


def capture(path: Path) -> Path:
    """Runs the embedded model over a natural text and writes the file that `load` reads.

    The same machine writes the same bytes each time.
    raises kvlab.models.ModelError when the embedded model cannot be had
    """
    from kvlab import models

    loaded = models.load(models.EMBEDDED)
    ids = loaded.tokenizer(
        models.natural_text(TEXT), add_special_tokens=False, return_tensors="pt"
    ).input_ids[:, :TOKENS]
    keys, values, queries = _attention_inputs(loaded.model, ids)

    ratios = [_channel_ratio(key) for key in keys]
    by_ratio = sorted(range(len(ratios)), key=ratios.__getitem__)
    marked, median = by_ratio[-1], by_ratio[(len(by_ratio) - 1) // 2]
    about = {
        "layers": [marked, median],
        "channel_ratios": [round(ratios[layer], 3) for layer in (marked, median)],
        "tokens": [loaded.tokenizer.decode([token]) for token in ids[0].tolist()],
        "source": (
            f"{models.EMBEDDED_NAME} (Q4_1 weights, computed in float32) read the first "
            f"{TOKENS} tokens of the course's text '{TEXT}'; of its {len(keys)} layers the "
            f"file keeps layer {marked}, whose Key channels differ most (largest over "
            f"median magnitude {ratios[marked]:.2f}), and layer {median}, which is the "
            f"median one ({ratios[median]:.2f}), as float16."
        ),
    }
    arrays: dict[str, Any] = {"about": np.array(json.dumps(about, ensure_ascii=False))}
    for layer in (marked, median):
        for name, of in (("keys", keys), ("values", values), ("queries", queries)):
            arrays[f"{name}_{layer}"] = of[layer].to(torch.float16).numpy()
    _write(path, arrays)
    return path


@torch.no_grad()
def _attention_inputs(
    model: Any, ids: Tensor
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Keys and Values of every layer from the model's cache, queries from its projections."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    queries: list[Tensor] = []

    def keep_queries(attention: Any, args: Any, kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"]
        cos, sin = kwargs["position_embeddings"]
        flat = attention.q_proj(hidden)
        heads = flat.view(*hidden.shape[:-1], -1, attention.head_dim).transpose(1, 2)
        queries.append(apply_rotary_pos_emb(heads, heads, cos, sin)[0])

    hooks = [
        block.self_attn.register_forward_pre_hook(keep_queries, with_kwargs=True)
        for block in model.model.layers
    ]
    try:
        output = model(ids, use_cache=True, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    # transformers 5.24 renamed the field, and warns on stderr when the old name is read
    cache = output["cache" if "cache" in output else "past_key_values"]
    keys = [layer.keys for layer in cache.layers]
    values = [layer.values for layer in cache.layers]
    return keys, values, queries


def _channel_ratio(keys: Tensor) -> float:
    magnitudes = keys.abs().amax(dim=(0, 2)).flatten()
    return float(magnitudes.max() / magnitudes.median())


def _write(path: Path, arrays: dict[str, Any]) -> None:
    """An .npz file, whole or not at all. numpy gives every member the same fixed date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".capture-", dir=path.parent) as scratch:
        part = Path(scratch) / path.name
        with part.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        os.replace(part, path)
