"""Figures of a quality result: KL against bytes, and KL against a constant added to Keys.

Called by `kvlab.quality.report`. Draws what the JSON says and judges nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.plots import PALETTE, bare, new_figure

Json = dict[str, Any]
MB = 1e6
# family -> colour and mark; one colour a method, one mark a family
LOOKS = {
    "course mixed": ("vermilion", "o"),
    "hqq axis 1": ("blue", "s"),
    "hqq axis 0": ("sky", "D"),
    "quanto 0/0": ("yellow", "v"),
    "quanto -1/0": ("green", "^"),
    "fp8": ("purple", "P"),
    "course both per token": ("orange", "X"),
    "DynamicCache": ("black", "*"),
}
NAMES = {
    "course mixed": "course's cache (mixed axes)",
    "quanto -1/0": "quanto -1/0 (KIVI's axes)",
    "course both per token": "course's cache, both per token",
}
# family -> where the bits are written beside a mark, as alignment and points: where no other is
NOTES = {
    "course mixed": ("center", (0, -14)),
    "hqq axis 1": ("right", (-7, -3)),
    "quanto 0/0": ("left", (8, 3)),
}
FLOOR = 1e-6  # below this a float32 model cannot tell two caches apart


def against_bytes(record: Json) -> Figure:
    """KL of every cache against what it holds; a line joins a family's best at each size."""
    figure, ax = _new(9.0, 5.8)
    rows = {row["id"]: row for row in record["rows"]}
    shown = {name for name in record["table"] if rows[name]["bits"]}
    for one in record["equal_bytes"]:
        if one["kv_bits"] == 32:
            shown |= {one["course"], *one["rivals"]}
    for family in LOOKS:
        ours = [rows[n] for n in shown if rows[n]["family"] == family]
        if ours:
            _curve(ax, family, sorted(ours, key=lambda row: row["bytes"]["held"]))
    for one in record["equal_bytes"]:
        if one["kv_bits"] == 32:
            _gap(ax, rows[one["course"]], [rows[b["id"]] for b in one["best"]])
    _base(ax, record, rows)
    ax.set_yscale("log")
    ax.set_xlabel("the whole cache at the end (MB)")
    ax.set_ylabel("KL to DynamicCache (nats a token)")
    ax.set_title("What quantizing the KV cache costs, against the bytes it holds")
    ax.legend(frameon=False, fontsize=9)
    return figure


def outliers(record: Json) -> Figure:
    """KL of each cache against the constant that was added to two channels of every Key."""
    figure, ax = _new(8.0, 5.0)
    rows = {row["id"]: row for row in record["rows"]}
    shifts = record["shifts"]
    for cache in shifts["caches"]:
        ours = [rows[name] for name in cache["rows"]]
        if not ours:
            continue
        colour, mark = _look(ours[0]["family"])
        sizes = [row["setting"]["key_shift"] for row in ours]
        heights = [max(_mean_kl(row, shifts["texts"]), FLOOR) for row in ours]
        ax.plot(sizes, heights, f"{mark}-", color=colour, label=_name(cache["id"]))
    ax.set_yscale("log")
    ax.set_xticks(shifts["sizes"])
    ax.set_xlabel("added to two channels of every Key (the Keys' own unit)")
    ax.set_ylabel("KL to DynamicCache (nats a token)")
    ax.set_title("The same model, word for word, with outlier channels in its Keys")
    ax.annotate(
        f"at or below {FLOOR:g}: rounding of float32",
        (0.99, FLOOR),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    ax.axhline(FLOOR, color=PALETTE["grey"], linewidth=0.8, linestyle=":")
    # beside the axes, where no curve can be
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _curve(ax: Axes, family: str, rows: Sequence[Json]) -> None:
    colour, mark = _look(family)
    at = [row["bytes"]["held"] / MB for row in rows]
    heights = [row["kl"]["mean"] for row in rows]
    errors = [row["kl"]["standard_error_blocks"] or 0.0 for row in rows]
    ax.errorbar(
        at,
        heights,
        # an error as large as the mean has no place on a logarithmic axis
        yerr=[
            [min(e, 0.9 * h) for e, h in zip(errors, heights, strict=True)],
            errors,
        ],
        fmt=mark,
        color=colour,
        label=_name(family),
        capsize=2,
        markersize=7,
    )
    best: list[Json] = []
    for row in rows:
        if not best or row["kl"]["mean"] < best[-1]["kl"]["mean"]:
            best.append(row)
    ax.plot(
        [row["bytes"]["held"] / MB for row in best],
        [row["kl"]["mean"] for row in best],
        "-",
        color=colour,
        linewidth=1,
        alpha=0.6,
    )
    for row in rows:
        _note(ax, row, f"{row['bits']} bits")


def _note(ax: Axes, row: Json, text: str) -> None:
    side, offset = NOTES.get(row["family"], ("left", (7, 4)))
    ax.annotate(
        text,
        (row["bytes"]["held"] / MB, row["kl"]["mean"]),
        xytext=offset,
        textcoords="offset points",
        ha=side,
        fontsize=8,
        color=PALETTE[LOOKS[row["family"]][0]],
    )


def _gap(ax: Axes, course: Json, rivals: Sequence[Json]) -> None:
    """An arrow from the best rival down to the course's cache: how many times the KL."""
    if not rivals:
        return
    best = min(rivals, key=lambda row: row["kl"]["mean"])
    x = course["bytes"]["held"] / MB
    high, low = best["kl"]["mean"], course["kl"]["mean"]
    ax.annotate(
        "",
        (x, low),
        xytext=(x, high),
        arrowprops={"arrowstyle": "<->", "color": PALETTE["grey"]},
    )
    ax.annotate(
        f"÷ {high / low:.1f} at equal bytes",
        (x, (high * low) ** 0.5),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        # over the curves, which pass behind
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        zorder=3,
    )


def _base(ax: Axes, record: Json, rows: dict[str, Json]) -> None:
    dynamic = [rows[n] for n in record["table"] if rows[n]["family"] == "DynamicCache"]
    if dynamic:
        ax.text(
            0.99,
            0.02,
            f"DynamicCache: {dynamic[0]['bytes']['held'] / MB:.2f} MB, KL 0",
            transform=ax.transAxes,
            ha="right",
            fontsize=9,
        )


def _mean_kl(row: Json, texts: Sequence[str]) -> float:
    found = [text["kl"]["mean"] for text in row["by_text"] if text["text"] in texts]
    return float(sum(found) / len(found))


def _look(family: str) -> tuple[str, str]:
    colour, mark = LOOKS.get(family, ("grey", "."))
    return PALETTE[colour], mark


def _name(text: str) -> str:
    """A family's or a setting's name as a reader would say it."""
    family, _, rest = text.partition(",")
    named = NAMES.get(family, family)
    return f"{named},{rest}" if rest else named


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure with one set of axes."""
    figure, axes = new_figure(1, 1, width, height)
    bare(axes[0, 0])
    return figure, axes[0, 0]
