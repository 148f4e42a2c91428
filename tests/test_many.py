"""`kvlab autograde`: a class at once, the same scores as one by one, whatever is handed in and whatever dies."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import classroom
import nbformat
import pytest
from conftest import ROOT, TINY, Grader
from nbgrader.api import Gradebook
from rich.console import Console
from sqlalchemy.exc import OperationalError
from typer.testing import CliRunner

import kvlab
from kvlab import course, runtime
from kvlab.course import CourseError, Lab
from kvlab.grading import (
    LabResult,
    book,
    commands,
    handed_in,
    intake,
    ledger,
    many,
    summary,
    task,
    worker,
)
from kvlab.grading.crew import Crew
from kvlab.grading.ledger import Line
from kvlab.grading.many import Request, Row, Summary
from kvlab.grading.task import Graded, GradeRow, Task
from kvlab.grading.worker import WorkerDied

pytestmark = [
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning"),
    pytest.mark.filterwarnings("ignore::nbformat.warnings.DuplicateCellId"),
    pytest.mark.filterwarnings("ignore::nbformat.warnings.MissingIDFieldWarning"),
]
RIGHT = [
    {1: "def double(number):\n    return number + number if number + 0 else 0"},
    {2: "def add_one(number):\n    return 1 + number"},
]
WRONG = [
    {1: "def double(number):\n    return 3 * number"},
    {2: "def add_one(number):\n    return number", 3: "is_even = nothing"},
]


@pytest.fixture(scope="module", autouse=True)
def sandbox_where_there_is_one() -> Iterator[None]:
    """So that these tests run on any machine; without it `kvlab autograde` stops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SANDBOX", "auto")
        yield


@pytest.fixture
def own_lab(own_course: Path) -> Lab:
    (lab,) = course.find_labs(own_course)
    (own_course / "submitted").mkdir()
    classroom.with_template(own_course, own_course / "gradebook.db")
    return lab


def hand_in(lab: Lab, student: str, path: Path | None = None) -> Path:
    """The lab's solution, or another file, as somebody's submission."""
    folder = lab.solution.parents[2] / "submitted" / student / lab.name
    classroom.write(folder / f"{lab.name}.ipynb", (path or lab.solution).read_bytes())
    return folder


def run(lab: Lab, **request: Any) -> Summary:
    return many.autograde(lab.solution.parents[2], [lab], Request(**request))


def rows_in(root: Path, url: str = "") -> dict[str, tuple[object, ...]]:
    """Every grade in a gradebook, by student."""
    found: dict[str, tuple[object, ...]] = {}
    with Gradebook(url or f"sqlite:///{root / 'gradebook.db'}") as gradebook:
        for submission in gradebook.assignment_submissions(TINY):
            (notebook,) = submission.notebooks
            grades = sorted(
                (g.name, g.auto_score, g.manual_score, g.needs_manual_grade)
                for g in notebook.grades
            )
            comments = sorted((c.name, c.auto_comment) for c in notebook.comments)
            late = notebook.late_submission_penalty
            assert submission.student_id not in found
            found[submission.student_id] = (grades, comments, late)
    return found


def table(result: Summary) -> list[Row]:
    """The rows as they are in every run."""
    return [replace(row, state="graded", seconds=0.0) for row in result.rows]


# --- a crew that runs nothing ---------------------------------------------------------


Pretend = Callable[[Callable[[Task], Graded | BaseException]], None]


@pytest.fixture
def pretend() -> Iterator[Pretend]:
    """Replaces the grading itself; everything around it is real."""
    with contextlib.ExitStack() as stack:

        def use(grade: Callable[[Task], Graded | BaseException]) -> None:
            stack.enter_context(classroom.in_this_process(grade))

        use(classroom.full_marks)
        yield use


def failing(task: Task) -> Graded:
    result = LabResult(task.lab.name, task.student, problem="broken", fault="course")
    return Graded(result)


# --- the same scores as one by one ----------------------------------------------------


@pytest.fixture(scope="module")
def a_class(tiny_course: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course with a class of eight, nothing graded. Copy it before grading."""
    root = tmp_path_factory.mktemp("class") / "course"
    unwanted = shutil.ignore_patterns("submitted", "autograded", "feedback", "*-*.db")
    shutil.copytree(tiny_course, root, ignore=unwanted)
    (lab,) = course.find_labs(root)
    classroom.make_class(root, lab, 8, RIGHT, WRONG, seed=1)
    classroom.with_template(root, root / "gradebook.db")
    return root


@pytest.fixture(scope="module")
def graded_class(
    a_class: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Summary]:
    """The same class, graded in one go by two processes."""
    root = tmp_path_factory.mktemp("graded") / "course"
    shutil.copytree(a_class, root, symlinks=True)
    labs = course.find_labs(root)
    return root, many.autograde(root, labs, Request(jobs=2))


def test_a_class_gets_the_scores_that_it_gets_one_by_one(
    a_class: Path,
    graded_class: tuple[Path, Summary],
    grade_soon: Grader,
    tmp_path: Path,
) -> None:
    root, result = graded_class
    one_by_one = tmp_path / "course"
    shutil.copytree(a_class, one_by_one, symlinks=True)
    (lab,) = course.find_labs(one_by_one)
    students = sorted(p.name for p in (root / "submitted").iterdir())
    assert len(result.rows) == len(students) == 8
    futures = {}
    for student in students:
        folder = one_by_one / "submitted" / student
        aside = one_by_one / "aside" / student
        shutil.move(folder, aside)
        if (aside / TINY / f"{TINY}.ipynb").is_file():
            text = (aside / TINY / f"{TINY}.ipynb").read_text()
            futures[student] = grade_soon(one_by_one, lab, student, text)
    points = {row.student: row.points for row in result.rows if row.points is not None}
    alone = {student: future.result() for student, future in futures.items()}
    assert points == {s: r.points for s, r in alone.items() if not r.fault}
    assert {r.student: r.notes for r in result.rows if r.points is not None} == {
        s: r.notes for s, r in alone.items() if not r.fault
    }
    kept: dict[str, tuple[object, ...]] = {}
    for database in one_by_one.glob("gradebook-*.db"):
        kept |= rows_in(one_by_one, f"sqlite:///{database}")
    in_one_go = rows_in(root)
    assert in_one_go == {student: kept[student] for student in points}
    assert len({points[s] for s in points}) > 2


def test_a_class_shows_in_gradebook_folder_and_summary(
    graded_class: tuple[Path, Summary],
) -> None:
    root, result = graded_class
    graded = {row.student for row in result.rows if row.points is not None}
    assert set(rows_in(root)) == graded
    assert {
        p.parts[-3] for p in root.glob(f"autograded/*/{TINY}/{TINY}.ipynb")
    } == graded
    document = json.loads((root / ".grading" / "summary.json").read_text())
    assert sum(document["counts"].values()) == 8
    assert [row["student"] for row in document["rows"]] == sorted(
        row.student for row in result.rows
    )
    assert document["kvlab"] == kvlab.__version__


def test_what_is_graded_is_not_graded_again(
    graded_class: tuple[Path, Summary], pretend: Pretend
) -> None:
    root, first = graded_class
    pretend(lambda task: pytest.fail(f"{task.student} was graded again"))
    before = rows_in(root)
    second = many.autograde(root, course.find_labs(root), Request())
    assert table(second) == table(first)
    assert {row.state for row in second.rows} <= {"already graded", "failed"}
    assert rows_in(root) == before


def test_kill_9_half_way_costs_nothing(
    a_class: Path, graded_class: tuple[Path, Summary], tmp_path: Path
) -> None:
    root = tmp_path / "course"
    shutil.copytree(a_class, root, symlinks=True)
    command = [sys.executable, "-m", "kvlab.grading.commands", "autograde"]
    arguments = ["--root", str(root), "--jobs", "1"]
    with subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        seen = [line for line, _ in zip(process.stdout, range(3), strict=False)]
        process.send_signal(signal.SIGKILL)
    url = f"sqlite:///{root / 'gradebook.db'}"
    before = {line.student: line for line in ledger.lines_of(root, url)}
    assert len(seen) == 3 and 1 <= len(before) < 8
    again = many.autograde(root, course.find_labs(root), Request(jobs=1))
    whole_root, whole = graded_class
    assert table(again) == table(whole)
    assert rows_in(root) == rows_in(whole_root)
    after = {line.student: line for line in ledger.lines_of(root, url)}
    assert before.items() <= after.items()  # nothing was done twice


def test_a_dask_scheduler_gives_the_same_table(
    a_class: Path, graded_class: tuple[Path, Summary], tmp_path: Path
) -> None:
    distributed = pytest.importorskip("distributed")
    root = tmp_path / "course"
    shutil.copytree(a_class, root, symlinks=True)
    _, whole = graded_class
    kept = {row.student for row in whole.rows if row.points is not None}
    kept = set(sorted(kept)[:3]) | {"nobody"}
    for path in (root / "submitted").iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        dashboard_address=None,
        silence_logs="CRITICAL",
    ) as cluster:
        address = cluster.scheduler_address
        labs = course.find_labs(root)
        result = many.autograde(root, labs, Request(scheduler=address))
    assert result.faults == ()
    assert table(result) == [row for row in table(whole) if row.student in kept]
    expected = rows_in(graded_class[0])
    assert rows_in(root) == {student: expected[student] for student in rows_in(root)}


# --- odd submissions ------------------------------------------------------------------


@pytest.fixture(scope="module")
def odd_class(tiny_course: Path, tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """One of each odd kind, and one that is right."""
    root = tmp_path_factory.mktemp("odd") / "course"
    unwanted = shutil.ignore_patterns("submitted", "autograded", "feedback", "*-*.db")
    shutil.copytree(tiny_course, root, ignore=unwanted)
    (lab,) = course.find_labs(root)
    for kind, make in classroom.ODD.items():
        make(root / "submitted" / kind / lab.name, lab)
    hand_in(lab, "right")
    classroom.with_template(root, root / "gradebook.db")
    with classroom.in_this_process(task.grade):
        return many.autograde(root, [lab], Request())


@pytest.mark.parametrize("kind", sorted(classroom.ODD))
def test_an_odd_submission_ends_as_a_row(kind: str, odd_class: Summary) -> None:
    (row,) = [row for row in odd_class.rows if row.student == kind]
    if kind in classroom.FAILS:
        assert (row.state, row.points) == ("failed", None)
        assert classroom.FAILS[kind] in row.reason
    else:
        assert (row.reason, row.points) == ("", 20)


def test_odd_submissions_touch_no_other(odd_class: Summary) -> None:
    (row,) = [row for row in odd_class.rows if row.student == "right"]
    assert (row.state, row.points, odd_class.faults) == ("graded", 20, ())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (" alice", "begins or ends with a space"),
        ("a\nb", "control characters"),
        ("a[1]", "takes for a pattern"),
        ("x" * 129, "has 129 characters"),
        (os.fsdecode(b"\xff"), "is not UTF-8"),
    ],
)
def test_a_name_that_nbgrader_cannot_take_is_said(
    own_lab: Lab, pretend: Pretend, name: str, reason: str
) -> None:
    hand_in(own_lab, name)
    hand_in(own_lab, "Żółć, {x}; 'y'")
    bad, good = sorted(run(own_lab).rows, key=lambda row: row.points or 0)
    assert reason in bad.reason and bad.state == "failed"
    assert (good.student, good.points) == ("Żółć, {x}; 'y'", 20)


def test_a_file_that_may_not_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classroom.write(tmp_path / f"{TINY}.ipynb", "{}")

    def refuse(*arguments: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    problem = handed_in.read(tmp_path, TINY).problem
    assert problem == f"{TINY}.ipynb cannot be read (Permission denied)."


def test_links_pipes_and_too_much_are_left_out_and_the_rest_is_graded(
    own_lab: Lab, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hand_in(own_lab, "ana")
    (folder / "secret.ipynb.bak").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe")
    classroom.write(folder / "data" / "big.bin", b"x" * 2_000_000)
    (folder / "loop").symlink_to(folder)
    monkeypatch.setattr(handed_in, "MAX_BYTES", 1_000_000)
    taken: list[Task] = []
    pretend(lambda task: taken.append(task) or classroom.full_marks(task))  # type: ignore[func-returns-value]
    run(own_lab)
    assert set(taken[0].files) == {f"{TINY}.ipynb"}
    assert [note.split(" ")[0] for note in taken[0].notes] == [
        "data/big.bin",
        "loop",
        "pipe",
        "secret.ipynb.bak",
    ]


def test_more_files_than_anybody_needs_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handed_in, "MAX_FILES", 3)
    for number in range(5):
        classroom.write(tmp_path / f"{number}.txt", "x")
    snapshot = handed_in.read(tmp_path, TINY)
    assert len(snapshot.files) == 3 and "left out" in snapshot.left_out[0]


def test_a_large_notebook_is_not_even_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_NOTEBOOK_BYTES", 100)
    classroom.write(tmp_path / "a.ipynb", "[" * 200)
    with pytest.raises(intake.Unreadable, match="Clear its outputs"):
        intake.read(tmp_path / "a.ipynb")


def test_nbgraders_exporter_reads_what_nbformat_stumbles_over(
    own_lab: Lab, tmp_path: Path
) -> None:
    path = tmp_path / f"{TINY}.ipynb"
    reader = intake.ReadSubmission(default_preprocessors=[])
    for kind in ("byte_order_mark", "odd_types", "lone_surrogates"):
        classroom.ODD[kind](tmp_path, own_lab)
        text, _ = reader.from_filename(str(path))
        sources = [cell.source for cell in nbformat.reads(text, 4).cells]
        assert len(sources) == len(nbformat.read(own_lab.solution, 4).cells)


# --- whose fault ----------------------------------------------------------------------


def test_a_submission_that_nbgrader_cannot_grade_is_no_fault_of_the_course(
    own_lab: Lab, pretend: Pretend
) -> None:
    for student in ("ana", "bad", "zoë"):
        hand_in(own_lab, student)
    pretend(lambda t: (failing if t.student == "bad" else classroom.full_marks)(t))
    result = run(own_lab)
    assert result.faults == ()
    assert [(row.state, row.reason) for row in result.rows] == [
        ("graded", ""),
        ("failed", "broken"),
        ("graded", ""),
    ]


def test_a_lab_that_cannot_be_graded_even_untouched_is_the_courses_fault(
    own_lab: Lab, pretend: Pretend
) -> None:
    students = [f"{number:02}" for number in range(6)]
    for student in students:
        hand_in(own_lab, student)
    tried: list[str] = []

    def grade(task: Task) -> Graded:
        tried.append(task.student)
        return failing(task)

    pretend(grade)
    result = run(own_lab)
    assert "01_tiny cannot be graded, not even untouched: broken" in result.faults
    assert [row.state for row in result.rows] == ["not graded"] * 6
    assert len(tried) < 6  # the others were spared
    pretend(classroom.full_marks)
    assert [row.state for row in run(own_lab).rows] == ["graded"] * 6


def test_a_scheduler_that_is_not_there_is_said(
    own_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("kvlab.grading.crew.CONNECT_SECONDS", 0.1)
    hand_in(own_lab, "ana")
    result = run(own_lab, scheduler="tcp://127.0.0.1:9")
    assert "no dask scheduler answers at tcp://127.0.0.1:9" in result.faults[0]
    assert [row.state for row in result.rows] == ["not graded"]


def test_workers_that_all_leave_end_the_run(
    own_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def nobody(
        jobs: int, scheduler: str, patience: float, modules: list[str]
    ) -> Iterator[Crew]:
        with ThreadPoolExecutor(1) as executor:
            gone = threading.Event()
            executor.submit(gone.wait)
            try:
                yield Crew(executor, lambda: 1, patience, lambda: False)
            finally:
                gone.set()

    hand_in(own_lab, "ana")
    monkeypatch.setattr(many, "crew", nobody)
    monkeypatch.setattr(many, "LOOK_AGAIN", 0.1)
    result = run(own_lab)
    assert "no worker is left to grade" in result.faults[0]
    assert [row.state for row in result.rows] == ["not graded"]


def test_workers_of_another_version_are_refused(own_lab: Lab, pretend: Pretend) -> None:
    hand_in(own_lab, "ana")
    pretend(lambda task: replace(classroom.full_marks(task), version="0"))
    (fault,) = run(own_lab).faults
    assert "the workers have kvlab 0" in fault


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda lab: lab.solution.unlink(), "run `make build` first"),
        (lambda lab: lab.solution.write_text("{"), "cannot be read"),
        (
            lambda lab: (lab.solution.parents[2] / "nbgrader_config.py").write_text(
                "("
            ),
            "nbgrader_config.py cannot be used: SyntaxError",
        ),
        (
            lambda lab: shutil.rmtree(lab.solution.parents[2] / "submitted"),
            "submissions are expected in submitted/STUDENT/LAB/LAB.ipynb",
        ),
    ],
    ids=["no solution", "broken solution", "broken settings", "no submissions"],
)
def test_a_fault_of_the_course_exits_with_2(
    own_lab: Lab, pretend: Pretend, spoil: Callable[[Lab], object], said: str
) -> None:
    hand_in(own_lab, "ana")
    spoil(own_lab)
    arguments = ["autograde", "--root", str(own_lab.solution.parents[2])]
    result = CliRunner().invoke(commands.app, arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_without_a_sandbox_nothing_is_graded_unless_it_is_switched_off(
    own_lab: Lab, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_in(own_lab, "ana")
    monkeypatch.setattr("kvlab.grading.sandbox.why_not", lambda: "There is none.")
    for said in ("", "on"):
        monkeypatch.setenv("SANDBOX", said)
        with pytest.raises(CourseError, match=r"There is none.*SANDBOX=off"):
            run(own_lab)
    monkeypatch.setenv("SANDBOX", "off")
    taken: list[Task] = []
    pretend(lambda given: taken.append(given) or classroom.full_marks(given))  # type: ignore[func-returns-value]
    assert [row.points for row in run(own_lab).rows] == [20]
    assert taken[0].lab.sandbox == "off"


def test_failed_submissions_exit_with_0(own_lab: Lab, pretend: Pretend) -> None:
    hand_in(own_lab, "ana").joinpath(f"{TINY}.ipynb").unlink()
    hand_in(own_lab, "zoë")
    arguments = ["autograde", "--root", str(own_lab.solution.parents[2])]
    result = CliRunner().invoke(commands.app, arguments)
    assert result.exit_code == 0
    assert "ana 01_tiny failed: 01_tiny.ipynb is missing" in result.output
    assert "zoë 01_tiny graded 20 / 20" in result.output


# --- killed in between ----------------------------------------------------------------


class Killed(BaseException):
    """What a test raises where a process would be killed."""


def killed(*arguments: object, **named: object) -> None:
    raise Killed


@pytest.mark.parametrize(
    ("where", "what"),
    [(book, "place"), (book, "enter"), (ledger.Ledger, "write")],
    ids=["before the folder", "before the gradebook", "before the ledger"],
)
def test_killed_between_two_steps_the_next_run_ends_the_same(
    own_lab: Lab,
    pretend: Pretend,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    what: str,
) -> None:
    hand_in(own_lab, "ana")
    root = own_lab.solution.parents[2]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(where, what, killed)
        run(own_lab)
    (row,) = run(own_lab).rows
    assert (row.state, row.points, row.old_points) == ("graded", 20, None)
    assert list(rows_in(root)) == ["ana"]
    assert (root / "autograded" / "ana" / TINY / f"{TINY}.ipynb").is_file()


def test_rows_of_a_submission_are_written_all_or_none(
    own_lab: Lab, pretend: Pretend
) -> None:
    hand_in(own_lab, "ana")

    def half(task: Task) -> Graded:
        graded = classroom.full_marks(task)
        return replace(graded, grades=graded.grades[:2])

    pretend(half)
    with pytest.raises(KeyError):
        run(own_lab)
    assert rows_in(own_lab.solution.parents[2]) == {}


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    def graded(*files: tuple[str, bytes, int]) -> Graded:
        return Graded(LabResult(TINY, "ana"), files=files)

    folder = tmp_path / "ana" / TINY
    book.place(folder, graded(("a.ipynb", b"1", 0o444), ("d/old.txt", b"", 0o444)))
    (tmp_path / "ana" / f".{TINY}.new").mkdir()  # left by a run that was killed
    book.place(folder, graded(("a.ipynb", b"2", 0o444)))
    assert [p.name for p in folder.iterdir()] == ["a.ipynb"]
    assert (folder / "a.ipynb").read_bytes() == b"2"
    assert [p.name for p in folder.parent.iterdir()] == [TINY]


def test_what_is_lost_from_folder_or_gradebook_is_graded_again(
    own_lab: Lab, pretend: Pretend
) -> None:
    root = own_lab.solution.parents[2]
    hand_in(own_lab, "ana")
    hand_in(own_lab, "zoë")
    run(own_lab)
    shutil.rmtree(root / "autograded" / "ana")
    with Gradebook(f"sqlite:///{root / 'gradebook.db'}") as gradebook:
        gradebook.remove_submission(TINY, "zoë")
    assert [row.state for row in run(own_lab).rows] == ["graded", "graded"]
    assert set(rows_in(root)) == {"ana", "zoë"}


def test_two_runs_at_once_are_refused(own_lab: Lab) -> None:
    with (
        ledger.only_one(own_lab.solution.parents[2]),
        pytest.raises(CourseError, match=rf"another run \(process {os.getpid()}\)"),
    ):
        run(own_lab)


def test_a_broken_ledger_is_said(own_lab: Lab) -> None:
    root = own_lab.solution.parents[2]
    (root / ".grading" / "ledger.db").write_text("no database " * 100)
    with pytest.raises(CourseError, match="Move it away"):
        run(own_lab)


def test_a_gradebook_that_fails_ends_the_run_and_keeps_what_was_graded(
    own_lab: Lab, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for student in ("ana", "zoë"):
        hand_in(own_lab, student)
    enter = book.enter

    def fail_for_zoe(gradebook: Gradebook, student: str, graded: Graded) -> None:
        if student == "zoë":
            raise OperationalError("INSERT", {}, Exception("database is locked"))
        enter(gradebook, student, graded)

    monkeypatch.setattr(book, "enter", fail_for_zoe)
    with pytest.raises(CourseError, match=r"cannot be used: .*database is locked"):
        run(own_lab)
    monkeypatch.undo()
    assert set(rows_in(own_lab.solution.parents[2])) == {"ana"}


# --- workers --------------------------------------------------------------------------


def test_a_worker_that_dies_costs_its_own_submission_after_one_retry(
    own_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for student in ("a", "b dies", "c"):
        hand_in(own_lab, student)
    marker = tmp_path / "marker"
    classroom.write(hand_in(own_lab, "d") / "note.txt", f"dies once: {marker}")
    monkeypatch.setenv("PYTHONPATH", str(Path(classroom.__file__).parent))
    monkeypatch.setattr("kvlab.grading.task.grade", classroom.grade_or_die)
    result = run(own_lab, jobs=1)
    assert [row.points for row in result.rows] == [20, None, 20, 20]
    dead = result.rows[1]
    assert dead.state == "failed" and "ended by signal SIGKILL" in dead.reason
    assert result.faults == () and marker.exists()
    (line,) = [
        line
        for line in ledger.lines_of(
            own_lab.solution.parents[2],
            f"sqlite:///{own_lab.solution.parents[2] / 'gradebook.db'}",
        )
        if not line.graded
    ]
    assert line.due  # the next run tries it again


def test_a_worker_that_takes_too_long_is_ended() -> None:
    own = worker.Worker()
    with pytest.raises(WorkerDied, match="longer than 0 seconds"):
        own.call(signal.sigwait, {signal.SIGUSR1}, 0.01)
    own.kill()
    assert not own.scratch.exists()


def test_a_worker_that_cannot_start_is_no_fault_of_a_submission(
    own_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_in(own_lab, "ana")
    classroom.write(tmp_path / "nbgrader.py", "raise ImportError('nbgrader is broken')")
    monkeypatch.setattr(worker, "_path", lambda: f"{tmp_path}:{ROOT / 'tools'}")
    result = run(own_lab, jobs=1)
    assert "cannot start: ImportError: nbgrader is broken" in result.faults[0]
    assert [row.state for row in result.rows] == ["not graded"]


# --- graded again ---------------------------------------------------------------------


def half_marks(task: Task) -> Graded:
    """Full marks but for the first test."""
    graded = classroom.full_marks(task)
    (todo,) = graded.result.todos
    cells = (replace(todo.cells[0], points=0.0), *todo.cells[1:])
    result = replace(graded.result, todos=(replace(todo, cells=cells),))
    lost = todo.cells[0].grade_id
    rows = [
        GradeRow(lost, 0.0, False) if r.grade_id == lost else r for r in graded.grades
    ]
    return replace(graded, result=result, grades=tuple(rows))


def test_a_changed_submission_is_graded_again_and_the_old_score_shown(
    own_lab: Lab, pretend: Pretend
) -> None:
    pretend(half_marks)
    folder = hand_in(own_lab, "ana")
    run(own_lab)
    classroom.write(folder / "more.txt", "x")
    pretend(classroom.full_marks)
    (row,) = run(own_lab).rows
    assert (row.points, row.old_points, row.old_max) == (20, 14, 20)
    assert "(was 14 / 20)" in summary.sentence(row)


def test_force_is_kept_by_the_next_run_when_it_is_killed(
    own_lab: Lab, pretend: Pretend
) -> None:
    for student in ("ana", "bo", "zoë"):
        hand_in(own_lab, student)
    run(own_lab)
    calls: list[str] = []

    def second_one_is_the_last(task: Task) -> Graded | BaseException:
        calls.append(task.student)
        return Killed() if len(calls) == 2 else half_marks(task)

    pretend(second_one_is_the_last)
    with pytest.raises(Killed):
        run(own_lab, force=True)
    pretend(half_marks)
    rows = run(own_lab).rows
    assert sorted(row.state for row in rows) == ["already graded", "graded", "graded"]
    assert {row.points for row in rows} == {14}


def test_a_regrade_that_fails_is_marked_and_the_old_score_stays_as_old(
    own_lab: Lab, pretend: Pretend
) -> None:
    root = own_lab.solution.parents[2]
    hand_in(own_lab, "ana")
    run(own_lab)
    before = rows_in(root)
    pretend(lambda t: (failing if t.student == "ana" else classroom.full_marks)(t))
    for _ in range(2):  # the second run finds it as it is
        (row,) = run(own_lab, force=True).rows
        assert (row.state, row.points, row.old_points) == ("failed", None, 20)
        assert "failed: broken (was 20 / 20)" in summary.sentence(row)
    assert rows_in(root) == before
    (row,) = run(own_lab).rows
    assert (row.state, row.old_points) == ("failed", 20)


def change(lab: Lab, old: str, new: str) -> None:
    """As an instructor who edits the solution notebook after grading."""
    text = lab.solution.read_text(encoding="utf-8")
    assert old in text
    lab.solution.write_text(text.replace(old, new), encoding="utf-8")
    root = lab.solution.parents[2]
    (template,) = (root / ".grading" / "templates").iterdir()
    shutil.copy(template, many.template_path(root, lab, many.cells_of(lab)))


def test_a_changed_test_offers_a_regrade_and_keeps_all_scores(
    own_lab: Lab, pretend: Pretend
) -> None:
    hand_in(own_lab, "ana")
    run(own_lab)
    change(own_lab, "2 is even.", "two is even.")
    hand_in(own_lab, "zoë")
    result = run(own_lab)
    assert [(row.state, row.older) for row in result.rows] == [
        ("already graded", True),
        ("graded", False),
    ]
    page = Console(record=True, width=200, file=open(os.devnull, "w"))  # noqa: SIM115
    summary.print_summary(result, page)
    assert "1 submissions were graded with an older version of the lab: --force" in (
        page.export_text()
    )
    again = run(own_lab, force=True)
    assert [row.older for row in again.rows] == [False, False]


def test_a_changed_check_marks_scores_as_older_too(
    own_lab: Lab, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_in(own_lab, "ana")
    run(own_lab)
    assert [row.older for row in run(own_lab).rows] == [False]
    monkeypatch.setattr(runtime, "source_sha256", {"checks": "f" * 64}.__getitem__)
    assert [row.older for row in run(own_lab).rows] == [True]
    assert [row.older for row in run(own_lab, force=True).rows] == [False]


@pytest.mark.parametrize(
    ("old", "new", "worth"),
    [
        ('"points": 6', '"points": 5', 17.0),
        ("test_todo_1_errors", "test_todo_1_refuses", 20.0),
    ],
    ids=["points", "a cell"],
)
def test_changed_points_or_cells_wait_for_force_and_delete_nothing_first(
    own_lab: Lab, pretend: Pretend, old: str, new: str, worth: float
) -> None:
    root = own_lab.solution.parents[2]
    for student in ("ana", "zoë"):
        hand_in(own_lab, student)
    run(own_lab)
    with Gradebook(f"sqlite:///{root / 'gradebook.db'}") as gradebook:
        gradebook.find_grade("written_1", TINY, TINY, "ana").manual_score = 1.5
        gradebook.db.commit()
    before = rows_in(root)
    change(own_lab, old, new)
    for request in ({}, {"force": True, "student": "ana"}):
        result = run(own_lab, **request)
        assert "has other cells or points now" in result.faults[0]
        assert {row.state for row in result.rows} == {"not graded"}
        assert rows_in(root) == before
    result = run(own_lab, force=True)
    assert [(row.points, row.max_points) for row in result.rows] == [(worth, worth)] * 2
    if worth != 20:
        assert [(row.old_points, row.old_max) for row in result.rows] == [(20, 20)] * 2
    assert result.faults == ()
    grades = dict((g[0], g) for g in rows_in(root)["ana"][0])  # type: ignore[attr-defined]
    assert set(grades) == {c.grade_id for c in many.cells_of(own_lab) if c.graded}
    assert grades["written_1"] == ("written_1", None, 1.5, True)
    (kept,) = (root / ".grading" / "old").iterdir()
    saved = {row["student"]: row["grades"] for row in json.loads(kept.read_text())}
    assert sum(grade["auto_score"] or 0 for grade in saved["zoë"]) == 20


def test_a_forced_submission_that_is_gone_keeps_its_score_as_old(
    own_lab: Lab, pretend: Pretend
) -> None:
    for student in ("ana", "zoë"):
        hand_in(own_lab, student)
    run(own_lab)
    shutil.rmtree(own_lab.solution.parents[2] / "submitted" / "ana")
    gone, there = run(own_lab, force=True).rows
    assert (gone.state, gone.points, gone.old_points) == ("failed", None, 20)
    assert "no longer in submitted/" in gone.reason
    assert there.points == 20


# --- what people entered, and other gradebooks ----------------------------------------


def test_scores_by_hand_extensions_and_due_dates_reach_the_grader_and_stay(
    own_lab: Lab, pretend: Pretend
) -> None:
    root = own_lab.solution.parents[2]
    hand_in(own_lab, "ana")
    run(own_lab)
    with Gradebook(f"sqlite:///{root / 'gradebook.db'}") as gradebook:
        gradebook.update_or_create_assignment(TINY, duedate="2026-01-01 12:00:00 UTC")
        gradebook.grant_extension(TINY, "ana", days=3)
        gradebook.find_grade("test_todo_1", TINY, TINY, "ana").manual_score = 5
        gradebook.db.commit()
    taken: list[Task] = []

    def grade(task: Task) -> Graded:
        taken.append(task)
        return replace(classroom.full_marks(task), penalty=2.5)

    pretend(grade)
    run(own_lab, force=True)
    (given,) = taken
    assert str(given.lab.duedate) == "2026-01-01 12:00:00"
    assert given.kept.extension is not None and given.kept.extension.days == 3
    assert given.kept.scores == (("test_todo_1", 5.0, None),)
    grades, _, penalty = rows_in(root)["ana"]
    assert ("test_todo_1", 6.0, 5.0, True) in grades  # type: ignore[operator]
    assert penalty == 2.5


def test_a_late_submission_gets_the_penalty_of_nbgrader(
    own_lab: Lab, pretend: Pretend
) -> None:
    pretend(task.grade)  # in this process
    root = own_lab.solution.parents[2]
    settings = root / "nbgrader_config.py"
    settings.write_text(
        settings.read_text() + "\nc.LateSubmissionPlugin.penalty_method = 'zero'\n"
    )
    with Gradebook(f"sqlite:///{root / 'gradebook.db'}") as gradebook:
        gradebook.update_or_create_assignment(TINY, duedate="2026-01-01 12:00:00 UTC")
    classroom.write(
        hand_in(own_lab, "ana") / "timestamp.txt", "2026-01-02 12:00:00 UTC"
    )
    (row,) = run(own_lab).rows
    assert row.points == 20
    assert rows_in(root)["ana"][2] == 20


def test_another_gradebook_gets_the_rows_and_the_courses_own_none(
    own_lab: Lab, pretend: Pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = own_lab.solution.parents[2]
    hand_in(own_lab, "ana")
    other = tmp_path / "elsewhere.db"
    shutil.copy(root / "gradebook.db", other)
    arguments = ["autograde", "--root", str(root), "--db", f"sqlite:///{other}"]
    assert CliRunner().invoke(commands.app, arguments).exit_code == 0
    assert set(rows_in(root, f"sqlite:///{other}")) == {"ana"}
    assert rows_in(root) == {}
    assert [row.state for row in run(own_lab).rows] == ["graded"]  # in its own, too
    seen: list[str] = []
    monkeypatch.setattr(
        "kvlab.grading.engine.Gradebook", lambda url, course_id: seen.append(url)
    )
    url = "postgresql+psycopg://ada:p%40ss@db.example/grades?sslmode=require"
    with pytest.raises((AttributeError, TypeError)):
        run(own_lab, db_url=url)
    assert seen == [url]


def test_ones_own_practice_is_no_submission(own_lab: Lab, pretend: Pretend) -> None:
    hand_in(own_lab, "me")
    hand_in(own_lab, "ana")
    assert [row.student for row in run(own_lab).rows] == ["ana"]
    assert [row.student for row in run(own_lab, student="me").rows] == ["me"]


def test_ones_own_practice_does_not_keep_a_changed_lab_from_a_class(
    own_lab: Lab, pretend: Pretend
) -> None:
    hand_in(own_lab, "me")
    run(own_lab, student="me")
    change(own_lab, '"points": 6', '"points": 5')
    hand_in(own_lab, "ana")
    result = run(own_lab)
    assert [(row.student, row.points) for row in result.rows] == [("ana", 17)]
    assert result.faults == ()


# --- what a person sees ---------------------------------------------------------------


def test_the_summary_counts_by_lab_and_names_what_needs_a_look() -> None:
    line = Line("zoë", "02", "", "", 3, 20, notes=("Repaired it.",))
    rows = (
        Row("ana", "01", "graded", 20, 20, 12, 20),
        Row("bo", "01", "failed", None, 20, 7, 20, reason="It is [bold]empty[/]."),
        many._row_of(line),
    )
    page = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    summary.print_summary(Summary(rows, ("the course is broken",)), page)
    text = " ".join(page.export_text().split())
    for part in (
        "01 1 0 1 0 0",
        "02 0 1 0 0 0",
        "all 1 1 1 0 0",
        "bo 01 failed: It is [bold]empty[/]. (was 7 / 20)",
        "ana 01 graded 20 / 20 (was 12 / 20)",
        "zoë 02: Repaired it.",
        "the course is broken",
    ):
        assert part in text, part


def test_progress_in_a_terminal_shows_the_time_left() -> None:
    page = Console(
        record=True,
        width=100,
        force_terminal=True,
        file=open(os.devnull, "w"),  # noqa: SIM115
    )
    with summary.progress_on(page, "grading") as step:
        step(3, 10, "")
        step(4, 10, "ana 01 graded")
    assert "left" in page.export_text()


def test_the_class_is_the_same_for_the_same_seed(own_lab: Lab, tmp_path: Path) -> None:
    made = []
    for name in ("first", "second", "third"):
        root = tmp_path / name
        seed = 2 if name == "third" else 1
        made.append(classroom.make_class(root, own_lab, 40, RIGHT, WRONG, seed))
    assert made[0] == made[1] != made[2]
    kinds = [member.kind for member in made[0]]
    assert sum(kind in classroom.ODD for kind in kinds) == 4
    assert {"right", "wrong", "untouched"} <= set(kinds)
    first, second = (
        {
            p.relative_to(root): p.read_bytes()
            for p in root.rglob("*.ipynb")
            if p.is_file()
        }
        for root in (tmp_path / "first", tmp_path / "second")
    )
    assert first == second
