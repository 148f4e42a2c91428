"""`make grade`: nbgrader's own verdict, on whatever a student hands in, shown so that it helps."""

from __future__ import annotations

import copy
import html
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from conftest import TINY, Grader, Submission, hand_in
from nbformat import NotebookNode
from nbgrader.api import Gradebook
from nbgrader.utils import determine_grade
from rich.console import Console
from typer.testing import CliRunner

from kvlab import cli, course, grading
from kvlab.course import Lab
from kvlab.grading import (
    CellResult,
    LabResult,
    TodoResult,
    WrittenResult,
    engine,
    preprocessors,
    released,
)
from kvlab.grading.answers import replace_answer
from kvlab.grading.repair import repair

pytestmark = [
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning"),
    pytest.mark.filterwarnings("ignore::nbformat.warnings.DuplicateCellId"),
]

Make = Callable[[NotebookNode, NotebookNode], Submission]
SUBMISSIONS: dict[str, Make] = {}


def submission(make: Make) -> Make:
    """Registers a function (solved, empty) -> what a student hands in."""
    SUBMISSIONS[make.__name__] = make
    return make


def with_answer(todo: int, source: str) -> Make:
    return lambda solved, empty: replace_answer(solved, todo, source)


def cell_of(notebook: NotebookNode, grade_id: str) -> NotebookNode:
    return notebook.cells[place_of(notebook, grade_id)]


def place_of(notebook: NotebookNode, grade_id: str) -> int:
    marks = [c.metadata.get("nbgrader", {}).get("grade_id") for c in notebook.cells]
    return marks.index(grade_id)


def without(notebook: NotebookNode, *grade_ids: str) -> NotebookNode:
    changed = copy.deepcopy(notebook)
    for grade_id in grade_ids:
        del changed.cells[place_of(changed, grade_id)]
    return changed


def test_a_new_gradebook_is_of_the_schema_that_nbgrader_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    code = "import nbgrader.api as api; print(api.get_alembic_version())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert engine.newest_schema() == ran.stdout.strip() != "", ran.stderr


# --- what is handed in: answers -------------------------------------------------------

SUBMISSIONS["solved"] = lambda solved, empty: solved
SUBMISSIONS["empty"] = lambda solved, empty: empty
ANSWERS = {
    "wrong": "    return 3 * number",
    "wrong_where_hidden": (
        "    if isinstance(number, str):\n"
        "        raise ValueError('number')\n"
        "    return 2 * number if number < 100 else 0"
    ),
    "accepts_text": "    return 2 * number",
    "name_error": "    return 2 * nmber",
    "half_done": (
        "    if isinstance(number, str):\n"
        "        raise NotImplementedError('text')\n"
        "    return 2 * number"
    ),
    "endless": "    while True:\n        pass",
    "ignores_the_interrupt": (
        "    while True:\n"
        "        try:\n"
        "            while True:\n"
        "                pass\n"
        "        except KeyboardInterrupt:\n"
        "            pass"
    ),
    "kills_the_kernel": "    import os\n    os._exit(0)",
    "leaves": "    exit()",
    "warns": (
        "    import os, sys, warnings\n"
        "    warnings.warn('careful')\n"
        "    print('talk', file=sys.stderr)\n"
        "    os.write(2, b'more talk')\n"
        "    if isinstance(number, str):\n"
        "        raise ValueError('number')\n"
        "    return 2 * number"
    ),
    "shows_a_number": (
        "    import sys\n"
        "    sys.displayhook(0.5)\n"
        "    if isinstance(number, str):\n"
        "        raise ValueError('number')\n"
        "    return 2 * number"
    ),
}
SUBMISSIONS |= {
    name: with_answer(1, f"def double(number):\n{body}")
    for name, body in ANSWERS.items()
}
SUBMISSIONS |= {
    "syntax_error": with_answer(1, "def double(number):\n    return 2 *"),
    "endless_cell": with_answer(1, "while True:\n    pass"),
    "leaves_at_the_end": with_answer(
        2, "def add_one(number):\n    return number + 1\n\n\nexit()"
    ),
}

# --- what is handed in: damage --------------------------------------------------------


@submission
def answer_copied_as_stub(solved: NotebookNode, empty: NotebookNode) -> Submission:
    """The untouched cell once more, below: it would overwrite the answer."""
    place = place_of(solved, "todo_1")
    solved.cells.insert(place + 1, cell_of(empty, "todo_1"))
    return solved


@submission
def answer_copied_above(solved: NotebookNode, empty: NotebookNode) -> Submission:
    solved.cells.insert(0, cell_of(empty, "todo_1"))
    return solved


@submission
def answer_split_in_two(solved: NotebookNode, empty: NotebookNode) -> Submission:
    """JupyterLab gives both halves the marks."""
    answer = cell_of(solved, "todo_1")
    first = copy.deepcopy(answer)
    first.source, first.id = "FACTOR = 2", "first-half"
    answer.source = answer.source.replace("2 * number", "FACTOR * number")
    solved.cells.insert(place_of(solved, "todo_1"), first)
    return solved


@submission
def copied_test(solved: NotebookNode, empty: NotebookNode) -> Submission:
    solved.cells.insert(1, copy.deepcopy(cell_of(solved, "test_todo_1")))
    solved.cells.append(copy.deepcopy(cell_of(solved, "test_todo_1")))
    return solved


@submission
def written_copied(solved: NotebookNode, empty: NotebookNode) -> Submission:
    solved.cells.append(copy.deepcopy(cell_of(empty, "written_1")))
    return solved


@submission
def empty_marks(solved: NotebookNode, empty: NotebookNode) -> Submission:
    for grade_id in ("todo_1", "test_todo_2"):
        cell_of(solved, grade_id).metadata["nbgrader"] = {}
    return solved


@submission
def marks_lost(solved: NotebookNode, empty: NotebookNode) -> Submission:
    for cell in solved.cells:
        cell.metadata.clear()
    return solved


@submission
def marks_and_ids_lost(solved: NotebookNode, empty: NotebookNode) -> Submission:
    """As after a conversion to a script and back; one test was edited, too."""
    test = cell_of(empty, "test_todo_3")
    test["source"] = test.source.replace("2 is even.", "two is even")
    for number in (1, 2, 3):
        source = cell_of(solved, f"todo_{number}").source
        cell_of(empty, f"todo_{number}")["source"] = source
    cell_of(empty, "written_1")["source"] = "Because two divides it."
    for cell in empty.cells:
        cell.metadata.clear()
        cell["id"] = nbformat.v4.new_code_cell()["id"]
    return empty


@submission
def saved_by_colab(solved: NotebookNode, empty: NotebookNode) -> Submission:
    """Format 4.0, ids in the metadata, no locks, marks gone, outputs kept."""
    for cell in solved.cells:
        cell["metadata"] = NotebookNode(id=cell.pop("id"), outputId="x")
        if cell.cell_type == "code":
            cell["outputs"] = [nbformat.v4.new_output("stream", text="old")]
    solved["nbformat_minor"] = 0
    solved.metadata["colab"] = {"provenance": []}
    return json.dumps(solved)


@submission
def grade_id_changed(solved: NotebookNode, empty: NotebookNode) -> Submission:
    for grade_id in ("todo_2", "test_todo_2"):
        cell = cell_of(solved, grade_id)
        cell.metadata.nbgrader["grade_id"] = f"my_{grade_id}"
        cell["id"] = f"my_{grade_id}"
    return solved


@submission
def marks_forged(solved: NotebookNode, empty: NotebookNode) -> Submission:
    """Points raised, and a failing test made an answer, which nbgrader never fails."""
    cell_of(solved, "test_todo_2").metadata.nbgrader["points"] = 100
    cell_of(solved, "test_todo_1").metadata.nbgrader["solution"] = True
    return replace_answer(solved, 1, "def double(number):\n    return 0")


@submission
def deleted_test(solved: NotebookNode, empty: NotebookNode) -> Submission:
    return without(solved, "test_todo_1")


@submission
def answer_deleted(solved: NotebookNode, empty: NotebookNode) -> Submission:
    return without(solved, "todo_1")


@submission
def answer_and_tests_deleted(solved: NotebookNode, empty: NotebookNode) -> Submission:
    return without(solved, "todo_1", "test_todo_1", "test_todo_1_errors")


@submission
def given_deleted(solved: NotebookNode, empty: NotebookNode) -> Submission:
    return without(solved, "given_checks")


@submission
def retyped_test(solved: NotebookNode, empty: NotebookNode) -> Submission:
    cell = cell_of(solved, "test_todo_1")
    place = place_of(solved, "test_todo_1")
    text = nbformat.v4.new_markdown_cell(cell.source, metadata=cell.metadata)
    solved.cells[place] = text
    return solved


@submission
def softened_test(solved: NotebookNode, empty: NotebookNode) -> Submission:
    cell_of(solved, "test_todo_1")["source"] = "pass"
    return replace_answer(solved, 1, "def double(number):\n    return 0")


@submission
def moved_test(solved: NotebookNode, empty: NotebookNode) -> Submission:
    solved.cells.insert(0, solved.cells.pop(place_of(solved, "test_todo_1")))
    return solved


@submission
def format_3(solved: NotebookNode, empty: NotebookNode) -> Submission:
    return nbformat.writes(nbformat.convert(solved, 3), version=3)


@submission
def renamed(solved: NotebookNode, empty: NotebookNode) -> Submission:
    return {f"{TINY} (1).ipynb": solved, "scratch.ipynb": nbformat.v4.new_notebook()}


@submission
def two_notebooks(solved: NotebookNode, empty: NotebookNode) -> Submission:
    return {f"{TINY}.ipynb": empty, f"{TINY} (1).ipynb": solved}


@submission
def another_notebook(solved: NotebookNode, empty: NotebookNode) -> Submission:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1")])


# --- what is handed in and cannot be graded -------------------------------------------

SUBMISSIONS |= {
    "cut_off": lambda solved, empty: course.notebook_text(solved)[:3000],
    "nothing_in_it": lambda solved, empty: "",
    "no_notebook": lambda solved, empty: "[]",
    "no_cells": lambda solved, empty: '{"nbformat": 4, "nbformat_minor": 5}',
    "merge_conflict": lambda solved, empty: "{\n<<<<<<< HEAD\n}\n",
    "format_5": lambda solved, empty: course.notebook_text(solved).replace(
        '"nbformat": 4', '"nbformat": 5'
    ),
    "missing": lambda solved, empty: {"notes.txt": "I forgot"},
}


class Graded(dict[str, Future[LabResult]]):
    """Results on their way; a submission that nobody asked for is made when it is."""

    def __init__(self, submit: Callable[[str], Future[LabResult]]) -> None:
        self._submit = submit

    def __missing__(self, name: str) -> Future[LabResult]:
        self[name] = self._submit(name)
        return self[name]


@pytest.fixture(scope="module")
def handed_in(
    request: pytest.FixtureRequest,
    tiny_course: Path,
    tiny_lab: Lab,
    solved: NotebookNode,
    empty: NotebookNode,
    grade_soon: Grader,
) -> Graded:
    """The submissions above, on their way through nbgrader: those that tests ask for."""

    def submit(name: str) -> Future[LabResult]:
        made = SUBMISSIONS[name](copy.deepcopy(solved), copy.deepcopy(empty))
        return grade_soon(tiny_course, tiny_lab, name, made)

    results = Graded(submit)
    for item in request.session.items:
        name = getattr(getattr(item, "callspec", None), "params", {}).get("name")
        if item.path == Path(__file__) and name in SUBMISSIONS:
            _ = results[name]
    return results


# --- what becomes of it ---------------------------------------------------------------

FULL = (8, 6, 6)
STATES = {
    "solved": ("right", FULL, ""),
    "empty": ("not attempted", (0, 0, 0), ""),
    "wrong": ("wrong", (0, 6, 6), "double(2) is not twice 2."),
    "wrong_where_hidden": ("wrong", (2, 6, 6), "a large number is not doubled."),
    "accepts_text": ("wrong", (6, 6, 6), "text was not refused."),
    "name_error": ("error", (0, 6, 6), "NameError: name 'nmber' is not defined"),
    "half_done": ("wrong", (6, 6, 6), "A part of it is not attempted yet."),
    "endless": ("timed out", (0, 6, 6), "It was still running after 5 seconds."),
    "ignores_the_interrupt": ("timed out", (0, 6, 6), "It was still running"),
    "kills_the_kernel": ("error", (0, 6, 6), "This ended the Python process"),
    "leaves": ("wrong", (0, 6, 6), "double(2) is not twice 2."),
    "warns": ("right", FULL, ""),
    "shows_a_number": ("right", FULL, ""),
    "syntax_error": ("error", (0, 6, 6), "SyntaxError: invalid syntax (line 2)"),
    "endless_cell": ("timed out", (0, 6, 6), "It was still running"),
    "leaves_at_the_end": ("right", (8, 0, 6), ""),
    "marks_forged": ("wrong", (0, 6, 6), "double(2) is not twice 2."),
    "softened_test": ("wrong", (0, 6, 6), "double(2) is not twice 2."),
    "answer_deleted": ("not attempted", (0, 6, 6), ""),
    "answer_and_tests_deleted": ("not attempted", (0, 6, 6), ""),
    "two_notebooks": ("not attempted", (0, 0, 0), ""),
    "another_notebook": ("not attempted", (0, 0, 0), ""),
}
NOTES = {
    "answer_copied_as_stub": "answer cell of TODO 1 was there 2 times",
    "answer_copied_above": "answer cell of TODO 1 was there 2 times",
    "answer_split_in_two": "answer cell of TODO 1 was there 2 times",
    "copied_test": "test cell test_todo_1 was there 3 times",
    "written_copied": "answer cell written_1 was there 2 times",
    "empty_marks": "missing from 2 cells (todo_1, test_todo_2)",
    "marks_lost": "missing from 9 cells",
    "marks_and_ids_lost": "missing from 9 cells",
    "saved_by_colab": "missing from 9 cells",
    "grade_id_changed": "missing from 2 cells (todo_2, test_todo_2)",
    "deleted_test": "test cell test_todo_1 was missing and put back",
    "answer_deleted": "answer cell of TODO 1 was missing",
    "answer_and_tests_deleted": "test_todo_1, the test cell test_todo_1_errors were",
    "given_deleted": "given cell given_checks was missing and put back",
    "retyped_test": "test cell test_todo_1 had become a markdown cell",
    "softened_test": "test cell test_todo_1 had been changed",
    "moved_test": "test cell test_todo_1 stood above its answer",
    "format_3": "notebook format 3",
    "renamed": "was called '01_tiny (1).ipynb'",
    "two_notebooks": "01_tiny (1).ipynb is there too",
    "another_notebook": "is it the right file?",
}
PROBLEMS = {
    "cut_off": "is not valid JSON (line",
    "nothing_in_it": "is empty",
    "no_notebook": "is JSON, but not a notebook",
    "no_cells": "is not a valid notebook",
    "merge_conflict": "conflict of a git merge",
    "format_5": "is in notebook format 5",
    "missing": "is missing: no notebook was handed in",
}
GRADABLE = [name for name in SUBMISSIONS if name not in PROBLEMS]


@pytest.mark.parametrize("name", GRADABLE)
def test_every_todo_gets_its_points(name: str, handed_in: Graded) -> None:
    result = handed_in[name].result()
    state, points, hint = STATES.get(name, ("right", FULL, ""))
    assert (result.problem, result.max_points) == ("", 20)
    assert tuple(todo.points for todo in result.todos) == points
    assert result.todos[0].state == state
    assert hint in result.todos[0].hint
    assert bool(hint) == bool(result.todos[0].hint)


@pytest.mark.parametrize("name", GRADABLE)
def test_what_was_repaired_is_said_and_nothing_else(
    name: str, handed_in: Graded
) -> None:
    notes = handed_in[name].result().notes
    if name in NOTES:
        assert NOTES[name] in " ".join(notes)
    else:
        assert notes == ()


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_cannot_be_read_gets_a_reason(name: str, handed_in: Graded) -> None:
    result = handed_in[name].result()
    assert PROBLEMS[name] in result.problem
    assert (result.fault, result.points, result.max_points) == ("notebook", 0, 20)


def test_a_written_answer_is_for_a_person_and_never_lost(
    handed_in: Graded,
) -> None:
    for name, answered in {
        "solved": True,
        "empty": False,
        "marks_and_ids_lost": True,
        "written_copied": True,
    }.items():
        (question,) = handed_in[name].result().written
        assert question == WrittenResult("written_1", "Written question", answered)


def test_an_error_in_the_cell_that_ends_the_kernel_is_its_own(
    handed_in: Graded,
) -> None:
    todo = handed_in["leaves_at_the_end"].result().todos[1]
    assert (todo.state, todo.points) == ("error", 0)
    assert "ended the Python process" in todo.hint


# --- plain nbgrader, typed by hand ----------------------------------------------------


def scores(root: Path, student: str) -> dict[str, tuple[object, ...]]:
    with Gradebook(f"sqlite:///{root / 'gradebook.db'}") as book:
        notebook = book.find_submission_notebook(TINY, TINY, student)
        return {
            grade.name: (grade.auto_score, grade.manual_score, grade.needs_manual_grade)
            for grade in notebook.grades
        }


def nbgrader(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nbgrader", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def test_make_grade_and_nbgrader_give_the_same_scores(
    own_course: Path, tiny_lab: Lab, solved: NotebookNode, tmp_path: Path
) -> None:
    by_hand = tmp_path / "by_hand"
    answer = "import sys\n\n\ndef double(number):\n    print(1, file=sys.stderr)\n"
    mixed = replace_answer(solved, 1, answer + "    return 2 * number")
    mixed = replace_answer(mixed, 2, "def add_one(number):\n    return number")
    del cell_of(mixed, "todo_3").metadata["nbgrader"]
    release = own_course / "notebooks" / TINY / f"{TINY}.ipynb"
    release.write_text(course.notebook_text(mixed), encoding="utf-8")
    shutil.copytree(own_course, by_hand)
    hand_in(by_hand, tiny_lab, "me", mixed)

    (result,) = grading.grade(own_course, course.find_labs(own_course))
    typed = nbgrader(by_hand, "autograde", TINY, "--student", "me")

    assert typed.returncode == 0, typed.stderr
    assert scores(own_course, "me") == scores(by_hand, "me")
    assert [todo.points for todo in result.todos] == [6, 0, 6]


def test_no_submission_stops_nbgrader_from_grading_the_next(
    own_course: Path, tiny_lab: Lab, solved: NotebookNode, empty: NotebookNode
) -> None:
    for student, name in {
        "a": "answer_copied_as_stub",
        "b": "empty_marks",
        "c": "cut_off",
        "d": "answer_and_tests_deleted",
        "e": "renamed",
        "z": "solved",
    }.items():
        made = SUBMISSIONS[name](copy.deepcopy(solved), copy.deepcopy(empty))
        hand_in(own_course, tiny_lab, student, made)
    api = course.nbgrader_api(own_course, own_course)
    log = api.autograde(TINY, "*")["log"]
    assert "for student 'c'" in log  # the one that is no JSON
    totals = {
        student: sum(score or 0 for score, _, _ in scores(own_course, student).values())
        for student in "abdez"
    }
    assert totals == {"a": 20, "b": 20, "d": 12, "e": 20, "z": 20}


# --- the lab in the gradebook ---------------------------------------------------------


@pytest.fixture
def own_lab(own_course: Path) -> Lab:
    return course.find_labs(own_course)[0]


def change_points(lab: Lab, old: str, new: str) -> None:
    """As an instructor who edits the solution notebook: TODO 2 becomes worth less."""
    text = lab.solution.read_text(encoding="utf-8")
    assert old in text
    lab.solution.write_text(text.replace(old, new), encoding="utf-8")


def registered_points(root: Path) -> dict[str, float]:
    with Gradebook(f"sqlite:///{root / 'gradebook.db'}") as book:
        return {c.name: c.max_score for c in book.find_notebook(TINY, TINY).grade_cells}


def add_submission(root: Path, student: str) -> None:
    with Gradebook(f"sqlite:///{root / 'gradebook.db'}") as book:
        book.update_or_create_student(student)
        book.update_or_create_submission(TINY, student)


def submitters(root: Path) -> set[str]:
    with Gradebook(f"sqlite:///{root / 'gradebook.db'}") as book:
        return {s.student.id for s in book.assignment_submissions(TINY)}


def test_a_lab_in_the_gradebook_is_not_registered_again(
    own_course: Path, own_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "generate", lambda api, lab: pytest.fail("registered"))
    grading.register(own_course, own_lab, course.nbgrader_api(own_course, own_course))


def test_what_a_solution_notebook_gives_is_what_the_gradebook_holds(
    own_course: Path, solved: NotebookNode
) -> None:
    with Gradebook(f"sqlite:///{own_course / 'gradebook.db'}") as book:
        kept = released.in_gradebook(book, TINY)
    made = released.in_solution_notebook(solved)
    assert kept == [replace(cell, above="") for cell in made]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(('"points": 6', '"points": 5'), id="points"),
        pytest.param(("2 is even.", "two is even."), id="a test"),
        pytest.param(("test_todo_1_errors", "test_todo_1_refuses"), id="a cell"),
    ],
)
def test_a_changed_lab_replaces_only_ones_own_practice(
    own_course: Path, own_lab: Lab, change: tuple[str, str]
) -> None:
    api = course.nbgrader_api(own_course, own_course)
    add_submission(own_course, "me")
    change_points(own_lab, *change)
    grading.register(own_course, own_lab, api, practice="me")
    assert submitters(own_course) == set()
    expected = course.test_cells(nbformat.read(own_lab.solution, as_version=4))
    points = registered_points(own_course)
    assert {name: points[name] for name in expected} == {
        name: worth for name, (_, worth) in expected.items()
    }


def test_a_changed_text_without_points_keeps_every_submission(
    own_course: Path, own_lab: Lab
) -> None:
    add_submission(own_course, "me")
    add_submission(own_course, "alice")
    given = "Like kvlab.checks, as far as this lab needs it."
    change_points(own_lab, given, f"{given} No more.")
    api = course.nbgrader_api(own_course, own_course)
    grading.register(own_course, own_lab, api, practice="me")
    assert submitters(own_course) == {"me", "alice"}
    with Gradebook(f"sqlite:///{own_course / 'gradebook.db'}") as book:
        sources = [c.source for c in book.find_notebook(TINY, TINY).source_cells]
    assert any(f"{given} No more." in source for source in sources)


def test_a_changed_lab_with_work_of_others_is_left_alone(
    own_course: Path, own_lab: Lab
) -> None:
    before = registered_points(own_course)
    add_submission(own_course, "me")
    add_submission(own_course, "alice")
    change_points(own_lab, '"points": 6', '"points": 5')
    (result,) = grading.grade(own_course, [own_lab])
    assert result.fault == "course"
    assert "01_tiny has changed" in result.problem and "alice" in result.problem
    assert "make autograde LAB=01_tiny FORCE=1" in result.problem
    assert submitters(own_course) == {"me", "alice"}
    assert registered_points(own_course) == before
    assert not (own_course / "submitted").exists()


def test_a_changed_lab_keeps_the_work_of_the_student_named(
    own_course: Path, own_lab: Lab
) -> None:
    add_submission(own_course, "alice")
    change_points(own_lab, '"points": 6', '"points": 5')
    (result,) = grading.grade(own_course, [own_lab], student="alice")
    assert result.fault == "course"
    assert submitters(own_course) == {"alice"}


def test_a_gradebook_that_cannot_be_read_is_said(
    own_course: Path, own_lab: Lab
) -> None:
    (own_course / "gradebook.db").write_text("no database " * 100)
    (result,) = grading.grade(own_course, [own_lab])
    assert result.fault == "course"
    assert re.search("gradebook .* cannot be used: .*not a database", result.problem)


# --- grade() as a whole ---------------------------------------------------------------


def test_grading_touches_no_notebook_of_the_student(
    own_course: Path, own_lab: Lab, solved: NotebookNode, tmp_path: Path
) -> None:
    folder = own_lab.release.parent
    own_lab.release.rename(folder / f"{TINY} (1).ipynb")
    (folder / "data.txt").write_text("1 2 3")
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}
    (result,) = grading.grade(own_course, [own_lab])
    assert result.todos[0].state == "not attempted"
    assert "was called" in result.notes[0]
    assert before == {
        p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()
    }


def test_a_broken_lab_leaves_no_old_score_and_stops_no_other(
    own_course: Path, own_lab: Lab
) -> None:
    second = own_course / "solutions" / "02_tiny"
    second.mkdir()
    shutil.copy(own_lab.source, second / "02_tiny.py")
    course.build(own_course, "02_tiny")
    add_submission(own_course, "me")
    own_lab.release.write_text("{", encoding="utf-8")
    steps: list[tuple[str, str]] = []
    broken, whole = grading.grade(
        own_course,
        course.find_labs(own_course),
        progress=lambda lab, step: steps.append((lab, step)),
    )
    assert "not valid JSON" in broken.problem
    assert submitters(own_course) == set()
    assert len(whole.todos) == 3 and whole.feedback is not None
    assert ("02_tiny", "running its cells") in steps


def test_an_interrupt_ends_the_run(
    own_course: Path, own_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nbgrader catches a Ctrl-C and reports it as one more failed submission."""

    def interrupted(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nbgrader.converters.Autograde.start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grading.grade(own_course, [own_lab])


def test_a_missing_notebook_is_said(own_course: Path, own_lab: Lab) -> None:
    own_lab.release.unlink()
    (result,) = grading.grade(own_course, [own_lab])
    assert result.problem.startswith("notebooks/01_tiny/01_tiny.ipynb is missing")


def test_a_submission_of_somebody_else_is_never_overwritten(
    own_course: Path, own_lab: Lab
) -> None:
    hand_in(own_course, own_lab, "alice", "her work")
    (result,) = grading.grade(own_course, [own_lab], student="alice")
    kept = own_course / "submitted" / "alice" / TINY / f"{TINY}.ipynb"
    assert result.fault == "course"
    assert "submitted/alice/01_tiny is there already" in result.problem
    assert kept.read_text() == "her work"


def test_feedback_shows_the_hint_and_hides_the_hidden_tests(
    own_course: Path, own_lab: Lab, solved: NotebookNode
) -> None:
    answer = """
from IPython.display import HTML, display

display(HTML("<script>alert('boo')</script><table><tr><td>7</td></tr></table>"))


def double(number):
    if not isinstance(number, str) and number > 100:
        return nothing_of_this_name
    return 2 * number
"""
    notebook = replace_answer(solved, 1, answer)
    notebook.cells[0]["source"] += "\n\n<script>alert('text')</script> and $a < b$"
    own_lab.release.write_text(course.notebook_text(notebook), encoding="utf-8")
    (result,) = grading.grade(own_course, [own_lab])
    assert result.feedback is not None
    page = result.feedback.read_text(encoding="utf-8")
    text = html.unescape(re.sub(r"<[^>]*>", "", page))
    assert "TODO 1 wrong: text was not refused." in text
    assert "NameError: name 'nothing_of_this_name' is not defined" in text
    assert "return nothing_of_this_name" in text  # the frame in the student's own cell
    assert "test_small_number_is_doubled()" in text  # the visible half of the test
    assert "secret_number" not in text and "HIDDEN" not in text
    assert str(course.__file__) not in text
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    assert "<td>7</td>" in page


def test_only_errors_decide_about_a_test_cell() -> None:
    outputs = [
        nbformat.v4.new_output("stream", name="stderr", text="careful"),
        nbformat.v4.new_output(
            "execute_result", data={"text/plain": "0.5"}, execution_count=1
        ),
    ]
    marks = {"grade": True, "solution": False, "grade_id": "test_todo_1", "points": 4}
    cell = nbformat.v4.new_code_cell(
        "test()", metadata={"nbgrader": marks}, outputs=outputs
    )
    assert determine_grade(copy.deepcopy(cell)) == (0, 4)
    cell, _ = preprocessors.FreeOutputs().preprocess_cell(cell, {}, 0)
    assert determine_grade(cell) == (4, 4)
    assert [output.output_type for output in cell.outputs] == ["stream", "display_data"]
    cell.outputs.append(nbformat.v4.new_output("error", ename="Wrong", evalue="no"))
    assert determine_grade(cell) == (0, 4)


def test_repair_leaves_a_good_notebook_as_it_is(
    solved: NotebookNode, empty: NotebookNode
) -> None:
    cells = released.in_solution_notebook(solved)
    repaired = copy.deepcopy(empty)
    assert repair(repaired, cells) == []
    assert [c.source for c in repaired.cells] == [c.source for c in empty.cells]
    assert [c.id for c in repaired.cells] == [c.id for c in empty.cells]


# --- the scoreboard -------------------------------------------------------------------


def a_todo(number: int, state: str, points: float, hint: str = "") -> TodoResult:
    cell = CellResult(f"test_todo_{number}", state, points, 5, hint)  # type: ignore[arg-type]
    return TodoResult(number, f"the title of number {number}", (cell,))


RESULTS = [
    LabResult(
        "03_kv_axes_and_window",
        "me",
        todos=(
            a_todo(1, "right", 5),
            a_todo(
                2, "wrong", 0, "the scale has shape (1, 2, 5, 1), so " + "word " * 20
            ),
            a_todo(3, "timed out", 0, "It was still running after 60 seconds."),
            a_todo(4, "not attempted", 0),
            a_todo(5, "error", 0, "name_of_code: stays small"),
        ),
        written=(
            WrittenResult("written_1", "Why so?", True),
            WrittenResult("written_2", "And now?", False),
        ),
        notes=("The test cell test_todo_1 was missing and put back.",),
        feedback=Path.cwd() / "feedback" / "me" / "03" / "03.html",
    ),
    LabResult("04", "me", problem="04.ipynb is not valid JSON", fault="notebook"),
]


def shown(results: list[LabResult], **options: object) -> str:
    page = io.StringIO()
    grading.print_scoreboard(results, Console(file=page, width=80, **options))  # type: ignore[arg-type]
    return page.getvalue()


def test_scoreboard_fits_80_columns_and_shows_everything() -> None:
    page = shown(RESULTS)
    assert max(map(len, page.splitlines())) <= 80
    flat = " ".join(page.split())
    for part in (
        "right 1 the title of number 1 5 / 5",
        "wrong 2 the title of number 2 0 / 5 the scale has shape (1, 2, 5, 1), so word",
        "timed out 3",
        "not attempted 4",
        "error 5 the title of number 5 0 / 5 name_of_code: stays small",
        "in this lab 5 / 25",
        "to be read by a person: Why so?",
        "not answered: And now?",
        "note: The test cell test_todo_1 was missing and put back.",
        "feedback: feedback/me/03/03.html",
        "error 04.ipynb is not valid JSON",
        "total 5 / 45",
    ):
        assert part in flat, part


def test_scoreboard_has_colours_on_a_terminal_only() -> None:
    assert "\x1b[" not in shown(RESULTS)
    assert "\x1b[" in shown(RESULTS, force_terminal=True, color_system="standard")


def test_a_todo_is_as_bad_as_its_worst_test() -> None:
    def state_of(*states: str) -> str:
        cells = (CellResult("x", state, 0, 1) for state in states)  # type: ignore[arg-type]
        return TodoResult(1, "", tuple(cells)).state

    assert state_of("right", "right") == "right"
    assert state_of("right", "wrong") == "wrong"
    assert state_of("wrong", "error") == "wrong"  # its sentence says more
    assert state_of("error", "timed out") == "timed out"
    assert state_of("not attempted", "not attempted") == "not attempted"
    assert state_of("not attempted", "error") == "error"
    assert state_of("not attempted", "right") == "wrong"


def test_progress_is_one_line_a_lab_without_a_terminal() -> None:
    page = io.StringIO()
    with grading.progress_on(Console(file=page, width=80), 2) as progress:
        for lab in ("01", "02"):
            for step in ("copying", "running"):
                progress(lab, step)
    assert page.getvalue() == "grading 01\ngrading 02\n"


def test_progress_moves_on_a_terminal() -> None:
    page = io.StringIO()
    console = Console(file=page, width=80, force_terminal=True)
    with grading.progress_on(console, 1) as progress:
        progress("01", "running its cells")
    assert "running its cells" in page.getvalue()


@pytest.mark.parametrize(
    ("results", "options", "code"),
    [
        (RESULTS, [], 0),
        (RESULTS, ["--strict"], 1),
        ([replace(RESULTS[0], todos=(a_todo(1, "right", 5),))], ["--strict"], 0),
        ([LabResult("04", "me", problem="changed", fault="course")], [], 2),
    ],
)
def test_exit_code_says_whether_grading_worked(
    own_course: Path,
    monkeypatch: pytest.MonkeyPatch,
    results: list[LabResult],
    options: list[str],
    code: int,
) -> None:
    monkeypatch.setattr(grading, "grade", lambda *arguments: results)
    arguments = ["grade", "--root", str(own_course), *options]
    assert CliRunner().invoke(cli.app, arguments).exit_code == code
