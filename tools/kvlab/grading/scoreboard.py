"""Shows results in a terminal: a table a lab, a row a TODO, then what a person will read.

Called by `kvlab grade`. Never computes a score: it prints what it is given.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
)
from rich.table import Table
from rich.text import Text

from kvlab.grading.engine import Progress as Report
from kvlab.grading.outcome import LabResult, TodoResult

STYLES = {
    "right": "bold green",
    "wrong": "bold red",
    "error": "bold magenta",
    "timed out": "bold yellow",
    "not attempted": "dim",
}

PROTECTIONS = {
    "sandbox": "Your code ran apart from the tests, in a sandbox (bubblewrap).",
    "process": "Your code ran apart from the tests, but without a sandbox: it could "
    "read and change your files.",
}


@contextmanager
def progress_on(console: Console, labs: int) -> Iterator[Report]:
    """A callback for `grade`: a moving line in a terminal, else one line a lab.

    labs  how many there are
    """
    if not console.is_terminal:
        seen: set[str] = set()

        def print_once(lab: str, step: str) -> None:
            if lab not in seen:
                console.print(f"grading {lab}", highlight=False, markup=False)
            seen.add(lab)

        yield print_once
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=labs)
        started: list[str] = []

        def show(lab: str, step: str) -> None:
            if lab not in started:
                started.append(lab)
            bar.update(
                task,
                description=f"[bold]{lab}[/] {step}",
                completed=len(started) - 1,
            )

        yield show


def print_scoreboard(results: Sequence[LabResult], console: Console) -> None:
    """Every lab's table, notes and feedback page; then the total."""
    for result in results:
        console.print()
        console.print(_table(result))
        _print_below(result, console)
    console.print()
    console.print(_total(results))
    for protection in dict.fromkeys(result.protection for result in results):
        if protection:
            console.print(Text(PROTECTIONS[protection], style="dim"))


def _table(result: LabResult) -> Table:
    table = Table(
        title=Text(result.lab, style="bold"),
        title_justify="left",
        box=box.HORIZONTALS,
        border_style="dim",
        expand=True,
        show_footer=True,
    )
    points = _fraction(result.points, result.max_points)
    table.add_column("state", width=13, no_wrap=True)
    table.add_column("", min_width=1, no_wrap=True)
    table.add_column("TODO", Text("in this lab", style="bold"), ratio=1)
    table.add_column(
        "points", Text(points, style="bold"), justify="right", no_wrap=True
    )
    if result.problem:
        label = "not graded" if result.fault == "course" else "error"
        reason = Text(result.problem, style="red")
        table.add_row(Text(label, style="bold red"), "", reason, "")
    for todo in result.todos:
        table.add_row(
            Text(todo.state, style=STYLES[todo.state]),
            str(todo.number),
            _what(todo),
            _fraction(todo.points, todo.max_points),
        )
    return table


def _what(todo: TodoResult) -> Text:
    """The TODO's title, and the hint below it."""
    text = Text(todo.title)
    if todo.hint:
        text.append(f"\n{todo.hint}", style="italic")
    return text


def _print_below(result: LabResult, console: Console) -> None:
    """What belongs to a lab and is no row: questions, repairs, the feedback page."""
    for question in result.written:
        state = "to be read by a person" if question.answered else "not answered"
        _line(console, f"{state}: {question.title}")
    for note in result.notes:
        _line(console, f"note: {note}", style="yellow")
    if result.feedback is not None:
        _line(console, f"feedback: {os.path.relpath(result.feedback)}")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Padding(Text(text, style=style), (0, 0, 0, 2), expand=False))


def _total(results: Sequence[LabResult]) -> Text:
    points = sum(result.points for result in results)
    most = sum(result.max_points for result in results)
    text = Text("total ", style="bold")
    text.append(
        _fraction(points, most), style="bold green" if points >= most else "bold"
    )
    ungraded = [result.lab for result in results if result.fault == "course"]
    if ungraded:
        text.append(f"  (not graded: {', '.join(ungraded)})", style="red")
    return text


def _fraction(points: float, most: float) -> str:
    return f"{points:g} / {most:g}"
