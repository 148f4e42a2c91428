"""Makes a class: submissions of mixed right, wrong, untouched and odd kinds, the same for the same seed.

Used by the tests, and by hand to measure: `python tests/classroom.py --students 300 --to FOLDER` writes a copy
of the course with such a class in it and prints the command that grades it. Never runs a notebook.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

from kvlab import course
from kvlab.course import Lab
from kvlab.grading import many
from kvlab.grading.answers import replace_answer
from kvlab.grading.crew import Crew
from kvlab.grading.outcome import CellResult, LabResult, TodoResult
from kvlab.grading.task import Graded, GradeRow, Task

ROOT = Path(__file__).parents[1]
SHARE_ODD = 0.10
NAMES = ("ana", "björn", "chloé", "đặng", "eşref", "fatima", "李雷", "o'neil", "zoë m")
Answers = Sequence[dict[int, str]]  # each: TODO -> source of its answer cell
ODD: dict[str, Callable[[Path, Lab], None]] = {}


@dataclass(frozen=True)
class Member:
    """One student of a class.

    kind  right, wrong, untouched, or the name of an odd submission
    """

    student: str
    kind: str


def make_class(
    root: Path, lab: Lab, size: int, right: Answers, wrong: Answers, seed: int = 1
) -> list[Member]:
    """Writes a class into submitted/; returns who handed in what."""
    rng = random.Random(seed)
    odd = max(1, round(SHARE_ODD * size))
    kinds = rng.choices(("right", "wrong", "untouched"), (4, 4, 2), k=size - odd)
    kinds += [sorted(ODD)[rng.randrange(len(ODD))] for _ in range(odd)]
    rng.shuffle(kinds)
    solved = nbformat.read(lab.solution, as_version=4)
    untouched = nbformat.read(lab.release, as_version=4)
    members = []
    for number, kind in enumerate(kinds):
        student = f"{number:03} {NAMES[number % len(NAMES)]}"
        members.append(Member(student, kind))
        folder = root / "submitted" / student / lab.name
        if kind in ODD:
            ODD[kind](folder, lab)
            continue
        if kind == "untouched":
            notebook = untouched
        else:
            given = rng.choice(right if kind == "right" else wrong)
            notebook = with_answers(solved, given)
        write(folder / f"{lab.name}.ipynb", notebook)
    return members


def with_answers(solved: NotebookNode, answers: dict[int, str]) -> NotebookNode:
    """The solved notebook with other answers to some TODOs."""
    for todo, source in answers.items():
        solved = replace_answer(solved, todo, source)
    return solved


def write(path: Path, content: NotebookNode | dict[str, Any] | str | bytes) -> None:
    """A file with its folders."""
    if isinstance(content, dict):
        content = json.dumps(content)
    if isinstance(content, str):
        content = content.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


# --- odd submissions: folder submitted/STUDENT/LAB, lab -------------------------------


def odd(make: Callable[[Path, Lab], None]) -> Callable[[Path, Lab], None]:
    ODD[make.__name__] = make
    return make


def changed(make: Callable[[dict[str, Any]], object]) -> None:
    """Registers an odd kind that is the solved notebook with something done to its JSON."""

    def hand_in(folder: Path, lab: Lab) -> None:
        notebook = json.loads(lab.solution.read_text(encoding="utf-8"))
        made = make(notebook)
        content = made if isinstance(made, (str, bytes)) else notebook
        write(folder / f"{lab.name}.ipynb", content)

    ODD[make.__name__] = hand_in


def marked(notebook: dict[str, Any], start: str) -> dict[str, Any]:
    """The first cell whose grade_id begins so."""
    for cell in notebook["cells"]:
        if cell["metadata"].get("nbgrader", {}).get("grade_id", "").startswith(start):
            found: dict[str, Any] = cell
            return found
    raise KeyError(start)


@changed
def cut_off(notebook: dict[str, Any]) -> object:
    return json.dumps(notebook)[:2000]


@changed
def unknown_format(notebook: dict[str, Any]) -> object:
    notebook["nbformat"] = 5


@changed
def copied_cells(notebook: dict[str, Any]) -> object:
    notebook["cells"] += copy.deepcopy(notebook["cells"])


@changed
def deleted_cells(notebook: dict[str, Any]) -> object:
    notebook["cells"].remove(marked(notebook, "test_todo_1"))


@changed
def retyped_cells(notebook: dict[str, Any]) -> object:
    for start in ("test_todo_1", "todo_2"):
        cell = marked(notebook, start)
        cell["cell_type"] = "markdown"
        del cell["outputs"], cell["execution_count"]


@changed
def lost_metadata(notebook: dict[str, Any]) -> object:
    for cell in notebook["cells"]:
        cell["metadata"] = {}


@changed
def byte_order_mark(notebook: dict[str, Any]) -> object:
    return "\ufeff" + json.dumps(notebook)


@changed
def lone_surrogates(notebook: dict[str, Any]) -> object:
    marked(notebook, "todo_1")["source"] += "\n# \ud800"
    notebook["metadata"]["name"] = "\udfff"


@changed
def odd_types(notebook: dict[str, Any]) -> object:
    notebook["metadata"] |= {"kernelspec": 7, "kvlab": [1], "language_info": ["python"]}
    notebook["cells"][0]["metadata"] |= {"tags": 5, "jupyter": "no"}
    notebook["nbformat_minor"] = "5"
    answer = marked(notebook, "todo_1")
    answer |= {"outputs": [1, {"output_type": "none"}], "execution_count": "seven"}


@changed
def number_without_end(notebook: dict[str, Any]) -> object:
    return json.dumps(notebook)[:-1] + ', "x": ' + "9" * 5000 + "}"


@odd
def no_notebook(folder: Path, lab: Lab) -> None:
    write(folder / "notes.txt", "I forgot")


@odd
def folder_for_file(folder: Path, lab: Lab) -> None:
    write(folder / f"{lab.name}.ipynb" / "inside.txt", "")


@odd
def another_name(folder: Path, lab: Lab) -> None:
    write(folder / "Copy of My Lab.IPYNB.txt", lab.solution.read_bytes())


@odd
def one_folder_down(folder: Path, lab: Lab) -> None:
    write(folder / "my lab" / f"{lab.name}.ipynb", lab.solution.read_bytes())


@odd
def huge_file(folder: Path, lab: Lab) -> None:
    write(folder / f"{lab.name}.ipynb", lab.solution.read_bytes())
    os.truncate(folder / f"{lab.name}.ipynb", 60_000_000)


@odd
def link_to_elsewhere(folder: Path, lab: Lab) -> None:
    folder.mkdir(parents=True)
    (folder / f"{lab.name}.ipynb").symlink_to(lab.solution)


@odd
def linked_folder(folder: Path, lab: Lab) -> None:
    folder.parent.mkdir(parents=True)
    folder.symlink_to(lab.solution.parent)


@odd
def pipe_for_file(folder: Path, lab: Lab) -> None:
    folder.mkdir(parents=True)
    os.mkfifo(folder / f"{lab.name}.ipynb")


@odd
def student_is_a_file(folder: Path, lab: Lab) -> None:
    write(folder.parent, "")


@odd
def unknown_lab(folder: Path, lab: Lab) -> None:
    write(folder.with_name(f"{lab.name} (1)") / "x.ipynb", lab.solution.read_bytes())


@odd
def no_date(folder: Path, lab: Lab) -> None:
    write(folder / f"{lab.name}.ipynb", lab.solution.read_bytes())
    write(folder / "timestamp.txt", b"\xffyesterday")


FAILS = {  # odd kinds that cannot be graded, and a word of the reason
    "cut_off": "is not valid JSON",
    "folder_for_file": "is a folder",
    "huge_file": "has 60 MB",
    "link_to_elsewhere": "links are not followed",
    "linked_folder": "links are not followed",
    "no_notebook": "no notebook was handed in",
    "number_without_end": "a number that is too long",
    "pipe_for_file": "is not an ordinary file",
    "student_is_a_file": "a folder was expected",
    "unknown_format": "is in notebook format 5",
    "unknown_lab": "Should it be called",
}


# --- a course to put it in ------------------------------------------------------------


def with_template(root: Path, gradebook: Path) -> None:
    """Saves the seconds that a template takes: the gradebook holds the lab alone."""
    for lab in course.find_labs(root):
        found = many.template_path(root, lab, many.cells_of(lab))
        shutil.copy(gradebook, found)


def grade_or_die(task: Task) -> Graded:
    """In the place of `task.grade`, in a worker: what a student is called decides."""
    if "dies" in task.student:
        os.kill(os.getpid(), signal.SIGKILL)
    if "dies once" in task.files.get("note.txt", b"").decode():
        marker = Path(task.files["note.txt"].decode().split(": ")[1])
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return full_marks(task)


def full_marks(task: Task) -> Graded:
    """What grading gives for a right answer, without running anything."""
    notebook = json.loads(task.lab.files[f"{task.lab.name}.ipynb"])
    marks = [c["metadata"].get("nbgrader", {}) for c in notebook["cells"]]
    tests = {
        m["grade_id"]: float(m["points"])
        for m in marks
        if m.get("grade") and not m["solution"]
    }
    cells = tuple(CellResult(name, "right", p, p) for name, p in tests.items())
    rows = [GradeRow(name, points, False) for name, points in tests.items()]
    for mark in marks:
        if mark.get("grade") and mark["solution"]:
            rows.append(GradeRow(mark["grade_id"], None, True))
    comments = tuple((m["grade_id"], None) for m in marks if m.get("solution"))
    result = LabResult(task.lab.name, task.student, (TodoResult(1, "all", cells),))
    files = ((f"{task.lab.name}.ipynb", json.dumps(notebook).encode(), 0o444),)
    return Graded(result, tuple(rows), comments, files=files)


class Inline(Executor):
    """Does nothing elsewhere: gives for each task what a function says or raises."""

    def __init__(self, grade: Callable[[Task], Graded | BaseException]) -> None:
        self.grade = grade

    def submit(self, fn: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        """What is asked for stands in the second place, as `Crew.submit` puts it."""
        future: Future[Any] = Future()
        result = self.grade(arguments[1])
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
        return future


@contextmanager
def in_this_process(
    grade: Callable[[Task], Graded | BaseException],
) -> Iterator[None]:
    """Lets `many` grade with a function, one submission after another."""

    @contextmanager
    def crew(
        jobs: int, scheduler: str, patience: float, modules: Sequence[str]
    ) -> Iterator[Crew]:
        yield Crew(Inline(grade), lambda: 1, patience)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(many, "crew", crew)
        yield


# --- by hand --------------------------------------------------------------------------


def main() -> None:
    """Writes a course with a class in it."""
    from conftest import copy_of_labs
    from test_answers import suite

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--students", type=int, default=300)
    parser.add_argument("--lab", default="01_memory_budget")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--to", type=Path, required=True, help="a folder to be made")
    options = parser.parse_args()
    (lab,) = course.choose_labs(ROOT, options.lab)
    options.to.mkdir(parents=True)
    (own,) = copy_of_labs(options.to, [lab])
    answers = [[a.sources for a in suite(lab, kind)] for kind in ("right", "wrong")]
    members = make_class(options.to, own, options.students, *answers, options.seed)
    kinds: dict[str, int] = {}
    for member in members:
        kinds[member.kind] = kinds.get(member.kind, 0) + 1
    print(json.dumps(kinds, indent=1, sort_keys=True))
    print(f"kvlab autograde --root {options.to}")


if __name__ == "__main__":
    main()
