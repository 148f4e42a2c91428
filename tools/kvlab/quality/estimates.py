"""Means over tokens, with standard errors that say what they assume; and ratios of two of them.

Called by `run` and `report`. Arithmetic on plain numbers only.

Tokens of one text are not independent. So three errors stand side by side: over single tokens (too
small when neighbours are alike), over blocks of tokens in a row, and over texts (honest about
texts, but estimated from a handful of them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

Json = dict[str, Any]
METRICS = ("kl", "nll_increase", "topk_overlap")


def of_tokens(values: Sequence[float], block: int) -> Json:
    """What is kept of one text: mean, its error over tokens, and the mean of each block.

    values  one a token, whole blocks of them
    """
    if not values or len(values) % block:
        raise ValueError(f"{len(values)} values do not fill blocks of {block}")
    starts = range(0, len(values), block)
    return {
        "mean": rounded(fmean(values)),
        "standard_error": rounded(_error(values)),
        "blocks": [rounded(fmean(values[at : at + block])) for at in starts],
    }


def over_texts(texts: Sequence[Json], tokens: int) -> Json:
    """The mean over texts of equal length, with its three standard errors.

    texts   as `of_tokens` makes them, of one metric
    tokens  of each text
    return  mean; standard_error (tokens as if independent), standard_error_blocks,
            standard_error_texts; an error is None where there is one observation
    """
    mean = fmean(text["mean"] for text in texts)
    squares = 0.0
    for text in texts:
        within = (text["standard_error"] or 0.0) ** 2 * tokens * (tokens - 1)
        squares += within + tokens * (text["mean"] - mean) ** 2
    count = tokens * len(texts)
    by_token = math.sqrt(squares / (count - 1) / count) if count > 1 else None
    return {
        "mean": rounded(mean),
        "standard_error": rounded(by_token),
        "standard_error_blocks": rounded(_error(_blocks(texts))),
        "standard_error_texts": rounded(_error([text["mean"] for text in texts])),
    }


def ratio(above: Sequence[Json], below: Sequence[Json]) -> Json:
    """How many times one cache's mean is another's, on the same tokens of the same texts.

    The error over blocks is that of a ratio of means over pairs (delta method); the error over
    texts leaves one text out at a time (jackknife), and is None with one text.
    return  ratio, standard_error_blocks, standard_error_texts, by_text
    """
    tops, bottoms = _blocks(above), _blocks(below)
    value = fmean(tops) / fmean(bottoms)
    residuals = [t - value * b for t, b in zip(tops, bottoms, strict=True)]
    error = _error(residuals)
    return {
        "ratio": rounded(value),
        "standard_error_blocks": rounded(error and error / fmean(bottoms)),
        "standard_error_texts": rounded(_jackknife(above, below)),
        "by_text": [
            rounded(a["mean"] / b["mean"]) for a, b in zip(above, below, strict=True)
        ],
    }


def rounded(value: float | None) -> float | None:
    """Six significant digits: more than any of these figures has."""
    return None if value is None else float(f"{value:.6g}")


def _jackknife(above: Sequence[Json], below: Sequence[Json]) -> float | None:
    count = len(above)
    if count < 2:
        return None
    tops, bottoms = ([text["mean"] for text in side] for side in (above, below))
    without = [
        (sum(tops) - tops[i]) / (sum(bottoms) - bottoms[i]) for i in range(count)
    ]
    middle = fmean(without)
    return math.sqrt((count - 1) / count * sum((w - middle) ** 2 for w in without))


def _blocks(texts: Sequence[Json]) -> list[float]:
    return [block for text in texts for block in text["blocks"]]


def _error(values: Sequence[float]) -> float | None:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
