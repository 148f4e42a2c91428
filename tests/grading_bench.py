"""Times plain nbgrader and the course's own grading on the same class, and compares their scores row by row.

Called by `make bench GRADING=1`. Writes only under .bench/, which it removes. Plain nbgrader runs
with its own settings: an ordinary kernel for each submission, tests in the student's process. It is given
the honest submissions only, since nothing keeps it from what a hostile one does.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import classroom
import nbformat
import psutil
from conftest import copy_of_labs
from hostile import HOSTILE
from nbgrader.api import Gradebook
from rich.console import Console
from rich.table import Table
from test_answers import suite

from kvlab import course
from kvlab.course import Lab
from kvlab.grading import sandbox
from kvlab.grading.answers import replace_answer
from kvlab.runtime import cpu_cores

ROOT = Path(__file__).parents[1]
WORK = ROOT / ".bench"
HONEST = ("right", "wrong", "untouched")
# written for a small lab, and as hostile in any other
ANYWHERE = ("floods_the_output", "fork_bomb", "leaves_a_daemon", "recurses")
PLAIN_CONFIG = """c = get_config()
c.CourseDirectory.course_id = "kvlab"
c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "notebooks"
c.CourseDirectory.ignore = ["*.py"]
c.ExecutePreprocessor.timeout = 120
"""
Scores = dict[tuple[str, str], float]  # (student, lab) -> points of the tests


@dataclass(frozen=True)
class Run:
    """One whole command.

    seconds       wall time
    memory_bytes  the most that all its processes held at once, shared pages counted once
    states        how many submissions ended so, by what our own summary says
    spent         seconds of the submissions alone, added up over the processes
    """

    seconds: float
    memory_bytes: int
    scores: Scores
    states: dict[str, int] = field(default_factory=dict)
    spent: float = 0.0


@contextmanager
def course_copy(name: str, labs: Sequence[Lab]) -> Iterator[tuple[Path, list[Lab]]]:
    """A folder with these labs alone, and with nobody's work."""
    root = WORK / name
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    try:
        yield root, copy_of_labs(root, labs)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def timed(command: Sequence[str | Path], root: Path) -> tuple[float, int]:
    """Wall seconds and peak bytes of a command.

    raises RuntimeError with its last words when it fails
    """
    started = time.perf_counter()
    log = WORK / "log.txt"
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as said:
        process = psutil.Popen([*map(str, command)], cwd=root, stdout=said, stderr=said)
    peak = 0

    def watch() -> None:
        nonlocal peak
        while process.is_running():
            held = 0
            try:
                family = [process, *process.children(recursive=True)]
            except psutil.Error:
                return
            for one in family:
                try:
                    held += one.memory_full_info().pss
                except psutil.Error:
                    continue
            peak = max(peak, held)
            time.sleep(2)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    process.wait()
    seconds = time.perf_counter() - started
    if process.returncode:
        last = log.read_text("utf-8", "replace").strip().splitlines()[-5:]
        raise RuntimeError(f"{command[2:]} ended with {process.returncode}: {last}")
    return seconds, peak


def scores_of(root: Path) -> Scores:
    with Gradebook(f"sqlite:///{root / 'gradebook.db'}") as book:
        return {
            (submission.student.id, submission.assignment.name): sum(
                grade.auto_score or 0
                for n in submission.notebooks
                for grade in n.grades
            )
            for assignment in book.assignments
            for submission in book.assignment_submissions(assignment.name)
        }


def different(one: Scores, other: Scores) -> list[tuple[str, str]]:
    """The rows that only one has, or that have another score."""
    rows = sorted(one.keys() | other.keys())
    return [row for row in rows if one.get(row) != other.get(row)]


def forget_scores(root: Path) -> None:
    for name in ("autograded", ".grading", "gradebook.db"):
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def plain(root: Path, labs: Sequence[Lab]) -> Run:
    """`nbgrader autograde LAB` for each lab, with nbgrader's own settings."""
    ours = root / "nbgrader_config.py"
    kept = ours.read_bytes()
    forget_scores(root)
    try:
        ours.write_text(PLAIN_CONFIG, encoding="utf-8")
        seconds, most = 0.0, 0
        for lab in labs:
            nbgrader = [sys.executable, "-m", "nbgrader"]
            made = f"--CourseDirectory.release_directory={root / 'released_by_plain'}"
            known = [*nbgrader, "generate_assignment", lab.name, "--force", made]
            subprocess.run(known, cwd=root, check=True, capture_output=True)
            took, held = timed([*nbgrader, "autograde", lab.name], root)
            seconds, most = seconds + took, max(most, held)
        return Run(seconds, most, scores_of(root))
    finally:
        ours.write_bytes(kept)


def ours(root: Path, jobs: int) -> Run:
    """`kvlab autograde`, its first start and its shutdown included."""
    forget_scores(root)
    kvlab = Path(sys.executable).with_name("kvlab")
    seconds, most = timed([kvlab, "autograde", "--jobs", str(jobs)], root)
    rows = json.loads((root / ".grading" / "summary.json").read_text("utf-8"))["rows"]
    states = dict(Counter(row["state"] for row in rows))
    return Run(
        seconds, most, scores_of(root), states, sum(row["seconds"] for row in rows)
    )


def hand_in_hostile(root: Path, lab: Lab) -> list[str]:
    """Hostile answers, each in a solved notebook in the place of the TODO it names."""
    solved = nbformat.read(lab.solution, as_version=4)
    students = []
    for hostile in HOSTILE:
        if hostile.lab == lab.name or hostile.name in ANYWHERE:
            students.append(f"hostile {hostile.name}")
            made = replace_answer(solved, hostile.todo, hostile.source)
            to = root / "submitted" / students[-1] / lab.name / f"{lab.name}.ipynb"
            classroom.write(to, made)
    return students


def one_of_each(labs: Sequence[Lab], console: Console) -> None:
    """The solved notebook of every lab, by both."""
    with course_copy("one", labs) as (root, copied):
        for lab in copied:
            to = root / "submitted" / "solved" / lab.name / f"{lab.name}.ipynb"
            classroom.write(to, lab.solution.read_bytes())
        theirs, mine = plain(root, copied), ours(root, 1)
    table = Table(title="One solved submission of every lab, one process")
    for heading in ("", "seconds", "points"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, run in (("plain nbgrader", theirs), ("kvlab autograde", mine)):
        points = sum(run.scores.values())
        table.add_row(name, f"{run.seconds:.1f}", f"{points:g}")
    console.print(table)


def throughput_of_two() -> float:
    """How much more two processes compute than one, here and now: memory and cores are shared."""
    code = "held = {}\nfor n in range(6_000_000): held[n % 5000] = str(n)"

    def seconds(count: int) -> float:
        started = time.perf_counter()
        busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
        for process in busy:
            process.wait()
        return time.perf_counter() - started

    return 2 * seconds(1) / seconds(2)


def a_class(lab: Lab, students: int, console: Console) -> None:
    """A class by plain nbgrader, by us with one job and with two."""
    ceiling = throughput_of_two()
    answers = [[a.sources for a in suite(lab, kind)] for kind in ("right", "wrong")]
    with course_copy("class", [lab]) as (root, (own,)):
        members = classroom.make_class(root, own, students, *answers)
        honest = [m.student for m in members if m.kind in HONEST]
        kinds = {m.student: m.kind for m in members}
        aside = WORK / "odd"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for member in members:
            if member.kind not in HONEST:
                (root / "submitted" / member.student).rename(aside / member.student)
        theirs, same, pair = plain(root, [own]), ours(root, 1), ours(root, 2)
        for path in aside.iterdir():
            path.rename(root / "submitted" / path.name)
        hostile = hand_in_hostile(root, own)
        kinds |= dict.fromkeys(hostile, "hostile")
        everyone = ours(root, 2)
    shutil.rmtree(aside, ignore_errors=True)
    everybody = len(kinds)
    table = Table(title=f"A class on {lab.name}, {cpu_cores()} CPU cores")
    for heading in ("", "submissions", "seconds", "each", "ratio", "GiB at most"):
        table.add_column(heading, justify="right" if heading else "left")
    of_plain = theirs.seconds / len(honest)
    for name, run, count in (
        ("plain nbgrader, honest ones", theirs, len(honest)),
        ("ours, 1 job, the same", same, len(honest)),
        ("ours, 2 jobs, the same", pair, len(honest)),
        ("ours, 2 jobs, odd and hostile too", everyone, everybody),
    ):
        table.add_row(
            name,
            str(count),
            f"{run.seconds:.1f}",
            f"{run.seconds / count:.2f}",
            f"{of_plain / (run.seconds / count):.2f}",
            f"{run.memory_bytes / 2**30:.2f}",
        )
    console.print(table)
    console.print(
        f"2 jobs do {same.seconds / pair.seconds:.2f} times as much as 1; two processes "
        f"that only compute did {ceiling:.2f} times as much as one, just before"
    )
    differ = different(theirs.scores, same.scores)
    console.print(f"scores of {len(honest)} honest rows that differ: {len(differ)}")
    for student, lab_name in differ:
        key = student, lab_name
        console.print(
            f"  {student} ({kinds[student]}): plain {theirs.scores.get(key)}, "
            f"ours {same.scores.get(key)}"
        )
    moved = different(same.scores, pair.scores)
    console.print(f"scores that differ between 1 job and 2: {len(moved)}")
    of_honest = {k: score for k, score in everyone.scores.items() if k in same.scores}
    changed = different(same.scores, of_honest)
    console.print(
        f"honest rows that odd and hostile neighbours changed: {len(changed)}"
    )
    console.print(f"what became of them with 2 jobs: {everyone.states}")
    console.print(
        f"ours, 1 job: {same.spent / len(honest):.2f} s in each submission; the rest, "
        f"{same.seconds - same.spent:.1f} s, once for the run: start, gradebook, preload"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--students", type=int, default=40)
    parser.add_argument("--lab", action="append", help="of the class; more than once")
    options = parser.parse_args()
    console = Console()
    sandbox.wanted("on")  # else the longest part would be for nothing
    labs = [
        lab
        for lab in course.find_labs(ROOT)
        if course.is_graded(nbformat.read(lab.solution, as_version=4))
    ]
    chosen = options.lab or ["03_kv_axes_and_window"]
    try:
        one_of_each(labs, console)
        for lab in labs:
            if lab.name in chosen:
                a_class(lab, options.students, console)
    finally:
        shutil.rmtree(WORK, ignore_errors=True)


if __name__ == "__main__":
    main()
