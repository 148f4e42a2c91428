"""Shows how a class is being graded, and what came of it: progress, table, sentences.

Called by `kvlab autograde` and `kvlab feedback`. Never computes a score: it prints what it is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from kvlab.grading.many import Row, State, Summary

MOST_LINES = 40  # of one kind; the JSON file has all
STATES: tuple[State, ...] = (
    "graded",
    "repaired",
    "failed",
    "already graded",
    "not graded",
)
Step = Callable[[int, int, str], None]  # done, of how many, the last one in words


@contextmanager
def progress_on(console: Console, doing: str) -> Iterator[Step]:
    """A bar with the time left in a terminal; elsewhere a line for each that is done."""
    if not console.is_terminal:

        def print_line(done: int, total: int, last: str) -> None:
            if last:
                console.print(
                    f"[{done}/{total}] {last}",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )

        yield print_line
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(doing, total=None)
        known = False

        def move(done: int, total: int, last: str) -> None:
            nonlocal known
            if not known:  # what was skipped must not count as fast work
                bar.reset(task, total=total, completed=done)
                known = True
            bar.update(task, total=total, completed=done)

        yield move


def sentence(row: Row) -> str:
    """One submission in a line."""
    who = f"{row.student} {row.lab}".strip()
    if row.points is None:
        said = f"{row.state}: {row.reason}"
    else:
        said = f"{row.state} {row.points:g} / {row.max_points:g}"
    return f"{who} {said}{_before(row)}"


def _before(row: Row) -> str:
    if row.old_points is None:
        return ""
    worth = "" if row.old_max is None else f" / {row.old_max:g}"
    return f" (was {row.old_points:g}{worth})"


def print_summary(summary: Summary, console: Console) -> None:
    """A table with a row for each lab, then what a person should look at."""
    console.print(_table(summary.rows))
    groups = {
        "failed": [r for r in summary.rows if r.state in ("failed", "not graded")],
        "another score than before": [
            r for r in summary.rows if r.old_points is not None and r.points is not None
        ],
    }
    for title, rows in groups.items():
        _print_lines(console, title, [sentence(row) for row in rows])
    notes = [
        f"{row.student} {row.lab}: {' '.join(row.notes)}"
        for row in summary.rows
        if row.notes and row.state != "failed"
    ]
    _print_lines(console, "repaired", notes)
    if summary.older:
        _say(
            console,
            f"{summary.older} submissions were graded with an older version of the lab: "
            "--force (FORCE=1) grades them again and shows old and new scores.",
            "yellow",
        )
    for fault in summary.faults:
        _say(console, fault, "bold red")


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.HORIZONTALS, border_style="dim", show_footer=True)
    labs = sorted({row.lab for row in rows})
    counts = {lab: Counter(r.state for r in rows if r.lab == lab) for lab in labs}
    total = Counter(row.state for row in rows)
    table.add_column("lab", Text("all"), overflow="fold")
    for state in STATES:
        table.add_column(state, str(total[state]), justify="right")
    for lab in labs:
        numbers = [str(counts[lab][state]) for state in STATES]
        table.add_row(Text(lab or "(no lab)"), *numbers)
    return table


def _print_lines(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        console.print(Text(f"\n{title}:", style="bold"))
    for line in lines[:MOST_LINES]:
        _say(console, f"  {line}")
    if len(lines) > MOST_LINES:
        _say(console, f"  and {len(lines) - MOST_LINES} more in .grading/summary.json")


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)
