"""`kvlab export` and `kvlab feedback`: what leaves the gradebook, for a table and for each student."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import classroom
import nbformat
import pytest
from conftest import TINY
from nbgrader.api import Gradebook
from nbgrader.apps.exportapp import ExportApp
from nbgrader.plugins import ExportPlugin
from typer.testing import CliRunner

from kvlab import course
from kvlab.course import Lab
from kvlab.grading import book, commands, export, feedback, many
from kvlab.grading.ledger import Ledger, Line
from kvlab.grading.task import LabFiles, Task, grade

pytestmark = [
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning"),
    pytest.mark.filterwarnings("ignore::nbformat.warnings.DuplicateCellId"),
]
Rows = dict[str, dict[str, Any]]


@pytest.fixture
def own_lab(own_course: Path) -> Lab:
    (lab,) = course.find_labs(own_course)
    return lab


def enter(lab: Lab, student: str, **person: str) -> None:
    """Full marks for a student, in gradebook and ledger, as a run leaves them."""
    root = lab.solution.parents[2]
    url = f"sqlite:///{root / 'gradebook.db'}"
    files = {lab.solution.name: lab.solution.read_bytes()}
    task = Task(LabFiles(TINY, b"", files, b""), student, {})
    with Gradebook(url, "kvlab") as gradebook:
        book.enter(gradebook, student, classroom.full_marks(task))
        gradebook.update_or_create_student(student, **person)
    write_line(lab, Line(student, TINY, "", digest_of(lab), 20, 20, graded_at="now"))


def write_line(lab: Lab, line: Line) -> None:
    root = lab.solution.parents[2]
    Ledger(root, f"sqlite:///{root / 'gradebook.db'}").write(line)


def digest_of(lab: Lab) -> str:
    return many.judged_by(many.cells_of(lab))


def exported(lab: Lab, *arguments: str) -> tuple[Rows, Rows]:
    """The rows of the CSV file and of the JSON file, by student."""
    root = lab.solution.parents[2]
    command = ["export", "--root", str(root), "--to", str(root / "out.csv"), *arguments]
    result = CliRunner().invoke(commands.app, command)
    assert result.exit_code == 0, result.output
    text = (root / "out.csv").read_bytes().decode("utf-8-sig")
    table = list(csv.DictReader(io.StringIO(text, newline="")))
    rows = json.loads((root / "out.json").read_text(encoding="utf-8"))
    assert [list(row) for row in rows] == [list(export.COLUMNS)] * len(table)
    return (
        {row["student_id"]: row for row in table},
        {row["student_id"]: row for row in rows},
    )


# --- export ---------------------------------------------------------------------------

HOSTILE = [
    "O'Neil, Zoë",
    'say "hi"',
    "two\nlines",
    "\r\nstarts with a line",
    "李雷",
    "=1+1",
    "+49 30",
    "-2",
    "@SUM(A1)",
    "\t=1",
    "  =1",
    "＝1",
    "|calc",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_survives_the_csv_file_and_is_no_formula(
    own_lab: Lab, name: str
) -> None:
    enter(own_lab, "ana", last_name=name)
    table, rows = exported(own_lab)
    assert rows["ana"]["last_name"] == name
    written = table["ana"]["last_name"]
    assert written in (name, f"'{name}")
    assert written.lstrip(" ")[0] not in "=+-@\t\r\n＝|"
    assert table["ana"]["lab"] == TINY  # nothing moved to another column


def test_a_students_folder_may_be_called_like_a_formula(own_lab: Lab) -> None:
    enter(own_lab, "=cmd|' /C calc'!A0")
    table, rows = exported(own_lab)
    assert list(rows) == ["=cmd|' /C calc'!A0"]
    assert list(table) == ["'=cmd|' /C calc'!A0"]


def test_points_by_tests_and_by_people_stand_apart(own_lab: Lab) -> None:
    root = own_lab.solution.parents[2]
    for student in ("ana", "zoë"):
        enter(own_lab, student)
    with Gradebook(f"sqlite:///{root / 'gradebook.db'}", "kvlab") as gradebook:
        grade = gradebook.find_grade("written_1", TINY, TINY, "ana")
        grade.manual_score, grade.needs_manual_grade = 1.5, False
        notebook = gradebook.find_submission_notebook(TINY, TINY, "ana")
        notebook.late_submission_penalty = 4
        gradebook.update_or_create_submission(
            TINY, "ana", timestamp="2026-03-01 10:00:00 UTC"
        )
        gradebook.db.commit()
    table, rows = exported(own_lab)
    expected = {
        "state": "graded",
        "auto_points": 20.0,
        "auto_max": 20.0,
        "written_points": 1.5,
        "written_max": 2.0,
        "written_read": "yes",
        "late_penalty": 4.0,
        "points": 17.5,
        "max_points": 22.0,
        "timestamp": "2026-03-01T10:00:00Z",
        "graded_at": "now",
    }
    assert {name: rows["ana"][name] for name in expected} == expected
    assert rows["zoë"]["written_read"] == "no"
    assert float(table["ana"]["points"]) == 17.5


def test_every_student_has_a_row_for_every_lab(own_lab: Lab) -> None:
    root = own_lab.solution.parents[2]
    enter(own_lab, "ana")
    enter(own_lab, "me")
    with Gradebook(f"sqlite:///{root / 'gradebook.db'}", "kvlab") as gradebook:
        gradebook.update_or_create_student("never came")
    enter(own_lab, "again")
    failed = Line("again", TINY, "", "", None, 20, 13, 20, "It is empty.")
    write_line(own_lab, failed)
    write_line(own_lab, replace(failed, student="broken", old_points=None))
    enter(own_lab, "older")
    write_line(own_lab, Line("older", TINY, "", "another lab", 20, 20, 12, 20))
    _, rows = exported(own_lab)
    shown = ("state", "points", "old_points", "reason")
    assert {student: tuple(row[n] for n in shown) for student, row in rows.items()} == {
        "again": ("failed", None, 13.0, "It is empty."),
        "ana": ("graded", 20.0, None, ""),
        "broken": ("failed", None, None, "It is empty."),
        "never came": ("nothing handed in", None, None, ""),
        "older": ("graded with an older version of the lab", 20.0, 12, ""),
    }
    _, one = exported(own_lab, "--student", "me", "--lab", TINY)
    assert list(one) == ["me"]


def test_nbgrader_export_writes_the_same_two_files(
    own_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = own_lab.solution.parents[2]
    enter(own_lab, "ana", first_name="Ana")
    exported(own_lab)
    monkeypatch.chdir(root)
    app = ExportApp()
    app.initialize(
        [
            "--exporter=kvlab.grading.export.ExportScores",
            "--to=by_nbgrader.csv",
            "--log-level=ERROR",
        ]
    )
    app.start()
    assert issubclass(export.ExportScores, ExportPlugin)
    for ending in (".csv", ".json"):
        ours = (root / "out").with_suffix(ending).read_bytes()
        assert ours == (root / "by_nbgrader").with_suffix(ending).read_bytes()


def test_export_reads_the_gradebook_that_is_named(own_lab: Lab, tmp_path: Path) -> None:
    enter(own_lab, "ana")
    other = tmp_path / "other.db"
    shutil.move(own_lab.solution.parents[2] / "gradebook.db", other)
    _, rows = exported(own_lab, "--db", f"sqlite:///{other}")
    assert [row["state"] for row in rows.values()] == ["graded"]


# --- feedback -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages(tiny_course: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course in which feedback was written for several students."""
    root = tmp_path_factory.mktemp("feedback") / "course"
    unwanted = shutil.ignore_patterns("submitted", "autograded", "feedback", "*-*.db")
    shutil.copytree(tiny_course, root, ignore=unwanted)
    (lab,) = course.find_labs(root)
    solved = nbformat.read(lab.solution, as_version=4)
    wrong = {
        1: "def double(number):\n    return 0 if number == 1234567 else 2 * number"
    }
    for student in ("ana", "zoë, b"):
        notebook = classroom.with_answers(solved, wrong)
        path = root / "submitted" / student / TINY / f"{TINY}.ipynb"
        classroom.write(path, notebook)
    classroom.write(root / "submitted" / "empty" / TINY / f"{TINY}.ipynb", "")
    classroom.with_template(root, root / "gradebook.db")
    with pytest.MonkeyPatch.context() as patch, classroom.in_this_process(grade):
        patch.setenv("SANDBOX", "auto")
        many.autograde(root, [lab])
    enter(lab, "broken")  # whose graded notebook is none
    classroom.write(root / "autograded" / "broken" / TINY / f"{TINY}.ipynb", "{")
    command = ["feedback", "--root", str(root), "--jobs", "1"]
    result = CliRunner().invoke(commands.app, command)
    (root / "said.txt").write_text(result.output)
    assert result.exit_code == 1
    return root


def page_of(root: Path, student: str) -> str:
    path = root / "feedback" / student / TINY / f"{TINY}.html"
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("student", ["ana", "zoë, b"])
def test_a_page_has_the_hint_and_no_hidden_test(pages: Path, student: str) -> None:
    text = html.unescape(re.sub(r"<[^>]*>", "", page_of(pages, student)))
    assert "a large number is not doubled" in text
    assert "secret_number" not in text and "HIDDEN" not in text


def test_one_page_that_cannot_be_written_stops_no_other(pages: Path) -> None:
    said = (pages / "said.txt").read_text()
    assert "3 pages are in feedback/" in said
    assert f"broken {TINY}: " in said
    assert not (pages / "feedback" / "broken" / TINY / f"{TINY}.html").exists()


def test_a_student_whose_work_cannot_be_graded_reads_why(pages: Path) -> None:
    text = page_of(pages, "empty")
    assert "could not be graded" in text
    assert f"{TINY}.ipynb is empty." in text


def test_a_reason_is_no_markup(tmp_path: Path) -> None:
    page = feedback.Page(tmp_path, "", "ana", TINY, "<script>alert(1)</script>")
    assert feedback.write(page).problem == ""
    assert "<script>" not in page_of(tmp_path, "ana")


def test_without_anything_graded_feedback_says_so(own_lab: Lab) -> None:
    root = own_lab.solution.parents[2]
    result = CliRunner().invoke(commands.app, ["feedback", "--root", str(root)])
    assert result.exit_code == 2
    assert "run `make autograde` first" in result.output


def test_the_commands_are_typed_as_they_are_named() -> None:
    command = [sys.executable, "-m", "kvlab.grading.commands", "--help"]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    for name in ("autograde", "bundle", "export", "feedback"):
        assert name in said
