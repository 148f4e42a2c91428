"""Puts an answer into a notebook, as a student would.

Called by the tests, which turn every file under tests/answers/ into a submission. Never runs anything.
"""

from __future__ import annotations

import copy

from nbformat import NotebookNode

from kvlab.course import CourseError


def replace_answer(notebook: NotebookNode, todo: int, source: str) -> NotebookNode:
    """A copy of the notebook in which the answer cell of a TODO has another source.

    raises CourseError when the notebook has no such cell
    """
    changed = copy.deepcopy(notebook)
    for cell in changed.cells:
        if str(cell.metadata.get("todo", "")).startswith(f"TODO {todo}:"):
            cell["source"] = source
            return changed
    raise CourseError(f"the notebook has no answer cell for TODO {todo}")
