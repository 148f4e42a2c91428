"""The figures that the notebooks show.

Called by the notebooks (`from kvlab import plots`). Never computes an answer to a TODO: it draws what it is given.
"""

from __future__ import annotations

import io
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

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

    alt  one or two sentences for readers who cannot see the picture
    """
    from IPython.display import display

    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110, bbox_inches="tight")
    display(
        {"image/png": picture.getvalue(), "text/plain": alt},
        metadata={"image/png": {"alt": alt}},
        raw=True,
    )
