"""Remembers what became of every submission, so that a run can be killed and go on.

Called by `many`, `export` and `feedback`. Never holds a score that counts: those are in nbgrader's gradebook.
A line is written after the gradebook has the scores, so a missing line costs a repetition and nothing else.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kvlab.course import CourseError

FOLDER = ".grading"
TABLE = """
CREATE TABLE IF NOT EXISTS lines (
    gradebook TEXT, student TEXT, lab TEXT, due INTEGER, line TEXT,
    PRIMARY KEY (gradebook, student, lab)
)
"""


@dataclass(frozen=True)
class Line:
    """What became of one submission.

    digest      of its files; another digest is another submission
    lab_digest  of what the lab judges by; another one is another version of the lab
    points      of the tests; None when it could not be graded
    old_points  what it had before, when that differs or when it could not be graded
    reason      why it could not be graded; "" when it was
    notes       what was repaired
    due         it is to be graded again, whatever the digests say
    graded_at   UTC, ISO 8601
    """

    student: str
    lab: str
    digest: str
    lab_digest: str
    points: float | None
    max_points: float
    old_points: float | None = None
    old_max: float | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    graded_at: str = ""
    due: bool = False

    @property
    def graded(self) -> bool:
        """Whether it has a score."""
        return self.points is not None


class Ledger:
    """The lines of one course and one gradebook."""

    def __init__(self, root: Path, db_url: str) -> None:
        """Opens or makes .grading/ledger.db.

        db_url  the gradebook that the lines belong to
        """
        path = folder_of(root) / "ledger.db"
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute(TABLE)
        except sqlite3.Error as error:
            raise CourseError(
                f"{path} cannot be used ({error}). Move it away: what it says is made "
                "again by grading again."
            ) from None
        self._gradebook = hashlib.sha256(db_url.encode()).hexdigest()[:16]

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def find(self, student: str, lab: str) -> Line | None:
        """The line of a submission."""
        return next(self._lines("AND student = ? AND lab = ?", student, lab), None)

    def lines(self) -> list[Line]:
        """All lines, in order of student and lab."""
        return list(self._lines("ORDER BY student, lab"))

    def write(self, line: Line) -> None:
        """Puts a line in the place of an older one, if there is one."""
        own = asdict(line)
        due = own.pop("due")
        self._db.execute(
            "INSERT OR REPLACE INTO lines VALUES (?, ?, ?, ?, ?)",
            (self._gradebook, line.student, line.lab, due, json.dumps(own)),
        )

    def make_due(self, submissions: Iterable[tuple[str, str]]) -> None:
        """Marks them, all or none: a run that is killed then goes on with the rest.

        submissions  student and lab
        """
        with self._db:
            self._db.execute("BEGIN")
            self._db.executemany(
                "UPDATE lines SET due = 1 "
                "WHERE gradebook = ? AND student = ? AND lab = ?",
                [(self._gradebook, *pair) for pair in submissions],
            )

    def _lines(self, condition: str, *values: str) -> Iterator[Line]:
        query = f"SELECT due, line FROM lines WHERE gradebook = ? {condition}"
        known = {field.name for field in fields(Line)}
        for due, text in self._db.execute(query, (self._gradebook, *values)):
            own = {k: v for k, v in json.loads(text).items() if k in known}
            own["notes"] = tuple(own.get("notes", ()))
            yield Line(**own, due=bool(due))


def folder_of(root: Path) -> Path:
    """The folder .grading of a course, made when it is missing."""
    folder = root / FOLDER
    folder.mkdir(exist_ok=True)
    return folder


def lines_of(root: Path, db_url: str) -> list[Line]:
    """All lines of a course; none where nothing was ever graded this way."""
    if not (root / FOLDER / "ledger.db").is_file():
        return []
    with closing(Ledger(root, db_url)) as ledger:
        return ledger.lines()


@contextmanager
def only_one(root: Path) -> Iterator[None]:
    """Keeps a second run out of the same course; the system frees it when one is killed.

    raises CourseError when another run is at work
    """
    path = folder_of(root) / "lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            who = file.read().strip() or "unknown"
            raise CourseError(
                f"another run (process {who}) is grading this course. Wait for it."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that is there as a whole or not at all."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(content)
    beside.replace(path)
