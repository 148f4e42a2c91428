"""Grades everything under submitted/: many submissions at once, each apart from all others.

Called by `kvlab autograde` and the tests. Only this process writes the gradebook and autograded/. Never
deletes a score: a submission that fails keeps what it had, marked as old. Order of what is written for a
submission: autograded/STUDENT/LAB, then its rows in the gradebook in one transaction, then its line in the
ledger; killed in between, the next run grades that submission again and writes the same.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from nbgrader.api import Gradebook, MissingEntry
from nbgrader.apps.api import NbGraderAPI

import kvlab
from kvlab import course
from kvlab.course import CourseError, Lab
from kvlab.grading import book as books
from kvlab.grading import engine, handed_in, ledger, prefork, released, sandbox, task
from kvlab.grading.crew import Crew, crew, outcome
from kvlab.grading.handed_in import Submission
from kvlab.grading.ledger import Ledger, Line
from kvlab.grading.released import ReleasedCell
from kvlab.grading.task import Graded, LabFiles, Task
from kvlab.grading.worker import WorkerDied

State = Literal["graded", "repaired", "failed", "already graded", "not graded"]
PATIENCE = 300  # seconds a submission may take beside its cells
LOOK_AGAIN = 60  # seconds without a result, after which the crew is looked for
MORE_CELLS = 20  # than the lab has, in a student's notebook


@dataclass(frozen=True)
class Request:
    """What is to be graded, and by whom.

    student    one student; all when empty
    jobs       processes; one for each core when 0
    scheduler  address of a dask scheduler, used instead
    force      grade again what was graded
    db_url     another gradebook than the course's (SQLAlchemy)
    """

    student: str = ""
    jobs: int = 0
    scheduler: str = ""
    force: bool = False
    db_url: str = ""


@dataclass(frozen=True)
class Row:
    """One submission in the summary.

    points      of the tests; None when it has none
    old_points  what it had before, when that is another number or when it failed now
    older       it was graded with an older version of the lab
    """

    student: str
    lab: str
    state: State
    points: float | None = None
    max_points: float = 0.0
    old_points: float | None = None
    old_max: float | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    older: bool = False


@dataclass(frozen=True)
class Summary:
    """What a run did.

    faults  what in the course itself kept submissions from being graded
    """

    rows: tuple[Row, ...]
    faults: tuple[str, ...] = ()

    @property
    def older(self) -> int:
        """How many submissions have a score by an older version of their lab."""
        return sum(row.older for row in self.rows)


Report = Callable[[int, int, Row | None], None]  # done, of how many, the last one


def autograde(
    root: Path,
    labs: Sequence[Lab],
    request: Request = Request(),
    report: Report = lambda done, total, row: None,
) -> Summary:
    """Grades what is not graded yet, and writes .grading/summary.json.

    raises CourseError when nothing can be graded at all
    """
    api = open_course(root, request.db_url)
    with (
        ledger.only_one(root),
        closing(Ledger(root, api.coursedir.db_url)) as lines,
        engine.gradebook(api) as book,
    ):
        run = _Run(root, api, book, lines, request, report)
        summary = run.grade(labs)
    path = ledger.folder_of(root) / "summary.json"
    ledger.write_atomically(path, as_json(summary).encode())
    return summary


def open_course(root: Path, db_url: str = "") -> NbGraderAPI:
    """nbgrader at work in the course, with its own or with another gradebook.

    raises CourseError when its settings cannot be read
    """
    try:
        if db_url:
            return course.nbgrader_api(root, root, db_url=db_url)
        return course.nbgrader_api(root, root)
    except Exception as error:  # the settings are a program
        reason = f"{type(error).__name__}: {error}"
        raise CourseError(f"nbgrader_config.py cannot be used: {reason}") from None


def sandbox_for(request: Request) -> str:
    """Whether student code is locked in: always, unless SANDBOX says something else.

    raises CourseError when it must be and cannot be
    """
    if not request.scheduler:  # else it is for its workers to find out
        try:
            sandbox.wanted("on")
        except sandbox.SandboxMissing as error:
            raise CourseError(str(error)) from None
    return os.environ.get(sandbox.SWITCH, "").lower() or "on"


def as_json(summary: Summary) -> str:
    """The summary as a JSON document."""
    counts: dict[str, int] = {}
    for row in summary.rows:
        counts[row.state] = counts.get(row.state, 0) + 1
    document = {
        "kvlab": kvlab.__version__,
        "written_at": _now(),
        "counts": counts,
        "older_version_of_the_lab": summary.older,
        "course_faults": list(summary.faults),
        "rows": [asdict(row) for row in summary.rows],
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def judged_by(cells: Sequence[ReleasedCell]) -> str:
    """The digest of what decides about a score: cells, points, tests, `kvlab.checks`."""
    judged = [
        (c.grade_id, c.cell_type, c.solution, c.points, c.source if c.locked else "")
        for c in sorted(cells, key=lambda cell: cell.grade_id)
    ]
    return _sha256(judged, task.judges())


def template_of(root: Path, lab: Lab, cells: Sequence[ReleasedCell]) -> Path:
    """A gradebook that holds the lab alone; made once, for it takes seconds."""
    path = template_path(root, lab, cells)
    if not path.is_file():
        with tempfile.TemporaryDirectory(prefix="kvlab-template-") as name:
            fresh = Path(name, "gradebook.db")
            engine.register(root, lab, open_course(root, f"sqlite:///{fresh}"))
            for older in path.parent.glob(f"{lab.name}-*.db"):
                older.unlink()
            beside = path.with_suffix(".new")
            shutil.copyfile(fresh, beside)
            beside.replace(path)
    return path


def template_path(root: Path, lab: Lab, cells: Sequence[ReleasedCell]) -> Path:
    """Where that gradebook is kept for this version of the lab."""
    folder = ledger.folder_of(root) / "templates"
    folder.mkdir(exist_ok=True)
    key = _sha256([asdict(cell) for cell in cells], version("nbgrader"))[:16]
    return folder / f"{lab.name}-{key}.db"


def cells_of(lab: Lab) -> list[ReleasedCell]:
    """The lab's marked cells, as the gradebook keeps them; [] when it has no tests.

    raises CourseError when the solution notebook cannot be read
    """
    try:
        solution = engine.solution_of(lab)
    except CourseError:
        raise
    except Exception as error:
        raise CourseError(f"{lab.solution} cannot be read: {error}") from None
    if not course.test_cells(solution):
        return []
    return [replace(cell, above="") for cell in released.in_solution_notebook(solution)]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _sha256(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class _Sent:
    """A piece of work under way; no submission when it is the lab's own trial."""

    lab: str
    submission: Submission | None = None
    digest: str = ""


@dataclass
class _Settled:
    """A lab that can be graded.

    digest  of what it judges by
    modules  what its kernels import
    trial   whether its untouched notebook could be graded; None when nobody tried
    held    results that wait for the trial
    """

    files: LabFiles
    digest: str
    code_cells: int
    modules: list[str] = field(default_factory=list)
    trial: bool | None = None
    tried: bool = False
    held: list[tuple[_Sent, Graded]] = field(default_factory=list)


class _Run:
    """One run of the coordinating process."""

    def __init__(
        self,
        root: Path,
        api: NbGraderAPI,
        book: Gradebook,
        lines: Ledger,
        request: Request,
        report: Report,
    ) -> None:
        self.root, self.api, self.book, self.lines = root, api, book, lines
        self.request, self.report = request, report
        self.sandbox = sandbox_for(request)
        self.labs: dict[str, _Settled] = {}
        self.faults: dict[str, str] = {}  # lab, or "" for all of them -> what is wrong
        self.rows: list[Row] = []
        self.total = 0

    def grade(self, labs: Sequence[Lab]) -> Summary:
        """Everything, from looking around to the last row."""
        names = [lab.name for lab in labs]
        found = self._submissions(names)
        self._settle(labs, {s.lab for s in found if not s.problem})
        if self.request.force:
            self._make_due(found, names)
        todo = [s for s in found if self._is_to_do(s)]
        self.total = len(found)
        self.report(len(self.rows), self.total, None)
        if todo:
            try:
                self._work_off(todo)
            except CourseError as error:
                self.faults[""] = str(error)
        self._say_what_was_not_done(todo)
        self._mark_what_is_gone(found, names)
        rows = sorted(self.rows, key=lambda row: (row.student, row.lab))
        return Summary(tuple(rows), tuple(self.faults.values()))

    # --- what there is ----------------------------------------------------------------

    def _submissions(self, names: Sequence[str]) -> list[Submission]:
        every = course.find_labs(self.root)
        known = [lab.name for lab in every]
        folder = self.root / "submitted"
        if not folder.is_dir():
            raise CourseError(
                f"{folder} is missing: submissions are expected in "
                "submitted/STUDENT/LAB/LAB.ipynb"
            )
        found = handed_in.submissions(folder, known)
        student = self.request.student
        if student:
            found = [s for s in found if s.student == student]
            if not found:
                raise CourseError(f"nothing is in submitted/{student}")
        else:
            found = [s for s in found if s.student != engine.PRACTICE]
        whole = set(names) == set(known)
        have = {s.student for s in found if s.lab in names}
        return [
            s
            for s in found
            if s.lab in names
            or (s.lab not in known and (whole or s.student not in have))
        ]

    def _settle(self, labs: Sequence[Lab], wanted: set[str]) -> None:
        """Prepares the labs that somebody handed in; notes what is wrong with others."""
        for lab in labs:
            if lab.name not in wanted:
                continue
            try:
                cells = cells_of(lab)
                if cells:
                    self.labs[lab.name] = self._settled(lab, cells)
            except CourseError as error:
                self.faults[lab.name] = str(error)

    def _settled(self, lab: Lab, cells: list[ReleasedCell]) -> _Settled:
        self._bring_up_to_date(lab, cells)
        template = template_of(self.root, lab, cells)
        files = task.lab_files(self.root, lab, template, self.sandbox)
        duedate = self.book.find_assignment(lab.name).duedate
        return _Settled(
            replace(files, duedate=duedate),
            judged_by(cells),
            sum(c.cell_type == "code" for c in cells),
            prefork.packages_of(engine.solution_of(lab)),
        )

    def _bring_up_to_date(self, lab: Lab, cells: list[ReleasedCell]) -> None:
        """Sees to it that the gradebook holds the lab as it is now.

        raises CourseError when scores would be lost by that, and nobody said --force
        """
        try:
            kept = released.in_gradebook(self.book, lab.name)
            submissions = self.book.assignment_submissions(lab.name)
            count = sum(s.student.id != engine.PRACTICE for s in submissions)
        except MissingEntry:
            kept, count = [], 0
        if {c.grade_id: c for c in kept} == {c.grade_id: c for c in cells}:
            return
        self.book.db.commit()  # nothing of ours is open while nbgrader writes
        if not count:
            engine.register(self.root, lab, self.api, engine.PRACTICE)
            self.book.db.expire_all()
            return
        everybody = self.request.force and not self.request.student
        if not books.same_cells(kept, cells) and not everybody:
            raise CourseError(
                f"{lab.name} has other cells or points now than when its {count} "
                "submissions were graded, so nothing was graded for it. `make autograde "
                f"FORCE=1 LAB={lab.name}` grades them all by the new version and shows "
                "old and new scores."
            )
        name = f"{lab.name}-{_now().replace(':', '')}.json"
        books.write_down(
            self.book, lab.name, ledger.folder_of(self.root) / "old" / name
        )
        books.revise(self.book, lab.name, cells)

    def _make_due(self, found: Sequence[Submission], names: Sequence[str]) -> None:
        """All that was graded is to be graded again, also by a later run."""
        due = {(s.student, s.lab) for s in found if s.lab in self.labs}
        if not self.request.student:
            due |= {(x.student, x.lab) for x in self.lines.lines() if x.lab in names}
        self.lines.make_due(due)

    # --- what is to be done -----------------------------------------------------------

    def _is_to_do(self, submission: Submission) -> bool:
        """Whether it has to be graded; when not, its row is made."""
        student, lab = submission.student, submission.lab
        if submission.problem:
            self._fail(submission, "", submission.problem)
            return False
        if lab in self.faults:
            self._add(Row(student, lab, "not graded", reason=self.faults[lab]))
            return False
        if lab not in self.labs:  # a lab without tests
            return False
        line = self.lines.find(student, lab)
        if line is None or line.due:
            return True
        settled = self.labs[lab]
        same_lab = line.lab_digest == settled.digest
        if line.digest != handed_in.read(submission.folder, lab).digest:
            return True
        if line.graded and not self._is_kept(student, lab):
            return True
        if not line.graded and not same_lab:
            return True
        self._add(_row_of(line, skipped=True, older=line.graded and not same_lab))
        return False

    def _is_kept(self, student: str, lab: str) -> bool:
        """Whether gradebook and folder still have what the ledger says."""
        notebook = self._autograded(student, lab) / f"{lab}.ipynb"
        known = books.submission_in(self.book, lab, student) is not None
        return known and notebook.is_file()

    def _autograded(self, student: str, lab: str) -> Path:
        return self.root / "autograded" / student / lab

    # --- doing it ---------------------------------------------------------------------

    def _work_off(self, todo: Sequence[Submission]) -> None:
        queue = deque(todo)
        under_way: dict[Future[Any], _Sent] = {}
        modules = dict.fromkeys(m for s in self.labs.values() for m in s.modules)
        who = self.request.jobs, self.request.scheduler, self._patience()
        with crew(*who, list(modules)) as team:
            while queue or under_way:
                while queue and len(under_way) < team.room():
                    self._send(team, queue.popleft(), under_way)
                done, _ = wait(under_way, LOOK_AGAIN, return_when=FIRST_COMPLETED)
                if not done and not team.is_there():
                    raise CourseError(
                        "no worker is left to grade. Start some and repeat the command: "
                        "what was graded is kept."
                    )
                for future in done:
                    sent = under_way.pop(future)
                    self._receive(team, sent, future, under_way)

    def _patience(self) -> float:
        settings = course.nbgrader_config(self.root)
        limit = settings.Execute.get("timeout", None)
        seconds = limit if isinstance(limit, int) and limit > 0 else 60
        cells = max(settled.code_cells for settled in self.labs.values()) + MORE_CELLS
        return float(PATIENCE + 2 * seconds * cells)

    def _send(
        self, team: Crew, submission: Submission, under_way: dict[Future[Any], _Sent]
    ) -> None:
        lab = submission.lab
        if lab in self.faults:  # found out meanwhile
            return
        snapshot = handed_in.read(submission.folder, lab)
        if snapshot.problem:
            self._fail(submission, snapshot.digest, snapshot.problem)
            return
        work = Task(
            self.labs[lab].files,
            submission.student,
            snapshot.files,
            snapshot.left_out,
            books.kept_by_people(self.book, lab, submission.student),
        )
        self.book.db.commit()
        future = team.submit(task.grade, work)
        under_way[future] = _Sent(lab, submission, snapshot.digest)

    def _receive(
        self,
        team: Crew,
        sent: _Sent,
        future: Future[Any],
        under_way: dict[Future[Any], _Sent],
    ) -> None:
        try:
            graded: Graded = outcome(future)
        except WorkerDied as death:
            self._take_death(sent, str(death))
            return
        if graded.version != task.judges():
            raise CourseError(
                f"the workers have kvlab {graded.version}, and this machine "
                f"{task.judges()}. Install the same on both."
            )
        settled = self.labs[sent.lab]
        if sent.submission is None:
            self._take_trial(settled, graded)
        elif graded.result.fault != "course":
            self._store(sent, graded)
        elif settled.trial is None:
            settled.held.append((sent, graded))
            if not settled.tried:
                settled.tried = True
                trial = team.submit(task.grade, task.untouched(settled.files))
                under_way[trial] = _Sent(sent.lab)
        elif settled.trial:
            self._store(sent, graded)

    def _take_trial(self, settled: _Settled, graded: Graded) -> None:
        """Tells whose fault it was: the lab's, or that of submissions that failed."""
        settled.trial = not graded.result.fault
        if settled.trial:
            for sent, failed in settled.held:
                self._store(sent, failed)
        else:
            name = settled.files.name
            self.faults[name] = (
                f"{name} cannot be graded, not even untouched: {graded.result.problem}"
            )

    def _take_death(self, sent: _Sent, how: str) -> None:
        settled = self.labs[sent.lab]
        if sent.submission is None:
            settled.trial = False
            self.faults[sent.lab] = f"{sent.lab} cannot be graded: {how}"
            return
        reason = (
            f"The process that graded it came to its end twice ({how}), so nothing of "
            "it could be judged."
        )
        self._fail(sent.submission, sent.digest, reason, due=True)

    # --- keeping it -------------------------------------------------------------------

    def _store(self, sent: _Sent, graded: Graded) -> None:
        submission, result = sent.submission, graded.result
        assert submission is not None
        if result.fault:
            self._fail(submission, sent.digest, result.problem, result.notes)
            return
        student, lab = submission.student, submission.lab
        old, old_max = self._before(student, lab)
        if (old, old_max) == (result.points, result.max_points):
            old = old_max = None
        books.place(self._autograded(student, lab), graded)
        books.enter(self.book, student, graded)
        line = Line(
            student,
            lab,
            sent.digest,
            self.labs[lab].digest,
            result.points,
            result.max_points,
            old,
            old_max,
            notes=result.notes,
            seconds=graded.seconds,
            graded_at=_now(),
        )
        self.lines.write(line)
        self._add(_row_of(line))

    def _fail(
        self,
        submission: Submission,
        digest: str,
        reason: str,
        notes: tuple[str, ...] = (),
        due: bool = False,
    ) -> None:
        """Notes a reason in the place of a score; what it had before stays, as old."""
        student, lab = submission.student, submission.lab
        old, old_max = self._before(student, lab)
        settled = self.labs.get(lab)
        lab_digest = settled.digest if settled else ""
        line = Line(
            student,
            lab,
            digest,
            lab_digest,
            None,
            course.POINTS_PER_LAB,
            old,
            old_max,
            reason,
            notes,
            graded_at=_now(),
            due=due,
        )
        if not submission.problem or lab in self.labs:
            self.lines.write(line)
        self._add(_row_of(line))

    def _before(self, student: str, lab: str) -> tuple[float | None, float | None]:
        """The score that a submission had, and of how much."""
        line = self.lines.find(student, lab)
        if line is not None and line.graded:
            return line.points, line.max_points
        if line is not None and line.old_points is not None:
            return line.old_points, line.old_max
        submission = books.submission_in(self.book, lab, student)
        return (None, None) if submission is None else books.points_of_tests(submission)

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        if self.total:
            self.report(len(self.rows), self.total, row)

    # --- what is left -----------------------------------------------------------------

    def _say_what_was_not_done(self, todo: Sequence[Submission]) -> None:
        """A row for everything that the course, and not its author, kept from a score."""
        done = {(row.student, row.lab) for row in self.rows}
        for submission in todo:
            student, lab = submission.student, submission.lab
            if (student, lab) not in done:
                reason = self.faults.get(lab) or self.faults.get("", "")
                old, old_max = self._before(student, lab)
                self._add(
                    Row(
                        student,
                        lab,
                        "not graded",
                        old_points=old,
                        old_max=old_max,
                        reason=reason,
                    )
                )

    def _mark_what_is_gone(
        self, found: Sequence[Submission], names: Sequence[str]
    ) -> None:
        """A submission that is to be graded again, and is no longer there."""
        present = {(s.student, s.lab) for s in found}
        for line in self.lines.lines():
            if (
                line.due
                and line.lab in names
                and (line.student, line.lab) not in present
                and self.request.student in ("", line.student)
            ):
                reason = "It is no longer in submitted/, so it was not graded again."
                gone = Submission(line.student, line.lab, self.root, "")
                self._fail(gone, line.digest, reason)


def _row_of(line: Line, skipped: bool = False, older: bool = False) -> Row:
    state: State = "repaired" if line.notes else "graded"
    if not line.graded:
        state = "failed"
    elif skipped:
        state = "already graded"
    return Row(
        line.student,
        line.lab,
        state,
        line.points,
        line.max_points,
        line.old_points,
        line.old_max,
        line.reason,
        line.notes,
        line.seconds,
        older,
    )
