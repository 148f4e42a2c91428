"""What one submission needs to be graded anywhere, and what comes back: both are data.

Called by `many`, in processes of its own (`worker`) or on other machines. Never sees the course's
folder or its gradebook: a task brings its own copies and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import nbformat
from nbgrader.api import Gradebook
from nbgrader.apps.api import NbGraderAPI
from nbgrader.utils import parse_utc

import kvlab
from kvlab import course, runtime
from kvlab.course import ClearTodos, Lab
from kvlab.grading import engine
from kvlab.grading.outcome import LabResult
from kvlab.grading.sandbox import SWITCH

STANDS_FOR = (
    "student"  # what a student is called in the copy: any folder's name will do
)
TIMESTAMP = "timestamp.txt"  # nbgrader's own file, for late penalties


@dataclass(frozen=True)
class LabFiles:
    """What a lab needs to be graded.

    settings  nbgrader_config.py
    files     what lies in solutions/LAB, without the source: path -> content
    template  a SQLite gradebook that holds this lab and nobody's work, compressed
    sandbox   whether student code is locked in: what SANDBOX says where it runs
    duedate   when it was to be handed in (UTC), as the course's gradebook has it
    """

    name: str
    settings: bytes
    files: dict[str, bytes]
    template: bytes
    sandbox: str = "on"
    duedate: datetime.datetime | None = None


@dataclass(frozen=True)
class Kept:
    """What people have entered for a submission already: it decides about penalties.

    scores  grade_id -> manual score and extra credit
    """

    extension: datetime.timedelta | None = None
    scores: tuple[tuple[str, float | None, float | None], ...] = ()


@dataclass(frozen=True)
class Task:
    """One submission.

    files    path -> content
    notes    what was left out of it
    """

    lab: LabFiles
    student: str
    files: dict[str, bytes]
    notes: tuple[str, ...] = ()
    kept: Kept = Kept()


@dataclass(frozen=True)
class GradeRow:
    """A row of nbgrader's table of grades, as autograding leaves it."""

    grade_id: str
    auto_score: float | None
    needs_manual_grade: bool


@dataclass(frozen=True)
class Graded:
    """What became of a task.

    grades     nbgrader's scores; empty when the submission could not be graded
    comments   grade_id -> nbgrader's own comment
    penalty    points, for handing in late
    timestamp  when it was handed in (UTC), where nbgrader was told
    files      what nbgrader wrote into its autograded folder: path -> content and mode
    """

    result: LabResult
    grades: tuple[GradeRow, ...] = ()
    comments: tuple[tuple[str, str | None], ...] = ()
    penalty: float | None = None
    timestamp: datetime.datetime | None = None
    files: tuple[tuple[str, bytes, int], ...] = ()
    seconds: float = 0.0
    version: str = field(default_factory=lambda: judges())


def judges() -> str:
    """Which kvlab judges: its version, and what its checks say, which decides on points."""
    return f"{kvlab.__version__} (checks {runtime.source_sha256('checks')[:12]})"


def lab_files(root: Path, lab: Lab, template: Path, sandbox: str) -> LabFiles:
    """Reads what a lab needs.

    template  the SQLite gradebook that holds it
    sandbox   on, off or auto
    """
    folder = lab.solution.parent
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    settings = (root / "nbgrader_config.py").read_bytes()
    packed = zlib.compress(template.read_bytes())
    return LabFiles(lab.name, settings, files, packed, sandbox)


def untouched(lab: LabFiles) -> Task:
    """The lab as nobody has worked on it: can it be graded at all?"""
    name = f"{lab.name}.ipynb"
    solution = nbformat.reads(lab.files[name].decode("utf-8"), as_version=4)
    released, _ = ClearTodos().preprocess(copy.deepcopy(solution), {})
    return Task(lab, STANDS_FOR, {name: json.dumps(released).encode()})


# --- where it is done -----------------------------------------------------------------


def grade(task: Task) -> Graded:
    """nbgrader's verdict, made in a course folder that is thrown away.

    Whatever goes wrong is in the result; raises nothing but KeyboardInterrupt.
    """
    started = time.monotonic()
    os.environ[SWITCH] = task.lab.sandbox
    try:
        with _folder() as root:
            graded = _grade_in(root, task)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        problem = LabResult(task.lab.name, task.student, problem=reason, fault="course")
        graded = Graded(problem)
    return replace(graded, seconds=round(time.monotonic() - started, 2))


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """The course folder of a task, which has the same name for every task of a process."""
    root = Path(tempfile.gettempdir(), f"kvlab-task-{os.getpid()}").resolve()
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(mode=0o700)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _grade_in(root: Path, task: Task) -> Graded:
    notes = _lay_out(root, task)
    api = course.nbgrader_api(root, root, db_url=f"sqlite:///{root / 'gradebook.db'}")
    _enter_what_people_gave(api, task)
    solution = root / "solutions" / task.lab.name / f"{task.lab.name}.ipynb"
    lab = Lab(task.lab.name, solution.with_suffix(".py"), solution, solution)
    result = engine.autograde(api, lab, STANDS_FOR)
    result = replace(
        result, student=task.student, notes=(*task.notes, *notes, *result.notes)
    )
    return Graded(result) if result.fault else _with_rows(api, result)


def _lay_out(root: Path, task: Task) -> list[str]:
    """Writes the folder as nbgrader expects it; returns what had to be left out."""
    notes = []
    (root / "nbgrader_config.py").write_bytes(task.lab.settings)
    (root / "gradebook.db").write_bytes(zlib.decompress(task.lab.template))
    handed_in = root / "submitted" / STANDS_FOR / task.lab.name
    for folder, files in (
        (root / "solutions" / task.lab.name, task.lab.files),
        (handed_in, task.files),
    ):
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    timestamp = handed_in / TIMESTAMP
    if timestamp.is_file():
        try:
            parse_utc(timestamp.read_text(encoding="utf-8").strip() or None)
        except (ValueError, OverflowError):
            timestamp.unlink()
            notes.append(f"{TIMESTAMP} holds no date; when it came is unknown.")
    return notes


def _enter_what_people_gave(api: NbGraderAPI, task: Task) -> None:
    """Due date, extension and scores given by hand, for nbgrader's late penalty."""
    if task.lab.duedate is None and task.kept == Kept():
        return
    with engine.gradebook(api) as book:
        book.find_assignment(task.lab.name).duedate = task.lab.duedate
        if task.kept != Kept():
            book.update_or_create_student(STANDS_FOR)
            submission = book.update_or_create_submission(task.lab.name, STANDS_FOR)
            submission.extension = task.kept.extension
            for grade_id, manual, extra in task.kept.scores:
                grade = _grade(book, task.lab.name, grade_id)
                grade.manual_score, grade.extra_credit = manual, extra
        book.db.commit()


def _grade(book: Gradebook, lab: str, grade_id: str) -> Any:
    return book.find_grade(grade_id, lab, lab, STANDS_FOR)


def _with_rows(api: NbGraderAPI, result: LabResult) -> Graded:
    """What nbgrader left in the gradebook and in the folder of graded notebooks."""
    with engine.quietly(), engine.gradebook(api) as book:
        submission = book.find_submission(result.lab, STANDS_FOR)
        (notebook,) = submission.notebooks
        grades = tuple(
            GradeRow(grade.name, grade.auto_score, grade.needs_manual_grade)
            for grade in sorted(notebook.grades, key=lambda grade: str(grade.name))
        )
        comments = tuple(
            (str(comment.name), comment.auto_comment) for comment in notebook.comments
        )
        penalty, timestamp = notebook.late_submission_penalty, submission.timestamp
    folder = Path(api.coursedir.root, "autograded", STANDS_FOR, result.lab)
    files = tuple(
        (path.relative_to(folder).as_posix(), path.read_bytes(), path.stat().st_mode)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    )
    return Graded(result, grades, comments, penalty, timestamp, files)
