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

from kvlab.matrix.caches import BuiltCache, cache_argument


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


@torch.inference_mode()
def forced_log_probs(
    model: Any,
    prompt: Tensor,
    forced: Tensor,
    build: Callable[[], BuiltCache],
    chunk: int = 1,
) -> Tensor:
    """What a model predicts while it is fed fixed tokens after a prompt.

    prompt  int64 [batch, tokens]
    forced  int64 [batch, scored], fed `chunk` at a time
    return  log-probabilities float32 [batch, scored + 1, vocabulary]: position i is the
            prediction after i forced tokens, so position 0 comes from the prompt alone
    """
    built = build()
    step = {cache_argument(model): built.cache, "use_cache": True}
    logits = [model(input_ids=prompt, logits_to_keep=1, **step).logits]
    for part in forced.split(chunk, dim=1):
        logits.append(model(input_ids=part, **step).logits)
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
    builds: Sequence[Callable[[], BuiltCache]],
    topk: int,
) -> list[TokenScores]:
    """Scores of the baseline (first of `builds`) and of each candidate, fed one by one.

    trajectory  int64 [batch, scored]: the baseline's first greedy tokens. The first of them is
                predicted by the prefill, which returns exact Keys and Values in every cache.
    """
    reference: Tensor | None = None
    results = []
    for build in builds:
        predicted = forced_log_probs(model, prompt, trajectory[:, :-1], build)
        results.append(scores(predicted, trajectory, reference, topk))
        reference = predicted if reference is None else reference
    return results


def natural_text(
    model: Any,
    token_ids: Tensor,
    prompt_tokens: int,
    builds: Sequence[tuple[Callable[[], BuiltCache], int]],
    topk: int,
) -> list[TokenScores]:
    """Scores on a text; the tokens after the prompt are fed, and the one after each is scored.

    token_ids  int64 [1, prompt + scored + 1]
    builds     the baseline first; each with the number of tokens to feed at once
    """
    prompt, forced = token_ids[:, :prompt_tokens], token_ids[:, prompt_tokens:-1]
    targets = token_ids[:, prompt_tokens + 1 :]
    reference: Tensor | None = None
    results = []
    for build, chunk in builds:
        predicted = forced_log_probs(model, prompt, forced, build, chunk)[:, 1:]
        results.append(scores(predicted, targets, reference, topk))
        reference = predicted if reference is None else reference
    return results
