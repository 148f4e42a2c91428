"""Turns measurements into rows, gates, mechanism metrics and the decision.

Called by `run`. Arithmetic on plain numbers only: the same input gives the same verdict anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvlab.matrix.workload import CONTEXT, Acceptance, CandidateFamily, Cell, RunMode

Json = dict[str, Any]


@dataclass(frozen=True)
class Mean:
    """A mean over tokens and its standard error, as if the tokens were independent."""

    mean: float
    standard_error: float | None

    @classmethod
    def of(cls, values: list[float]) -> Mean:
        mean = math.fsum(values) / len(values)
        if len(values) < 2:
            return cls(mean, None)
        variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
        return cls(mean, math.sqrt(variance / len(values)))


def measurement(cell_runs: list[Json]) -> Json:
    """One measurement as the JSON holds it, from the runs of a cell: warm-up first.

    Of the runs' memory figures the largest counts; where only the warm-up was watched, its own.
    """
    warm_up, *repeats = cell_runs
    latencies = [run["latency_ms"] for run in repeats]
    watched = [run["memory"] for run in repeats if run["memory"]] or [warm_up["memory"]]
    memory = {name: _largest(watched, name) for name in watched[0]}
    base, base_reserved = memory["base_allocated"], memory["base_reserved"]
    last = repeats[-1]
    generated = len(last["token_ids"][0])
    return {
        "median_latency_ms": median(latencies),
        "min_latency_ms": min(latencies),
        "generated_tokens": generated,
        "generation_ms_per_token": median(latencies) / generated,
        "base_allocated_bytes": base,
        "base_reserved_bytes": base_reserved,
        "peak_allocated_bytes": memory["peak_allocated"],
        "peak_reserved_bytes": memory["peak_reserved"],
        "incremental_peak_allocated_bytes": memory["peak_allocated"] - base,
        "incremental_peak_reserved_bytes": _minus(
            memory["peak_reserved"], base_reserved
        ),
        "decode_peak_allocated_bytes": memory["decode_peak_allocated"],
        "decode_peak_reserved_bytes": memory["decode_peak_reserved"],
        "decode_incremental_peak_allocated_bytes": memory["decode_peak_allocated"]
        - base,
        "median_ttft_ms": median(run["ttft_ms"] for run in repeats),
        "median_tpot_ms": median(run["tpot_ms"] for run in repeats),
        "largest_gap_ms": max(run["largest_gap_ms"] for run in repeats),
        "warm_up_latency_ms": warm_up["latency_ms"],
        "repeats": [
            {
                name: run[name]
                for name in (
                    "latency_ms",
                    "ttft_ms",
                    "tpot_ms",
                    "largest_gap_ms",
                    "process",
                )
            }
            for run in repeats
        ],
        "overflow_count": last["overflows"],
        "cached_tokens": last["cached_tokens"],
        "cache_bytes": last["cache_bytes"],
        "layer_class": last["layer_class"],
        "cache_config": last["cache_config"],
        "cache_config_unchanged": all(
            run["cache_config_unchanged"] for run in cell_runs
        ),
    }


def row(
    cell: Cell,
    runs: tuple[list[Json], list[Json]],
    trajectory: tuple[Json, Json],
    acceptance: Acceptance,
) -> Json:
    """A row of the matrix: baseline and candidate of one cell beside each other.

    runs        of the baseline and of the candidate, warm-up first
    trajectory  the token scores of both on the fixed trajectory
    """
    assert cell.family is not None and cell.residual_length is not None
    base, ours = measurement(runs[0]), measurement(runs[1])
    base_nll, our_nll = (Mean.of(scored["nll"]) for scored in trajectory)
    pairs = zip(trajectory[0]["nll"], trajectory[1]["nll"], strict=True)
    delta = Mean.of([candidate - baseline for baseline, candidate in pairs])
    kl = Mean.of(trajectory[1]["kl"])
    overlap = Mean.of(trajectory[1]["topk_overlap"])
    saved = (
        base["incremental_peak_allocated_bytes"]
        - ours["incremental_peak_allocated_bytes"]
    )
    latency_ratio = ours["median_latency_ms"] / base["median_latency_ms"]
    gates = {
        "peak_saved": saved > acceptance.peak_saved_bytes_above,
        "nll_increase": delta.mean <= acceptance.nll_increase_at_most,
        "topk_overlap": overlap.mean >= acceptance.topk_overlap_at_least,
        "latency_ratio": latency_ratio <= acceptance.latency_ratio_at_most,
    }
    return {
        "matrix_role": cell.matrix_role,
        "candidate_id": cell.family.id,
        "context_length": cell.context_length,
        "max_new_tokens": cell.max_new_tokens,
        "residual_length": cell.residual_length,
        "nbits": cell.family.nbits,
        "q_group_size": cell.family.q_group_size,
        "axis_key": cell.family.axis_key,
        "axis_value": cell.family.axis_value,
        "baseline": base,
        "candidate": ours,
        "baseline_quality": _quality(trajectory[0], base_nll),
        "candidate_quality": _quality(trajectory[1], our_nll),
        "fixed_continuation_nll_delta": delta.mean,
        "fixed_continuation_nll_delta_standard_error": delta.standard_error,
        "fixed_continuation_nll_ratio": our_nll.mean / base_nll.mean
        if base_nll.mean > 0
        else None,
        "fixed_continuation_kl": kl.mean,
        "fixed_continuation_kl_standard_error": kl.standard_error,
        "mean_topk_overlap": overlap.mean,
        "mean_topk_overlap_standard_error": overlap.standard_error,
        "incremental_peak_saved_bytes": saved,
        "incremental_peak_reduction_ratio": saved
        / base["incremental_peak_allocated_bytes"],
        "decode_incremental_peak_saved_bytes": base[
            "decode_incremental_peak_allocated_bytes"
        ]
        - ours["decode_incremental_peak_allocated_bytes"],
        "cache_bytes_saved": base["cache_bytes"]["total"]
        - ours["cache_bytes"]["total"],
        "latency_ratio_candidate_over_baseline": latency_ratio,
        "latency_ratio_by_repeat": [
            c["latency_ms"] / b["latency_ms"]
            for b, c in zip(base["repeats"], ours["repeats"], strict=True)
        ],
        "tpot_ratio_candidate_over_baseline": ours["median_tpot_ms"]
        / base["median_tpot_ms"],
        **agreement(runs[0][-1]["token_ids"], runs[1][-1]["token_ids"]),
        "expected_decode_window_flushes": cell.max_new_tokens // cell.residual_length,
        "overflow_note": overflow_note(cell, ours["overflow_count"]),
        "gates": gates,
        "eligible": all(gates.values()),
    }


def agreement(baseline: list[list[int]], candidate: list[list[int]]) -> Json:
    """How far two greedy outputs agree; a diagnostic, never a gate.

    first_divergence_index  the first new token at which any row of the batch differs
    """
    same = [
        [a == b for a, b in zip(one, other, strict=True)]
        for one, other in zip(baseline, candidate, strict=True)
    ]
    differing = [
        index for line in same for index, equal in enumerate(line) if not equal
    ]
    count = sum(len(line) for line in same)
    return {
        "greedy_output_exact_match": not differing,
        "token_agreement_rate": 1 - len(differing) / count,
        "first_divergence_index": min(differing, default=None),
    }


def overflow_note(cell: Cell, overflows: int) -> str:
    """What the row says about its window: how often it overflowed, and of what."""
    assert cell.residual_length is not None
    fed, window = cell.max_new_tokens - 1, cell.residual_length
    if overflows == 0:
        return (
            f"no overflow: the {fed} tokens fed back never fill a window of {window}, "
            "so only the prompt was quantized, once"
        )
    times = "once" if overflows == 1 else f"{overflows} times"
    return f"{fed} tokens fed back overflowed a window of {window} {times}"


def mechanism_metrics(rows: list[Json], family: CandidateFamily) -> Json:
    """Where a family begins to save memory and to pass the gates, and its best row.

    The two context figures look at the context matrix, the rest at all rows.
    """
    contexts = sorted(
        (row for row in rows if row["matrix_role"] == CONTEXT),
        key=lambda row: row["context_length"],
    )
    saving = [row for row in contexts if row["incremental_peak_saved_bytes"] > 0]
    crossed = [row for row in contexts if row["eligible"]]
    eligible = [row for row in rows if row["eligible"]]
    best = max(
        eligible, key=lambda row: row["incremental_peak_saved_bytes"], default=None
    )
    named = (
        "matrix_role",
        "candidate_id",
        "context_length",
        "residual_length",
        "incremental_peak_saved_bytes",
    )
    return {
        "memory_reduction_onset_context": saving[0]["context_length"]
        if saving
        else None,
        "eligible_crossover_context": crossed[0]["context_length"] if crossed else None,
        "backend_axis": {
            "axis_key": family.axis_key,
            "axis_value": family.axis_value,
        },
        "eligible_candidate_count": len(eligible),
        "selected_candidate": best and {name: best[name] for name in named},
    }


def verdict(run_mode: RunMode, failed: bool, eligible: int) -> Json:
    """evidence_level and decision."""
    if failed:
        return {
            "evidence_level": "failed_real_gpu_attempt",
            "decision": "reject_until_cache_configuration_fixed",
        }
    if run_mode == "dry_run":
        return {
            "evidence_level": "environment_preflight",
            "decision": "ready_to_measure",
        }
    return {
        "evidence_level": "matched_transformers_quantized_cache_context_window_matrix",
        "decision": "accept_local_cache_candidate" if eligible else "tune_cache_policy",
    }


def natural_quality(scored: list[list[Json]]) -> list[Json]:
    """Means over the tokens of several texts; the baseline first.

    scored  [cache][text] token scores
    """
    joined = [
        {name: [value for text in texts for value in text[name]] for name in texts[0]}
        for texts in scored
    ]
    base = joined[0]["nll"]
    results = []
    for ours in joined:
        nll = Mean.of(ours["nll"])
        result: Json = {
            "mean_nll": nll.mean,
            "mean_nll_standard_error": nll.standard_error,
        }
        if ours is not joined[0]:
            pairs = zip(base, ours["nll"], strict=True)
            delta = Mean.of([candidate - baseline for baseline, candidate in pairs])
            kl, overlap = Mean.of(ours["kl"]), Mean.of(ours["topk_overlap"])
            result |= {
                "nll_increase": delta.mean,
                "nll_increase_standard_error": delta.standard_error,
                "kl": kl.mean,
                "kl_standard_error": kl.standard_error,
                "topk_overlap": overlap.mean,
                "topk_overlap_standard_error": overlap.standard_error,
            }
        results.append(result)
    return results


def _quality(scored: Json, nll: Mean) -> Json:
    return {
        "tokens": len(scored["nll"]),
        "mean_nll": nll.mean,
        "mean_nll_standard_error": nll.standard_error,
    }


def _largest(memories: list[Json], name: str) -> Any:
    values = [memory[name] for memory in memories]
    return None if None in values else max(values)


def _minus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one - other
