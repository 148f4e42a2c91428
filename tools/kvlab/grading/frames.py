"""Where in a notebook an exception came about, as IPython shows it.

Called by both ends of the border, in their kernels. Frames of packages are left out: they say nothing about
a cell, and IPython takes ten times longer for them than for all the rest of a test.
"""

from __future__ import annotations

from types import TracebackType


def rendered(error: BaseException) -> list[str]:
    """IPython's lines for an exception: a heading, a text for each cell's frame, what it says.

    Only in a kernel.
    """
    from IPython import get_ipython

    shell = get_ipython()
    lines: list[str] = shell.InteractiveTB.structured_traceback(
        type(error), error, _in_cells(error.__traceback__, shell)
    )
    return lines


def _in_cells(last: TracebackType | None, shell: object) -> TracebackType | None:
    """The same traceback without the frames that lie outside the notebook's cells."""
    kept = []
    while last is not None:
        if shell.compile.format_code_name(last.tb_frame.f_code.co_filename):  # type: ignore[attr-defined]
            kept.append(last)
        last = last.tb_next
    made = None
    for each in reversed(kept):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made
