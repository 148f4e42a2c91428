"""Finds the labs and builds their notebooks from one source a lab.

Called by `kvlab build`, by `grading` (to register a lab in the gradebook), by nbgrader_config.py and by the tests.
Never runs a notebook, and never overwrites a student notebook that has been worked on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jupytext
import nbformat
from nbformat import NotebookNode
from nbgrader.apps.api import NbGraderAPI
from nbgrader.coursedir import CourseDirectory
from nbgrader.preprocessors import ClearSolutions, NbGraderPreprocessor
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

POINTS_PER_LAB = 20
KERNELSPEC = {
    "display_name": "Python 3 (ipykernel)",
    "language": "python",
    "name": "python3",
}
FIRST_CELL = Path(__file__).with_name("first_cell.py")
NBGRADER_DEFAULTS: dict[str, Any] = {
    "grade": False,
    "locked": False,
    "schema_version": 3,
    "solution": False,
    "task": False,
}


class CourseError(Exception):
    """Something in the course's own files is wrong; the message says what and where."""


@dataclass(frozen=True)
class Lab:
    """Where the three files of one lab stand."""

    name: str
    source: Path
    solution: Path
    release: Path


def source_folder(root: Path) -> Path:
    """solutions/; in a bundle for students, which has none, released/."""
    solutions = root / "solutions"
    return solutions if solutions.is_dir() else root / "released"


def is_bundle(root: Path) -> bool:
    """Whether the course came without its solutions and hidden tests."""
    return not (root / "solutions").is_dir() and (root / "released").is_dir()


def find_labs(root: Path) -> list[Lab]:
    """Every folder solutions/LAB that holds LAB.py, in order of name; in a bundle released/LAB."""
    solutions = source_folder(root)
    ending = ".ipynb" if is_bundle(root) else ".py"
    folders = sorted(solutions.iterdir()) if solutions.is_dir() else []
    labs = [
        Lab(
            name=folder.name,
            source=folder / f"{folder.name}.py",
            solution=folder / f"{folder.name}.ipynb",
            release=root / "notebooks" / folder.name / f"{folder.name}.ipynb",
        )
        for folder in folders
        if (folder / f"{folder.name}{ending}").is_file()
    ]
    if not labs:
        raise CourseError(
            f"no lab found in {solutions}: expected solutions/LAB/LAB.py. "
            "Run this in the course's folder."
        )
    return labs


def choose_labs(root: Path, name: str | None) -> list[Lab]:
    """The lab called `name`, or all labs when no name is given."""
    labs = find_labs(root)
    if not name:
        return labs
    chosen = [lab for lab in labs if lab.name == name]
    if not chosen:
        known = ", ".join(lab.name for lab in labs)
        raise CourseError(f"there is no lab {name!r}. The labs are: {known}")
    return chosen


# --- from source to solution notebook -------------------------------------------------


def in_language(cells: list[NotebookNode], language: str) -> list[NotebookNode]:
    """The cells without `lang` in their header and those written in `language`."""
    return [c for c in cells if c.metadata.get("lang", language) == language]


def read_source(source: Path, repo_url: str = "", language: str = "en") -> NotebookNode:
    """The solution notebook of a lab, from its py:percent source.

    source   solutions/LAB/LAB.py
    repo_url address that the first cell fetches the course from; "" leaves it out
    language which of the `lang="..."` markdown cells are kept
    raises CourseError when two cells would get the same id, or when the lab is not
           written in that language
    """
    text = jupytext.read(source, fmt="py:percent")
    written_in = {c.metadata["lang"] for c in text.cells if "lang" in c.metadata}
    if written_in and language not in written_in:
        known = ", ".join(sorted(written_in))
        raise CourseError(
            f"{source.name} has no prose in {language!r}, only in: {known}"
        )
    notebook = nbformat.v4.new_notebook(
        metadata={"kernelspec": KERNELSPEC, "language_info": {"name": "python"}}
    )
    taken: set[str] = set()
    for cell in in_language(text.cells, language):
        cell.metadata.pop("lang", None)
        marks = cell.metadata.get("nbgrader")
        if marks is not None:
            cell.metadata["nbgrader"] = NBGRADER_DEFAULTS | marks
            if marks["grade_id"] == "setup":
                cell.source = first_cell(repo_url)
            if marks["grade_id"] in taken:
                raise CourseError(
                    f"{source.name}: grade_id {marks['grade_id']!r} is used twice"
                )
        cell["id"] = _cell_id(cell, taken)
        taken.add(cell["id"])
        notebook.cells.append(cell)
    nbformat.validate(notebook)
    return notebook


def repo_url_of(root: Path) -> str:
    """The course's address, `repo-url` under [tool.kvlab] in pyproject.toml; or ""."""
    project = root / "pyproject.toml"
    if not project.is_file():
        return ""
    settings = tomllib.loads(project.read_text(encoding="utf-8"))
    return str(settings.get("tool", {}).get("kvlab", {}).get("repo-url", ""))


def first_cell(repo_url: str) -> str:
    """The source of every lab's first code cell, with the address to fetch from."""
    text = FIRST_CELL.read_text(encoding="utf-8").strip()
    place = 'REPO_URL = ""'
    if place not in text:
        raise CourseError(f"{FIRST_CELL.name} has no line {place}")
    return text.replace(place, f"REPO_URL = {json.dumps(repo_url)}")


def notebook_text(notebook: NotebookNode) -> str:
    """The notebook as the bytes that are committed: sorted keys, UTF-8, LF."""
    text = json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False)
    return text + "\n"


def _cell_id(cell: NotebookNode, taken: set[str]) -> str:
    """grade_id, or a slug of the heading or first line; numbered when taken."""
    if "nbgrader" in cell.metadata:
        return str(cell.metadata["nbgrader"]["grade_id"])
    heading = re.search(r"^#+\s*(.+)$", cell.source, flags=re.MULTILINE)
    line = heading.group(1) if heading else cell.source.strip().split("\n")[0]
    slug = re.sub(r"[^a-z0-9]+", "-", line.lower()).strip("-")[:48] or "cell"
    number, name = 1, slug
    while name in taken:
        number += 1
        name = f"{slug}-{number}"
    return name


# --- from solution notebook to student notebook, inside nbgrader ----------------------


class ClearTodos(ClearSolutions):
    """Replaces an answer by a NotImplementedError that names its own TODO.

    A solution cell carries `todo="TODO 1: quantize Keys per channel"` in its metadata.
    """

    def preprocess_cell(
        self, cell: NotebookNode, resources: dict[str, Any], cell_index: int
    ) -> tuple[NotebookNode, dict[str, Any]]:
        message = cell.metadata.get("todo", "TODO")
        stub = f"raise NotImplementedError({json.dumps(message, ensure_ascii=False)})"
        self.code_stub = {"python": stub}
        return super().preprocess_cell(cell, resources, cell_index)


class StampRelease(NbGraderPreprocessor):
    """Writes into a student notebook what its cells were when it left."""

    def preprocess(
        self, nb: NotebookNode, resources: dict[str, Any]
    ) -> tuple[NotebookNode, dict[str, Any]]:
        nb.metadata["kvlab"] = {"released_cells_sha256": _cells_digest(nb)}
        return nb, resources


def _cells_digest(notebook: NotebookNode) -> str:
    """What a student could lose: type, text and outputs of every cell."""
    cells = [
        [cell.cell_type, cell.source, cell.get("outputs", [])]
        for cell in notebook.cells
    ]
    text = json.dumps(cells, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def is_untouched(release: Path) -> bool:
    """Whether a student notebook is still exactly what a build once wrote."""
    try:
        notebook = nbformat.read(release, as_version=4)
        stamp = notebook.metadata["kvlab"]["released_cells_sha256"]
    except Exception:  # unreadable in whatever way: it is not ours to overwrite
        return False
    return bool(stamp == _cells_digest(notebook))


def nbgrader_config(root: Path) -> Config:
    """The settings of nbgrader_config.py in `root`."""
    return PyFileConfigLoader("nbgrader_config.py", path=str(root)).load_config()


def nbgrader_api(
    root: Path, course: Path, gradebook: bool = True, **directories: str
) -> NbGraderAPI:
    """nbgrader at work in the folder `course` with the settings of `root`.

    gradebook    False generates without a database, as `nbgrader ... --no-db` does
    directories  overrides such as release_directory="/tmp/x" or db_url="sqlite:///..."
    """
    # nbgrader runs `alembic`, which lies beside this interpreter, by its bare name.
    scripts = str(Path(sys.executable).parent)
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    config = nbgrader_config(root)
    config.CourseDirectory.root = str(course)
    for name, value in directories.items():
        config.CourseDirectory[name] = value
    if not gradebook:
        config.GenerateAssignment.no_database = True
        config.SaveCells.enabled = False
    config.NbGraderAPI.log_level = "ERROR"
    return NbGraderAPI(CourseDirectory(config=config), config=config)


def generate(api: NbGraderAPI, lab: Lab) -> None:
    """Runs nbgrader's generate_assignment for one lab.

    raises CourseError with nbgrader's own words when it refuses
    """
    result = api.generate_assignment(lab.name, force=True)
    if not result["success"]:
        reason = (result.get("log") or result.get("error") or "").strip()
        raise CourseError(f"nbgrader could not generate {lab.name}:\n{reason}")


@contextmanager
def fresh_build(
    root: Path, labs: list[Lab], repo_url: str = "", language: str = "en"
) -> Iterator[Path]:
    """A temporary folder with solutions/ and notebooks/ built afresh.

    repo_url  another address than the one in pyproject.toml
    """
    repo_url = repo_url or repo_url_of(root)
    with tempfile.TemporaryDirectory(prefix="kvlab-build-") as name:
        course = Path(name)
        for lab in labs:
            folder = course / "solutions" / lab.name
            shutil.copytree(
                lab.source.parent,
                folder,
                ignore=shutil.ignore_patterns("*.ipynb", "*.py"),
            )
            notebook = read_source(lab.source, repo_url, language)
            (folder / lab.solution.name).write_bytes(notebook_text(notebook).encode())
        api = nbgrader_api(root, course, gradebook=False)
        for lab in labs:
            generate(api, lab)
        yield course


# --- what `make build` does ----------------------------------------------------------

Outcome = Literal["unchanged", "written", "kept"]


@dataclass(frozen=True)
class Built:
    """What a build did with one file: kept means a student's work was left alone."""

    path: Path
    outcome: Outcome


def build(
    root: Path,
    lab_name: str | None = None,
    repo_url: str = "",
    language: str = "en",
) -> list[Built]:
    """Writes solutions/LAB/LAB.ipynb and what students get under notebooks/LAB/."""
    labs = choose_labs(root, lab_name)
    report = []
    with fresh_build(root, labs, repo_url, language) as course:
        for lab in labs:
            fresh = course / "solutions" / lab.name / lab.solution.name
            report.append(_place(fresh, lab.solution))
            for fresh in sorted((course / "notebooks" / lab.name).rglob("*")):
                if fresh.is_file():
                    target = root / fresh.relative_to(course)
                    works = target == lab.release and not is_untouched(target)
                    report.append(_place(fresh, target, keep=works))
    return report


def _place(fresh: Path, target: Path, keep: bool = False) -> Built:
    """Puts a freshly built file where it belongs; an existing one to keep stays."""
    if target.is_file():
        if target.read_bytes() == fresh.read_bytes():
            return Built(target, "unchanged")
        if keep:
            return Built(target, "kept")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(fresh, target)
    return Built(target, "written")


# --- what a lab must hold -------------------------------------------------------------

TEST_OF_TODO = re.compile(r"^test_todo_(\d+)")


def todos(notebook: NotebookNode) -> dict[int, str]:
    """Number and title of every TODO, from the solution cells' `todo` metadata."""
    found = {}
    for cell in notebook.cells:
        title = cell.metadata.get("todo")
        if title:
            match = re.match(r"TODO (\d+): (.+)$", title)
            if not match:
                raise CourseError(f'{title!r} should read "TODO n: what to do"')
            found[int(match.group(1))] = match.group(2)
    return found


def test_cells(notebook: NotebookNode) -> dict[str, tuple[int, float]]:
    """grade_id of every autograded test cell, with its TODO and its points."""
    found = {}
    for cell in notebook.cells:
        marks = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "code" and marks.get("grade"):
            match = TEST_OF_TODO.match(marks["grade_id"])
            if not match:
                raise CourseError(
                    f"test cell {marks['grade_id']!r} should be called test_todo_N..."
                )
            found[marks["grade_id"]] = (int(match.group(1)), float(marks["points"]))
    return found


def is_graded(notebook: NotebookNode) -> bool:
    """Whether a lab asks for anything: lab 06 has neither a TODO nor a test."""
    return bool(todos(notebook) or test_cells(notebook))


def faults(notebook: NotebookNode) -> list[str]:
    """What keeps a solution notebook from being a lab; empty when nothing does."""
    found: list[str] = []
    if not is_graded(notebook):
        return found
    titles, tests = todos(notebook), test_cells(notebook)
    total = sum(points for _, points in tests.values())
    if total != POINTS_PER_LAB:
        found.append(f"the tests are worth {total:g} points, not {POINTS_PER_LAB}")
    if titles and sorted(titles) != list(range(1, len(titles) + 1)):
        found.append(f"the TODOs are numbered {sorted(titles)}")
    for number in titles:
        if number not in {n for n, _ in tests.values()}:
            found.append(f"TODO {number} has no test cell")
    for grade_id, (number, _) in tests.items():
        if number not in titles:
            found.append(f"{grade_id} tests a TODO that is not there")
    for cell in notebook.cells:
        marks = cell.metadata.get("nbgrader", {})
        if marks.get("grade") and cell.cell_type == "code":
            if "BEGIN HIDDEN TESTS" not in cell.source:
                found.append(f"{marks['grade_id']} has no hidden tests")
            number = tests[marks["grade_id"]][0]
            if f"with checks.todo({number}):" not in cell.source:
                found.append(f"{marks['grade_id']} lacks checks.todo({number})")
    return found
