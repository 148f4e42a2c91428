"""What several tests need: a tiny course, and nbgrader at work in two processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from kvlab import course
from kvlab.course import Lab
from kvlab.grading import LabResult, autograde, register

ROOT = Path(__file__).parents[1]
SUBMISSIONS = Path(__file__).with_name("submissions")
TINY = "01_tiny"

# What is handed in: a notebook, or the text or the files of a folder.
Submission = NotebookNode | str | Mapping[str, NotebookNode | str]
Grader = Callable[[Path, Lab, str, Submission], "Future[LabResult]"]


def copy_of_labs(root: Path, labs: Sequence[Lab]) -> list[Lab]:
    """Some labs in a course folder of their own, with nobody's work and no gradebook."""
    shutil.copy(ROOT / "nbgrader_config.py", root)
    for lab in labs:
        for folder in (lab.solution.parent, lab.release.parent):
            shutil.copytree(folder, root / folder.relative_to(ROOT))
    return course.find_labs(root)


def copy_of_course(root: Path, labs: Sequence[Lab]) -> list[Lab]:
    """The same, registered in a gradebook."""
    copies = copy_of_labs(root, labs)
    for lab in copies:
        register(root, lab, course.nbgrader_api(root, root))
    return copies


@pytest.fixture(scope="session")
def tiny_course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course of one small lab, built and registered. Copy it before changing it."""
    root = tmp_path_factory.mktemp("tiny")
    settings = (ROOT / "nbgrader_config.py").read_text(encoding="utf-8")
    assert "SECONDS_PER_CELL = 60" in settings
    settings = settings.replace("SECONDS_PER_CELL = 60", "SECONDS_PER_CELL = 5")
    (root / "nbgrader_config.py").write_text(settings, encoding="utf-8")
    folder = root / "solutions" / TINY
    folder.mkdir(parents=True)
    shutil.copy(SUBMISSIONS / "tiny_lab.py", folder / f"{TINY}.py")
    course.build(root)
    register(root, course.find_labs(root)[0], course.nbgrader_api(root, root))
    return root


@pytest.fixture
def own_course(tiny_course: Path, tmp_path: Path) -> Path:
    """A copy of the tiny course that a test may change."""
    root = tmp_path / "course"
    unwanted = shutil.ignore_patterns("submitted", "autograded", "feedback")
    shutil.copytree(tiny_course, root, ignore=unwanted)
    return root


@pytest.fixture(scope="session")
def grade_soon() -> Iterator[Grader]:
    """Hands one submission to nbgrader in one of two processes, which stay alive."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:

        def submit(
            root: Path, lab: Lab, student: str, submission: Submission
        ) -> Future[LabResult]:
            hand_in(root, lab, student, submission)
            return pool.submit(grade_one, root, lab, student)

        yield submit
        pool.shutdown(cancel_futures=True)


def hand_in(root: Path, lab: Lab, student: str, submission: Submission) -> None:
    """Writes a submission where nbgrader looks for it."""
    folder = root / "submitted" / student / lab.name
    folder.mkdir(parents=True)
    if isinstance(submission, (str, NotebookNode)):
        submission = {f"{lab.name}.ipynb": submission}
    for name, content in submission.items():
        if isinstance(content, NotebookNode):
            content = course.notebook_text(content)
        (folder / name).write_text(content, encoding="utf-8")


def grade_one(root: Path, lab: Lab, student: str) -> LabResult:
    """Runs in a worker process: nbgrader's verdict, kept in the worker's own gradebook."""
    return autograde(_api(root), lab, student)


@cache
def _api(root: Path):  # type: ignore[no-untyped-def]
    own = root / f"gradebook-{os.getpid()}.db"
    shutil.copy(root / "gradebook.db", own)
    return course.nbgrader_api(root, root, db_url=f"sqlite:///{own}")


@pytest.fixture(scope="session")
def tiny_lab(tiny_course: Path) -> Lab:
    """The tiny course's lab."""
    return course.find_labs(tiny_course)[0]


@pytest.fixture(scope="session")
def solved(tiny_lab: Lab) -> NotebookNode:
    """The tiny lab with every answer."""
    return nbformat.read(tiny_lab.solution, as_version=4)


@pytest.fixture(scope="session")
def empty(tiny_lab: Lab) -> NotebookNode:
    """The tiny lab as a student gets it."""
    return nbformat.read(tiny_lab.release, as_version=4)
