"""Builds the cache of a setting, and says how to feed it.

Called by `score` and `bytes_held`. Never changes a cache; the libraries' own are built as `matrix`
builds them.
"""

from __future__ import annotations

from typing import Any

from kvlab.matrix import caches
from kvlab.matrix.caches import BuiltCache
from kvlab.matrix.workload import CandidateFamily
from kvlab.quality.setting import Setting


def new_cache(model_config: Any, setting: Setting) -> BuiltCache:
    """A new, empty cache.

    raises ValueError, or whatever the library raises, for a setting that cannot be
    """
    if setting.method == "fp8":
        from transformers import QuantizedCache

        cache: Any = QuantizedCache(backend="fp8", config=model_config)
        return BuiltCache(cache, None, None, "Fp8QuantizedLayer", None)
    if setting.method == "course":
        from kvlab.cache import MixedAxisCache

        cache = MixedAxisCache(
            model_config,
            key_bits=setting.key_bits,
            value_bits=setting.value_bits,
            group_size=setting.group,
            window=setting.window,
            sink_tokens=setting.sinks,
            key_axis=setting.key_axis,
            value_axis=setting.value_axis,
            key_fits=setting.fits,
        )
        return BuiltCache(cache, None, None, "MixedAxisLayer", None)
    return caches.build(model_config, library_family(setting), setting.window)


def library_family(setting: Setting) -> CandidateFamily | None:
    """What `matrix` calls a setting of hqq or quanto; None for every other method."""
    if setting.method not in ("hqq", "quanto"):
        return None
    if setting.key_bits != setting.value_bits:
        raise ValueError(
            f"{setting.method} has one number of bits, not {setting.bits} for Keys and Values"
        )
    return CandidateFamily(
        id=setting.family,
        name="quantized_cache",
        backend=setting.method,
        nbits=setting.key_bits,
        q_group_size=setting.group,
        axis_key=int(setting.key_axis),
        axis_value=int(setting.value_axis),
    )


def held_bytes(cache: Any) -> int:
    """The bytes of the tokens that a cache holds: codes, scales, zero points, exact tokens."""
    own = getattr(cache, "nbytes", None)
    return int(own) if own is not None else caches.cache_bytes(cache)["total"]


def allocated_bytes(cache: Any) -> int:
    """Held bytes, and room that is reserved for tokens to come."""
    own = getattr(cache, "allocated_nbytes", None)
    return int(own) if own is not None else caches.cache_bytes(cache)["total"]


def exact_chunks(setting: Setting, prompt_tokens: int, fed_tokens: int) -> list[int]:
    """How many tokens to feed at once so that each sees what it sees when fed one by one.

    A chunk ends with the token that makes tokens leave the window: that step still sees them
    exact, the next one restored. DynamicCache and fp8 treat each token apart from the others (but
    for the prompt), so they take any number.
    return  the chunks, in order; they sum to fed_tokens
    """
    first = step = max(fed_tokens, 1)
    if family := library_family(setting):
        first = step = caches.exact_chunk(family, setting.window)
    elif setting.method == "course":
        _, quantized = tokens_held(setting, prompt_tokens, 0)
        window = prompt_tokens - setting.sinks - quantized
        first, step = setting.window + setting.group - window, setting.group
    chunks: list[int] = []
    while (left := fed_tokens - sum(chunks)) > 0:
        chunks.append(min(left, step if chunks else first))
    return chunks


def tokens_held(
    setting: Setting, prompt_tokens: int, fed_tokens: int
) -> tuple[int, int]:
    """How many tokens are exact and how many quantized after a prompt and some fed tokens.

    hqq and quanto quantize the whole prompt, then everything whenever the window is full; the
    course's cache quantizes whole groups that have left the window.
    raises ValueError when the prompt is shorter than the sinks
    """
    total = prompt_tokens + fed_tokens
    if setting.method in ("hqq", "quanto"):
        exact = fed_tokens % setting.window
    elif setting.method == "course":
        if prompt_tokens < setting.sinks:
            raise ValueError(
                f"a prompt of {prompt_tokens} tokens is shorter than {setting.sinks} sinks"
            )
        left = max(total - setting.sinks - setting.window, 0)
        exact = total - left // setting.group * setting.group
    else:
        exact = 0 if setting.method == "fp8" else total
    return exact, total - exact
