"""`kvlab.matrix.workload` and `shapes`: what the paired experiment measures, as plain data."""

from __future__ import annotations

import hashlib
from dataclasses import FrozenInstanceError, replace

import pytest

from kvlab.matrix import (
    EMBEDDED_CPU,
    PROFILES,
    Q_CUDA_MECHANISM,
    Acceptance,
    CandidateFamily,
    profile,
    with_model,
)
from kvlab.matrix.shapes import (
    KVShape,
    first_refusal,
    nearest_length,
    quantized_lengths,
    refusal,
)
from kvlab.matrix.workload import FURTHER, HQQ

EMBEDDED_SHAPE = KVShape(batch_size=1, kv_heads=3, head_dim=64)
QWEN_SHAPE = KVShape(batch_size=1, kv_heads=2, head_dim=64)


def test_gpu_profile_is_the_specified_one() -> None:
    w = Q_CUDA_MECHANISM
    assert (w.profile, w.workload_id) == ("Q-CUDA-MECHANISM", "quant-kv-runtime")
    assert (w.model_id, w.model_revision) == ("Qwen/Qwen2.5-0.5B-Instruct", "main")
    assert w.dtype == "bfloat16"
    assert w.prompt == "Explain why KV Cache grows with context length."
    assert (w.context_lengths, w.context_new_tokens) == ((512, 2048, 4096), 64)
    assert w.context_residual_length == 128
    assert (w.window_context_length, w.window_new_tokens) == (512, 128)
    assert w.window_residual_lengths == (16, 32, 64)
    assert w.candidate == HQQ
    assert (HQQ.backend, HQQ.nbits, HQQ.q_group_size) == ("hqq", 4, 64)
    assert (HQQ.axis_key, HQQ.axis_value) == (1, 1)
    assert (w.warm_up_runs, w.measured_repeats, w.seed) == (1, 3, 42)
    assert (w.quality_tokens, w.quality_topk) == (16, 5)
    assert w.acceptance == Acceptance(0, 0.50, 0.60, 2.00)


def test_embedded_profile_is_the_same_experiment_on_a_laptop() -> None:
    w = EMBEDDED_CPU
    assert (w.model_id, w.dtype) == ("embedded", "float32")
    assert w.context_lengths == (128, 512, 1024)
    for same in (
        "workload_id",
        "prompt",
        "candidate",
        "window_residual_lengths",
        "context_residual_length",
        "window_context_length",
        "acceptance",
        "seed",
    ):
        assert getattr(w, same) == getattr(Q_CUDA_MECHANISM, same), same
    assert w.workload_version != Q_CUDA_MECHANISM.workload_version


def test_embedded_windows_overflow_as_often_as_announced() -> None:
    w = EMBEDDED_CPU
    for window, flushes in w.to_json()["expected_decode_window_flushes"].items():
        assert (w.window_new_tokens - 1) // int(window) == flushes


def test_workload_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Q_CUDA_MECHANISM.seed = 7  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        {"model_id": "org/other"},
        {"dtype": "float16"},
        {"context_lengths": (512, 2048)},
        {"window_residual_lengths": (16, 32)},
        {"context_new_tokens": 65},
        {"candidate": replace(HQQ, nbits=2)},
        {"batch_size": 2},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("name", PROFILES)
def test_another_model_matrix_or_bit_width_needs_another_version(
    name: str, change: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match="version of its own"):
        replace(profile(name), **change)  # type: ignore[arg-type]
    replace(profile(name), workload_version="mine", **change)  # type: ignore[arg-type]


def test_what_is_measured_beside_the_pair_needs_no_new_version() -> None:
    assert replace(Q_CUDA_MECHANISM, further_candidates=()).workload_version == "1"


def test_another_model_is_said_in_the_workload() -> None:
    other = with_model(Q_CUDA_MECHANISM, "embedded")
    assert other.profile == "Q-CUDA-MECHANISM"
    assert (other.model_id, other.model_overridden) == ("embedded", True)
    assert other.workload_version == "1+embedded"
    assert other.context_lengths == Q_CUDA_MECHANISM.context_lengths
    assert with_model(other, "org/third").workload_version == "1+org-third"


def test_the_profiles_own_model_overrides_nothing() -> None:
    same = with_model(Q_CUDA_MECHANISM, Q_CUDA_MECHANISM.model_id)
    assert same == Q_CUDA_MECHANISM


def test_another_revision_of_the_same_model_is_an_override() -> None:
    pinned = with_model(Q_CUDA_MECHANISM, Q_CUDA_MECHANISM.model_id, "a" * 40)
    assert (pinned.model_revision, pinned.model_overridden) == ("a" * 40, True)


@pytest.mark.parametrize(
    "wrong",
    [{"quality_tokens": 18}, {"quality_tokens": 1}, {"measured_repeats": 0}],
    ids=str,
)
def test_impossible_workload_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        replace(EMBEDDED_CPU, **wrong)  # type: ignore[arg-type]


def test_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="Q-CUDA-MECHANISM, embedded_cpu"):
        profile("gpu")


def test_json_holds_the_prompt_by_its_digest_too() -> None:
    plain = Q_CUDA_MECHANISM.to_json()
    assert (
        plain["prompt_sha256"] == hashlib.sha256(plain["prompt"].encode()).hexdigest()
    )
    assert plain["context_lengths"] == [512, 2048, 4096]
    assert plain["expected_decode_window_flushes"] == {"16": 8, "32": 4, "64": 2}


def test_a_group_is_one_baseline_and_its_candidates() -> None:
    *contexts, window = Q_CUDA_MECHANISM.groups()
    assert [group[0].context_length for group in contexts] == [512, 2048, 4096]
    for group in [*contexts, window]:
        assert group[0].candidate_id == "dynamic_cache"
        assert all(cell.family for cell in group[1:])
    hqq = [cell for cell in window if cell.family == HQQ]
    assert [cell.residual_length for cell in hqq] == [16, 32, 64]
    names = [cell.key for group in [*contexts, window] for cell in group]
    assert len(set(names)) == len(names)


def test_one_more_family_is_one_more_entry() -> None:
    one_more = CandidateFamily("new", "new_cache", "new", 4, 64, 0, 1)
    more = replace(EMBEDDED_CPU, further_candidates=(*FURTHER, one_more))
    added = [c.key for g in more.groups() for c in g if c.family == one_more]
    assert added == ["context_capacity/512/new/window 128"]
    everywhere = replace(more, further_context_lengths=None)
    added = [c.key for g in everywhere.groups() for c in g if c.family == one_more]
    assert len(added) == len(EMBEDDED_CPU.context_lengths) + 3
    assert more.groups()[0] == EMBEDDED_CPU.groups()[0]


def test_cache_config_is_a_new_dict_at_every_call() -> None:
    one, other = HQQ.cache_config(32), HQQ.cache_config(32)
    assert one == other and one is not other
    one.pop("backend")
    assert HQQ.cache_config(32) == other


# ---- shapes -------------------------------------------------------------------------------------


def test_the_prompt_and_every_overflow_get_quantized() -> None:
    assert quantized_lengths(512, 71, 16) == [512, 528, 544, 560, 576]
    assert quantized_lengths(512, 63, 128) == [512]
    assert quantized_lengths(10, 4, 4) == [10, 14]


def test_required_pair_fits_both_models_everywhere() -> None:
    for workload, shape in (
        (EMBEDDED_CPU, EMBEDDED_SHAPE),
        (Q_CUDA_MECHANISM, QWEN_SHAPE),
        (Q_CUDA_MECHANISM, EMBEDDED_SHAPE),
    ):
        for group in workload.groups():
            for cell in group:
                if cell.family == workload.candidate:
                    run = (cell.max_new_tokens - 1, cell.residual_length)
                    assert not first_refusal(HQQ, shape, cell.context_length, *run)


def test_refusal_says_what_does_not_fit() -> None:
    assert refusal(HQQ, EMBEDDED_SHAPE, 128) is None
    assert "3 x 127 x 64 values make 381 groups" in str(
        refusal(HQQ, EMBEDDED_SHAPE, 127)
    )
    assert "multiple of 4" in str(refusal(replace(HQQ, nbits=2), QWEN_SHAPE, 513))
    assert "3 bits" in str(refusal(replace(HQQ, nbits=3), QWEN_SHAPE, 512))
    strided = replace(HQQ, nbits=2, q_group_size=2, axis_key=0, axis_value=0)
    assert "the group must be a multiple of 4, not 2" in str(
        refusal(strided, EMBEDDED_SHAPE, 128)
    )
    assert "48 values are no multiple" in str(refusal(FURTHER[0], EMBEDDED_SHAPE, 16))
    assert refusal(FURTHER[1], EMBEDDED_SHAPE, 17) is None
    narrow = replace(EMBEDDED_SHAPE, head_dim=80)
    assert "64 along head_dim do not divide its 80" in str(
        refusal(FURTHER[1], narrow, 17)
    )


@pytest.mark.parametrize(
    ("family", "shape", "wanted", "near"),
    [
        (HQQ, EMBEDDED_SHAPE, 127, 128),
        (HQQ, EMBEDDED_SHAPE, 128, 128),
        (replace(HQQ, nbits=2), QWEN_SHAPE, 513, 514),
        (FURTHER[0], EMBEDDED_SHAPE, 100, 128),
        (FURTHER[0], EMBEDDED_SHAPE, 90, 64),
        (replace(HQQ, nbits=3), QWEN_SHAPE, 512, None),
    ],
)
def test_nearest_length_that_works(
    family: CandidateFamily, shape: KVShape, wanted: int, near: int | None
) -> None:
    assert nearest_length(family, shape, wanted) == near


def test_window_that_never_fits_has_no_nearest_length() -> None:
    # every overflow adds 48 values a channel: some of the sums are no multiple of 64
    run = {"tokens_fed": 71, "residual_length": 16}
    assert nearest_length(FURTHER[0], EMBEDDED_SHAPE, 512, **run) is None
