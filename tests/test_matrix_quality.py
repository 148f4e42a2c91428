"""`kvlab.matrix.quality`: scores by hand, and feeding in chunks instead of token by token."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from test_matrix_measure import FAMILIES, QUANTO, name_of, prompt, tiny_model

from kvlab.matrix import caches, quality
from kvlab.matrix.judge import Mean
from kvlab.matrix.workload import HQQ, CandidateFamily


def log_probs(*rows: list[float]) -> torch.Tensor:
    """Log-probabilities [1, len(rows), vocabulary] of given probabilities."""
    return torch.tensor([rows]).log()


def test_scores_by_hand() -> None:
    baseline = log_probs([0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4])
    candidate = log_probs([0.25, 0.5, 0.2, 0.05], [0.4, 0.3, 0.2, 0.1])
    targets = torch.tensor([[0, 3]])
    scored = quality.scores(candidate, targets, baseline, topk=2)
    assert scored.nll == pytest.approx([math.log(4), math.log(10)])
    by_hand = []
    for p, q in (
        ([0.5, 0.25, 0.125, 0.125], [0.25, 0.5, 0.2, 0.05]),
        ([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]),
    ):
        by_hand.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    assert scored.kl == pytest.approx(by_hand)
    # top two: {0, 1} and {1, 0}; {3, 2} and {0, 1}
    assert scored.topk_overlap == [1.0, 0.0]


def test_baseline_has_no_distance_to_itself() -> None:
    own = quality.scores(log_probs([0.5, 0.5]), torch.tensor([[1]]), None, topk=1)
    assert (own.kl, own.topk_overlap) == ([], [])
    assert own.nll == pytest.approx([math.log(2)])


def test_mean_and_its_standard_error() -> None:
    values = [1.0, 2.0, 4.0, 9.0]
    mean = Mean.of(values)
    assert mean.mean == 4.0
    spread = math.sqrt(((3**2) + (2**2) + 0 + (5**2)) / 3)
    assert mean.standard_error == pytest.approx(spread / 2)
    assert Mean.of([7.0]) == Mean(7.0, None)


# quanto's Key axis at a window of 32 is left out: its groups move as the context grows, so tokens
# that lie on one grid are put on another, where some fall half way between two codes, and then the
# last bit of a float decides
@pytest.mark.parametrize(
    ("family", "window"),
    [(f, w) for f in FAMILIES for w in (32, 64) if (f, w) != (QUANTO, 32)],
    ids=lambda value: str(value) if isinstance(value, int) else name_of(value),
)
def test_a_window_at_once_is_what_its_tokens_see_one_by_one(
    family: CandidateFamily, window: int
) -> None:
    # in double precision, so that the order of the sums does not move a code
    model, ids = tiny_model(torch.float64), prompt(1, 64 + 150, seed=3)
    filled = quality.prefill(model, ids[:, :64])

    def feed(family: CandidateFamily | None, chunk: int) -> torch.Tensor:
        built = caches.build(model.config, family, window)
        return quality.forced_log_probs(model, filled, ids[:, 64:], built, chunk)

    one_by_one, at_once = feed(family, 1), feed(family, caches.ANY_NUMBER)
    assert one_by_one.shape == (1, 151, 256)
    assert (one_by_one - at_once).abs().max() < 1e-4
    beside = feed(None, 150)
    assert (one_by_one - beside).abs().mean() > 1e-2


def making(
    model: Any, family: CandidateFamily | None, window: int | None
) -> quality.MakeCache:
    return partial(caches.build, model.config, family, window)


@pytest.mark.parametrize("family", [HQQ, QUANTO], ids=name_of)
def test_first_token_of_the_trajectory_comes_from_the_exact_prefill(
    family: CandidateFamily,
) -> None:
    model, ids = tiny_model(), prompt(1, 64)
    trajectory = prompt(1, 16, seed=5)
    both = [making(model, None, None), making(model, family, 32)]
    base, ours = quality.fixed_trajectory(model, ids, trajectory, both, 5)
    assert len(base.nll) == len(ours.nll) == len(ours.kl) == 16
    assert ours.nll[0] == base.nll[0]
    assert ours.kl[0] == pytest.approx(0, abs=1e-6)
    assert ours.topk_overlap[0] == 1.0
    assert min(ours.kl[1:]) > 0
    assert 0 <= min(ours.topk_overlap) <= max(ours.topk_overlap) <= 1


def test_a_cache_like_the_baseline_scores_like_it() -> None:
    model, ids = tiny_model(), prompt(2, 32)
    twice = [making(model, None, None)] * 2
    base, same = quality.fixed_trajectory(model, ids, prompt(2, 8, seed=2), twice, 5)
    assert same.nll == base.nll
    assert len(same.nll) == 16  # of both rows
    assert same.kl == pytest.approx([0.0] * 16, abs=1e-6)
    assert same.topk_overlap == [1.0] * 16


def test_natural_text_scores_what_follows_each_fed_token() -> None:
    model, ids = tiny_model(), prompt(1, 64 + 20 + 1, seed=4)
    both = [making(model, None, None), making(model, HQQ, 16)]
    base, ours = quality.natural_text(model, ids, 64, both, 5)
    with torch.no_grad():
        whole = model(input_ids=ids).logits.log_softmax(-1)
    expected = [-whole[0, t, ids[0, t + 1]].item() for t in range(64, 84)]
    assert base.nll == pytest.approx(expected, abs=1e-4)
    assert len(ours.kl) == 20 and min(ours.kl) > 0


def test_scored_caches_are_checked_like_measured_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(config: Any, cache_config: dict[str, Any]) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=config)

    backend = replace(caches.BACKENDS["hqq"], build=wrong)
    monkeypatch.setitem(caches.BACKENDS, "hqq", backend)
    model = tiny_model()
    with pytest.raises(caches.CacheFault):
        quality.forced_log_probs(
            model,
            quality.prefill(model, prompt(1, 8)),
            prompt(1, 4),
            caches.build(model.config, HQQ, 16),
            at_once=4,
        )


@pytest.mark.parametrize("family", [None, *FAMILIES], ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_cache_filled_by_hand_is_the_one_that_the_model_fills(
    family: CandidateFamily | None, dtype: torch.dtype, batch: int
) -> None:
    model, ids = tiny_model(dtype), prompt(batch, 64 + 34)
    filled = quality.prefill(model, ids[:, :64])
    built = caches.build(model.config, family, 32)
    ours = quality.forced_log_probs(model, filled, ids[:, 64:], built, at_once=1)
    cache = caches.build(model.config, family, 32).cache
    step = {caches.cache_argument(model): cache}
    with torch.inference_mode():
        logits = [model(input_ids=ids[:, :64], logits_to_keep=1, **step).logits]
        for token in ids[:, 64:].split(1, dim=1):
            logits.append(model(input_ids=token, **step).logits)
    assert torch.equal(ours, torch.cat(logits, dim=1).float().log_softmax(-1))


def test_cache_that_is_not_exact_for_the_prompt_is_refused() -> None:
    model = tiny_model()
    built = caches.build(model.config, HQQ, 16)
    layer = built.cache.layers[0]
    real = layer.update
    layer.update = lambda k, v, *rest, **more: tuple(
        t * 1.01 for t in real(k, v, *rest, **more)
    )
    filled = quality.prefill(model, prompt(1, 64))
    with pytest.raises(caches.CacheFault, match="not exact"):
        quality.forced_log_probs(model, filled, prompt(1, 4), built, at_once=4)
