"""Takes a submission in: finds its notebook, whatever it is called, and says when it cannot be read.

Called by nbgrader (`prepare`, a hook; `ReadSubmission`, its exporter), by `engine` and by `handed_in`.
Never changes or removes a file that a student handed in, and never follows a link.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.exporters import NotebookExporter
from nbformat import NotebookNode

from kvlab.grading import released
from kvlab.grading.repair import whose_cells

HANDED_IN_AS = "handed_in_as"  # in the notebook's `kvlab` metadata
MAX_NOTEBOOK_BYTES = 50_000_000
NOT_HANDED_IN = (".", "__")  # folders that programs make: .ipynb_checkpoints, __MACOSX


class Unreadable(Exception):
    """A submission that cannot be graded; the message says why and what to do."""


def prepare(assignment: str, student: str, notebooks: list[str]) -> None:
    """nbgrader's `pre_convert_hook`: lets it find a notebook that was renamed.

    nbgrader calls it in the course's folder, and grades what `notebooks` then lists.
    """
    if not notebooks:
        return
    folder = Path(notebooks[0]).parent
    copied = settle_name(folder, assignment, lab_notebook(assignment))
    if copied is not None:
        notebooks.append(str(copied))


def lab_notebook(lab: str, name: str = "") -> Path:
    """The lab's own notebook, seen from the course's folder, where nbgrader works.

    A bundle for students has no solutions/, but released/ with the tests they may see.
    """
    paths = [
        Path(folder, lab, f"{name or lab}.ipynb")
        for folder in ("solutions", "released")
    ]
    return next((path for path in paths if path.is_file()), paths[0])


def settle_name(folder: Path, lab: str, solution: Path) -> Path | None:
    """Copies a renamed notebook to LAB.ipynb, when there is none; returns the copy."""
    wanted = folder / f"{lab}.ipynb"
    if os.path.lexists(wanted) or not solution.is_file():
        return None
    cells = released.in_solution_notebook(nbformat.read(solution, as_version=4))
    best: tuple[int, float, Path] | None = None
    for path in notebooks_in(folder):
        try:
            found = len(whose_cells(read(path), cells))
        except Unreadable:
            continue
        if 2 * found >= len(cells):
            best = max(best or (0, 0.0, path), (found, path.stat().st_mtime, path))
    if best is None:
        return None
    notebook = read(best[2])
    if not isinstance(notebook.metadata.get("kvlab"), dict):
        notebook.metadata["kvlab"] = NotebookNode()
    notebook.metadata.kvlab[HANDED_IN_AS] = best[2].relative_to(folder).as_posix()
    wanted.write_text(json.dumps(notebook), encoding="utf-8")
    return wanted


def name_before(notebook: NotebookNode) -> str:
    """What the notebook was called when it was handed in; "" when it kept its name."""
    own = notebook.metadata.get("kvlab")
    name = own.get(HANDED_IN_AS) if isinstance(own, dict) else None
    return name if isinstance(name, str) else ""


def notebooks_in(folder: Path) -> list[Path]:
    """Files that are notebooks by name, also LAB.ipynb.txt and one folder further down."""
    found = []
    for path in [*folder.glob("*"), *folder.glob("*/*")]:
        between = path.relative_to(folder).parts[:-1]
        hidden = any(part.startswith(NOT_HANDED_IN) for part in between)
        if not hidden and ".ipynb" in path.name.lower() and _is_ordinary(path):
            found.append(path)
    return sorted(found)


def left_aside(folder: Path, lab: str) -> list[str]:
    """Other notebooks of a submission, which nobody grades."""
    names = [path.relative_to(folder).as_posix() for path in notebooks_in(folder)]
    return [name for name in names if name != f"{lab}.ipynb"]


def _is_ordinary(path: Path) -> bool:
    """Whether it is a file itself: no link, no folder, nothing that blocks a reader."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


# --- reading --------------------------------------------------------------------------


class ReadSubmission(NotebookExporter):
    """nbgrader's exporter, which also reads what nbformat alone would stumble over."""

    def from_file(
        self, file_stream: Any, resources: dict[str, Any] | None = None, **kw: Any
    ) -> tuple[NotebookNode, dict[str, Any]]:
        """The notebook in an open file, converted."""
        name = Path(getattr(file_stream, "name", "the notebook")).name
        notebook = _notebook_in(name, file_stream.read())
        result: tuple[NotebookNode, dict[str, Any]] = self.from_notebook_node(
            notebook, resources=resources, **kw
        )
        return result


def read(path: Path) -> NotebookNode:
    """The notebook in a file, in format 4, without outputs: those are made anew.

    raises Unreadable
    """
    name = path.name
    if path.is_symlink():
        raise Unreadable(f"{name} is a link to another place; links are not followed.")
    if path.is_dir():
        raise Unreadable(f"{name} is a folder, not a notebook.")
    try:
        if not _is_ordinary(path):
            raise Unreadable(f"{name} is not an ordinary file.")
        size = path.stat().st_size
        if size > MAX_NOTEBOOK_BYTES:
            raise Unreadable(
                f"{name} has {size / 1e6:.0f} MB, and {MAX_NOTEBOOK_BYTES / 1e6:.0f} MB "
                "is the limit. Clear its outputs and save it again."
            )
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"{name} is not UTF-8 text ({error.reason}).") from None
    except OSError as error:
        raise Unreadable(f"{name} cannot be read ({error.strerror}).") from None
    return _notebook_in(name, text)


def _notebook_in(name: str, text: str) -> NotebookNode:
    text = text.removeprefix("\ufeff")  # Windows editors put it before UTF-8
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
    except ValueError:  # a number of thousands of digits
        raise Unreadable(f"{name} holds a number that is too long.") from None
    return _as_notebook(name, content)


def _as_notebook(name: str, content: Any) -> NotebookNode:
    """The parsed JSON as a notebook of format 4."""
    version = content.get("nbformat") if isinstance(content, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise Unreadable(f"{name} is JSON, but not a notebook.")
    if not 1 <= version <= 4:
        raise Unreadable(
            f"{name} is in notebook format {version}; "
            "formats up to 4 are known here. Save it from JupyterLab."
        )
    try:
        if version == 4:
            _settle_types(content)
        notebook = nbformat.reads(json.dumps(content), as_version=4)
        for cell in notebook.cells:
            for key, kind in (("cell_type", str), ("metadata", dict), ("source", str)):
                if not isinstance(cell[key], kind):
                    raise TypeError(f"the {key} of a cell is no {kind.__name__}")
    except Exception as error:  # nbformat raises whatever the missing part leads to
        reason = str(error).split("\n")[0] or type(error).__name__
        raise Unreadable(f"{name} is not a valid notebook: {reason}") from None
    return notebook


def _settle_types(content: dict[str, Any]) -> None:
    """Replaces what has the wrong type by nothing, where nothing is lost by it."""
    if not isinstance(content.get("cells"), list):
        raise TypeError("it has no list of cells")
    if type(content.get("nbformat_minor")) is not int:
        content["nbformat_minor"] = 5
    if not isinstance(content.get("metadata"), dict):
        content["metadata"] = {}
    for cell in content["cells"]:
        if not isinstance(cell, dict):
            raise TypeError("one of its cells is no cell")
        if not isinstance(cell.get("metadata"), dict):
            cell["metadata"] = {}
        if cell.get("cell_type") == "code":
            cell |= {"outputs": [], "execution_count": None}
        files = cell.get("attachments", {})
        if not isinstance(files, dict) or not all(
            isinstance(file, dict) for file in files.values()
        ):
            del cell["attachments"]
