"""`kvlab.matrix.judge`: rows, gates, mechanism metrics and the four outcomes, on made-up numbers."""

from __future__ import annotations

from typing import Any

import pytest

from kvlab.matrix import Acceptance, judge
from kvlab.matrix.workload import CONTEXT, HQQ, WINDOW, Cell

Json = dict[str, Any]
MIB = 2**20


def one_run(latency_ms: float = 1000.0, peak: int = 100 * MIB, **changes: Any) -> Json:
    """A generation of ten tokens, as `measure` gives it."""
    memory = {
        "base_allocated": 50 * MIB,
        "peak_allocated": 50 * MIB + peak,
        "decode_peak_allocated": 50 * MIB + peak // 2,
        "base_reserved": None,
        "peak_reserved": None,
        "decode_peak_reserved": None,
    }
    return {
        "token_ids": [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]],
        "latency_ms": latency_ms,
        "ttft_ms": latency_ms * 0.1,
        "tpot_ms": latency_ms * 0.1,
        "largest_gap_ms": latency_ms * 0.2,
        "overflows": 0,
        "cached_tokens": 521,
        "cache_bytes": {"total": peak // 4},
        "layer_class": "L",
        "cache_config": None,
        "cache_config_unchanged": True,
        "memory": memory,
        "process": 1,
    } | changes


def runs(*latencies: float, peak: int = 100 * MIB, **changes: Any) -> list[Json]:
    """A warm-up that was watched, and repeats that were not: a CPU's cell."""
    repeats = [one_run(ms, peak, memory=None, **changes) for ms in latencies]
    return [one_run(9999.0, peak, **changes), *repeats]


def scored(nll: list[float], overlap: float = 1.0) -> Json:
    return {"nll": nll, "kl": [0.01] * len(nll), "topk_overlap": [overlap] * len(nll)}


def row(
    *,
    saved: int = 10 * MIB,
    nll: float = 0.1,
    overlap: float = 0.9,
    ratio: float = 1.5,
    cell: Cell | None = None,
) -> Json:
    return judge.row(
        cell or Cell(CONTEXT, 512, 10, HQQ, 128),
        (
            runs(1000.0, 1000.0),
            runs(1000.0 * ratio, 1000.0 * ratio, peak=100 * MIB - saved),
        ),
        (scored([1.0, 1.0]), scored([1.0 + nll, 1.0 + nll], overlap)),
        Acceptance(),
    )


# ---- a measurement ------------------------------------------------------------------------------


def test_measurement_takes_the_median_and_leaves_the_warm_up_out() -> None:
    made = judge.measurement(runs(30.0, 10.0, 50.0))
    assert (made["median_latency_ms"], made["min_latency_ms"]) == (30.0, 10.0)
    assert made["warm_up_latency_ms"] == 9999.0
    assert [repeat["latency_ms"] for repeat in made["repeats"]] == [30.0, 10.0, 50.0]
    assert (made["generated_tokens"], made["generation_ms_per_token"]) == (10, 3.0)
    assert (made["median_ttft_ms"], made["median_tpot_ms"]) == (3.0, 3.0)
    assert made["largest_gap_ms"] == 10.0


def test_peaks_of_a_cpu_come_from_the_warm_up() -> None:
    made = judge.measurement(runs(30.0, 10.0, peak=8 * MIB))
    assert made["base_allocated_bytes"] == 50 * MIB
    assert made["peak_allocated_bytes"] == 58 * MIB
    assert made["incremental_peak_allocated_bytes"] == 8 * MIB
    assert made["decode_peak_allocated_bytes"] == 54 * MIB
    assert made["decode_incremental_peak_allocated_bytes"] == 4 * MIB
    assert made["base_reserved_bytes"] is None
    assert made["incremental_peak_reserved_bytes"] is None


def test_peaks_of_a_gpu_are_the_largest_of_the_repeats_not_the_warm_up() -> None:
    def reserving(peak: int) -> Json:
        run = one_run(peak=peak)
        run["memory"] |= {
            "base_reserved": 60 * MIB,
            "peak_reserved": 60 * MIB + peak,
            "decode_peak_reserved": 60 * MIB,
        }
        return run

    made = judge.measurement(
        [reserving(90 * MIB), reserving(7 * MIB), reserving(8 * MIB)]
    )
    assert made["incremental_peak_allocated_bytes"] == 8 * MIB
    assert made["incremental_peak_reserved_bytes"] == 8 * MIB
    assert made["peak_reserved_bytes"] == 68 * MIB


# ---- gates --------------------------------------------------------------------------------------


def test_row_compares_candidate_with_baseline() -> None:
    made = row(saved=10 * MIB, nll=0.25, overlap=0.8, ratio=1.5)
    assert made["incremental_peak_saved_bytes"] == 10 * MIB
    assert made["incremental_peak_reduction_ratio"] == pytest.approx(0.1)
    assert made["decode_incremental_peak_saved_bytes"] == 5 * MIB
    assert made["cache_bytes_saved"] == 10 * MIB // 4
    assert made["fixed_continuation_nll_delta"] == pytest.approx(0.25)
    assert made["fixed_continuation_nll_delta_standard_error"] == pytest.approx(0)
    assert made["fixed_continuation_nll_ratio"] == pytest.approx(1.25)
    assert made["fixed_continuation_kl"] == pytest.approx(0.01)
    assert made["mean_topk_overlap"] == pytest.approx(0.8)
    assert made["latency_ratio_candidate_over_baseline"] == 1.5
    assert made["latency_ratio_by_repeat"] == [1.5, 1.5]
    assert made["eligible"] and all(made["gates"].values())


@pytest.mark.parametrize(
    ("gate", "passes", "fails"),
    [
        ("peak_saved", {"saved": 1}, {"saved": 0}),
        ("peak_saved", {"saved": 1}, {"saved": -5}),
        ("nll_increase", {"nll": 0.5}, {"nll": 0.5001}),
        ("nll_increase", {"nll": -0.3}, {"nll": 3.0}),
        ("topk_overlap", {"overlap": 0.6}, {"overlap": 0.5999}),
        ("latency_ratio", {"ratio": 2.0}, {"ratio": 2.0001}),
    ],
)
def test_each_gate_at_its_edge(gate: str, passes: Json, fails: Json) -> None:
    assert row(**passes)["eligible"]
    failed = row(**fails)
    assert not failed["eligible"]
    assert [name for name, passed in failed["gates"].items() if not passed] == [gate]


def test_disagreeing_outputs_and_nll_ratio_are_no_gates() -> None:
    other = [[1, 2, 9, 9, 9, 9, 9, 9, 9, 9]]
    made = judge.row(
        Cell(WINDOW, 512, 10, HQQ, 16),
        (runs(10.0, 10.0), runs(10.0, 10.0, peak=MIB, token_ids=other)),
        (scored([0.01, 0.01]), scored([0.2, 0.2])),
        Acceptance(),
    )
    assert made["fixed_continuation_nll_ratio"] == pytest.approx(20)
    assert not made["greedy_output_exact_match"]
    assert made["first_divergence_index"] == 2
    assert made["token_agreement_rate"] == pytest.approx(0.3)
    assert made["eligible"]


def test_agreement_of_equal_and_of_batched_outputs() -> None:
    assert judge.agreement([[1, 2]], [[1, 2]]) == {
        "greedy_output_exact_match": True,
        "token_agreement_rate": 1.0,
        "first_divergence_index": None,
    }
    batched = judge.agreement([[1, 2], [3, 4]], [[1, 2], [3, 5]])
    assert batched["token_agreement_rate"] == 0.75
    assert batched["first_divergence_index"] == 1


def test_row_says_when_its_window_never_overflowed() -> None:
    quiet = row(cell=Cell(CONTEXT, 512, 64, HQQ, 128))
    assert quiet["expected_decode_window_flushes"] == 0
    assert quiet["overflow_note"].startswith("no overflow: the 63 tokens")
    cell = Cell(WINDOW, 512, 128, HQQ, 64)
    # two are expected, one happens: the last new token is never fed back
    noisy = judge.row(
        cell,
        (runs(10.0), runs(10.0, overflows=1)),
        (scored([1.0]), scored([1.0])),
        Acceptance(),
    )
    assert noisy["expected_decode_window_flushes"] == 2
    assert noisy["candidate"]["overflow_count"] == 1
    assert noisy["overflow_note"] == (
        "127 tokens fed back overflowed a window of 64 once"
    )


# ---- metrics and decision -----------------------------------------------------------------------


def context_row(length: int, saved: int, **rest: float) -> Json:
    return row(saved=saved, cell=Cell(CONTEXT, length, 10, HQQ, 128), **rest)  # type: ignore[arg-type]


def test_mechanism_metrics_find_onset_crossover_and_the_best_row() -> None:
    rows = [
        context_row(4096, 30 * MIB, nll=0.9),  # saves most, but is refused
        context_row(512, -1),
        context_row(1024, 5 * MIB, ratio=3.0),
        context_row(2048, 17 * MIB),
        row(saved=20 * MIB, cell=Cell(WINDOW, 512, 10, HQQ, 64)),
    ]
    metrics = judge.mechanism_metrics(rows, HQQ)
    assert metrics["memory_reduction_onset_context"] == 1024
    assert metrics["eligible_crossover_context"] == 2048
    assert metrics["backend_axis"] == {"axis_key": 1, "axis_value": 1}
    assert metrics["eligible_candidate_count"] == 2
    assert metrics["selected_candidate"] == {
        "matrix_role": WINDOW,
        "candidate_id": "hqq_axis1",
        "context_length": 512,
        "residual_length": 64,
        "incremental_peak_saved_bytes": 20 * MIB,
    }


def test_mechanism_metrics_of_nothing() -> None:
    metrics = judge.mechanism_metrics([], HQQ)
    assert metrics["memory_reduction_onset_context"] is None
    assert metrics["eligible_crossover_context"] is None
    assert metrics["eligible_candidate_count"] == 0
    assert metrics["selected_candidate"] is None


MATCHED = "matched_transformers_quantized_cache_context_window_matrix"


@pytest.mark.parametrize(
    ("mode", "failed", "eligible", "level", "decision"),
    [
        ("dry_run", False, 0, "environment_preflight", "ready_to_measure"),
        ("real_gpu", False, 1, MATCHED, "accept_local_cache_candidate"),
        ("embedded_cpu", False, 6, MATCHED, "accept_local_cache_candidate"),
        ("real_gpu", False, 0, MATCHED, "tune_cache_policy"),
        (
            "real_gpu",
            True,
            0,
            "failed_real_gpu_attempt",
            "reject_until_cache_configuration_fixed",
        ),
        (
            "embedded_cpu",
            True,
            3,
            "failed_real_gpu_attempt",
            "reject_until_cache_configuration_fixed",
        ),
    ],
)
def test_decision_table(
    mode: Any, failed: bool, eligible: int, level: str, decision: str
) -> None:
    assert judge.verdict(mode, failed, eligible) == {
        "evidence_level": level,
        "decision": decision,
    }


def test_natural_quality_joins_the_texts() -> None:
    base = [scored([1.0, 2.0]), scored([3.0])]
    ours = [scored([1.5, 2.5], 0.5), scored([4.0], 1.0)]
    baseline, candidate = judge.natural_quality([base, ours])
    assert baseline["mean_nll"] == 2.0 and "kl" not in baseline
    assert candidate["mean_nll"] == pytest.approx(8 / 3)
    assert candidate["nll_increase"] == pytest.approx(2 / 3)
    # of the paired differences .5 .5 1, not of the two losses
    assert candidate["nll_increase_standard_error"] == pytest.approx(1 / 6)
    assert candidate["topk_overlap"] == pytest.approx(2 / 3)
    assert candidate["kl"] == pytest.approx(0.01)
