"""Writes all scores as CSV and, with the same rows, as JSON: a row for each student and lab.

Called by `kvlab export`, and by nbgrader itself: `nbgrader export --exporter=kvlab.grading.export.ExportScores`.
Never changes the gradebook.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbgrader.api import Gradebook
from nbgrader.plugins import ExportPlugin

from kvlab.grading import book as books
from kvlab.grading import engine, released
from kvlab.grading.ledger import Line, lines_of, write_atomically
from kvlab.grading.many import judged_by

COLUMNS = (
    "student_id",
    "last_name",
    "first_name",
    "email",
    "lab",
    "state",
    "auto_points",
    "auto_max",
    "written_points",
    "written_max",
    "written_read",
    "late_penalty",
    "points",
    "max_points",
    "old_points",
    "reason",
    "timestamp",
    "graded_at",
)
# A spreadsheet takes such a text for a formula, also after a space or in full width.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠", "|", "%")
Cells = dict[str, Any]


class ExportScores(ExportPlugin):
    """Both files, named after `to`: grades.csv and grades.json."""

    def export(self, gradebook: Gradebook) -> None:
        """nbgrader's entry point."""
        coursedir = getattr(self.parent, "coursedir", None)
        lines = lines_of(Path(coursedir.root), coursedir.db_url) if coursedir else []
        rows = rows_of(
            gradebook,
            lines,
            labs=[str(name) for name in self.assignment],
            students=[str(name) for name in self.student],
        )
        for path in write(rows, Path(self.to or "grades.csv")):
            self.log.info("Wrote %s", path)


def rows_of(
    gradebook: Gradebook,
    lines: Sequence[Line],
    labs: Sequence[str] = (),
    students: Sequence[str] = (),
) -> list[Cells]:
    """A row for each student and lab, in order of student and lab.

    lines     what the ledger says; submissions that failed stand nowhere else
    labs      only these; all when empty
    students  only these; all but one's own practice when empty
    """
    known = {student.id: student for student in gradebook.students}
    named = {lab.name: lab for lab in gradebook.assignments if lab.notebooks}
    ledger = {(line.student, line.lab): line for line in lines}
    people = set(known) | {line.student for line in lines}
    return [
        _row(gradebook, named[lab], known.get(student), student, ledger)
        for student in sorted(people)
        if (student in students if students else student != engine.PRACTICE)
        for lab in sorted(named)
        if not labs or lab in labs
    ]


def _row(
    gradebook: Gradebook,
    lab: Any,
    person: Any | None,
    student: str,
    ledger: dict[tuple[str, str], Line],
) -> Cells:
    line = ledger.get((student, lab.name))
    submission = books.submission_in(gradebook, lab.name, student)
    row: Cells = dict.fromkeys(COLUMNS)
    row |= {
        "student_id": student,
        "lab": lab.name,
        "auto_max": float(lab.max_code_score or 0),
        "written_max": float(lab.max_written_score or 0),
        "max_points": float(lab.max_score or 0),
        "state": "nothing handed in",
        "reason": "",
    }
    for name in ("last_name", "first_name", "email"):
        row[name] = getattr(person, name, None) or ""
    if line is not None:
        row |= {"reason": line.reason, "graded_at": line.graded_at}
    if line is not None and not line.graded:
        return row | {"state": "failed", "old_points": line.old_points}
    if submission is None:
        return row
    row |= _scores(submission)
    if line is not None:
        row["old_points"] = line.old_points
        cells = released.in_gradebook(gradebook, lab.name)
        if line.lab_digest != judged_by(cells):
            row["state"] = "graded with an older version of the lab"
    return row


def _scores(submission: Any) -> Cells:
    """What the gradebook has for a submission; points by hand and penalties included."""
    auto, _ = books.points_of_tests(submission)
    total = float(submission.score or 0)
    penalty = float(submission.late_submission_penalty or 0)
    written = [
        grade
        for notebook in submission.notebooks
        for grade in notebook.grades
        if grade.cell_type == "markdown"
    ]
    unread = any(grade.needs_manual_grade for grade in written)
    time = submission.timestamp
    return {
        "state": "graded",
        "auto_points": auto,
        "written_points": float(submission.written_score or 0),
        "written_read": "no" if unread else "yes",
        "late_penalty": penalty,
        "points": max(0.0, total - penalty),
        "timestamp": "" if time is None else f"{time.isoformat()}Z",
    }


# --- the files ------------------------------------------------------------------------


def write(rows: Sequence[Cells], to: Path) -> tuple[Path, Path]:
    """Writes the CSV file `to` and the JSON file beside it; returns both."""
    beside = to.with_suffix(".json")
    if beside == to:
        to = to.with_suffix(".csv")
    write_atomically(to, as_csv(rows))
    text = json.dumps(list(rows), indent=1, ensure_ascii=False) + "\n"
    write_atomically(beside, text.encode())
    return to, beside


def as_csv(rows: Sequence[Cells]) -> bytes:
    """The rows as spreadsheets read them: UTF-8 with its mark, no text a formula."""
    page = io.StringIO()
    table = csv.writer(page, lineterminator="\r\n")
    table.writerow(COLUMNS)
    for row in rows:
        table.writerow([_harmless(row[name]) for name in COLUMNS])
    return page.getvalue().encode("utf-8-sig")


def _harmless(value: Any) -> Any:
    """A text that a spreadsheet would compute gets an apostrophe, which it hides."""
    if value is None:
        return ""
    if isinstance(value, str) and value.lstrip(" ").startswith(FORMULA):
        return f"'{value}"
    return value
