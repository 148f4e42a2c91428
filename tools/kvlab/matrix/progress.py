"""Shows how far a run is: a bar on a terminal or in a notebook, plain lines elsewhere.

Called by `run` through one function. Writes to stdout only.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# What a run calls: (finished units, all units, what is under way)
Report = Callable[[int, int, str], None]


@contextmanager
def shown() -> Iterator[Report]:
    """The kind of progress that fits where this runs."""
    if _in_notebook() and importlib.util.find_spec("ipywidgets"):
        kind = _notebook_bar
    elif sys.stdout.isatty() and importlib.util.find_spec("rich"):
        kind = _terminal_bar
    else:
        kind = _lines
    with kind() as report:
        yield report


def silent(done: int, total: int, text: str) -> None:
    """Shows nothing."""


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config


@contextmanager
def _terminal_bar() -> Iterator[Report]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("", total=None)

        def report(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text)

        yield report


@contextmanager
def _notebook_bar() -> Iterator[Report]:
    from tqdm.notebook import tqdm  # type: ignore[import-untyped]

    with tqdm(total=1) as bar:

        def report(done: int, total: int, text: str) -> None:
            bar.total = total
            bar.set_description_str(text, refresh=False)
            bar.update(done - bar.n)
            bar.refresh()

        yield report


@contextmanager
def _lines() -> Iterator[Report]:
    def report(done: int, total: int, text: str) -> None:
        print(f"[{done:>{len(str(total))}}/{total}] {text}", flush=True)

    yield report
