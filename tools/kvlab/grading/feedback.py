"""Writes every student's feedback page, many at once.

Called by `kvlab feedback`. nbgrader writes the pages, with what nbgrader_config.py hides from them. Never
changes a score, and one page that cannot be written stops no other.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from kvlab.course import CourseError
from kvlab.grading import engine, ledger
from kvlab.grading.crew import crew, outcome
from kvlab.grading.many import open_course
from kvlab.grading.worker import WorkerDied

PATIENCE = 300.0  # seconds for one page


@dataclass(frozen=True)
class Page:
    """One student's page for one lab.

    reason  why it cannot be graded, which is then all that the page says
    problem why there is no page; "" when there is one
    """

    root: Path
    db_url: str
    student: str
    lab: str
    reason: str = ""
    problem: str = ""

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.root / "feedback" / self.student / self.lab / f"{self.lab}.html"


def write_all(
    root: Path,
    labs: Sequence[str],
    student: str = "",
    jobs: int = 0,
    db_url: str = "",
    report: Callable[[int, int, Page | None], None] = lambda done, total, page: None,
) -> list[Page]:
    """All pages, in order of student and lab.

    labs     whose pages are written
    student  one student; all but one's own practice when empty
    raises CourseError when no page can be written at all
    """
    wanted = _wanted(root, labs, student, db_url)
    report(0, len(wanted), None)
    written = []
    with crew(jobs, "", PATIENCE) as team:
        pages = {team.submit(write, page): page for page in wanted}
        for future in as_completed(pages):
            try:
                page = outcome(future)
            except WorkerDied as death:
                asked = pages[future]
                page = _failed(asked, f"the process that wrote it ended ({death})")
            written.append(page)
            report(len(written), len(pages), page)
    return sorted(written, key=lambda page: (page.student, page.lab))


def write(page: Page) -> Page:
    """Writes one page, in whatever process this is called."""
    if page.reason:
        try:
            page.path.parent.mkdir(parents=True, exist_ok=True)
            ledger.write_atomically(page.path, _page_with(page).encode())
        except OSError as error:
            return _failed(page, str(error))
        return page
    api = open_course(page.root, page.db_url)
    with engine.quietly():
        result = api.generate_feedback(page.lab, page.student, force=True)
    if result["success"] and page.path.is_file():
        return page
    text = result.get("log") or result.get("error") or "nbgrader wrote no page"
    return _failed(page, " ".join(text.strip().split("\n")[-1].split()))


def _failed(page: Page, problem: str) -> Page:
    return replace(page, problem=problem)


def _wanted(root: Path, labs: Sequence[str], student: str, db_url: str) -> list[Page]:
    """What has a graded notebook, and what has a reason in its place."""
    url = open_course(root, db_url).coursedir.db_url
    reasons = {
        (line.student, line.lab): line.reason
        for line in ledger.lines_of(root, url)
        if not line.graded
    }
    graded = {
        (path.parent.parent.name, path.parent.name)
        for path in (root / "autograded").glob("*/*/*.ipynb")
        if path.stem == path.parent.name
    }
    chosen = [
        Page(root, db_url, who, lab, reasons.get((who, lab), ""))
        for who, lab in sorted(graded | set(reasons))
        if lab in labs and (who == student if student else who != engine.PRACTICE)
    ]
    if not chosen:
        raise CourseError("nothing is graded yet: run `make autograde` first")
    return chosen


def _page_with(page: Page) -> str:
    """The page of a submission that could not be graded."""
    title = html.escape(page.lab)
    reason = html.escape(page.reason)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{title}</title></head>\n"
        f"<body><h1>{title}</h1>\n<p>This submission could not be graded.</p>\n"
        f"<p>{reason}</p>\n</body></html>\n"
    )
