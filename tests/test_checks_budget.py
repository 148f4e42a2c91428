"""The checks of lab 01 name the known mistakes and let every right variant pass.

Run by pytest, in this process. Builds no notebook and starts no kernel.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from kvlab.checks import Wrong, budget

SHAPE: dict[str, Any] = {
    "batch": 3,
    "tokens": 7,
    "layers": 5,
    "kv_heads": 11,
    "head_dim": 13,
    "bytes_per_value": 4,
}
BYTES = 2 * 3 * 7 * 5 * 11 * 13 * 4
SERVER = {
    "memory_bytes": 1000,
    "weight_bytes": 100,
    "reserve_bytes": 30,
    "kv_bytes_per_request": 7,
}
DECODE: dict[str, Any] = {
    "bandwidth_bytes_per_second": 1000.0,
    "weight_bytes": 60,
    "kv_bytes": 7,
    "batch": 5,
}


def sentence(check: Callable[..., None], got: Any, **known: Any) -> str:
    """What a wrong result is told."""
    with pytest.raises(Wrong) as caught:
        check(got, **known)
    return str(caught.value)


# --- weights --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "bits", "got"),
    [
        (7_000_000_000, 4, 3_500_000_000),
        (3, 4, 2),
        (1, 1, 1),
        (9, 8, 9),
        (96, 4.5, 54),
        (3, 4.5, 2),
        (405_853_388_800, 16, 811_706_777_600),
        (3, 4, torch.tensor(2)),
        (3, 4, np.int64(2)),
    ],
)
def test_weights_accepts_whole_bytes(parameters: int, bits: float, got: Any) -> None:
    budget.weights(got, parameters=parameters, bits=bits)


@pytest.mark.parametrize(
    ("got", "hint"),
    [
        (28_000_000_000, "that is the number of bits"),
        (3.5, "that is in GB"),
        (7e9 / 2 / 2**30, "that is in GiB"),
        (3.26, "that is in GiB"),
        (3500.0, "that is in MB"),
        (3_758_096_384, "a GB was taken for a GiB"),
        (3_259_629_011, "a GiB was taken for a GB"),
        (3_500_000_000.0, "the type is not"),
        (torch.tensor(3.5e9, dtype=torch.float64), "the type is not"),
        (7_000_000_000, "rounded the bytes of one parameter up"),
        (0, "rounded the bytes of one parameter down"),
        (14_000_000_000, "bits has no part in it"),
        (3_490_000_000, "something was rounded on the way"),
        (5, "too small"),
        (None, "returns nothing"),
        ("3500000000", "a str"),
        (True, "a bool"),
        ([3_500_000_000], "a list"),
        (math.inf, "a finite number"),
        (math.nan, "a finite number"),
    ],
)
def test_weights_names_the_mistake(got: Any, hint: str) -> None:
    assert hint in sentence(budget.weights, got, parameters=7_000_000_000, bits=4)


def test_weights_names_rounding_down() -> None:
    assert "you rounded down" in sentence(budget.weights, 1, parameters=3, bits=4)


def test_weights_refuses_a_part_of_a_byte() -> None:
    said = sentence(budget.weights, 1.5, parameters=3, bits=4)
    assert "part of a byte is counted" in said


# --- KV cache -------------------------------------------------------------------------


@pytest.mark.parametrize("got", [BYTES, torch.tensor(BYTES), np.int64(BYTES)])
def test_kv_cache_accepts_whole_bytes(got: Any) -> None:
    budget.kv_cache(got, **SHAPE, query_heads=44)


def test_kv_cache_accepts_the_reference_of_the_lab() -> None:
    shape = dict(zip(SHAPE, (1, 4096, 32, 8, 128, 2), strict=True))
    budget.kv_cache(536_870_912, **shape, query_heads=32)


@pytest.mark.parametrize(
    ("factor", "hint"),
    [
        (Fraction(1, 2), "Keys and Values are not both counted"),
        (Fraction(2), "counted twice"),
        (Fraction(1, 3), "batch has no part in it"),
        (Fraction(1, 7), "tokens has no part in it"),
        (Fraction(1, 21), "the cache of a single token"),
        (Fraction(1, 5), "layers has no part in it"),
        (Fraction(1, 11), "kv_heads has no part in it"),
        (Fraction(1, 13), "head_dim has no part in it"),
        (Fraction(1, 4), "the number of values, not of bytes"),
        (Fraction(4), "query heads are counted"),
        (Fraction(7), "tokens is in it twice"),
        (Fraction(8), "that is the number of bits"),
        (Fraction(1, 8), "one division by 8 too many"),
        (Fraction(1, 10), "two things at once"),
    ],
)
def test_kv_cache_names_a_factor(factor: Fraction, hint: str) -> None:
    got = int(BYTES * factor)
    assert hint in sentence(budget.kv_cache, got, **SHAPE, query_heads=44)


@pytest.mark.parametrize(
    ("got", "hint"),
    [
        (BYTES / 2**30, "that is in GiB"),
        (BYTES / 1e9, "that is in GB"),
        (BYTES / 2**20, "that is in MiB"),
        (float(BYTES), "the type is not"),
        (BYTES + 1, "something was rounded on the way"),
        (17, "too small"),
    ],
)
def test_kv_cache_names_units_and_types(got: Any, hint: str) -> None:
    assert hint in sentence(budget.kv_cache, got, **SHAPE, query_heads=44)


def test_kv_cache_rounds_half_a_byte_up() -> None:
    ones = dict.fromkeys(SHAPE, 1) | {"bytes_per_value": 0.25}
    budget.kv_cache(1, **ones, query_heads=1)
    assert "rounded down" in sentence(budget.kv_cache, 0, **ones, query_heads=1)
    assert "part of a byte" in sentence(budget.kv_cache, 0.5, **ones, query_heads=1)


@pytest.mark.parametrize(("width", "way"), [(0.5, "up"), (1.5, "up"), (1.5, "down")])
def test_kv_cache_names_a_width_that_was_rounded(width: float, way: str) -> None:
    shape = SHAPE | {"bytes_per_value": width}
    rounded = math.ceil(width) if way == "up" else math.floor(width)
    said = sentence(budget.kv_cache, BYTES // 4 * rounded, **shape, query_heads=44)
    assert f"you rounded bytes_per_value {way}" in said


@pytest.mark.parametrize("part", ["layers", "batch", "kv_heads"])
def test_kv_cache_names_what_was_rounded_up_by_itself(part: str) -> None:
    shape = dict.fromkeys(SHAPE, 1) | {"bytes_per_value": 0.25, part: 5}
    said = sentence(budget.kv_cache, 5, **shape, query_heads=5)
    word = {"layers": "layer", "batch": "request", "kv_heads": "KV head"}[part]
    assert f"the bytes of each {word} up" in said


def test_query_heads_are_no_mistake_without_groups() -> None:
    budget.kv_cache(BYTES, **SHAPE, query_heads=SHAPE["kv_heads"])


# --- what fits ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "weights", "reserve", "cache", "got"),
    [
        (1000, 100, 30, 7, 124),
        (1000, 100, 200, 7, 100),
        (999, 100, 200, 7, 99),
        (1000, 100, 900, 7, 0),
        (1000, 100, 901, 7, 0),
        (100, 500, 20, 7, 0),
        (0, 0, 0, 1, 0),
        (1000, 100, 30, 7, torch.tensor(124)),
        (1000, 100, 30, 7, np.int64(124)),
    ],
)
def test_concurrency_accepts_what_fits(
    memory: int, weights: int, reserve: int, cache: int, got: Any
) -> None:
    sizes = (memory, weights, reserve, cache)
    budget.concurrency(got, **dict(zip(SERVER, sizes, strict=True)))


@pytest.mark.parametrize(
    ("got", "hint"),
    [
        (125, "you rounded up"),
        (870 / 7, "part of a request is counted"),
        (124.0, "so an int"),
        (900 // 7, "the reserve is not taken off"),
        (970 // 7, "the weights are not taken off"),
        (1000 // 7, "neither the weights nor the reserve"),
        (930 // 7, "the reserve is added"),
        (970 // 107, "every request has weights of its own"),
        (900 // 37, "every request has a reserve of its own"),
        (1000 // 137, "weights and a reserve of its own"),
        (870, "how many bytes are left"),
        (-124, "fewer than no requests"),
        (100, "too small"),
        (None, "returns nothing"),
    ],
)
def test_concurrency_names_the_mistake(got: Any, hint: str) -> None:
    assert hint in sentence(budget.concurrency, got, **SERVER)


def test_concurrency_names_rounding_at_the_edges() -> None:
    exact = SERVER | {"reserve_bytes": 200}
    assert "you left it out" in sentence(budget.concurrency, 99, **exact)
    nearest = SERVER | {"kv_bytes_per_request": 8}  # 108.75 requests
    assert "nearest" in sentence(budget.concurrency, 109, **nearest)
    too_small = SERVER | {"weight_bytes": 5000}
    assert "fewer than no" in sentence(budget.concurrency, -576, **too_small)
    assert "not even one" in sentence(budget.concurrency, 1, **too_small)


# --- decode rate ----------------------------------------------------------------------

RATE = 5 * 1000 / 95


@pytest.mark.parametrize(
    "got",
    [RATE, Fraction(5000, 95), torch.tensor(RATE), np.float64(RATE), np.float32(RATE)],
)
def test_decode_rate_accepts_the_bound(got: Any) -> None:
    budget.decode_rate(got, **DECODE)


def test_decode_rate_accepts_a_whole_number_when_it_is_one() -> None:
    budget.decode_rate(20, **(DECODE | {"weight_bytes": 215}))


@pytest.mark.parametrize(
    ("got", "hint"),
    [
        (1000 / 95, "steps per second"),
        (95 / 1000, "the seconds of one step"),
        (95 / 1000 / 5, "the seconds for a token"),
        (1000 / 67, "the weights are read again for every request"),
        (1000 / 335, "and steps are counted"),
        (5000 / 67, "the cache of one request only"),
        (5000 / 60, "the cache is never read"),
        (1000 / 7, "the weights are never read"),
        (8 * RATE, "the bytes are counted as bits"),
        (RATE / 8, "the bandwidth is taken for bits"),
        (52, "rounded to a whole number"),
        (53.0, "rounded to a whole number"),
        (-RATE, "too small"),
        (0.0, "too small"),
        (90.0, "too large"),
        (50, "you rounded the steps per second"),
        (55.0, "you rounded the steps per second"),
        (None, "returns nothing"),
    ],
)
def test_decode_rate_names_the_mistake(got: Any, hint: str) -> None:
    assert hint in sentence(budget.decode_rate, got, **DECODE)


def test_an_empty_cache_is_no_division_by_zero_in_the_check() -> None:
    empty = DECODE | {"kv_bytes": 0}
    budget.decode_rate(5000 / 60, **empty)
    assert "steps" in sentence(budget.decode_rate, 1000 / 60, **empty)


# --- the module -----------------------------------------------------------------------


def test_no_check_returns_anything() -> None:
    for name in budget.__all__:
        assert inspect.signature(getattr(budget, name)).return_annotation == "None"
