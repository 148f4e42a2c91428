"""Takes a submission in: finds its notebook, whatever it is called, and says when it cannot be read.

Called by nbgrader before it converts a submission (`prepare`, a hook), and by `engine`.
Never changes or removes a file that a student handed in; a renamed notebook is copied beside itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from kvlab.course import notebook_text
from kvlab.grading import released
from kvlab.grading.repair import whose_cells

HANDED_IN_AS = "handed_in_as"  # in the notebook's `kvlab` metadata


class Unreadable(Exception):
    """A submission that cannot be graded; the message says why and what to do."""


def prepare(assignment: str, student: str, notebooks: list[str]) -> None:
    """nbgrader's `pre_convert_hook`: lets it find a notebook that was renamed.

    nbgrader calls it in the course's folder, and grades what `notebooks` then lists.
    """
    if not notebooks:
        return
    folder = Path(notebooks[0]).parent
    solution = Path("solutions", assignment, f"{assignment}.ipynb")
    copied = settle_name(folder, assignment, solution)
    if copied is not None:
        notebooks.append(str(copied))


def settle_name(folder: Path, lab: str, solution: Path) -> Path | None:
    """Copies a renamed notebook to LAB.ipynb, when there is none; returns the copy."""
    wanted = folder / f"{lab}.ipynb"
    if wanted.exists() or not solution.is_file():
        return None
    cells = released.in_solution_notebook(nbformat.read(solution, as_version=4))
    best: tuple[int, float, Path] | None = None
    for path in sorted(folder.glob("*.ipynb")):
        try:
            found = len(whose_cells(read(path), cells))
        except Unreadable:
            continue
        if 2 * found >= len(cells):
            best = max(best or (0, 0.0, path), (found, path.stat().st_mtime, path))
    if best is None:
        return None
    notebook = read(best[2])
    own = notebook.metadata.setdefault("kvlab", NotebookNode())
    own[HANDED_IN_AS] = best[2].name
    wanted.write_text(notebook_text(notebook), encoding="utf-8")
    return wanted


def name_before(notebook: NotebookNode) -> str:
    """What the notebook was called when it was handed in; "" when it kept its name."""
    return str(notebook.metadata.get("kvlab", {}).get(HANDED_IN_AS, ""))


def left_aside(folder: Path, lab: str) -> list[str]:
    """Other notebooks of a submission, which nobody grades."""
    notebooks = sorted(path.name for path in folder.glob("*.ipynb"))
    return [name for name in notebooks if name != f"{lab}.ipynb"]


def read(path: Path) -> NotebookNode:
    """The notebook in a file, in format 4.

    raises Unreadable
    """
    name = path.name
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"{name} is not UTF-8 text ({error.reason}).") from None
    if not text.strip():
        raise Unreadable(f"{name} is empty. Save it again in JupyterLab.")
    if "\n<<<<<<< " in text:
        raise Unreadable(
            f"{name} holds a conflict of a git merge. Settle it, and save it again."
        )
    try:
        content = json.loads(text)
    except RecursionError:
        raise Unreadable(f"{name} is nested too deeply to be a notebook.") from None
    except json.JSONDecodeError as error:
        raise Unreadable(
            f"{name} is not valid JSON (line {error.lineno}: {error.msg}), so it was cut "
            "off or edited by hand. Save it again in JupyterLab, or take an older copy."
        ) from None
    return _as_notebook(name, text, content)


def _as_notebook(name: str, text: str, content: Any) -> NotebookNode:
    """The parsed text as a notebook of format 4."""
    if not isinstance(content, dict) or not isinstance(content.get("nbformat"), int):
        raise Unreadable(f"{name} is JSON, but not a notebook.")
    if not 1 <= content["nbformat"] <= 4:
        raise Unreadable(
            f"{name} is in notebook format {content['nbformat']}; "
            "formats up to 4 are known here. Save it from JupyterLab."
        )
    try:
        notebook = nbformat.reads(text, as_version=4)
        for cell in notebook.cells:
            for key, kind in (("cell_type", str), ("metadata", dict), ("source", str)):
                if not isinstance(cell[key], kind):
                    raise TypeError(f"the {key} of a cell is no {kind.__name__}")
    except Exception as error:  # nbformat raises whatever the missing part leads to
        reason = str(error).split("\n")[0]
        raise Unreadable(f"{name} is not a valid notebook: {reason}") from None
    return notebook
