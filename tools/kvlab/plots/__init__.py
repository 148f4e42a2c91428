"""The figures that the notebooks show.

Called by the notebooks (`from kvlab import plots`). Never computes an answer to a TODO: it draws what it is given.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable
from typing import Any, Final, ParamSpec

from matplotlib.axes import Axes
from matplotlib.figure import Figure

import kvlab

# Okabe and Ito's colours, which colour-blind readers can tell apart
# (Okabe and Ito 2008, "Color Universal Design").
PALETTE: Final = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "vermilion": "#D55E00",
    "sky": "#56B4E9",
    "purple": "#CC79A7",
    "yellow": "#F0E442",
    "grey": "#7A7A7A",
    "black": "#000000",
}

Given = ParamSpec("Given")


def is_drawn() -> bool:
    """Whether the labs' figures are drawn: not while a notebook is graded."""
    return os.environ.get(kvlab.FIGURES, "").lower() != "off"


def drawing(draw: Callable[Given, Figure]) -> Callable[Given, Figure]:
    """For a function that draws: where nothing is drawn, it gives an empty figure."""

    @functools.wraps(draw)
    def drawn(*arguments: Given.args, **named: Given.kwargs) -> Figure:
        return draw(*arguments, **named) if is_drawn() else Figure()

    return drawn


def new_figure(
    rows: int, columns: int, width: float, height: float, **options: Any
) -> Any:
    """A figure and its axes [rows, columns], which no notebook displays by itself.

    width, height  inches
    options        of `matplotlib.pyplot.subplots`
    """
    import matplotlib.pyplot as plt

    given: dict[str, Any] = {"layout": "constrained", "squeeze": False} | options
    with plt.ioff():
        figure, axes = plt.subplots(rows, columns, figsize=(width, height), **given)
    plt.close(figure)
    return figure, axes


def bare(ax: Axes, *more: str) -> None:
    """Takes away the frame's top and right, and whatever other sides are named."""
    for side in ("top", "right", *more):
        ax.spines[side].set_visible(False)


def show(figure: Figure, alt: str) -> None:
    """Displays a figure in the notebook as a PNG with an alternative text.

    Where nothing is drawn, the text alone appears.

    alt  one or two sentences for readers who cannot see the picture
    """
    from IPython.display import display

    if not is_drawn():
        print(f"[Figure, not drawn here] {alt}")
        return
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110, bbox_inches="tight")
    display(
        {"image/png": picture.getvalue(), "text/plain": alt},
        metadata={"image/png": {"alt": alt}},
        raw=True,
    )
