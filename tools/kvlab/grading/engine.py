"""Grades submissions with nbgrader: registers a lab, autogrades, reads scores, writes feedback.

Called by `kvlab grade` (through `grade`) and by the tests. Never executes a cell itself, never changes
a file under notebooks/, and never deletes a submission that is not the student's own practice.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import nbformat
import nbgrader.api
from alembic.script import ScriptDirectory
from nbformat import NotebookNode
from nbformat.warnings import DuplicateCellId, MissingIDFieldWarning
from nbgrader.api import Gradebook, MissingEntry
from nbgrader.apps.api import NbGraderAPI
from nbgrader.dbutil import ALEMBIC_DIR
from sqlalchemy.exc import SAWarning, SQLAlchemyError

from kvlab import course
from kvlab.course import CourseError, Lab
from kvlab.grading import intake, released
from kvlab.grading.outcome import LabResult, judge

PRACTICE = "me"  # the student who grades their own notebooks
Progress = Callable[[str, str], None]  # lab, what is being done with it


@cache
def newest_schema() -> str:
    """The version of the gradebook's tables that this nbgrader has."""
    return str(ScriptDirectory(ALEMBIC_DIR).get_current_head())


# nbgrader asks a program of its own, which takes seconds at every new gradebook.
nbgrader.api.get_alembic_version = newest_schema


def grade(
    root: Path,
    labs: Sequence[Lab],
    student: str = PRACTICE,
    progress: Progress = lambda lab, step: None,
) -> list[LabResult]:
    """Grades notebooks/LAB as it stands, for every lab that has tests.

    student   whose submission it becomes; another than PRACTICE is never overwritten
    progress  is told what happens, while it happens
    """
    api = course.nbgrader_api(root, root)
    results = []
    for lab in labs:
        try:
            if not course.test_cells(solution_of(lab)):
                continue
            progress(lab.name, "comparing it with the gradebook")
            register(root, lab, api, practice=PRACTICE)
            progress(lab.name, "copying the notebook")
            hand_in(root, lab, student)
            progress(lab.name, "running its cells")
            result = autograde(api, lab, student)
            if not result.fault:
                progress(lab.name, "writing the feedback")
                result = replace(result, feedback=write_feedback(api, lab, student))
        except CourseError as error:
            result = LabResult(lab.name, student, problem=str(error), fault="course")
        except (intake.Unreadable, OSError) as error:
            result = LabResult(lab.name, student, problem=str(error), fault="notebook")
        results.append(result)
    return results


def full_marks(results: Sequence[LabResult]) -> bool:
    """Whether every lab got all the points that tests can give."""
    return all(not r.fault and r.points >= r.max_points for r in results)


def solution_of(lab: Lab) -> NotebookNode:
    """The lab's solution notebook.

    raises CourseError when it was never built
    """
    if not lab.solution.is_file():
        raise CourseError(f"{lab.solution} is missing: run `make build` first")
    return nbformat.read(lab.solution, as_version=4)


# --- the lab in the gradebook ---------------------------------------------------------


def register(
    root: Path, lab: Lab, api: NbGraderAPI, practice: str | None = None
) -> None:
    """Sees to it that the gradebook holds the lab as its solution notebook has it now.

    practice  the student whose submission may be removed for that; nobody's when None
    raises CourseError when the lab changed and somebody else's work is in the gradebook
    """
    solution = solution_of(lab)
    with gradebook(api) as book:
        if _holds(book, lab, solution):
            return
        changed = not _judges_alike(book, lab, solution)
        students = _students_with_work(book, lab) if changed else set()
        others = students - {practice}
        if others:
            raise CourseError(_changed_under(lab, others))
        if students:
            book.remove_submission(lab.name, practice)
    with tempfile.TemporaryDirectory(prefix="kvlab-release-") as release, quietly():
        directories = {
            "release_directory": release,
            "db_url": api.coursedir.db_url,
        }
        course.generate(
            course.nbgrader_api(root, Path(api.coursedir.root), **directories), lab
        )


@contextmanager
def gradebook(api: NbGraderAPI) -> Iterator[Gradebook]:
    """The gradebook that nbgrader uses there.

    raises CourseError when the database cannot be used
    """
    url = api.coursedir.db_url
    try:
        with quietly(), Gradebook(url, api.coursedir.course_id) as book:
            yield book
    except SQLAlchemyError as error:
        reason = str(error).split("\n")[0]
        raise CourseError(f"the gradebook {url} cannot be used: {reason}") from None


@contextmanager
def quietly() -> Iterator[None]:
    """Keeps to itself what libraries warn about on the way: no student can act on it."""
    with warnings.catch_warnings():
        for category in (SAWarning, DuplicateCellId, MissingIDFieldWarning):
            warnings.simplefilter("ignore", category)
        yield


def _holds(book: Gradebook, lab: Lab, solution: NotebookNode) -> bool:
    try:
        kept = released.in_gradebook(book, lab.name)
    except MissingEntry:
        return False
    wanted = [replace(c, above="") for c in released.in_solution_notebook(solution)]
    return {c.grade_id: c for c in kept} == {c.grade_id: c for c in wanted}


def _judges_alike(book: Gradebook, lab: Lab, solution: NotebookNode) -> bool:
    """Whether only texts differ that give no points: earlier scores stay right."""
    try:
        kept = released.in_gradebook(book, lab.name)
    except MissingEntry:
        return False

    def judged(cell: released.ReleasedCell) -> tuple[str, float | None, str]:
        is_test = cell.graded and not cell.solution
        return cell.grade_id, cell.points, cell.source if is_test else ""

    wanted = released.in_solution_notebook(solution)
    return sorted(map(judged, kept), key=str) == sorted(map(judged, wanted), key=str)


def _students_with_work(book: Gradebook, lab: Lab) -> set[str]:
    try:
        book.find_assignment(lab.name)
    except MissingEntry:
        return set()
    return {s.student.id for s in book.assignment_submissions(lab.name)}


def _changed_under(lab: Lab, others: set[str]) -> str:
    names = ", ".join(sorted(others)[:3]) + (", ..." if len(others) > 3 else "")
    return (
        f"{lab.name} has changed since it came into the gradebook, which holds "
        f"submissions for it ({names}). Nothing was changed. To go on, "
        f"run `make autograde LAB={lab.name} FORCE=1`: it keeps the old scores "
        "beside the new ones."
    )


# --- one submission -------------------------------------------------------------------


def hand_in(root: Path, lab: Lab, student: str) -> None:
    """Copies notebooks/LAB to submitted/STUDENT/LAB.

    raises CourseError when somebody else's submission stands there
    raises Unreadable when there is no notebook to copy
    """
    source = lab.release.parent
    target = root / "submitted" / student / lab.name
    if not any(source.glob("*.ipynb")):
        place = lab.release.relative_to(root)
        raise intake.Unreadable(f"{place} is missing. `make build` writes a new one.")
    if target.exists():
        if student != PRACTICE:
            raise CourseError(
                f"{target.relative_to(root)} is there already and was left alone. Grade "
                f"it with `nbgrader autograde {lab.name} --student {student}`."
            )
        shutil.rmtree(target)
    unwanted = shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__", "*.pyc")
    shutil.copytree(source, target, ignore=unwanted, symlinks=True)
    target.chmod(0o755)  # also when notebooks/LAB is read-only


def autograde(api: NbGraderAPI, lab: Lab, student: str) -> LabResult:
    """nbgrader's verdict on submitted/STUDENT/LAB, which must be registered.

    A submission that cannot be graded gets a result with the reason, and raises nothing.
    """
    root = Path(api.coursedir.root)
    name = f"{lab.name}.ipynb"
    folder = root / "submitted" / student / lab.name
    try:
        with quietly():
            intake.settle_name(folder, lab.name, lab.solution)
            if not (folder / name).is_file():
                aside = ", ".join(intake.left_aside(folder, lab.name)) or "no notebook"
                raise intake.Unreadable(f"{name} is missing: {aside} was handed in.")
            intake.read(folder / name)
    except intake.Unreadable as error:
        _forget(api, lab, student)
        return LabResult(lab.name, student, problem=str(error), fault="notebook")
    with quietly():
        result = api.autograde(lab.name, student, force=True)
    if result.get("error", "").rstrip().endswith("KeyboardInterrupt"):
        raise KeyboardInterrupt  # nbgrader takes it for a failed submission
    if not result["success"]:
        _forget(api, lab, student)
        reason = f"nbgrader could not grade it: {_last_reason(result)}"
        return LabResult(lab.name, student, problem=reason, fault="course")
    graded = nbformat.read(
        root / "autograded" / student / lab.name / name, as_version=4
    )
    todos, written = judge(graded, solution_of(lab), _scores(api, lab, student))
    own = graded.metadata.get("kvlab", {})
    notes = list(own.get("repairs", []))
    renamed = intake.name_before(graded)
    for other in intake.left_aside(folder, lab.name):
        if other != renamed:
            notes.append(f"{other} is there too; it was not graded.")
    return LabResult(
        lab.name,
        student,
        todos,
        written,
        tuple(notes),
        protection=own.get("protection", ""),
    )


def write_feedback(api: NbGraderAPI, lab: Lab, student: str) -> Path | None:
    """The page feedback/STUDENT/LAB/LAB.html, or None when nbgrader could not write it."""
    with quietly():
        result = api.generate_feedback(lab.name, student, force=True)
    page = Path(api.coursedir.root, "feedback", student, lab.name, f"{lab.name}.html")
    return page if result["success"] and page.is_file() else None


def _scores(api: NbGraderAPI, lab: Lab, student: str) -> dict[str, float]:
    """The gradebook's score for each graded cell."""
    with gradebook(api) as book:
        notebook = book.find_submission_notebook(lab.name, lab.name, student)
        return {grade.name: float(grade.score) for grade in notebook.grades}


def _forget(api: NbGraderAPI, lab: Lab, student: str) -> None:
    """Takes an older score of one's own practice away: it is not this notebook's."""
    if student == PRACTICE:
        with gradebook(api) as book, suppress(MissingEntry):
            book.remove_submission(lab.name, student)


def _last_reason(result: dict[str, str]) -> str:
    """The exception at the end of nbgrader's log, in one line."""
    text = result.get("log") or result.get("error") or ""
    reasons = re.findall(
        r"^\s*((?:\w+\.)*\w+(?:Error|Exception)\b.*)$", text, re.MULTILINE
    )
    lines = reasons or text.strip().split("\n")
    return " ".join(lines[-1].split())[:300]
