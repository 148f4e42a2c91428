"""Figures of lab 05: one step of a layer, quality against bytes, the outlier experiment.

Called by the notebook of lab 05 (`plots.model`).
Never runs a model and never scores: it draws what it is given.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from kvlab.plots import PALETTE, bare, drawing, new_figure

__all__ = ["outliers", "quality", "step"]

STORED, WINDOW, NEW = PALETTE["sky"], PALETTE["yellow"], PALETTE["orange"]
# Line styles and markers differ as well as colours.
CURVES = (
    (PALETTE["grey"], ":", "s"),
    (PALETTE["blue"], "-", "o"),
    (PALETTE["vermilion"], "--", "v"),
)
FONT_WIDTH = 0.602  # of DejaVu Sans Mono: the width of a character over the font size


# --- one step -------------------------------------------------------------------------


@drawing
def step(quantized: int, window: int, new: int, flushed: int) -> Figure:
    """Tokens of a layer before, during and after one step, a box for each.

    quantized, window  tokens that are stored before the step
    new                tokens that the step brings
    flushed            tokens of the window that the step quantizes
    """
    figure, axes = new_figure(1, 1, 11, 4.1)
    ax = axes[0, 0]
    old = quantized + window
    rows = (
        ("stored before\nthe step", 4.2, quantized, old, old, True),
        ("attention\nreads", 2.2, quantized, old, old + new, False),
        (
            "stored after\nthe step",
            0.2,
            quantized + flushed,
            old + new,
            old + new,
            True,
        ),
    )
    for label, low, first_exact, first_new, end, packed in rows:
        ax.text(-0.4, low + 0.5, label, ha="right", va="center", fontsize=11)
        for token in range(end):
            kind = STORED if token < first_exact else WINDOW
            kind = NEW if token >= first_new else kind
            height = 0.5 if packed and token < first_exact else 1.0
            box = Rectangle((token + 0.04, low), 0.92, height, facecolor=kind)
            box.set_edgecolor("black")
            box.set_linewidth(0.8)
            ax.add_patch(box)
            ax.text(
                token + 0.5,
                low + height / 2,
                str(token + 1),
                ha="center",
                va="center",
                fontsize=9,
            )
        said = "packed codes" if packed else "restored"
        parts = [(0, first_exact, said), (first_exact, first_new, "window, exact")]
        if first_new < end:
            parts.append((first_new, end, "new, exact"))
        for left, right, words in parts:
            ax.text((left + right) / 2, low + 1.12, words, ha="center", fontsize=9.5)
    for x, top, words in (
        (0.5, 4.15, "unpack, restore"),
        (old + new / 2, 2.15, "append; a full group\nis quantized"),
    ):
        arrow = {"arrowstyle": "->", "linewidth": 1.3}
        ax.annotate("", (x, top - 0.62), (x, top), arrowprops=arrow)
        ax.text(x + 0.25, top - 0.3, words, fontsize=9, va="center")
    ax.set_xlim(-3.2, old + new + 3.4)
    ax.set_ylim(-0.1, 5.8)
    ax.set_title("One step of one layer: first read, then store")
    ax.axis("off")
    return figure


# --- quality and bytes ----------------------------------------------------------------


@drawing
def quality(rows: Sequence[tuple[str, float, float, float]], text: str) -> Figure:
    """A bar for each cache: how much worse it predicts a text than DynamicCache.

    rows  (name, NLL increase and its standard error in nats a token, bytes in MB)
    text  what was read, for the title
    """
    figure, axes = new_figure(1, 1, 9.5, 0.9 + 0.52 * len(rows))
    ax = axes[0, 0]
    names = [name for name, *_ in rows]
    for place, (name, more, error, size) in enumerate(rows):
        own = name.startswith("yours")
        ax.barh(
            place,
            more,
            xerr=error,
            color=PALETTE["blue"] if own else PALETTE["orange"],
            hatch="" if own else "//",
            edgecolor="white",
            error_kw={"elinewidth": 1.3, "capsize": 3},
        )
        ax.annotate(
            f"{more:+.3f} · {size:.1f} MB",
            (max(more + error, 0), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
        )
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_yticks(range(len(rows)), names)
    ax.invert_yaxis()
    ax.margins(x=0.25)
    ax.set_xlabel("NLL increase over DynamicCache (nats a token)")
    ax.set_title(f"How much worse {text} is predicted")
    bare(ax)
    return figure


# --- the outlier experiment -----------------------------------------------------------


@drawing
def outliers(
    sizes: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    texts: Mapping[str, str],
    title: str,
) -> Figure:
    """NLL against the size of the outlier channels, and what each cache goes on to write.

    sizes   what was added to two channels of every Key, in the Keys' own unit
    curves  name -> NLL at each size, nats a token; the first is the exact one
    texts   name -> the text it wrote at the largest size; what differs from the first
            text is coloured
    """
    with plt.ioff():
        figure = plt.figure(figsize=(11.5, 5.0))
    plt.close(figure)
    ax = figure.add_axes((0.065, 0.13, 0.36, 0.70))
    for (name, points), (colour, line, marker) in zip(
        curves.items(), CURVES, strict=False
    ):
        ax.plot(sizes, points, color=colour, linestyle=line, marker=marker, label=name)
    ax.set_xlabel("added to two channels of every Key (no unit)")
    ax.set_ylabel("NLL of the text (nats a token)")
    ax.set_title("How well the next token is predicted", fontsize=11)
    ax.legend(frameon=False)
    bare(ax)

    left, width, columns = 0.475, 0.515, 54
    right = figure.add_axes((left, 0.04, width, 0.79))
    right.set_xlim(0, columns)
    right.axis("off")
    size = 11.5 * width * 72 / columns / FONT_WIDTH
    words = {name: text.split() for name, text in texts.items()}
    wrapped = {
        name: textwrap.wrap(" ".join(found), columns - 2)
        for name, found in words.items()
    }
    right.set_ylim(max(14.0, sum(len(part) + 2.1 for part in wrapped.values())), 0)
    right.set_title(
        f"What the model goes on to write at +{sizes[-1]:g}", fontsize=11, loc="left"
    )
    reference = next(iter(words.values()))
    down = 1.0
    for (name, found), (colour, _, _) in zip(words.items(), CURVES, strict=False):
        right.text(0, down, name, fontweight="bold", color=colour, fontsize=10.5)
        same = _common(found, reference)
        for line in wrapped[name]:
            down += 1
            at = 1
            # Word by word, so that what the font rounds does not add up.
            for word in line.split():
                right.text(
                    at,
                    down,
                    word.replace("$", r"\$"),
                    family="DejaVu Sans Mono",
                    fontsize=size,
                    color="black" if same > 0 else PALETTE["vermilion"],
                )
                at += len(word) + 1
                same -= 1
        down += 2.1
    figure.suptitle(title, fontsize=13, fontweight="bold", y=0.965)
    return figure


def _common(words: Sequence[str], others: Sequence[str]) -> int:
    """How many words agree from the start."""
    pairs = zip(words, others, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
