"""The answer suites under tests/answers/: every wrong answer loses what it must and is told why, every right one passes.

Each file replaces the answer of one TODO (or of several) in the solved notebook. Answers to different
TODOs share a submission, as if one student had given them all: a kernel that imports torch costs seconds.
Each submission is a real one, graded by nbgrader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, Grader, copy_of_course
from nbformat import NotebookNode

from kvlab import course
from kvlab.course import Lab
from kvlab.grading import LabResult
from kvlab.grading.answers import replace_answer

SUITES = Path(__file__).with_name("answers")
LABS = [lab for lab in course.find_labs(ROOT) if (SUITES / lab.name).is_dir()]
ENOUGH = {  # wrong and right answers that a lab has at least
    "01_memory_budget": (8, 4),
    "02_int8_linear": (8, 4),
    "03_kv_axes_and_window": (12, 5),
    "04_packed_groups": (25, 8),
    "05_real_model": (20, 6),
}


@dataclass(frozen=True)
class Answer:
    """One file of a suite.

    sources  the answer cell's new source, for each TODO it replaces
    loses    the test cells that give no point; empty for a right answer
    hint     what the scoreboard must say
    """

    name: str
    sources: dict[int, str]
    loses: frozenset[str]
    hint: str


def read_answer(path: Path) -> Answer:
    text = path.read_text(encoding="utf-8")
    head, *parts = re.split(r"^# todo: *(\d+) *$", text, flags=re.MULTILINE)
    assert not head.strip(), f"{path} must start with `# todo: N`"
    said = dict(re.findall(r"^# (loses|hint): *(.+?) *$", text, flags=re.MULTILINE))
    loses = (
        frozenset(re.split(r"[,\s]+", said["loses"]))
        if "loses" in said
        else frozenset()
    )
    return Answer(
        name=str(path.relative_to(SUITES).with_suffix("")),
        sources={
            int(number): part.strip() + "\n"
            for number, part in zip(parts[::2], parts[1::2], strict=True)
        },
        loses=loses,
        hint=said.get("hint", ""),
    )


def suite(lab: Lab, kind: str) -> list[Answer]:
    return [
        read_answer(path) for path in sorted(SUITES.glob(f"{lab.name}/{kind}/*.py"))
    ]


WRONG = [(lab, answer) for lab in LABS for answer in suite(lab, "wrong")]
RIGHT = [(lab, answer) for lab in LABS for answer in suite(lab, "right")]


def of_different_todos(answers: Iterable[Answer]) -> list[list[Answer]]:
    """The answers in as few groups as come easily, none with a TODO twice."""
    groups: list[list[Answer]] = []
    for answer in answers:
        for group in groups:
            if all(answer.sources.keys().isdisjoint(other.sources) for other in group):
                group.append(answer)
                break
        else:
            groups.append([answer])
    return groups


def with_answers(solved: NotebookNode, answers: Iterable[Answer]) -> NotebookNode:
    """The solved notebook with other answers, and without the cells that only show.

    A student may delete those; solved and empty notebooks keep them.
    """
    notebook = solved
    for answer in answers:
        for todo, source in answer.sources.items():
            notebook = replace_answer(notebook, todo, source)
    notebook.cells = [c for c in notebook.cells if "nbgrader" in c.metadata]
    return notebook


Graded = dict[str, tuple[Future[LabResult], list[Answer]]]


@pytest.fixture(scope="module")
def graded(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    grade_soon: Grader,
) -> Graded:
    """For every answer that is to be tested: its submission's result, and who shares it.

    Also one for `LAB/solved` and `LAB/empty`.
    """
    root = tmp_path_factory.mktemp("course")
    labs = {lab.name: lab for lab in copy_of_course(root, LABS)}
    asked: dict[str, list[Answer]] = {}
    for item in request.session.items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == Path(__file__) and "lab" in given:
            answers = asked.setdefault(given["lab"].name, [])
            answers += [given["answer"]] if "answer" in given else []
    results: Graded = {}
    for name, answers in asked.items():
        lab = labs[name]
        solved = nbformat.read(lab.solution, as_version=4)
        for kind, path in (("solved", lab.solution), ("empty", lab.release)):
            notebook = nbformat.read(path, as_version=4)
            results[f"{name}/{kind}"] = (grade_soon(root, lab, kind, notebook), [])
        for number, group in enumerate(of_different_todos(answers)):
            notebook = with_answers(solved, group)
            future = grade_soon(root, lab, f"group{number}", notebook)
            results |= {answer.name: (future, group) for answer in group}
    return results


def lost_cells(result: LabResult) -> set[str]:
    """The test cells without full points; each must have none at all."""
    cells = [cell for todo in result.todos for cell in todo.cells]
    assert all(cell.points in (0, cell.max_points) for cell in cells)
    return {cell.grade_id for cell in cells if cell.points == 0}


@pytest.mark.parametrize(("lab", "answer"), WRONG, ids=[a.name for _, a in WRONG])
def test_wrong_answer_loses_its_points_and_is_told_why(
    lab: Lab, answer: Answer, graded: Graded
) -> None:
    future, together = graded[answer.name]
    result = future.result()
    assert result.problem == ""
    (number,) = answer.sources
    (todo,) = [row for row in result.todos if row.number == number]
    own_cells = {cell.grade_id for cell in todo.cells}
    assert answer.loses and answer.loses <= own_cells
    assert lost_cells(result) & own_cells == answer.loses, todo.hint
    assert lost_cells(result) == set().union(*(other.loses for other in together))
    assert todo.state in ("wrong", "error")
    assert answer.hint and answer.hint in todo.hint


@pytest.mark.parametrize(("lab", "answer"), RIGHT, ids=[a.name for _, a in RIGHT])
def test_right_answer_gets_full_marks(lab: Lab, answer: Answer, graded: Graded) -> None:
    result = graded[answer.name][0].result()
    assert result.problem == ""
    for todo in result.todos:
        if todo.number in answer.sources:
            assert (todo.state, todo.hint) == ("right", "")


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
def test_solved_notebook_gets_full_marks(lab: Lab, graded: Graded) -> None:
    result = graded[f"{lab.name}/solved"][0].result()
    assert (result.problem, result.notes) == ("", ())
    assert {todo.hint for todo in result.todos} == {""}
    assert (result.points, result.max_points) == (20, 20)


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
def test_empty_notebook_gets_nothing_and_is_not_called_wrong(
    lab: Lab, graded: Graded
) -> None:
    result = graded[f"{lab.name}/empty"][0].result()
    assert (result.problem, result.notes) == ("", ())
    assert {todo.state for todo in result.todos} == {"not attempted"}
    assert (result.points, result.max_points) == (0, 20)
    assert not any(question.answered for question in result.written)


@pytest.mark.parametrize("name", ENOUGH)
def test_suite_has_enough_answers(name: str) -> None:
    counts = [sum(lab.name == name for lab, _ in answers) for answers in (WRONG, RIGHT)]
    assert all(have >= least for have, least in zip(counts, ENOUGH[name], strict=True))


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
def test_every_todo_has_wrong_answers(lab: Lab) -> None:
    todos = course.todos(nbformat.read(lab.solution, as_version=4))
    covered = {n for owner, answer in WRONG if owner == lab for n in answer.sources}
    assert covered == set(todos)
