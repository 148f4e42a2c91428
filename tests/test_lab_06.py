"""Lab 06 as its readers run it: a dry run, a measurement, a reading without a model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from kvlab import course, matrix, preflight
from kvlab.matrix import report
from kvlab.matrix.workload import profile

ROOT = Path(__file__).parents[1]
(LAB,) = (lab for lab in course.find_labs(ROOT) if lab.name == "06_gpu_matrix")

# A measurement of seconds in place of the profile's: its own place in the notebook.
REDUCED = """
from dataclasses import replace

workload = replace(
    workload,
    workload_version="test",
    context_lengths=(32,),
    context_new_tokens=2,
    window_context_length=16,
    window_new_tokens=3,
    window_residual_lengths=(2,),
    quality_tokens=2,
    measured_repeats=1,
    natural_prompt_tokens=16,
    natural_scored_tokens=2,
    further_candidates=(),
)
"""


def notebook(results: Path, **changes: str) -> NotebookNode:
    """The student's notebook, with another results folder and other settings."""
    read = nbformat.read(LAB.release, as_version=4)
    changes = {
        "report.results_folder()": f"Path({str(results)!r})",
        **{f'{name} = ""': f"{name} = {value!r}" for name, value in changes.items()},
    }
    for old, new in changes.items():
        assert any(old in cell.source for cell in read.cells), old
        for cell in read.cells:
            cell.source = cell.source.replace(old, new)
    return read


def measuring(results: Path) -> NotebookNode:
    """The same in embedded_cpu, on the reduced workload."""
    made = notebook(results)
    (settings,) = (cell for cell in made.cells if 'RUN_MODE = "dry_run"' in cell.source)
    settings.source = (
        settings.source.replace('"dry_run"', '"embedded_cpu"', 1) + REDUCED
    )
    return made


def executed(made: NotebookNode, folder: Path) -> NotebookNode:
    """All cells run; none may fail or write to stderr."""
    client = NotebookClient(
        made,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    for cell in made.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error", (cell.id, output)
            assert output.get("name") != "stderr", (cell.id, output.text)
    return made


def printed(made: NotebookNode) -> str:
    return "".join(
        output.text
        for cell in made.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream"
    )


def shown(made: NotebookNode, kind: str) -> list[Any]:
    """Everything of one media type that the notebook displays."""
    return [
        output.data[kind]
        for cell in made.cells
        for output in cell.get("outputs", [])
        if kind in output.get("data", {})
    ]


def source(words: str) -> str:
    """The one code cell that holds these words."""
    cells = nbformat.read(LAB.solution, as_version=4).cells
    (found,) = (c.source for c in cells if c.cell_type == "code" and words in c.source)
    return str(found)


# ---- the lab as a notebook ----------------------------------------------------------


def test_the_lab_is_sound_and_asks_for_no_points() -> None:
    solution = nbformat.read(LAB.solution, as_version=4)
    assert course.faults(solution) == []
    assert not course.is_graded(solution)


def test_the_lab_has_its_four_parts_in_order() -> None:
    text = "\n".join(cell.source for cell in nbformat.read(LAB.release, 4).cells)
    parts = re.findall(r"^## Part \d · (\w+)$", text, flags=re.MULTILINE)
    assert parts == ["Configure", "Run", "Read", "Explain"]
    assert 'RUN_MODE = "dry_run"' in text
    assert "What does not follow" in text


def test_code_is_narrow_enough_to_read() -> None:
    wide = [
        line
        for cell in nbformat.read(LAB.solution, as_version=4).cells
        if cell.cell_type == "code" and cell.id != "setup"
        for line in cell.source.splitlines()
        if len(line) >= 80
    ]
    assert not wide


# ---- reading and the dry run --------------------------------------------------------


def test_a_dry_run_without_any_result_shows_the_plan(tmp_path: Path) -> None:
    made = executed(notebook(tmp_path / "results"), tmp_path)
    text = printed(made)
    assert "ready_to_measure" in text
    assert "There is no saved result here" in text
    (plan,) = shown(made, "text/markdown")
    assert "| hqq\\_axis1 |" in plan or "| hqq_axis1 |" in plan
    assert "4,096" in plan
    assert not (tmp_path / "results").exists(), "a dry run leaves nothing behind"


def committed() -> list[Path]:
    return report.saved_runs(ROOT / "results")


def test_the_committed_result_is_read_without_a_model(tmp_path: Path) -> None:
    runs = committed()
    assert runs
    made = notebook(ROOT / "results")
    # neither transformers nor hqq may be asked for by the parts that read
    made.cells.append(
        nbformat.v4.new_code_cell(
            "print(sorted({'transformers', 'hqq', 'optimum'} & set(sys.modules)))"
        )
    )
    made = executed(made, tmp_path)
    text = printed(made)
    assert f"Read {runs[0].name}." in text
    assert text.rstrip().endswith("[]")
    record = report.load(runs[0])
    assert f"Decision: {record['decision']}" in text
    tables = "\n".join(shown(made, "text/markdown"))
    for title in ("The run", "Memory, context", "Time, window", "The gates", "Beside"):
        assert f"**{title}" in tables
    assert "published, another machine" in tables
    assert len(shown(made, "image/png")) == 3
    alternatives = [
        output.metadata["image/png"]["alt"]
        for cell in made.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert alternatives == [
        report.capacity_finding(record),
        report.latency_finding(record),
        report.quality_finding(record),
    ]


# ---- measuring ----------------------------------------------------------------------


def run_cell(**names: Any) -> str:
    """What part 2 prints with these settings, in this process."""
    lines: list[str] = []
    names["print"] = lambda *words: lines.append(" ".join(map(str, words)))
    exec(source("matrix.run("), {"matrix": matrix, "LOCAL_FILES_ONLY": True, **names})
    return "\n".join(lines)


def test_a_measurement_is_run_read_and_not_repeated(tmp_path: Path) -> None:
    if preflight.model_row(profile("embedded_cpu")).state != "ok":
        pytest.skip("the embedded model is not in the cache")
    results = tmp_path / "results"
    made = executed(measuring(results), tmp_path)
    text = printed(made)
    assert "ok       hqq:" in text
    assert "Wrote embedded_cpu-mine.json." in text
    assert "Read embedded_cpu-mine.json." in text
    path = results / "embedded_cpu-mine.json"
    record = report.load(path)
    assert len(record["measurement_matrix"]) == 2
    assert f"Decision: {record['decision']}" in text
    assert len(shown(made, "image/png")) == 3

    before = path.read_bytes()
    told = run_cell(
        RUN_MODE="embedded_cpu",
        RUN_LABEL="mine",
        workload=profile("embedded_cpu"),
        report=SimpleNamespace(results_folder=lambda: results),
    )
    assert "exists, and a result is never overwritten" in told
    assert path.read_bytes() == before


def test_a_run_that_cannot_start_is_explained_in_a_line(tmp_path: Path) -> None:
    """The GPU profile on a machine without a GPU: no traceback, a line that says why."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    told = run_cell(
        RUN_MODE="real_gpu",
        RUN_LABEL="mine",
        workload=profile("Q-CUDA-MECHANISM"),
        report=SimpleNamespace(results_folder=lambda: tmp_path),
    )
    assert "no CUDA device" in told
    written = json.loads((tmp_path / "real_gpu-mine.json").read_text("utf-8"))
    assert written["decision"] == "reject_until_cache_configuration_fixed"


# ---- the cell that may install ------------------------------------------------------

Installing = Callable[..., tuple[list[list[str]], str]]


@pytest.fixture
def installing(monkeypatch: pytest.MonkeyPatch) -> Installing:
    """Runs the cell with some packages missing; gives the pip commands and what it prints."""

    def run_cell(
        mode: str, missing: set[str], allowed: bool, model: str = "embedded"
    ) -> tuple[list[list[str]], str]:
        commands: list[list[str]] = []

        def remember(command: list[str], **_: Any) -> SimpleNamespace:
            commands.append(command)
            return SimpleNamespace(returncode=0, stderr="")

        monkeypatch.setattr(subprocess, "run", remember)
        lines: list[str] = []
        names = {
            "RUN_MODE": mode,
            "workload": SimpleNamespace(model_id=model),
            "find_spec": lambda name: None if name in missing else name,
            "print": lambda *words: lines.append(" ".join(words)),
        }
        cell = source("INSTALL_MISSING = False")
        exec(cell.replace("= False", f"= {allowed}"), names)
        return commands, "\n".join(lines)

    return run_cell


def test_it_installs_what_is_missing_and_nothing_else(installing: Installing) -> None:
    (command,), text = installing("embedded_cpu", {"hqq"}, True)
    assert command == [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"),
        "hqq",
    ]
    assert "Installed hqq." in text
    (command,), _ = installing("real_gpu", {"hqq", "gguf"}, True, model="Qwen/x")
    assert command[-2:] == ["--no-deps", "hqq"]


@pytest.mark.parametrize(
    ("mode", "missing", "allowed", "words"),
    [
        ("dry_run", {"hqq", "gguf"}, True, "needs no further package"),
        ("embedded_cpu", set(), True, "Nothing is missing"),
        ("embedded_cpu", {"hqq", "gguf"}, False, "Missing: hqq, gguf."),
    ],
)
def test_it_asks_first_and_leaves_a_whole_environment_alone(
    installing: Installing, mode: str, missing: set[str], allowed: bool, words: str
) -> None:
    commands, text = installing(mode, missing, allowed)
    assert commands == []
    assert words in text


# ---- the gates, moved ---------------------------------------------------------------


def test_moving_the_gates_judges_the_recorded_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {
        "matrix_role": "context_capacity",
        "context_length": 512,
        "residual_length": 128,
        "incremental_peak_saved_bytes": 1,
        "fixed_continuation_nll_delta": 0.2,
        "mean_topk_overlap": 0.95,
        "latency_ratio_candidate_over_baseline": 1.1,
        "eligible": True,
    }
    names = {"record": {"measurement_matrix": [row]}, "report": report}
    exec(source("NLL_AT_MOST"), names)
    assert "the plan: accepted  your gates: refused" in capsys.readouterr().out
    exec(
        source("NLL_AT_MOST").replace("NLL_AT_MOST = 0.05", "NLL_AT_MOST = 0.3"), names
    )
    assert "your gates: accepted" in capsys.readouterr().out
