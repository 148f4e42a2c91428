"""What a graded notebook says about each TODO: state, points and the one-line hint.

Called by `engine` after nbgrader has graded; shown by `scoreboard`. Never gives or takes a point:
points come from the gradebook.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from nbformat import NotebookNode
from nbgrader.utils import compute_checksum

from kvlab import course
from kvlab.grading.preprocessors import KERNEL_DIED, TIMED_OUT
from kvlab.grading.repair import mark_of

State = Literal["right", "wrong", "error", "timed out", "not attempted"]
WORST_FIRST: tuple[State, ...] = ("timed out", "wrong", "error", "not attempted")


@dataclass(frozen=True)
class CellResult:
    """One test cell."""

    grade_id: str
    state: State
    points: float
    max_points: float
    hint: str = ""


@dataclass(frozen=True)
class TodoResult:
    """One row of the scoreboard: a TODO with all its test cells."""

    number: int
    title: str
    cells: tuple[CellResult, ...]

    @property
    def points(self) -> float:
        """What its test cells gave."""
        return sum(cell.points for cell in self.cells)

    @property
    def max_points(self) -> float:
        """What its test cells can give."""
        return sum(cell.max_points for cell in self.cells)

    @property
    def state(self) -> State:
        """Right when every cell is; not attempted when no cell is more than that."""
        states = {cell.state for cell in self.cells}
        if states == {"not attempted", "right"}:
            return "wrong"
        return next((state for state in WORST_FIRST if state in states), "right")

    @property
    def hint(self) -> str:
        """The sentence of the first cell in the state shown; empty when there is none."""
        if self.state in ("right", "not attempted"):
            return ""
        hints = [cell.hint for cell in self.cells if cell.state == self.state]
        return hints[0] if hints else "A part of it is not attempted yet."


@dataclass(frozen=True)
class WrittenResult:
    """A written question, which a person reads. Its points are no part of the score."""

    grade_id: str
    title: str
    answered: bool


@dataclass(frozen=True)
class LabResult:
    """How one notebook of one student was graded.

    notes    what was repaired, and what else the student should know
    problem  why there are no rows; "" when there are
    fault    whose it is: the notebook's, or the course's, so that nothing was graded
    feedback the HTML page for the student
    protection  what student code was kept in while it ran: "sandbox" (bubblewrap), or
             only a "process" of its own
    """

    lab: str
    student: str
    todos: tuple[TodoResult, ...] = ()
    written: tuple[WrittenResult, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""
    fault: Literal["", "notebook", "course"] = ""
    feedback: Path | None = None
    protection: Literal["", "sandbox", "process"] = ""
    worth: float = course.POINTS_PER_LAB

    @property
    def points(self) -> float:
        """The sum over the TODOs."""
        return sum(todo.points for todo in self.todos)

    @property
    def max_points(self) -> float:
        """What the lab is worth, also when it could not be graded."""
        return sum(todo.max_points for todo in self.todos) or self.worth


def judge(
    graded: NotebookNode, solution: NotebookNode, scores: Mapping[str, float]
) -> tuple[tuple[TodoResult, ...], tuple[WrittenResult, ...]]:
    """The TODOs and the written questions of a graded notebook.

    graded    as nbgrader left it under autograded/, with outputs
    solution  the lab's solution notebook: titles and points
    scores    the gradebook's score for each grade_id
    """
    own = {mark_of(cell): cell for cell in graded.cells if mark_of(cell)}
    tests: dict[int, list[CellResult]] = {n: [] for n in sorted(course.todos(solution))}
    for grade_id, (number, worth) in course.test_cells(solution).items():
        points = scores.get(grade_id, 0.0)
        answers = [
            own[mark_of(cell)]
            for cell in solution.cells
            if str(cell.metadata.get("todo", "")).startswith(f"TODO {number}:")
            and mark_of(cell) in own
        ]
        state, hint = _state_and_hint(own.get(grade_id), answers, number)
        if state == "right" and points < worth:
            state, hint = "wrong", "The gradebook gives fewer points than the tests."
        tests[number].append(CellResult(grade_id, state, points, worth, hint))
    titles = course.todos(solution)
    rows = [TodoResult(n, titles[n], tuple(cells)) for n, cells in tests.items()]
    return tuple(rows), tuple(_written(graded, solution))


def _state_and_hint(
    test: NotebookNode | None, answers: list[NotebookNode], number: int
) -> tuple[State, str]:
    """What the outputs of one test cell mean; `answers` are the cells it tests."""
    if test is None:
        return "error", "The test cell is missing."
    error = _first_error(test)
    if error is None:
        return "right", ""
    if error.ename == "NameError":
        # Nothing was defined: what stopped the answer's own cell says more.
        error = next(filter(None, map(_first_error, answers)), error)
        where = "The answer's cell stopped: "
    else:
        where = ""
    return _meaning(error, where, number)


def _first_error(cell: NotebookNode) -> NotebookNode | None:
    errors = [o for o in cell.get("outputs", []) if o.output_type == "error"]
    stopped = [error for error in errors if error.ename == TIMED_OUT]
    return next(iter(stopped or errors), None)


def _meaning(error: NotebookNode, where: str, number: int) -> tuple[State, str]:
    said = re.sub(rf"^TODO {number} wrong: ", "", _one_line(error.evalue))
    if error.ename == "NotImplementedError":
        return "not attempted", ""
    if error.ename == TIMED_OUT:
        return "timed out", said or "It was still running when the time was up."
    if error.ename == KERNEL_DIED:
        return "error", said[:1].upper() + said[1:] + "."
    if error.ename in ("Wrong", "AssertionError"):
        return "wrong", said or "A test failed without saying why."
    if error.ename == "NameError":
        where = ""
    return "error", f"{where}{error.ename}: {said}".rstrip(": ")


def _one_line(text: str) -> str:
    text = re.sub(r"\((?:\S*?)\.py, line (\d+)\)", r"(line \1)", text)
    return " ".join(text.split())


def _written(graded: NotebookNode, solution: NotebookNode) -> list[WrittenResult]:
    """The written questions in the lab's order, each called by the heading above it."""
    answered = {
        mark_of(cell)
        for cell in graded.cells
        if mark_of(cell) and cell.source.strip() and not _is_as_released(cell)
    }
    heading, found = "", []
    for cell in solution.cells:
        marks = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "markdown" and not marks:
            headings = re.findall(r"^#+\s*(.+)$", cell.source, flags=re.MULTILINE)
            heading = headings[-1] if headings else heading
        if marks.get("grade") and marks.get("solution"):
            name = marks["grade_id"]
            found.append(WrittenResult(name, heading or name, name in answered))
    titles = [question.title for question in found]
    return [
        replace(
            question,
            title=f"{question.title} ({titles[: i + 1].count(question.title)})",
        )
        if titles.count(question.title) > 1
        else question
        for i, question in enumerate(found)
    ]


def _is_as_released(cell: NotebookNode) -> bool:
    """nbgrader's own test for an answer that nobody wrote."""
    return bool(cell.metadata.nbgrader.get("checksum") == compute_checksum(cell))
