"""`kvlab.matrix.run` and its files: one whole run of a tiny model, kills, refusals, failures."""

from __future__ import annotations

import copy
import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_matrix_measure import MIXED, QUANTO, tiny_model
from typer.testing import CliRunner

from kvlab import matrix, models, runtime
from kvlab.matrix import caches, files, machine, measure, progress, schema
from kvlab.matrix.commands import app
from kvlab.matrix.workload import HQQ, Workload

Json = dict[str, Any]
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"

TINY = Workload(
    profile="tiny",
    workload_version="tiny",
    model_id="tiny",
    dtype="float32",
    context_lengths=(64, 128),
    context_new_tokens=6,
    context_residual_length=16,
    window_context_length=96,
    window_new_tokens=34,
    window_residual_lengths=(16, 32),
    natural_texts=("river",),
    natural_prompt_tokens=64,
    natural_scored_tokens=32,
    measured_repeats=2,
    quality_tokens=5,
    further_candidates=(QUANTO, MIXED),
)
UNITS = 2 * (4 * 3 + 1) + (7 * 3 + 1) - 3 + 1  # quanto has no window of 16 here


class Bytes:
    """A tokenizer: one token a byte."""

    def __call__(self, text: str, return_tensors: str = "", **options: Any) -> Any:
        ids: Any = list(text.encode())
        if return_tensors:
            ids = torch.tensor([ids])
        return SimpleNamespace(input_ids=ids)


def tiny_loaded() -> models.LoadedModel:
    tokenizer: Any = Bytes()
    return models.LoadedModel(tiny_model(), tokenizer, "tiny", "c" * 40, "given")


def run_tiny(folder: Path, label: str = "a", **options: Any) -> Path:
    """A run of the tiny workload, on one thread as in the process that gets killed."""
    torch.set_num_threads(1)
    options = {
        "report": progress.silent,
        "loaded": tiny_loaded(),
        "workload": TINY,
    } | options
    return matrix.run("embedded_cpu", label, folder, **options)


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[tuple[int, int, str]]]:
    """One run of the tiny workload: its file, and the progress it reported."""
    reported: list[tuple[int, int, str]] = []
    folder = tmp_path_factory.mktemp("results")
    path = run_tiny(folder, report=lambda *told: reported.append(told))
    return path, reported


@pytest.fixture
def record(finished: tuple[Path, Any]) -> Json:
    return matrix.read(finished[0])


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# ---- the record ---------------------------------------------------------------------------------


def test_run_measures_every_row_and_fits_the_schema(record: Json) -> None:
    assert record["run_mode"] == "embedded_cpu"
    assert record["failure"] is None
    rows = record["measurement_matrix"]
    assert [
        (r["matrix_role"], r["context_length"], r["residual_length"]) for r in rows
    ] == [
        ("context_capacity", 64, 16),
        ("context_capacity", 128, 16),
        ("residual_window", 96, 16),
        ("residual_window", 96, 32),
    ]
    assert {r["candidate"]["layer_class"] for r in rows} == {"HQQQuantizedLayer"}
    assert {r["baseline"]["layer_class"] for r in rows} == {"DynamicLayer"}
    assert [r["candidate"]["overflow_count"] for r in rows] == [0, 0, 2, 1]
    assert [r["expected_decode_window_flushes"] for r in rows] == [0, 0, 2, 1]
    for r in rows:
        assert r["candidate"]["cache_config"] == HQQ.cache_config(r["residual_length"])
        assert (
            r["candidate"]["cache_bytes"]["total"]
            < r["baseline"]["cache_bytes"]["total"]
        )
        assert r["baseline"]["generated_tokens"] == r["max_new_tokens"]
        assert len(r["baseline"]["repeats"]) == 2
        assert r["candidate_quality"]["tokens"] == 5


def test_baseline_stands_alone_and_in_its_rows(record: Json) -> None:
    baseline = record["baseline"]
    assert baseline["name"] == "dynamic_cache"
    assert list(baseline["capacity_by_context"]) == ["64", "128"]
    for r in record["measurement_matrix"]:
        if r["matrix_role"] == "residual_window":
            assert r["baseline"] == baseline["residual_window"]
        else:
            assert (
                r["baseline"]
                == baseline["capacity_by_context"][str(r["context_length"])]
            )


def test_candidate_family_is_the_required_pair(record: Json) -> None:
    assert record["candidate_family"] == {
        "id": "hqq_axis1",
        "name": "quantized_cache",
        "backend": "hqq",
        "nbits": 4,
        "q_group_size": 64,
        "axis_key": 1,
        "axis_value": 1,
        "sink_tokens": 0,
        "residual_lengths": [16, 16, 32],
    }


def test_further_family_has_rows_of_its_own_where_shapes_allow(record: Json) -> None:
    quanto, mixed = record["further_candidates"]
    assert quanto["id"] == "quanto_kivi" and quanto["failure"] is None
    assert [r["residual_length"] for r in quanto["measurement_matrix"]] == [16, 16, 32]
    assert (quanto["axis_key"], quanto["axis_value"]) == (-1, 0)
    (left_out,) = quanto["left_out"]
    assert left_out["residual_length"] == 16
    assert "224 values are no multiple of the group" in left_out["reason"]
    assert mixed["id"] == "mixed_axes" and mixed["left_out"] == []
    assert [r["residual_length"] for r in mixed["measurement_matrix"]] == [16] * 3 + [
        32
    ]
    for row in mixed["measurement_matrix"]:
        assert row["candidate"]["layer_class"] == "MixedAxisLayer"
        assert row["candidate"]["cache_config"]["sink_tokens"] == 4
    decided = record["mechanism_metrics"]["eligible_candidate_count"]
    assert decided == sum(r["eligible"] for r in record["measurement_matrix"])


def test_natural_text_is_scored_for_every_cache_and_window(record: Json) -> None:
    natural = record["natural_text_quality"]
    assert natural["scored_tokens"] == 32
    named = [(c["candidate_id"], c["residual_length"]) for c in natural["candidates"]]
    assert named == [
        ("hqq_axis1", 16),
        ("hqq_axis1", 32),
        ("quanto_kivi", 32),
        ("mixed_axes", 16),
        ("mixed_axes", 32),
    ]
    for candidate in natural["candidates"]:
        assert candidate["kl"] > candidate["kl_standard_error"] > 0


def test_memory_on_a_cpu_says_where_it_comes_from(record: Json) -> None:
    assert "torch.profiler" in record["memory_source"]
    assert record["baseline"]["residual_window"]["peak_reserved_bytes"] is None


def test_inputs_are_the_prompts_tokens_repeated(record: Json) -> None:
    assert set(record["input_sha256_by_context"]) == {"64", "96", "128"}


def test_progress_counts_every_unit_once(
    finished: tuple[Path, Any], record: Json
) -> None:
    reported = finished[1]
    assert [done for done, _, _ in reported] == [*range(UNITS), UNITS]
    assert {total for _, total, _ in reported} == {UNITS}
    assert record["run"]["units"] == UNITS
    assert (record["run"]["processes"], record["run"]["resumed_units"]) == (1, 0)


def test_nothing_but_the_result_is_left(finished: tuple[Path, Any]) -> None:
    assert os.listdir(finished[0].parent) == [finished[0].name]


def test_result_names_no_host_user_or_path(finished: tuple[Path, Any]) -> None:
    assert_names_nobody(finished[0].read_text("utf-8"))


def assert_names_nobody(text: str) -> None:
    # a short or common name (root, a digit) may be part of a word
    for name in (socket.gethostname(), getpass.getuser(), str(Path.home()), str(ROOT)):
        assert not re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text), name
    # fields that say ratios in words apart, nothing looks like a path
    assert not re.search(r"(?<![\w/ ])/[a-z]+/[\w.]+", text)


def test_json_is_indented_and_ends_with_a_newline(finished: tuple[Path, Any]) -> None:
    text = finished[0].read_text("utf-8")
    assert text.startswith('{\n "schema_version"') and text.endswith("}\n")
    assert "NaN" not in text and "Infinity" not in text
    assert finished[0].stat().st_mode & 0o777 == 0o644


def test_same_seed_and_model_measure_the_same_but_time(
    record: Json, tmp_path: Path
) -> None:
    again = matrix.read(run_tiny(tmp_path))
    for one, other in zip(
        record["measurement_matrix"], again["measurement_matrix"], strict=True
    ):
        for field in (
            "incremental_peak_saved_bytes",
            "fixed_continuation_nll_delta",
            "mean_topk_overlap",
            "token_agreement_rate",
            "cache_bytes_saved",
        ):
            assert one[field] == other[field], field
    assert again["natural_text_quality"] == record["natural_text_quality"]


# ---- the schema ---------------------------------------------------------------------------------


def required_fields(
    spec: Json, value: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[Any, ...]]:
    """The place of every field that a record has, lists by their first item."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key)
            yield from required_fields(spec, item, (*path, key))
    elif isinstance(value, list) and value:
        yield from required_fields(spec, value[0], (*path, 0))


# maps from a context or window to something: what is in them is the run's own matter
MAPS = {
    "capacity_by_context",
    "input_sha256_by_context",
    "expected_decode_window_flushes",
}


def at(record: Json, path: tuple[Any, ...]) -> Any:
    value: Any = record
    for step in path:
        value = value[step]
    return value


def test_removing_any_field_makes_a_record_invalid(record: Json) -> None:
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(schema.schema())
    assert validator.is_valid(record)
    places = [
        path
        for path in required_fields(schema.schema(), record)
        if not (
            len(path) > 1
            and path[-2] in MAPS
            and isinstance(at(record, path[:-1]), dict)
        )
    ]
    assert len(places) > 400
    survived = []
    for path in places:
        holder = at(record, path[:-1])
        order = list(holder)
        value = holder.pop(path[-1])
        if validator.is_valid(record):
            survived.append(path)
        holder[path[-1]] = value
        for key in order:  # as it was
            holder[key] = holder.pop(key)
    assert not survived


@pytest.mark.parametrize(
    "place",
    [
        (),
        ("workload",),
        ("workload", "acceptance"),
        ("hardware",),
        ("measurement_matrix", 0),
        ("measurement_matrix", 0, "candidate"),
        ("measurement_matrix", 0, "candidate", "cache_bytes"),
        ("mechanism_metrics",),
        ("run",),
    ],
    ids=str,
)
def test_misspelt_field_makes_a_record_invalid(
    record: Json, place: tuple[Any, ...]
) -> None:
    changed = copy.deepcopy(record)
    at(changed, place)["finishd"] = 1
    assert schema.faults(changed)


@pytest.mark.parametrize(
    "change",
    [
        {"decision": "ready_to_measure"},
        {"evidence_level": "environment_preflight"},
        {"evidence_level": "failed_real_gpu_attempt"},
        {"measurement_matrix": []},
        {"natural_text_quality": None},
        {"memory_source": None},
        {"failure": {"stage": "s", "type": "t", "message": "m"}},
        {"schema_version": "0.9"},
        {"run_mode": "dry_run"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_contradictions_make_a_record_invalid(record: Json, change: Json) -> None:
    assert schema.faults(record | change)


def test_decision_must_fit_the_number_of_eligible_rows(record: Json) -> None:
    count = record["mechanism_metrics"]["eligible_candidate_count"]
    other = "tune_cache_policy" if count else "accept_local_cache_candidate"
    assert schema.faults(record | {"decision": other})


def test_schema_is_a_valid_draft_2020_12_schema() -> None:
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(schema.schema())
    assert schema.schema()["$schema"].endswith("2020-12/schema")


def test_committed_schema_is_the_packages_own() -> None:
    text = (RESULTS / "matrix.schema.json").read_text("utf-8")
    assert text == schema.schema_text(), (
        "run: kvlab matrix schema > results/matrix.schema.json"
    )


COMMITTED = files.all_in(RESULTS)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_committed_results_fit_the_schema_and_name_nobody(path: Path) -> None:
    record = matrix.read(path)
    assert path.name == f"{record['run_mode']}-{record['run_label']}.json"
    assert_names_nobody(path.read_text("utf-8"))
    broken = dict(record)
    del broken["decision"]
    assert schema.faults(broken)


def test_a_committed_run_of_the_embedded_model_is_of_the_current_workload() -> None:
    records = [matrix.read(path) for path in COMMITTED]
    current = matrix.EMBEDDED_CPU.workload_version
    assert any(
        r["run_mode"] == "embedded_cpu" and r["workload"]["workload_version"] == current
        for r in records
    )


def test_no_committed_figures_of_a_gpu_that_was_not_there() -> None:
    for path in COMMITTED:
        record = matrix.read(path)
        if record["measurement_matrix"] and record["run_mode"] == "real_gpu":
            assert record["hardware"]["compute_capability"]


def test_reading_something_else_says_what_is_wrong(
    tmp_path: Path, record: Json
) -> None:
    path = tmp_path / "x.json"
    del record["decision"]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="'decision' is a required property"):
        matrix.read(path)


def test_reading_works_without_jsonschema(
    finished: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    assert matrix.read(finished[0])["chapter"] == "06_gpu_matrix"
    other = tmp_path / "x.json"
    other.write_text("{}")
    with pytest.raises(ValueError, match="version None"):
        matrix.read(other)


# ---- dry run ------------------------------------------------------------------------------------


def test_dry_run_records_the_plan_and_loads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("a dry run loads nothing and asks no hub")

    monkeypatch.setattr(models, "load", fail)
    monkeypatch.setattr(models, "resolve_model_commit", fail)
    made = matrix.read(matrix.run("dry_run", "plan", tmp_path))
    assert made["environment_profile"] == "Q-CUDA-MECHANISM"
    assert made["evidence_level"] == "environment_preflight"
    assert made["decision"] == "ready_to_measure"
    assert made["measurement_matrix"] == [] and made["memory_source"] is None
    assert made["workload"]["resolved_model_commit"] is None
    assert len(made["plan"]) == 3 * 4 + 10
    assert os.listdir(tmp_path) == ["dry_run-plan.json"]


def test_planned_record_writes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not schema.faults(matrix.planned_record(matrix.EMBEDDED_CPU))
    assert os.listdir(tmp_path) == []


def test_importing_the_package_loads_no_torch() -> None:
    code = (
        "import sys, kvlab.matrix, kvlab.matrix.commands; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n"


# ---- labels -------------------------------------------------------------------------------------


def test_taken_label_is_refused_by_file_name_before_anything_runs(
    finished: tuple[Path, Any],
) -> None:
    path = finished[0]
    before = path.read_bytes()
    with pytest.raises(
        matrix.RunRefused, match=r"embedded_cpu-a\.json exists.*--force"
    ):
        run_tiny(path.parent, loaded=None)
    assert path.read_bytes() == before


def test_force_makes_numbered_siblings(tmp_path: Path) -> None:
    paths = [matrix.run("dry_run", "a", tmp_path, force=True) for _ in range(3)]
    assert [p.name for p in paths] == [
        "dry_run-a.json",
        "dry_run-a.2.json",
        "dry_run-a.3.json",
    ]
    assert [matrix.read(p)["run_label"] for p in paths] == ["a", "a.2", "a.3"]


@pytest.mark.parametrize("label", ["", "a b", "../a", "a/b", ".a", "a.2", "-a"])
def test_label_that_is_no_file_name_is_refused(label: str, tmp_path: Path) -> None:
    with pytest.raises(matrix.RunRefused, match="no run label"):
        matrix.run("dry_run", label, tmp_path)
    assert os.listdir(tmp_path) == []


def test_unknown_mode_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dry_run, real_gpu, embedded_cpu"):
        matrix.run("gpu", "a", tmp_path)  # type: ignore[arg-type]


def test_result_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    target.write_text("first")
    with pytest.raises(matrix.RunRefused, match="meanwhile"):
        files.write_new(target, {"a": 1})
    assert target.read_text() == "first"
    assert os.listdir(tmp_path) == ["x.json"]


def test_file_system_without_links_is_not_overwritten_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*args: Any) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", no_links)
    target = tmp_path / "x.json"
    files.write_new(target, {"a": 1})
    assert json.loads(target.read_text()) == {"a": 1}
    with pytest.raises(matrix.RunRefused, match="meanwhile"):
        files.write_new(target, {"a": 2})
    assert os.listdir(tmp_path) == ["x.json"]


def test_half_written_result_never_gets_its_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        files.write_new(tmp_path / "x.json", {"a": 1, "b": object()})
    with pytest.raises(ValueError):
        files.write_new(tmp_path / "x.json", {"a": float("nan")})
    assert os.listdir(tmp_path) == []


def test_second_process_with_the_same_label_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(matrix.RunRefused, match="another process")
    with files.only_run(tmp_path, "embedded_cpu", "a"), refused:
        run_tiny(tmp_path)
    assert os.listdir(tmp_path) == []


# ---- failures -----------------------------------------------------------------------------------


def failing_after(
    monkeypatch: pytest.MonkeyPatch, calls: int, message: str
) -> list[int]:
    """Lets this many generations through, then raises; returns a list that counts them."""
    real, counted = measure.generate, []

    def generate(*args: Any, **options: Any) -> Any:
        counted.append(1)
        if len(counted) > calls:
            raise RuntimeError(message)
        return real(*args, **options)

    monkeypatch.setattr(measure, "generate", generate)
    return counted


def test_failure_is_written_with_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = f"no kernel in {ROOT}/lib/x.so on {socket.gethostname()}"
    failing_after(monkeypatch, 13, message)
    with pytest.raises(matrix.RunFailed, match="--force") as caught:
        run_tiny(tmp_path)
    made = matrix.read(caught.value.path)
    assert caught.value.path == tmp_path / "embedded_cpu-a.json"
    assert made["failure"] == {
        "stage": "context_capacity/128/hqq_axis1/window 16/run 0",
        "type": "RuntimeError",
        "message": "no kernel in <path> on <host>",
    }
    assert made["evidence_level"] == "failed_real_gpu_attempt"
    assert made["decision"] == "reject_until_cache_configuration_fixed"
    assert len(made["measurement_matrix"]) == 1
    assert made["natural_text_quality"] is None
    assert_names_nobody(caught.value.path.read_text("utf-8"))


def test_repeating_a_failed_run_goes_on_from_its_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing_after(patch, 10, "broken")
        with pytest.raises(matrix.RunFailed):
            run_tiny(tmp_path)
    with pytest.raises(matrix.RunRefused, match="exists"):
        run_tiny(tmp_path)
    path = run_tiny(tmp_path, force=True)
    made = matrix.read(path)
    assert path.name == "embedded_cpu-a.2.json"
    assert made["failure"] is None
    # ten generations and one trajectory
    assert (made["run"]["resumed_units"], made["run"]["processes"]) == (11, 2)
    assert sorted(os.listdir(tmp_path)) == [
        "embedded_cpu-a.2.json",
        "embedded_cpu-a.json",
    ]


def test_further_family_that_fails_costs_only_its_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(config: Any, cache_config: Json) -> None:
        raise RuntimeError("no quanto today")

    backend = replace(caches.BACKENDS["quanto"], build=broken)
    monkeypatch.setitem(caches.BACKENDS, "quanto", backend)
    made = matrix.read(run_tiny(tmp_path))
    assert len(made["measurement_matrix"]) == 4 and made["failure"] is None
    quanto, mixed = made["further_candidates"]
    assert mixed["failure"] is None and len(mixed["measurement_matrix"]) == 4
    assert quanto["measurement_matrix"] == []
    assert quanto["failure"]["message"] == "no quanto today"
    assert quanto["failure"]["stage"].startswith("context_capacity/64/quanto_kivi")


def test_required_pair_that_cannot_fit_fails_with_the_nearest_length(
    tmp_path: Path,
) -> None:
    odd = replace(TINY, context_lengths=(63,), workload_version="odd")
    with pytest.raises(
        matrix.RunFailed, match=r"63 groups .*nearest context that works: 64"
    ):
        run_tiny(tmp_path, workload=odd)


def test_gpu_run_without_a_gpu_is_a_failed_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(matrix.RunFailed, match="no CUDA device") as caught:
        matrix.run("real_gpu", "a", tmp_path)
    made = matrix.read(caught.value.path)
    assert made["failure"]["stage"] == "environment"
    assert made["measurement_matrix"] == []


def test_model_out_of_reach_is_a_failed_attempt(tmp_path: Path) -> None:
    workload = replace(TINY, model_id="org/none", workload_version="none")
    with pytest.raises(
        matrix.RunFailed, match="resolve the model's commit: ModelError"
    ):
        run_tiny(
            tmp_path,
            workload=workload,
            loaded=None,
            local_files_only=True,
            cache_dir=tmp_path / "cache",
        )


def test_text_that_is_too_short_is_a_failed_attempt(tmp_path: Path) -> None:
    long = replace(TINY, natural_scored_tokens=100_000, workload_version="long")
    with pytest.raises(matrix.RunFailed, match=r"'river' has .* tokens"):
        run_tiny(tmp_path, workload=long)


def test_messages_lose_paths_addresses_and_names() -> None:
    text = (
        f"cannot open {Path.home()}/a b.txt, '/etc/x.conf' or C:\\Users\\me\\f; "
        f"asked https://host.example:80/x?y on {socket.gethostname()}; 3/4 of org/name"
    )
    cleaned = machine.without_names(text)
    for private in (
        str(Path.home()) + "/",
        "/etc",
        "Users",
        "host.example",
        socket.gethostname(),
    ):
        assert private not in cleaned, private
    assert "3/4 of org/name" in cleaned


# ---- kill and resume ----------------------------------------------------------------------------

TO_BE_KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_matrix_run
test_matrix_run.run_tiny(Path({folder!r}))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `kill -9` ended a run in the middle of its second group."""
    folder = tmp_path_factory.mktemp("killed")
    code = TO_BE_KILLED.format(tests=str(Path(__file__).parent), folder=str(folder))
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
    )
    partial = folder / ".embedded_cpu-a.partial"
    deadline = time.monotonic() + 300
    while not (partial.exists() and len(json.loads(partial.read_text())["units"]) > 13):
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    return folder


def copied(folder: Path, to: Path) -> Path:
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_killed_run_resumes_and_measures_no_finished_unit_again(
    killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(killed, tmp_path)
    assert not (folder / "embedded_cpu-a.json").exists()
    before = json.loads((folder / ".embedded_cpu-a.partial").read_text())["units"]
    assert 13 < len(before) < UNITS
    real, generated = measure.generate, []

    def counting(*args: Any, **options: Any) -> Any:
        generated.append(1)
        return real(*args, **options)

    monkeypatch.setattr(measure, "generate", counting)
    made = matrix.read(run_tiny(folder))
    assert made["run"]["processes"] == 2
    assert made["run"]["resumed_units"] == len(before)
    # what the first process measured stands in the result as it was
    kept = {
        unit["latency_ms"]
        for name, unit in before.items()
        if "latency_ms" in unit and not name.endswith("run 0")
    }
    rows = made["measurement_matrix"] + [
        row
        for further in made["further_candidates"]
        for row in further["measurement_matrix"]
    ]
    repeats = [
        r
        for row in rows
        for side in ("baseline", "candidate")
        for r in row[side]["repeats"]
    ]
    assert kept == {r["latency_ms"] for r in repeats if r["process"] == 1}
    assert {r["process"] for r in repeats} == {1, 2}
    # every missing generation once; and the warm-up again, of cells that were half done
    missing = sum(1 for name in all_runs() if name not in before)
    half = sum(
        1
        for name in all_runs()
        if name.endswith("run 0")
        and name in before
        and name.replace("run 0", "run 2") not in before
    )
    assert len(generated) == missing + half
    assert os.listdir(folder) == ["embedded_cpu-a.json"]


def all_runs() -> list[str]:
    return [
        f"{cell.key}/run {number}"
        for group in TINY.groups()
        for cell in group
        for number in range(3)
        if not cell.key.endswith("96/quanto_kivi/window 16")
    ]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"workload": replace(TINY, seed=7)}, r"workload\.seed was 42 and is 7"),
        (
            {"loaded": replace(tiny_loaded(), commit="d" * 40)},
            "commit was 'cccc.* and is 'dddd",
        ),
    ],
    ids=["workload", "commit"],
)
def test_another_identity_is_refused_and_says_why(
    change: Json, named: str, killed: Path, tmp_path: Path
) -> None:
    folder = copied(killed, tmp_path)
    partial = folder / ".embedded_cpu-a.partial"
    before = partial.read_bytes()
    with pytest.raises(matrix.RunRefused, match=named) as caught:
        run_tiny(folder, **change)
    assert f"Delete {partial}" in str(caught.value)
    assert partial.read_bytes() == before
    assert not (folder / "embedded_cpu-a.json").exists()


@pytest.mark.parametrize(
    ("part", "value", "named"),
    [
        ("framework_versions", {"torch": "0.1"}, r"framework\.torch was"),
        ("hardware", {"cpu": "another"}, r"hardware\.cpu was"),
        ("hardware", {"threads": 64}, r"hardware\.threads was"),
    ],
    ids=["versions", "cpu", "threads"],
)
def test_other_versions_or_hardware_are_refused(
    part: str,
    value: Json,
    named: str,
    killed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = copied(killed, tmp_path)
    real = getattr(runtime, part)
    monkeypatch.setattr(runtime, part, lambda *args: real(*args) | value)
    with pytest.raises(matrix.RunRefused, match=named):
        run_tiny(folder)


def test_another_label_starts_afresh(
    killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(killed, tmp_path)
    failing_after(monkeypatch, 1, "enough")
    with pytest.raises(matrix.RunFailed) as caught:
        run_tiny(folder, "b")
    made = matrix.read(caught.value.path)
    assert made["run"]["resumed_units"] == 0
    assert made["failure"]["stage"].startswith("context_capacity/64/hqq_axis1")
    assert (folder / ".embedded_cpu-a.partial").exists()


def test_units_of_a_run_that_was_killed_after_its_end_are_not_used_again(
    finished: tuple[Path, Any], killed: Path, tmp_path: Path
) -> None:
    partial = tmp_path / ".embedded_cpu-a.partial"
    partial.write_bytes((killed / partial.name).read_bytes())
    result = tmp_path / "embedded_cpu-a.json"
    result.write_bytes(finished[0].read_bytes())
    failed = json.loads(result.read_text())
    failed["failure"] = {"stage": "s", "type": "t", "message": "m"}
    sibling = tmp_path / "embedded_cpu-a.2.json"
    sibling.write_text(json.dumps(failed))
    os.utime(partial, (2000, 2000))
    os.utime(result, (1000, 1000))  # an earlier run
    os.utime(sibling, (3000, 3000))  # failed: what it measured is to be gone on from
    files.discard_finished(tmp_path, "embedded_cpu", "a")
    assert partial.exists()
    os.utime(result, (4000, 4000))
    files.discard_finished(tmp_path, "embedded_cpu", "a")
    assert not partial.exists()


def test_unreadable_partial_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".embedded_cpu-a.partial").write_text('{"units": {')
    with pytest.raises(matrix.RunRefused, match=r"cannot be read .*Delete"):
        run_tiny(tmp_path)


# ---- progress and commands ----------------------------------------------------------------------


def test_progress_is_plain_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress.shown() as report:
        report(3, 12, "a cell")
    captured = capsys.readouterr()
    assert captured.out == "[ 3/12] a cell\n" and not captured.err


def test_progress_is_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with progress.shown() as report:
        report(3, 12, "a cell")
        report(12, 12, "done")
    captured = capsys.readouterr()
    assert "12/12" in captured.out and "done" in captured.out and not captured.err


def test_progress_in_a_notebook_is_a_widget_or_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_in_notebook", lambda: True)
    with progress.shown() as report:
        report(3, 12, "a cell")
        report(12, 12, "done")
    assert not capsys.readouterr().err
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    with progress.shown() as report:
        report(3, 12, "a cell")
    assert capsys.readouterr().out == "[ 3/12] a cell\n"


def test_command_makes_a_dry_run_and_refuses_a_second(tmp_path: Path) -> None:
    arguments = ["run", "--label", "x", "--results", str(tmp_path)]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0
    assert "ready_to_measure" in first.output and "dry_run-x.json" in first.output
    second = CliRunner().invoke(app, arguments)
    assert second.exit_code == 2
    assert "dry_run-x.json exists" in second.output
    assert CliRunner().invoke(app, [*arguments, "--force"]).exit_code == 0


def test_command_takes_another_model(tmp_path: Path) -> None:
    arguments = [
        "run",
        "--label",
        "x",
        "--results",
        str(tmp_path),
        "--model",
        "embedded",
    ]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    workload = matrix.read(tmp_path / "dry_run-x.json")["workload"]
    assert (workload["model_id"], workload["model_overridden"]) == ("embedded", True)


def test_command_reports_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = [
        "run",
        "--mode",
        "real_gpu",
        "--label",
        "x",
        "--results",
        str(tmp_path),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert "no CUDA device" in done.output
    assert (tmp_path / "real_gpu-x.json").exists()


def test_command_prints_the_committed_schema() -> None:
    done = CliRunner().invoke(app, ["schema"])
    assert done.output == schema.schema_text()
