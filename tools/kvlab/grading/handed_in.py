"""Finds what students handed in, reads it once, and says what of it cannot be graded.

Called by `many`. Never follows a link, never opens anything but ordinary files, and never writes.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlab.grading.intake import MAX_NOTEBOOK_BYTES, NOT_HANDED_IN

MAX_FILES = 1000
MAX_BYTES = 100_000_000  # of one submission; nbgrader's own limit for a folder
MAX_STUDENT_NAME = 128  # characters: a column of nbgrader's gradebook
PATTERN = set("*?[")
IGNORED_ENDINGS = (".pyc", ".DS_Store")


@dataclass(frozen=True)
class Submission:
    """One folder submitted/STUDENT/LAB.

    student  the folder's name, as text that every file and database can hold
    problem  why it cannot be graded, before anything was read; "" when it can
    """

    student: str
    lab: str
    folder: Path
    problem: str = ""


@dataclass(frozen=True)
class Snapshot:
    """The files of a submission, as they were at one moment.

    files     path in the folder, with slashes -> content
    left_out  one sentence for each thing that was not read
    problem   why it cannot be graded; "" when it can
    digest    sha256 of all of this, hexadecimal
    """

    files: dict[str, bytes]
    left_out: tuple[str, ...]
    problem: str
    digest: str


# --- which there are ------------------------------------------------------------------


def submissions(submitted: Path, labs: Sequence[str]) -> list[Submission]:
    """Everything that lies in the folder `submitted`, in order of student and lab.

    labs  the names of all labs of the course that can be graded
    """
    found: list[Submission] = []
    for folder in _entries(submitted):
        student = shown(folder.name)
        problem = _problem_of_name(folder.name) or _problem_of_folder(folder)
        if problem:
            found.append(Submission(student, "", folder, problem))
            continue
        for inner in _entries(folder):
            reason = _problem_of_lab(inner, labs)
            found.append(Submission(student, shown(inner.name), inner, reason))
    return found


def shown(name: str) -> str:
    """A file name as text: bytes that are no UTF-8 are written out."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _entries(folder: Path) -> list[Path]:
    """What a folder holds, without what programs leave behind; [] when unreadable."""
    try:
        return sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    except OSError:
        return []


def _problem_of_name(name: str) -> str:
    if shown(name) != name:
        return "The name of the student's folder is not UTF-8. Rename the folder."
    if name.strip() != name:
        return (
            "The name of the student's folder begins or ends with a space. Rename it."
        )
    if not name.isprintable():
        return "The name of the student's folder holds control characters. Rename it."
    if set(name) & PATTERN:
        return (
            "The name of the student's folder holds * or ? or [, which nbgrader takes "
            "for a pattern. Rename it."
        )
    if len(name) > MAX_STUDENT_NAME:
        return (
            f"The name of the student's folder has {len(name)} characters; "
            f"{MAX_STUDENT_NAME} is the limit. Rename it."
        )
    return ""


def _problem_of_folder(folder: Path) -> str:
    """Why a student's or a lab's folder cannot be looked into; "" when it can."""
    name = shown(folder.name)
    if folder.is_symlink():
        return f"{name} is a link to another place; links are not followed."
    if not folder.is_dir():
        return f"{name} is a file; a folder was expected here."
    try:
        os.listdir(folder)
    except OSError as error:
        return f"The folder {name} cannot be read ({error.strerror})."
    return ""


def _problem_of_lab(folder: Path, labs: Sequence[str]) -> str:
    if folder.name in labs:
        return _problem_of_folder(folder)
    name = shown(folder.name)
    alike = difflib.get_close_matches(name, labs, n=1, cutoff=0.5)
    meant = f" Should it be called {alike[0]}?" if alike else ""
    return f"{name} is no lab of this course.{meant}"


# --- what is in one -------------------------------------------------------------------


def read(folder: Path, lab: str) -> Snapshot:
    """Every ordinary file of a submission, and what was wrong with the others."""
    files: dict[str, bytes] = {}
    left_out: list[str] = []
    reasons: dict[str, str] = {}
    for path in _files_below(folder):
        name = path.relative_to(folder).as_posix()
        if len(files) == MAX_FILES:
            left_out.append(f"Of more than {MAX_FILES} files the rest was left out.")
            break
        room = MAX_BYTES - sum(map(len, files.values()))
        try:
            files[name] = _content(path, min(room, _limit(name)))
        except ValueError as error:
            reasons[name] = str(error)
            left_out.append(f"{shown(name)} {error}; it was left out.")
    wanted = f"{lab}.ipynb"
    problem = f"{wanted} {reasons[wanted]}." if wanted in reasons else ""
    if not problem and not any(".ipynb" in name.lower() for name in files):
        problem = f"{wanted} is missing: no notebook was handed in."
        problem += "".join(f" {sentence}" for sentence in left_out)
    return Snapshot(files, tuple(left_out), problem, _digest(files, left_out))


def _files_below(folder: Path, depth: int = 8) -> Iterator[Path]:
    """Everything that is no folder, in order of name; programs' own folders left out."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        yield folder  # the reason is found when it is opened
        return
    for entry in entries:
        if entry.name.endswith(IGNORED_ENDINGS):
            continue
        if not entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)
        elif entry.name.endswith(".ipynb"):
            yield Path(entry.path)  # is named as what it is not
        elif depth and not entry.name.startswith(NOT_HANDED_IN):
            yield from _files_below(Path(entry.path), depth - 1)


def _limit(name: str) -> int:
    return MAX_NOTEBOOK_BYTES if name.lower().endswith(".ipynb") else MAX_BYTES


def _content(path: Path, limit: int) -> bytes:
    """The bytes of an ordinary file.

    raises ValueError with what keeps it from being read
    """
    try:
        # Without blocking: a pipe would wait for somebody to write into it.
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise ValueError("is a link, and links are not followed") from None
        raise ValueError(f"cannot be read ({error.strerror})") from None
    try:
        status = os.fstat(number)
        if stat.S_ISDIR(status.st_mode):
            raise ValueError("is a folder, not a file")
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not an ordinary file")
        if status.st_size > limit:
            raise ValueError(f"has {status.st_size / 1e6:.0f} MB, which is too much")
        with os.fdopen(number, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(number)


def _digest(files: dict[str, bytes], left_out: list[str]) -> str:
    sums = hashlib.sha256()
    for name, content in sorted(files.items()):
        sums.update(os.fsencode(name) + b"\0" + hashlib.sha256(content).digest())
    for sentence in left_out:
        sums.update(sentence.encode("utf-8", "backslashreplace"))
    return sums.hexdigest()
