"""The JSON Schema of a result, with what every field means.

Called by `files` and by the test that keeps results/matrix.schema.json the same. Data only.
`kvlab matrix schema` prints it.
"""

from __future__ import annotations

import json
from typing import Any

from kvlab.matrix.workload import RUN_MODES

Json = dict[str, Any]
SCHEMA_VERSION = "1.0"


def _kind(*names: str, **rest: Any) -> Json:
    kinds: Any = names[0] if len(names) == 1 else list(names)
    return {"type": kinds, **rest}


def _said(about: str, of: Json) -> Json:
    return {**of, "description": about}


INT = _kind("integer", minimum=0)
SIGNED = _kind("integer")
NUMBER = _kind("number")
POSITIVE = _kind("number", minimum=0)
TEXT = _kind("string", minLength=1)
FLAG = _kind("boolean")
DIGEST = _kind("string", pattern="^[0-9a-f]{64}$")


def _or_null(of: Json) -> Json:
    kinds = of["type"] if isinstance(of["type"], list) else [of["type"]]
    return {**of, "type": [*kinds, "null"]}


def _list(items: Json, **rest: Any) -> Json:
    return {"type": "array", "items": items, **rest}


def _list_or_null(items: Json) -> Json:
    return {"type": ["array", "null"], "items": items}


def _object(**properties: Json) -> Json:
    """Every field required and no other allowed: a misspelt one fails twice."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _map(pattern: str, of: Json) -> Json:
    return {
        "type": "object",
        "patternProperties": {pattern: of},
        "additionalProperties": False,
    }


def _ref(name: str) -> Json:
    return {"$ref": f"#/$defs/{name}"}


def _ref_or_null(name: str) -> Json:
    return {"anyOf": [_ref(name), {"type": "null"}]}


FAMILY = _object(
    id=_said("how rows name it", TEXT),
    name=_said("the kind of cache", TEXT),
    backend=TEXT,
    nbits=INT,
    q_group_size=INT,
    axis_key=_said("as the backend counts axes", SIGNED),
    axis_value=SIGNED,
    sink_tokens=_said("first tokens that stay exact", INT),
)

WORKLOAD = _object(
    workload_id={"const": "quant-kv-runtime"},
    workload_version=_said(
        "results of different versions are not to be compared", TEXT
    ),
    profile=TEXT,
    model_id=TEXT,
    model_revision=TEXT,
    model_overridden=_said("true when the model is not the profile's own", FLAG),
    resolved_model_commit=_said(
        "commit of the hub, or sha256 of the embedded model's file; null in a dry run",
        _or_null(TEXT),
    ),
    revision_resolution_source=_said("hub, local cache, given or embedded", TEXT),
    dtype=TEXT,
    prompt=_said("its tokens are repeated to the exact context length", TEXT),
    prompt_sha256=DIGEST,
    batch_size=INT,
    context_lengths=_list(INT),
    context_new_tokens=INT,
    context_residual_length=INT,
    window_context_length=INT,
    window_new_tokens=INT,
    window_residual_lengths=_list(INT),
    expected_decode_window_flushes=_said(
        "new tokens // window, for each window of the window matrix",
        _map("^[0-9]+$", INT),
    ),
    candidate=_ref("family"),
    further_candidates=_list(_ref("family")),
    further_context_lengths=_said(
        "where those are measured: at these contexts only; null for everywhere",
        _list_or_null(INT),
    ),
    warm_up_runs=INT,
    measured_repeats=INT,
    quality_tokens=_said("of the baseline's greedy output, fed to both", INT),
    quality_topk=INT,
    natural_texts=_list(TEXT),
    natural_prompt_tokens=INT,
    natural_scored_tokens=_said("of each text", INT),
    acceptance=_object(
        peak_saved_bytes_above=INT,
        nll_increase_at_most=POSITIVE,
        topk_overlap_at_least=POSITIVE,
        latency_ratio_at_most=POSITIVE,
    ),
    seed=INT,
)

REPEAT = _object(
    latency_ms=POSITIVE,
    ttft_ms=POSITIVE,
    tpot_ms=POSITIVE,
    largest_gap_ms=POSITIVE,
    process=_said("which process of a resumed run measured it, from 1", INT),
)

MEASUREMENT = _object(
    median_latency_ms=_said("prompt to last token, median of the repeats", POSITIVE),
    min_latency_ms=POSITIVE,
    generated_tokens=INT,
    generation_ms_per_token=_said("median latency / generated tokens", POSITIVE),
    base_allocated_bytes=_said("allocated before the prompt was fed", INT),
    base_reserved_bytes=_said("null on a CPU", _or_null(INT)),
    peak_allocated_bytes=_said("largest over prefill and decode", INT),
    peak_reserved_bytes=_or_null(INT),
    incremental_peak_allocated_bytes=_said("peak - base; the gate looks at this", INT),
    incremental_peak_reserved_bytes=_or_null(SIGNED),
    decode_peak_allocated_bytes=_said("largest after the prefill", INT),
    decode_peak_reserved_bytes=_or_null(INT),
    decode_incremental_peak_allocated_bytes=_said("decode peak - base", INT),
    median_ttft_ms=_said("time to first token: the prefill", POSITIVE),
    median_tpot_ms=_said(
        "time per output token: (latency - TTFT) / (new tokens - 1)", POSITIVE
    ),
    largest_gap_ms=_said("longest wait between two tokens, of all repeats", POSITIVE),
    warm_up_latency_ms=_said("on a CPU under the profiler, so slower", POSITIVE),
    repeats=_list(REPEAT, minItems=1),
    overflow_count=_said(
        "how often a full window was quantized while decoding, counted as it happened",
        INT,
    ),
    cached_tokens=_said("prompt and all new tokens but the last", INT),
    cache_bytes=_said(
        "counted from the cache object after the last token",
        _object(
            total=INT,
            codes=INT,
            scales=INT,
            zeros=INT,
            window=_said("tokens in high precision; all in a DynamicCache", INT),
            other=INT,
        ),
    ),
    layer_class=_said("of the layers that really ran", TEXT),
    cache_config=_said(
        "what the cache was built from, as it was after the run",
        {"anyOf": [_ref("cache_config"), {"type": "null"}]},
    ),
    cache_config_unchanged=_said(
        "equal to a copy made before, in every run", {"const": True}
    ),
)

CACHE_CONFIG = _object(
    backend=TEXT,
    nbits=INT,
    axis_key=SIGNED,
    axis_value=SIGNED,
    q_group_size=INT,
    residual_length=INT,
)
CACHE_CONFIG["properties"]["sink_tokens"] = INT  # only of a cache that knows them

QUALITY = _object(
    tokens=INT,
    mean_nll=_said("nats a token", NUMBER),
    mean_nll_standard_error=_or_null(POSITIVE),
)

ROW = _object(
    matrix_role={"enum": ["context_capacity", "residual_window"]},
    candidate_id=TEXT,
    context_length=INT,
    max_new_tokens=INT,
    residual_length=INT,
    nbits=INT,
    q_group_size=INT,
    axis_key=SIGNED,
    axis_value=SIGNED,
    baseline=_ref("measurement"),
    candidate=_ref("measurement"),
    baseline_quality=_ref("quality"),
    candidate_quality=_ref("quality"),
    fixed_continuation_nll_delta=_said(
        "candidate - baseline, nats a token, on the baseline's first greedy tokens",
        NUMBER,
    ),
    fixed_continuation_nll_delta_standard_error=_or_null(POSITIVE),
    fixed_continuation_nll_ratio=_said(
        "a diagnostic, never a gate", _or_null(POSITIVE)
    ),
    fixed_continuation_kl=_said("KL(baseline || candidate), nats a token", NUMBER),
    fixed_continuation_kl_standard_error=_or_null(POSITIVE),
    mean_topk_overlap=_said("share of the top tokens that both have", POSITIVE),
    mean_topk_overlap_standard_error=_or_null(POSITIVE),
    incremental_peak_saved_bytes=_said(
        "baseline's incremental peak - candidate's", SIGNED
    ),
    incremental_peak_reduction_ratio=_said("saved / baseline's", NUMBER),
    decode_incremental_peak_saved_bytes=_said(
        "the same after the prefill, whose activations dwarf a cache", SIGNED
    ),
    cache_bytes_saved=_said("from the cache objects", SIGNED),
    latency_ratio_candidate_over_baseline=_said("of the medians", POSITIVE),
    latency_ratio_by_repeat=_said("of runs one after the other", _list(POSITIVE)),
    tpot_ratio_candidate_over_baseline=POSITIVE,
    greedy_output_exact_match=_said("a diagnostic, never a gate", FLAG),
    token_agreement_rate=_said("a diagnostic, never a gate", POSITIVE),
    first_divergence_index=_or_null(INT),
    expected_decode_window_flushes=_said(
        "new tokens // window. One more than overflow_count where the window divides the "
        "new tokens, since the last token is never fed back",
        INT,
    ),
    overflow_note=TEXT,
    gates=_object(
        peak_saved=FLAG, nll_increase=FLAG, topk_overlap=FLAG, latency_ratio=FLAG
    ),
    eligible=_said("passes all four gates", FLAG),
)

SELECTED = _object(
    matrix_role=TEXT,
    candidate_id=TEXT,
    context_length=INT,
    residual_length=INT,
    incremental_peak_saved_bytes=SIGNED,
)

MECHANISM = _object(
    memory_reduction_onset_context=_said(
        "first context that saves peak memory", _or_null(INT)
    ),
    eligible_crossover_context=_said(
        "first context that passes every gate", _or_null(INT)
    ),
    backend_axis=_object(axis_key=SIGNED, axis_value=SIGNED),
    eligible_candidate_count=_said("rows of both matrices", INT),
    selected_candidate=_said(
        "the eligible row that saves the most bytes", _ref_or_null("selected")
    ),
)

FAILURE = _object(stage=TEXT, type=TEXT, message=TEXT)

LEFT_OUT = _object(
    matrix_role=TEXT,
    candidate_id=TEXT,
    context_length=INT,
    residual_length=INT,
    reason=TEXT,
)

NATURAL_BASELINE = _object(mean_nll=NUMBER, mean_nll_standard_error=_or_null(POSITIVE))
NATURAL_CANDIDATE = _object(
    candidate_id=TEXT,
    residual_length=INT,
    mean_nll=NUMBER,
    mean_nll_standard_error=_or_null(POSITIVE),
    nll_increase=NUMBER,
    nll_increase_standard_error=_or_null(POSITIVE),
    kl=NUMBER,
    kl_standard_error=_or_null(POSITIVE),
    topk_overlap=POSITIVE,
    topk_overlap_standard_error=_or_null(POSITIVE),
)

NOTES = _object(
    temperature_c=_or_null(NUMBER),
    clock_mhz=_or_null(NUMBER),
    power_mw=_or_null(NUMBER),
    load_average_1_minute=_or_null(NUMBER),
)

TOP = _object(
    schema_version={"const": SCHEMA_VERSION},
    chapter={"const": "06_gpu_matrix"},
    run_mode={"enum": list(RUN_MODES)},
    run_label=_said("with the file's name: RUN_MODE-RUN_LABEL.json", TEXT),
    environment_profile=TEXT,
    framework=_object(
        python=TEXT,
        torch=_or_null(TEXT),
        transformers=_or_null(TEXT),
        hqq=_or_null(TEXT),
        optimum_quanto=_or_null(TEXT),
        kvlab=TEXT,
    ),
    hardware=_object(
        cuda_available=FLAG,
        cuda=_said("the CUDA version of the torch build", _or_null(TEXT)),
        device=_said("null in a dry run", _or_null(TEXT)),
        total_memory_bytes=_said("of the device", _or_null(INT)),
        compute_capability=_or_null(TEXT),
        cpu=_or_null(TEXT),
        cpu_cores=_or_null(INT),
        threads=_said("that torch uses on the CPU", INT),
    ),
    workload=_ref("workload"),
    plan=_said(
        "every cell that the workload asks for; nothing here was measured",
        _list(
            _object(
                matrix_role=TEXT,
                candidate_id=TEXT,
                context_length=INT,
                max_new_tokens=INT,
                residual_length=_or_null(INT),
            )
        ),
    ),
    memory_source=_said("where the peaks come from; null in a dry run", _or_null(TEXT)),
    input_sha256_by_context=_said(
        "of the input tokens as JSON: equal when two runs were fed the same",
        _map("^[0-9]+$", DIGEST),
    ),
    baseline=_object(
        name={"const": "dynamic_cache"},
        capacity_by_context=_map("^[0-9]+$", _ref("measurement")),
        residual_window=_ref_or_null("measurement"),
    ),
    candidate_family=_object(
        **FAMILY["properties"],
        residual_lengths=_said(
            "of the context matrix and the window matrix", _list(INT)
        ),
    ),
    measurement_matrix=_said(
        "the required candidate beside the baseline", _list(_ref("row"))
    ),
    mechanism_metrics=_ref("mechanism"),
    further_candidates=_said(
        "other caches, measured in the same rounds beside the same baseline; no part of "
        "the decision",
        _list(
            _object(
                **FAMILY["properties"],
                residual_lengths=_list(INT),
                measurement_matrix=_list(_ref("row")),
                mechanism_metrics=_ref("mechanism"),
                left_out=_said(
                    "cells whose token counts the library refuses",
                    _list(_ref("left_out")),
                ),
                failure=_ref_or_null("failure"),
            )
        ),
    ),
    natural_text_quality=_said(
        "on natural texts, fed as if token by token; null when it was not reached",
        {
            "anyOf": [
                _object(
                    texts=_list(TEXT),
                    prompt_tokens=INT,
                    scored_tokens=_said("all texts together", INT),
                    note=TEXT,
                    baseline=_ref("natural_baseline"),
                    candidates=_list(_ref("natural_candidate")),
                ),
                {"type": "null"},
            ]
        },
    ),
    device_notes=_object(begin=_ref("notes"), end=_ref("notes")),
    run=_object(
        finished_utc=_kind("string", pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}Z$"),
        seconds=_said("spent on the units below, all processes together", POSITIVE),
        units=_said("generations and quality passes", INT),
        resumed_units=_said("of those, finished by an earlier process", INT),
        processes=_said("more than 1 when the run was resumed", INT),
    ),
    failure=_ref_or_null("failure"),
    evidence_level={
        "enum": [
            "environment_preflight",
            "matched_transformers_quantized_cache_context_window_matrix",
            "failed_real_gpu_attempt",
        ]
    },
    decision={
        "enum": [
            "ready_to_measure",
            "accept_local_cache_candidate",
            "tune_cache_policy",
            "reject_until_cache_configuration_fixed",
        ]
    },
)


def _when(condition: Json, **then: Json) -> Json:
    return {"if": {"properties": condition}, "then": {"properties": then}}


_MATCHED = {"const": "matched_transformers_quantized_cache_context_window_matrix"}
_NONE_ELIGIBLE = {"properties": {"eligible_candidate_count": {"const": 0}}}
_SOME_ELIGIBLE = {"properties": {"eligible_candidate_count": {"minimum": 1}}}

# the four outcomes: each evidence level goes with its decision and with what must be there
OUTCOMES = [
    _when(
        {"evidence_level": {"const": "environment_preflight"}},
        run_mode={"const": "dry_run"},
        decision={"const": "ready_to_measure"},
        measurement_matrix={"maxItems": 0},
        failure={"type": "null"},
    ),
    _when(
        {"evidence_level": _MATCHED},
        run_mode={"enum": ["real_gpu", "embedded_cpu"]},
        decision={"enum": ["accept_local_cache_candidate", "tune_cache_policy"]},
        measurement_matrix={"minItems": 1},
        natural_text_quality={"type": "object"},
        memory_source={"type": "string"},
        failure={"type": "null"},
    ),
    _when(
        {"evidence_level": {"const": "failed_real_gpu_attempt"}},
        decision={"const": "reject_until_cache_configuration_fixed"},
        failure={"type": "object"},
    ),
    _when(
        {"decision": {"const": "accept_local_cache_candidate"}},
        mechanism_metrics=_SOME_ELIGIBLE,
    ),
    _when(
        {"decision": {"const": "tune_cache_policy"}}, mechanism_metrics=_NONE_ELIGIBLE
    ),
]


def schema() -> Json:
    """The whole schema, draft 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "One run of the paired experiment: DynamicCache against QuantizedCache",
        "description": "Sizes in bytes, times in milliseconds, losses in nats a token.",
        **TOP,
        "allOf": OUTCOMES,
        "$defs": {
            "family": FAMILY,
            "workload": WORKLOAD,
            "measurement": MEASUREMENT,
            "cache_config": CACHE_CONFIG,
            "quality": QUALITY,
            "row": ROW,
            "selected": SELECTED,
            "mechanism": MECHANISM,
            "failure": FAILURE,
            "left_out": LEFT_OUT,
            "natural_baseline": NATURAL_BASELINE,
            "natural_candidate": NATURAL_CANDIDATE,
            "notes": NOTES,
        },
    }


def schema_text() -> str:
    """The schema as results/matrix.schema.json holds it."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def faults(record: Json) -> list[str]:
    """What is wrong with a record, in words; empty when it fits.

    raises ImportError where jsonschema is not installed
    """
    from jsonschema import (  # type: ignore[import-untyped]
        Draft202012Validator,
    )

    errors = Draft202012Validator(schema()).iter_errors(record)
    return [
        f"{'/'.join(map(str, error.absolute_path)) or 'top'}: {error.message}"
        for error in errors
    ]
