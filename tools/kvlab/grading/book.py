"""Writes into the course's gradebook what tasks brought back, and what a lab has become.

Called by `many`, in the coordinating process only. Never computes a point, and never takes away what
people entered: scores by hand, extra credit, comments, extensions.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbgrader.api import (
    Comment,
    Grade,
    Gradebook,
    GradeCell,
    MissingEntry,
    Notebook,
    SolutionCell,
    SourceCell,
    Student,
    SubmittedAssignment,
    SubmittedNotebook,
)

from kvlab.grading.ledger import write_atomically
from kvlab.grading.released import ReleasedCell
from kvlab.grading.task import Graded, Kept

# --- one submission -------------------------------------------------------------------


def submission_in(book: Gradebook, lab: str, student: str) -> Any | None:
    """nbgrader's row for a submission, or None."""
    with suppress(MissingEntry):
        return book.find_submission(lab, student)
    return None


def kept_by_people(book: Gradebook, lab: str, student: str) -> Kept:
    """What was entered by hand for a submission that was graded before."""
    submission = submission_in(book, lab, student)
    if submission is None:
        return Kept()
    scores = [
        (str(grade.name), grade.manual_score, grade.extra_credit)
        for notebook in submission.notebooks
        for grade in notebook.grades
        if grade.manual_score is not None or grade.extra_credit is not None
    ]
    return Kept(submission.extension, tuple(sorted(scores, key=str)))


def points_of_tests(submission: Any) -> tuple[float, float]:
    """Points of the test cells, and the most they can give."""
    return float(submission.code_score or 0), float(submission.max_code_score or 0)


def enter(book: Gradebook, student: str, graded: Graded) -> None:
    """Writes all rows of a submission, or none of them."""
    session = book.db
    try:
        if session.get(Student, student) is None:
            session.add(Student(id=student))
        lab = book.find_assignment(graded.result.lab)
        submission = submission_in(book, lab.name, student)
        if submission is None:
            submission = _empty_submission(lab, student)
            session.add(submission)
            session.flush()
        if graded.timestamp is not None:
            submission.timestamp = graded.timestamp
        (notebook,) = submission.notebooks
        rows = {row.grade_id: row for row in graded.grades}
        comments = dict(graded.comments)
        for grade in notebook.grades:
            row = rows[grade.name]
            by_hand = grade.manual_score is not None
            grade.auto_score = row.auto_score
            grade.needs_manual_grade = row.needs_manual_grade or by_hand
        for comment in notebook.comments:
            comment.auto_comment = comments.get(comment.name)
        notebook.late_submission_penalty = graded.penalty
        session.commit()
    except BaseException:
        session.rollback()
        raise


def _empty_submission(lab: Any, student: str) -> SubmittedAssignment:
    """A submission with rows for all cells, and no score in any."""
    notebooks = []
    for notebook in lab.notebooks:
        grades = [Grade(cell_id=cell.id) for cell in notebook.grade_cells]
        comments = [Comment(cell_id=cell.id) for cell in notebook.solution_cells]
        own = SubmittedNotebook(
            notebook_id=notebook.id, grades=grades, comments=comments
        )
        notebooks.append(own)
    return SubmittedAssignment(
        assignment_id=lab.id, student_id=student, notebooks=notebooks
    )


def place(folder: Path, graded: Graded) -> None:
    """Puts the graded notebook where nbgrader keeps it, as a whole or not at all."""
    fresh, old = (folder.with_name(f".{folder.name}.{word}") for word in ("new", "old"))
    for leftover in (fresh, old):
        _remove(leftover)
    for name, content, mode in graded.files:
        path = fresh / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode & 0o777)
    fresh.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink() or folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- a lab that has changed -----------------------------------------------------------


def same_cells(kept: Sequence[ReleasedCell], wanted: Sequence[ReleasedCell]) -> bool:
    """Whether two versions of a lab have the same cells, worth the same."""

    def cells(version: Sequence[ReleasedCell]) -> set[tuple[object, ...]]:
        return {(c.grade_id, c.cell_type, c.points, c.solution) for c in version}

    return cells(kept) == cells(wanted)


def write_down(book: Gradebook, lab: str, path: Path) -> None:
    """Keeps every row of a lab's submissions in a JSON file, before the lab changes."""
    rows = [
        {
            "student": submission.student_id,
            "timestamp": str(submission.timestamp or ""),
            "late_submission_penalty": notebook.late_submission_penalty,
            "grades": [grade.to_dict() for grade in notebook.grades],
            "comments": [comment.to_dict() for comment in notebook.comments],
        }
        for submission in book.assignment_submissions(lab)
        for notebook in submission.notebooks
    ]
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(rows, indent=1, ensure_ascii=False, default=str)
    write_atomically(path, text.encode())


def revise(book: Gradebook, lab: str, wanted: Sequence[ReleasedCell]) -> None:
    """Makes the gradebook hold another version of a lab, and keeps all submissions.

    The rows of a cell that is no longer in the lab go; a new cell gets rows without a
    score. All in one transaction.
    """
    session = book.db
    try:
        notebook = book.find_notebook(lab, lab)
        _revise_sources(session, notebook, wanted)
        graded = {c.grade_id: c for c in wanted if c.graded}
        for cell in _without_others(session, notebook.grade_cells, set(graded)):
            new = graded.pop(cell.name)
            cell.max_score, cell.cell_type = new.points, new.cell_type
        for new in graded.values():
            cell = GradeCell(
                name=new.grade_id,
                max_score=new.points,
                cell_type=new.cell_type,
                notebook=notebook,
            )
            session.add(cell)
            session.flush()
            for own in notebook.submissions:
                session.add(Grade(cell_id=cell.id, notebook=own))
        answers = {c.grade_id for c in wanted if c.solution}
        for cell in _without_others(session, notebook.solution_cells, set(answers)):
            answers.discard(cell.name)
        for name in sorted(answers):
            cell = SolutionCell(name=name, notebook=notebook)
            session.add(cell)
            session.flush()
            for own in notebook.submissions:
                session.add(Comment(cell_id=cell.id, notebook=own))
        session.commit()
    except BaseException:
        session.rollback()
        raise


def _revise_sources(
    session: Any, notebook: Notebook, wanted: Sequence[ReleasedCell]
) -> None:
    sources = {cell.grade_id: cell for cell in wanted}
    for source in list(notebook.source_cells):
        if source.name not in sources:
            session.delete(source)
    present = {source.name: source for source in notebook.source_cells}
    for name, new in sources.items():
        source = present.get(name)
        if source is None:
            source = SourceCell(name=name, notebook=notebook)
            session.add(source)
        source.cell_type, source.locked = new.cell_type, new.locked
        source.source, source.checksum = new.source, new.checksum


def _without_others(session: Any, cells: Sequence[Any], names: set[str]) -> list[Any]:
    """The cells called so; the others are deleted, with everybody's rows for them."""
    for cell in cells:
        if cell.name not in names:
            for row in [*cell.grades, *cell.comments]:
                session.delete(row)
            session.flush()
            session.delete(cell)
    session.flush()
    return [cell for cell in cells if cell.name in names]
