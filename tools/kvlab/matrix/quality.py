"""How far a candidate's predictions are from the baseline's, on the same fed tokens.

Called by `run`. Two texts: the baseline's own first greedy tokens (the figure the acceptance
needs) and a natural text (longer, since 16 tokens cannot tell two good caches apart).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvlab.matrix.caches import (
    ANY_NUMBER,
    BuiltCache,
    CacheFault,
    build,
    cache_argument,
)

MakeCache = Callable[[], BuiltCache]


@dataclass(frozen=True)
class TokenScores:
    """One number a scored token.

    nll           -log p(token), nats
    kl            KL(baseline || candidate), nats; empty for the baseline itself
    topk_overlap  share of the baseline's top tokens that are in the candidate's top
    """

    nll: list[float]
    kl: list[float]
    topk_overlap: list[float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Prefill:
    """A prompt's exact Keys and Values, computed once for all caches.

    logits       [batch, 1, vocabulary], of the prompt's last position
    keys_values  a pair of [batch, heads, tokens, head_dim] for each layer
    """

    logits: Tensor
    keys_values: list[tuple[Tensor, Tensor]]


@torch.inference_mode()
def prefill(model: Any, prompt: Tensor) -> Prefill:
    """What a model makes of a prompt, int64 [batch, tokens]."""
    cache = build(model.config, None, None).cache
    step = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
    logits = model(input_ids=prompt, **step).logits
    return Prefill(logits, [(layer.keys, layer.values) for layer in cache.layers])


@torch.inference_mode()
def forced_log_probs(
    model: Any,
    filled: Prefill,
    forced: Tensor,
    built: BuiltCache,
    at_once: int = ANY_NUMBER,
) -> Tensor:
    """What a model predicts while it is fed fixed tokens after a prompt.

    filled   the prompt. A cache gets its Keys and Values as from the model itself: the caches
             here use the exact ones for the prompt's own step, so each layer sees the same
    forced   int64 [batch, scored]
    built    an empty cache
    at_once  the most tokens to feed at once; never more than the cache has room for
    return   log-probabilities float32 [batch, scored + 1, vocabulary]: position i is the
             prediction after i forced tokens, so position 0 comes from the prompt alone
    raises CacheFault when the cache is not what was asked for, or not exact for the prompt
    """
    for number, pair in enumerate(filled.keys_values):
        used = built.cache.update(*pair, number)
        if not all(map(torch.equal, used, pair)):
            raise CacheFault("the cache is not exact in the prompt's own step")
    step = {cache_argument(model): built.cache, "use_cache": True}
    logits, fed = [filled.logits], 0
    while fed < forced.shape[1]:
        part = forced[:, fed : fed + min(built.room(), at_once)]
        logits.append(model(input_ids=part, **step).logits)
        fed += part.shape[1]
    built.verify()
    return torch.log_softmax(torch.cat(logits, dim=1).float(), dim=-1)


def scores(
    log_probs: Tensor, targets: Tensor, reference: Tensor | None, topk: int
) -> TokenScores:
    """Scores of predictions; without a reference they are the baseline's own.

    log_probs, reference  float32 [batch, scored, vocabulary]
    targets               int64 [batch, scored]
    """
    nll = -log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if reference is None:
        return TokenScores(nll.flatten().tolist(), [], [])
    kl = (reference.exp() * (reference - log_probs)).sum(dim=-1)
    theirs = reference.topk(topk, dim=-1).indices.unsqueeze(-1)
    ours = log_probs.topk(topk, dim=-1).indices.unsqueeze(-2)
    overlap = (theirs == ours).any(dim=-1).float().mean(dim=-1)
    return TokenScores(
        nll.flatten().tolist(), kl.flatten().tolist(), overlap.flatten().tolist()
    )


def fixed_trajectory(
    model: Any,
    prompt: Tensor,
    trajectory: Tensor,
    caches: Sequence[MakeCache],
    topk: int,
) -> list[TokenScores]:
    """Scores of each cache, the baseline first, on the baseline's first greedy tokens.

    trajectory  int64 [batch, scored]. The first token is predicted by the prefill, which every
                cache here does with exact Keys and Values
    """
    forced = trajectory[:, :-1]
    return _all_scores(model, prompt, forced, trajectory, caches, topk, first=0)


def natural_text(
    model: Any,
    token_ids: Tensor,
    prompt_tokens: int,
    caches: Sequence[MakeCache],
    topk: int,
) -> list[TokenScores]:
    """Scores of each cache, the baseline first, on a text: of what follows each fed token.

    token_ids  int64 [1, prompt + scored + 1]
    """
    prompt, forced = token_ids[:, :prompt_tokens], token_ids[:, prompt_tokens:-1]
    targets = token_ids[:, prompt_tokens + 1 :]
    return _all_scores(model, prompt, forced, targets, caches, topk, first=1)


def _all_scores(
    model: Any,
    prompt: Tensor,
    forced: Tensor,
    targets: Tensor,
    caches: Sequence[MakeCache],
    topk: int,
    first: int,
) -> list[TokenScores]:
    filled = prefill(model, prompt)
    reference: Tensor | None = None
    results = []
    for make in caches:
        predicted = forced_log_probs(model, filled, forced, make())[:, first:]
        results.append(scores(predicted, targets, reference, topk))
        reference = predicted if reference is None else reference
    return results
