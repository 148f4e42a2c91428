"""`kvlab.matrix.report` and its figures, on a run with fabricated figures.

The fabricated run goes through the same code as a real one (`judge`, the schema), with one row
that the memory gate refuses and one that the quality gates refuse.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvlab import matrix
from kvlab.matrix import files, judge, report
from kvlab.matrix.commands import app
from kvlab.matrix.workload import CONTEXT, WINDOW, Cell, Workload, profile

ROOT = Path(__file__).parents[1]
MIB = 2**20
Json = dict[str, Any]

SAVED_MIB = {512: -5, 2048: 17, 4096: 34}
NLL_INCREASE = {512: 0.125, 2048: 0.375, 4096: 0.75}
OVERLAP = {512: 0.8, 2048: 0.7, 4096: 0.5}
TIME_RATIO = {16: 1.6, 32: 1.5, 64: 1.25, 128: 1.3}


def one_run(cell: Cell, workload: Workload) -> Json:
    """What one generation of a cell would leave behind."""
    tokens, window = cell.context_length, cell.residual_length
    baseline_peak, held = 100 * MIB, tokens * 12288
    peak, latency = baseline_peak, 1000.0
    if window is not None:
        peak -= SAVED_MIB[tokens] * MIB
        held //= 3
        latency *= TIME_RATIO[window]
    return {
        "token_ids": [list(range(cell.max_new_tokens))],
        "latency_ms": latency,
        "ttft_ms": 100.0,
        "tpot_ms": (latency - 100) / (cell.max_new_tokens - 1),
        "largest_gap_ms": 40.0,
        "overflows": 0 if window is None else (cell.max_new_tokens - 1) // window,
        "cached_tokens": tokens + cell.max_new_tokens - 1,
        "cache_bytes": dict.fromkeys(("codes", "scales", "zeros", "window", "other"), 0)
        | {"total": held},
        "layer_class": "HQQQuantizedLayer" if cell.family else "DynamicLayer",
        "cache_config": cell.family.cache_config(window or 0) if cell.family else None,
        "cache_config_unchanged": True,
        "memory": {
            "base_allocated": 1000 * MIB,
            "peak_allocated": 1000 * MIB + peak,
            "decode_peak_allocated": 1000 * MIB + held,
            "base_reserved": None,
            "peak_reserved": None,
            "decode_peak_reserved": None,
        },
        "process": 1,
    }


def scores(cell: Cell, tokens: int) -> Json:
    if cell.family is None:
        return {"nll": [1.0, 2.0] * (tokens // 2), "kl": [], "topk_overlap": []}
    at = cell.context_length
    # half of the tokens lose a little more than the mean, half a little less
    worse = [NLL_INCREASE[at] + shift for shift in (-0.0625, 0.0625)]
    return {
        "nll": [1.0 + worse[0], 2.0 + worse[1]] * (tokens // 2),
        "kl": [0.01] * tokens,
        "topk_overlap": [OVERLAP[at]] * tokens,
    }


def fabricated(workload: Workload, label: str = "fabricated") -> Json:
    """A whole result of `real_gpu`, of a machine that does not exist."""
    made = matrix.planned_record(workload)
    runs = workload.warm_up_runs + workload.measured_repeats
    rows: dict[str, list[Json]] = {family.id: [] for family in workload.families}
    for baseline, *cells in workload.groups():
        base = [one_run(baseline, workload)] * runs
        measured = judge.measurement(base)
        if baseline.matrix_role == CONTEXT:
            made["baseline"]["capacity_by_context"][str(baseline.context_length)] = (
                measured
            )
        else:
            made["baseline"]["residual_window"] = measured
        for cell in cells:
            assert cell.family
            if cell.family != workload.candidate and cell.residual_length == 16:
                continue  # as if its library refused it
            pair = [scores(c, workload.quality_tokens) for c in (baseline, cell)]
            ours = [one_run(cell, workload)] * runs
            rows[cell.family.id].append(
                judge.row(cell, (base, ours), (pair[0], pair[1]), workload.acceptance)
            )
    own = rows[workload.candidate.id]
    made["measurement_matrix"] = own
    made["mechanism_metrics"] = judge.mechanism_metrics(own, workload.candidate)
    for further, family in zip(
        made["further_candidates"], workload.further_candidates, strict=True
    ):
        further["measurement_matrix"] = rows[family.id]
        further["mechanism_metrics"] = judge.mechanism_metrics(rows[family.id], family)
        further["left_out"] = [
            {
                "matrix_role": WINDOW,
                "candidate_id": family.id,
                "context_length": workload.window_context_length,
                "residual_length": 16,
                "reason": "its library refuses the token count",
            }
        ]
    natural = {"mean_nll": 2.5, "mean_nll_standard_error": 0.1}
    made["natural_text_quality"] = {
        "texts": list(workload.natural_texts),
        "prompt_tokens": workload.natural_prompt_tokens,
        "scored_tokens": 1024,
        "note": "the standard errors are on the small side",
        "baseline": natural,
        "candidates": [
            natural
            | {
                "candidate_id": workload.candidate.id,
                "residual_length": window,
                "nll_increase": 0.01,
                "nll_increase_standard_error": 0.004,
                "kl": 0.32 / window,
                "kl_standard_error": 0.0005,
                "topk_overlap": 0.93,
                "topk_overlap_standard_error": 0.01,
            }
            for window in (16, 32, 64, 128)
        ],
    }
    made["hardware"] |= {
        "cuda_available": True,
        "cuda": "13.0",
        "device": "No Such GPU",
        "total_memory_bytes": 12 * 2**30,
        "compute_capability": "8.9",
    }
    made["workload"] |= {
        "resolved_model_commit": "0123456789abcdef" * 2 + "01234567",
        "revision_resolution_source": "hub",
    }
    eligible = made["mechanism_metrics"]["eligible_candidate_count"]
    made |= {
        "run_mode": "real_gpu",
        "run_label": label,
        "memory_source": "fabricated for a test",
        **judge.verdict("real_gpu", False, eligible),
    }
    checked: Json = json.loads(json.dumps(made))
    return checked


GPU = profile("Q-CUDA-MECHANISM")


@pytest.fixture
def record() -> Json:
    return fabricated(GPU)


def saved(record: Json, folder: Path, name: str = "real_gpu-fabricated") -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record), "utf-8")
    return path


def cells(table: report.Table, row: int) -> dict[str, str]:
    return dict(zip(table.columns, table.rows[row], strict=True))


# ---- reading ------------------------------------------------------------------------


def test_a_valid_file_is_read(record: Json, tmp_path: Path) -> None:
    assert report.load(saved(record, tmp_path)) == record


def test_a_file_with_one_field_removed_is_refused_by_name(
    record: Json, tmp_path: Path
) -> None:
    del record["hardware"]["device"]
    path = saved(record, tmp_path)
    with pytest.raises(report.ReportError, match="device") as refused:
        report.load(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "no JSON"), ("[]", "result"), ('{"schema_version": "0.1"}', "result")],
)
def test_what_is_no_result_is_refused_in_words(
    content: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(report.ReportError, match=words) as refused:
        report.load(path)
    assert str(path) in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(report.ReportError, match=r"gone\.json cannot be read"):
        report.load(tmp_path / "gone.json")


def test_saved_runs_come_newest_first_without_plans_and_strangers(
    record: Json, tmp_path: Path
) -> None:
    old, new = copy.deepcopy(record), copy.deepcopy(record)
    old["run"]["finished_utc"] = "2026-01-01T00:00:00Z"
    new["run"]["finished_utc"] = "2026-02-01T00:00:00Z"
    first, second = (
        saved(new, tmp_path, "real_gpu-a"),
        saved(old, tmp_path, "real_gpu-b"),
    )
    saved(matrix.planned_record(GPU), tmp_path, "dry_run-plan")
    saved(new, tmp_path, "quality-of-something-else")
    (tmp_path / "real_gpu-broken.json").write_text("{}")
    assert report.saved_runs(tmp_path) == [first, second]
    assert report.saved_runs(tmp_path / "none") == []


def test_the_results_folder_is_the_courses_own() -> None:
    assert report.results_folder() == ROOT / "results"


# ---- tables -------------------------------------------------------------------------


def test_the_memory_table_gives_what_the_rows_hold(record: Json) -> None:
    table = report.memory_table(record, CONTEXT)
    assert [row[0] for row in table.rows] == [
        name for name in ("hqq_axis1", "quanto_kivi", "mixed_axes") for _ in range(3)
    ]
    row = cells(table, 1)
    assert row["context (tokens)"] == "2,048"
    assert row["peak saved (MiB)"] == "+17.00"
    assert row["of the peak (%)"] == "+17.0"
    assert row["cache holds (MiB)"] == "24.00 → 8.00"
    assert cells(table, 0)["peak saved (MiB)"] == "-5.00"


def test_context_rows_say_that_nothing_overflowed(record: Json) -> None:
    for table in (
        report.memory_table(record, CONTEXT),
        report.time_table(record, CONTEXT),
    ):
        assert {row[-1] for row in table.rows} == {"0"}
        (note,) = [note for note in table.notes if note.startswith("Overflows")]
        assert "window of 128 and 64 new tokens" in note
        assert "never fills" in note


def test_window_rows_give_the_counts_that_were_recorded(record: Json) -> None:
    record["measurement_matrix"][3]["candidate"]["overflow_count"] = 5
    table = report.time_table(record, WINDOW)
    own = [row for row in table.rows if row[0] == "hqq_axis1"]
    assert [(row[1], row[-1]) for row in own] == [("16", "5"), ("32", "3"), ("64", "1")]
    (note,) = [note for note in table.notes if note.startswith("Overflows")]
    assert "5 with window 16, 3 with window 32, 1 with window 64" in note
    assert "never fills" not in note


def test_rows_that_were_left_out_are_named_with_the_reason(record: Json) -> None:
    notes = " ".join(report.memory_table(record, WINDOW).notes)
    assert "Left out: quanto_kivi at 512 tokens, window 16 (its library" in notes
    assert "Left out" not in " ".join(report.memory_table(record, CONTEXT).notes)


def test_a_further_candidate_that_failed_is_named(record: Json) -> None:
    record["further_candidates"][0] |= {
        "failure": {"stage": "x", "type": "OSError", "message": "no compiler"},
    }
    assert "no compiler" in " ".join(report.memory_table(record, CONTEXT).notes)


def test_the_gates_table_shows_each_gate_with_its_figure(record: Json) -> None:
    table = report.gates_table(record)
    first, second, third = (list(cells(table, n).values()) for n in range(3))
    assert first[:3] == ["context 512", "✗ -5.00", "✓ +0.125 ± 0.016"]
    assert first[3:] == ["✓ 0.80", "✓ 1.30", "refused"]
    assert second[-1] == "accepted"
    assert third[2:4] == ["✗ +0.750 ± 0.016", "✗ 0.50"]
    assert "NLL increase ≤ 0.50 nats" in table.columns
    for further in report.further_gates_tables(record):
        assert "no part of the decision" in further.title


def test_gates_are_the_recorded_ones_not_judged_again(record: Json) -> None:
    record["measurement_matrix"][1]["gates"]["latency_ratio"] = False
    assert cells(report.gates_table(record), 1)["time ratio ≤ 2.00"] == "✗ 1.30"


def test_sixteen_tokens_that_overflow_nothing_are_said_to(record: Json) -> None:
    assert "fill no window" in report.gates_table(record).notes[0]
    record["workload"]["quality_tokens"] = 40
    assert "fill no window" not in report.gates_table(record).notes[0]


def test_natural_text_has_standard_errors(record: Json) -> None:
    table = report.natural_table(record)
    assert table
    assert cells(table, 0)["KL to the baseline (nats)"] == "0.0200 ± 0.0005"
    record["natural_text_quality"] = None
    assert report.natural_table(record) is None


def test_published_figures_stand_beside_the_readers_own_and_are_marked(
    record: Json,
) -> None:
    table = report.reference_table(record)
    beside = {row[:2]: row[2:] for row in table.rows}
    assert beside[("context 512", "peak")] == (
        "-18.1 % incremental peak",
        "costs 5.0 MiB (5.0 % of the baseline's)",
    )
    assert beside[("context 2,048", "peak")][1].startswith("saves 17.0 MiB")
    assert beside[("context 4,096", "overlap")] == ("0.55", "0.50")
    assert beside[("window 16", "time")] == ("ratio 1.60", "ratio 1.60")
    assert "another machine" in table.columns[2]
    assert "RTX 5070 Ti Laptop GPU, 12 GiB" in table.notes[0]
    assert "No Such GPU" in table.notes[0]


def test_published_figures_without_a_counterpart_say_so() -> None:
    small = replace(
        GPU, workload_version="test", context_lengths=(2048,), further_candidates=()
    )
    table = report.reference_table(fabricated(small))
    assert {row[3] for row in table.rows if "4,096" in row[0]} == {"not measured"}


def test_a_table_shows_itself_as_markdown_and_as_text() -> None:
    table = report.Table("T", ("a", "b | c"), (("x*y", "+1.5"), ("z", "2")), ("note",))
    assert table._repr_markdown_().splitlines() == [
        "**T**",
        "",
        "| a | b \\| c |",
        "|---|---:|",
        "| x\\*y | +1.5 |",
        "| z | 2 |",
        "",
        "note",
    ]
    assert str(table).splitlines()[2] == "x*y   +1.5"


# ---- sentences ----------------------------------------------------------------------


def test_the_decision_gives_the_reason_of_every_refused_row(record: Json) -> None:
    lines = report.decision_lines(record)
    text = "\n".join(lines)
    assert lines[0] == "Decision: accept_local_cache_candidate"
    assert "context 512: refused: it saves -5.00 MiB of peak" in text
    assert "context 2,048: accepted" in text
    assert "NLL rises by 0.750 nats, at most 0.50" in text
    assert "overlap by 0.50, at least 0.60" in text
    assert "saved from a context of 2,048 tokens on" in text
    assert "Selected, as the accepted row that saves most: context 2,048" in text


def test_nothing_eligible_and_nothing_saved_is_said() -> None:
    record = fabricated(GPU)
    record["mechanism_metrics"] |= {
        "memory_reduction_onset_context": None,
        "eligible_crossover_context": None,
        "selected_candidate": None,
    }
    text = "\n".join(report.decision_lines(record))
    assert "saved from no context on" in text
    assert "Selected" not in text
    assert "at no measured context" in report.capacity_finding(record)


def test_findings_name_figures_and_errors(record: Json) -> None:
    assert "from 2,048 tokens on" in report.capacity_finding(record)
    assert "saves 34.0 MiB (34 %" in report.capacity_finding(record)
    assert "1.60 times as long with window 16 (7 overflows)" in report.latency_finding(
        record
    )
    assert "+0.750 ± 0.016 nats" in report.quality_finding(record)
    assert "0.0025 ± 0.0005 (window 128)" in report.quality_finding(record)


def test_a_failed_run_says_where(record: Json, tmp_path: Path) -> None:
    record |= {
        "failure": {"stage": "load", "type": "OSError", "message": "gone"},
        "measurement_matrix": record["measurement_matrix"][:1],
        "natural_text_quality": None,
        **judge.verdict("real_gpu", True, 0),
    }
    record = report.load(saved(record, tmp_path))
    assert "failed at load: OSError: gone" in "\n".join(report.decision_lines(record))
    assert report.figures(record).keys() == set(report.FIGURES)


def test_a_dry_run_shows_the_plan_and_draws_nothing(tmp_path: Path) -> None:
    record = report.load(saved(matrix.planned_record(GPU), tmp_path))
    assert [table.title for table in report.tables(record)][1].startswith("The plan")
    assert "Nothing was measured" in "\n".join(report.decision_lines(record))
    assert report.write_figures(record, tmp_path, "plan") == []
    assert "No context" in report.capacity_finding(record)
    assert "No window" in report.latency_finding(record)
    assert "No quality" in report.quality_finding(record)


# ---- several runs -------------------------------------------------------------------


def test_two_runs_stand_side_by_side(record: Json) -> None:
    other = fabricated(GPU, "second")
    other["measurement_matrix"][1]["latency_ratio_candidate_over_baseline"] = 1.75
    table = report.comparison_table([record, other])
    assert table.columns == ("figure", "fabricated", "second")
    by_name = {row[0]: row[1:] for row in table.rows}
    assert by_name["decision"] == ("accept_local_cache_candidate",) * 2
    assert "; 1.30;" in by_name["context 2,048, hqq_axis1"][0]
    assert "; 1.75;" in by_name["context 2,048, hqq_axis1"][1]
    assert by_name["accepted rows"] == ("1 of 6", "1 of 6")
    assert len(table.notes) == 1


def test_a_comparison_warns_of_other_workloads_and_machines(record: Json) -> None:
    other = fabricated(
        replace(GPU, workload_version="test", context_lengths=(512, 2048))
    )
    other["hardware"]["device"] = "Another GPU"
    table = report.comparison_table([record, other])
    notes = " ".join(table.notes)
    assert "2 workload versions (1, test)" in notes
    assert "different devices" in notes
    by_name = {row[0]: row[1:] for row in table.rows}
    assert by_name["context 4,096, hqq_axis1"][1] == "not measured"
    assert len(set(report.comparison_table([record] * 2).columns)) >= 2


# ---- figures ------------------------------------------------------------------------


def test_every_figure_has_titles_axis_labels_and_gates(record: Json) -> None:
    figures = report.figures(record)
    assert tuple(figures) == report.FIGURES
    for figure in figures.values():
        for ax in figure.axes:
            assert ax.get_title() and ax.get_xlabel(), ax
            assert ax.get_ylabel() or ax.get_shared_y_axes()
    words = {
        name: " ".join(
            text.get_text()
            for ax in figure.axes
            for text in (*ax.texts, *ax.get_xticklabels())
        )
        for name, figure in figures.items()
    }
    assert "gate: must save more" in words["capacity"]
    assert "refused: peak" in words["capacity"]
    assert "refused: NLL, overlap" in words["capacity"]
    assert "gate: at most 2.00" in words["latency"]
    assert "7 overflows" in words["latency"]
    assert "gate: at most 0.50" in words["quality"]
    assert "gate: at least 0.60" in words["quality"]


def test_the_capacity_figure_draws_the_rows_of_the_file(record: Json) -> None:
    left, right = report.figures(record)["capacity"].axes
    for ax in (left, right):  # of a peak of 100 MiB, so MiB and per cent are the same
        assert [-5.0, 17.0, 34.0] in [list(line.get_ydata()) for line in ax.lines]


def test_figures_are_written_beside_each_other_and_replaced(
    record: Json, tmp_path: Path
) -> None:
    for _ in range(2):
        written = report.write_figures(record, tmp_path / "new", "run")
    assert [path.name for path in written] == [
        "run-capacity.png",
        "run-latency.png",
        "run-quality.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert len(list((tmp_path / "new").iterdir())) == 3


# ---- the command --------------------------------------------------------------------


def test_the_command_prints_tables_decision_and_comparison(
    record: Json, tmp_path: Path
) -> None:
    one = saved(record, tmp_path, "one")
    two = saved(fabricated(GPU, "second"), tmp_path, "two")
    done = CliRunner().invoke(
        app, ["report", str(one), str(two), "--figures", str(tmp_path / "f")]
    )
    assert done.exit_code == 0, done.output
    for words in ("Memory, context", "Time, window", "The gates", "Natural text"):
        assert words in done.output
    assert "Decision: accept_local_cache_candidate" in done.output
    assert "The runs side by side" in done.output
    assert len(list((tmp_path / "f").glob("*.png"))) == 6


def test_the_command_refuses_a_faulty_file_with_one_line(
    record: Json, tmp_path: Path
) -> None:
    del record["decision"]
    done = CliRunner().invoke(app, ["report", str(saved(record, tmp_path))])
    assert done.exit_code == 2
    assert "decision" in done.output
    assert "Traceback" not in done.output
    assert not list(tmp_path.glob("*.png"))


def test_no_figure_of_a_table_is_cut_on_a_narrow_terminal(record: Json) -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    report.print_report(record, console)
    printed = console.export_text()
    for figure in (
        "24.00 → 8.00",
        "✗ +0.750 ± 0.016",
        "0.0200 ± 0.0005",
        "quanto_kivi",
    ):
        assert figure in printed
    assert printed.count("Overflows counted: none") == 1


def test_a_report_needs_neither_transformers_nor_a_model(
    record: Json, tmp_path: Path
) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kvlab.matrix import report\n"
        "record = report.load(sys.argv[1])\n"
        "assert report.tables(record) and report.decision_lines(record)\n"
        "report.write_figures(record, Path(sys.argv[2]), 'x')\n"
        "heavy = {'torch', 'transformers', 'hqq', 'optimum'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    path = saved(record, tmp_path)
    command = [sys.executable, "-c", program, str(path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr


# ---- the results of the course ------------------------------------------------------


@pytest.mark.parametrize(
    "path", files.all_in(ROOT / "results"), ids=lambda path: path.name
)
def test_every_result_of_the_course_can_be_reported(path: Path, tmp_path: Path) -> None:
    record = report.load(path)
    assert report.tables(record)
    if record["measurement_matrix"]:
        assert len(report.write_figures(record, tmp_path, path.stem)) == 3
