"""Where in a notebook's cells an exception came about, as IPython would show it.

Called by both ends of the border, in their kernels. Only the frames of cells are shown, without colours:
IPython's own takes ten times longer for each failing call than the call, to find the module of every frame.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator

AROUND = 2  # lines of a cell that are shown before and after the one that matters


def rendered(error: BaseException) -> list[str]:
    """A heading, a text for each frame that lies in a cell, what the error says.

    Only in a kernel.
    """
    name = type(error).__name__
    heading = f"{name}{'Traceback (most recent call last)':>{74 - len(name)}}"
    try:
        said = f"{name}: {error}"
    except Exception:
        said = name
    return ["-" * 74, heading, *_frames(error), said]


def _frames(error: BaseException) -> Iterator[str]:
    from IPython import get_ipython

    known_as = get_ipython().compile.format_code_name
    for frame, line in traceback.walk_tb(error.__traceback__):
        place = frame.f_code.co_filename
        if names := known_as(place):
            function = frame.f_code.co_name
            inside = "" if function.startswith("<") else f", in {function}"
            first = max(1, line - AROUND)
            source = linecache.getlines(place)[first - 1 : line + AROUND]
            shown = (
                f"{'----> ' if n == line else '      '}{n:>3} {text.rstrip()}"
                for n, text in enumerate(source, first)
            )
            where = " ".join(names)
            yield "\n".join((f"{where}, line {line}{inside}", *shown))
