"""What each marked cell of a lab was when the lab left: the ground that grading stands on.

Called by `engine` (is the gradebook up to date?), `repair` and `intake` (whose cell is this?).
Never runs a cell and never changes a notebook or the gradebook.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from nbformat import NotebookNode
from nbgrader.api import Gradebook
from nbgrader.utils import compute_checksum, is_grade, is_locked, is_solution

from kvlab.course import ClearTodos

HIDDEN_BEGIN, HIDDEN_END = "BEGIN HIDDEN TESTS", "END HIDDEN TESTS"
TODO_OF_CELL = re.compile(r"^(?:test_)?todo_(\d+)")


@dataclass(frozen=True)
class ReleasedCell:
    """One cell with nbgrader's marks, as the gradebook keeps it.

    source  with its hidden tests, and without the answer
    points  None when the cell is not graded
    above   the text of the cell above it in the lab; "" when there is none
    """

    grade_id: str
    cell_type: str
    source: str
    locked: bool
    solution: bool
    points: float | None
    checksum: str
    above: str = ""

    @property
    def graded(self) -> bool:
        """Whether points are given for it, by a test or by a person."""
        return self.points is not None

    @property
    def is_test(self) -> bool:
        """Whether running it gives points."""
        return self.graded and not self.solution

    @property
    def todo(self) -> int | None:
        """The number of the TODO it belongs to."""
        match = TODO_OF_CELL.match(self.grade_id)
        return int(match.group(1)) if match else None

    @property
    def called(self) -> str:
        """How a sentence to the student names it."""
        if self.is_test:
            return f"the test cell {self.grade_id}"
        if self.solution and self.todo is not None:
            return f"the answer cell of TODO {self.todo}"
        kind = "answer" if self.solution else "given"
        return f"the {kind} cell {self.grade_id}"

    @property
    def marks(self) -> dict[str, object]:
        """The nbgrader metadata that the cell must carry."""
        marks: dict[str, object] = {
            "cell_type": self.cell_type,
            "checksum": self.checksum,
            "grade": self.graded,
            "grade_id": self.grade_id,
            "locked": self.locked,
            "schema_version": 3,
            "solution": self.solution,
            "task": False,
        }
        if self.points is not None:
            marks["points"] = self.points
        return marks

    @cached_property
    def visible(self) -> str:
        """The source as a student has it: without the hidden tests."""
        return without_hidden_tests(self.source)

    @cached_property
    def names(self) -> frozenset[str]:
        """The functions and classes that the cell defines at its top level."""
        return defined_names(self.visible) if self.cell_type == "code" else frozenset()


def without_hidden_tests(source: str) -> str:
    """The source with every region of hidden tests cut out."""
    kept, hidden = [], False
    for line in source.split("\n"):
        if HIDDEN_BEGIN in line:
            hidden = True
        elif HIDDEN_END in line:
            hidden = False
        elif not hidden:
            kept.append(line)
    return "\n".join(kept)


def defined_names(source: str) -> frozenset[str]:
    """Functions and classes defined at the top level, even in code that is broken."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        found = re.findall(
            r"^(?:async def|def|class) +(\w+)", source, flags=re.MULTILINE
        )
        return frozenset(found)
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return frozenset(node.name for node in body if isinstance(node, definitions))


def in_solution_notebook(solution: NotebookNode) -> list[ReleasedCell]:
    """What nbgrader would write into the gradebook for a lab's solution notebook."""
    notebook, _ = ClearTodos().preprocess(copy.deepcopy(solution), {})
    found = []
    for index, cell in enumerate(notebook.cells):
        if is_grade(cell) or is_solution(cell) or is_locked(cell):
            marks = cell.metadata.nbgrader
            found.append(
                ReleasedCell(
                    grade_id=marks["grade_id"],
                    cell_type=cell.cell_type,
                    source=cell.source,
                    locked=is_locked(cell),
                    solution=is_solution(cell),
                    points=float(marks["points"]) if is_grade(cell) else None,
                    checksum=compute_checksum(cell),
                    above=solution.cells[index - 1].source if index else "",
                )
            )
    return found


def in_gradebook(
    gradebook: Gradebook, lab: str, notebook_name: str = ""
) -> list[ReleasedCell]:
    """What the gradebook holds for a lab, in the order it was written.

    notebook_name  when it differs from the lab's name
    raises nbgrader.api.MissingEntry when the lab was never registered
    """
    notebook = gradebook.find_notebook(notebook_name or lab, lab)
    points = {cell.name: float(cell.max_score) for cell in notebook.grade_cells}
    solutions = {cell.name for cell in notebook.solution_cells}
    return [
        ReleasedCell(
            grade_id=cell.name,
            cell_type=cell.cell_type,
            source=cell.source,
            locked=cell.locked,
            solution=cell.name in solutions,
            points=points.get(cell.name),
            checksum=cell.checksum,
        )
        for cell in notebook.source_cells
    ]


def in_order_of(
    cells: Iterable[ReleasedCell], lab: Iterable[ReleasedCell]
) -> list[ReleasedCell]:
    """The cells in the order of the lab, each with the text above it there.

    A database promises no order, and keeps nothing of the cells around.
    """
    places = {cell.grade_id: (place, cell.above) for place, cell in enumerate(lab)}
    last = (len(places), "")
    ordered = sorted(cells, key=lambda cell: places.get(cell.grade_id, last)[0])
    return [replace(c, above=places.get(c.grade_id, last)[1]) for c in ordered]
