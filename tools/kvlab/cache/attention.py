"""Attention for one new token at a time, with one matrix product for all queries of a Key head.

Called by transformers once `use_decode_attention` has set it; works with every cache. Never used for
prompts or for training: those go to torch's own attention.

torch's own attention on a CPU reads a head's Keys and Values once for each query that shares them.
Here the queries that share a head are the rows of one matrix, so that these are read once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "kvlab_decode"


def use_decode_attention(model: Any) -> None:
    """Makes a model decode with it; `model.set_attn_implementation("sdpa")` undoes that."""
    AttentionInterface.register(NAME, decode_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def decode_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """softmax(query key^T x scaling + mask) value.

    query   [batch, heads, new, head_dim]
    key     [batch, key heads, tokens, head_dim]; value likewise
    mask    [batch, 1, new, tokens]: bool (true: attend) or added to the scores; None for none
    return  [batch, new, heads, head_dim] and no weights
    """
    batch, heads, new, head_dim = query.shape
    special = dropout or any(
        kwargs.get(name) is not None for name in ("position_bias", "softcap")
    )
    if new != 1 or special or (torch.is_grad_enabled() and query.requires_grad):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    key_heads = key.shape[1]
    queries = query.reshape(batch * key_heads, heads // key_heads, head_dim)
    queries = queries * (head_dim**-0.5 if scaling is None else scaling)
    scores = torch.bmm(queries, key.flatten(0, 1).transpose(1, 2))
    if attention_mask is not None:
        by_head = scores.view(batch, heads, 1, -1)
        if attention_mask.dtype == torch.bool:
            by_head.masked_fill_(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            by_head += attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    out = torch.bmm(weights, value.flatten(0, 1))
    return out.view(batch, 1, heads, value.shape[-1]), None
