"""Figures of the paired experiment: memory against context, time against window, quality.

Called by `kvlab.matrix.report` and lab 06. Draws what the JSON of a run says and judges nothing:
a hollow mark is a row that the run itself refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from kvlab.plots import PALETTE, bare, new_figure

Json = dict[str, Any]
MIB = 2**20
CONTEXT, WINDOW = "context_capacity", "residual_window"
COLOURS = ("blue", "orange", "green", "purple", "sky", "yellow")
MARKS = ("o", "s", "^", "D", "v", "P")
# the cache's line is broad and pale: where it and a peak are the same, both can be seen
LINES: dict[str, dict[str, Any]] = {
    "cache_bytes_saved": {"linewidth": 6, "alpha": 0.3},
    "incremental_peak_saved_bytes": {"linestyle": "-"},
    "decode_incremental_peak_saved_bytes": {"linestyle": "--"},
}
FAILED = {
    "peak_saved": "peak",
    "nll_increase": "NLL",
    "topk_overlap": "overlap",
    "latency_ratio": "time",
}


def capacity(record: Json) -> Figure:
    """Left: bytes saved against context. Right: the same as a share of the baseline's peak.

    Solid: the peak over the whole run, which the gate looks at. Dashed: the peak after the
    prefill. Broad and pale: the bytes of the cache object.
    """
    figure, (left, right) = _row(2, 11.5, 4.6)
    names = _candidates(record)
    for index, (name, colour, mark) in enumerate(names):
        rows = _rows(record, name, CONTEXT)
        apart = _beside(index, len(names))
        contexts = [row["context_length"] * apart for row in rows]
        for key, look in LINES.items():
            heights = [row[key] / MIB for row in rows]
            left.plot(contexts, heights, color=colour, **look)
        shares = [100 * row["incremental_peak_reduction_ratio"] for row in rows]
        right.plot(contexts, shares, "-", color=colour)
        for at, row, share in zip(contexts, rows, shares, strict=True):
            saved = row["incremental_peak_saved_bytes"] / MIB
            for ax, height in ((left, saved), (right, share)):
                _mark(ax, at, height, row, colour, mark)
    floor = record["workload"]["acceptance"]["peak_saved_bytes_above"]
    for ax, gate in ((left, floor / MIB), (right, 0.0)):
        _forbid(ax, below=gate, text="gate: must save more than this")
        _context_axis(ax, record)
    left.set_ylabel("saved against DynamicCache (MiB)")
    left.set_title("Memory saved by a quantized cache")
    right.set_ylabel("saved, of the baseline's incremental peak (%)")
    right.set_title("The same as a share of the peak")
    labels = ("the cache itself", "peak of the whole run", "peak after the prefill")
    lines = [
        Line2D([], [], color="black", label=label, **look)
        for label, look in zip(labels, LINES.values(), strict=True)
    ]
    _legend(figure, record, lines)
    return figure


def latency(record: Json) -> Figure:
    """Time of the run over the baseline's. Left: against window. Right: against context.

    Small dots are the repeats, each over the baseline's repeat beside it.
    """
    figure, (left, right) = _row(2, 11.5, 4.6, sharey=True)
    panels = ((left, WINDOW, "residual_length"), (right, CONTEXT, "context_length"))
    names = _candidates(record)
    for ax, role, place in panels:
        for index, (name, colour, mark) in enumerate(names):
            rows = _rows(record, name, role)
            at = [row[place] * _beside(index, len(names)) for row in rows]
            ratios = [row["latency_ratio_candidate_over_baseline"] for row in rows]
            ax.plot(at, ratios, "-", color=colour)
            for row, x, y in zip(rows, at, ratios, strict=True):
                repeats = row["latency_ratio_by_repeat"]
                ax.plot([x] * len(repeats), repeats, ".", color=colour, alpha=0.5)
                _mark(ax, x, y, row, colour, mark)
        _line(ax, 1.0, "as long as DynamicCache")
    limit = record["workload"]["acceptance"]["latency_ratio_at_most"]
    highest = max(
        (r["latency_ratio_candidate_over_baseline"] for r in _all_rows(record)),
        default=1.0,
    )
    left.set_ylim(bottom=0, top=max(limit, highest) * 1.15)
    for ax in (left, right):
        _forbid(ax, above=limit, text=f"gate: at most {limit:.2f} times")
    window = record["workload"]["window_context_length"]
    left.set_title(f"Time against window, at a context of {window:,} tokens")
    left.set_ylabel("time over DynamicCache's (ratio of medians)")
    _ticks(
        left,
        record["workload"]["window_residual_lengths"],
        _notes(record, WINDOW, "residual_length"),
    )
    left.set_xlabel(f"window (tokens); under it the verdict on {_required(record)}")
    windows = record["workload"]["context_residual_length"]
    right.set_title(f"Time against context, with a window of {windows}")
    _context_axis(right, record)
    dot = Line2D([], [], color="black", linestyle="", marker=".", label="one repeat")
    _legend(figure, record, [dot])
    return figure


def quality(record: Json) -> Figure:
    """Left: NLL increase and, middle, overlap on the fixed trajectory, a place a row.

    Right: KL and NLL increase on natural text against window. Bars are one standard error.
    """
    figure, (left, middle, right) = _row(3, 14.5, 4.8)
    places = _places(record)
    names = _candidates(record)
    acceptance = record["workload"]["acceptance"]
    for index, (name, colour, mark) in enumerate(names):
        shift = 0.16 * (index - (len(names) - 1) / 2)
        for row in _rows(record, name):
            x = places.index(_place(row)) + shift
            for ax, value, error in (
                (
                    left,
                    row["fixed_continuation_nll_delta"],
                    row["fixed_continuation_nll_delta_standard_error"],
                ),
                (
                    middle,
                    row["mean_topk_overlap"],
                    row["mean_topk_overlap_standard_error"],
                ),
            ):
                ax.errorbar(
                    x, value, yerr=error or 0, color=colour, linestyle="", capsize=3
                )
                _mark(ax, x, value, row, colour, mark)
    tokens, topk = (record["workload"][k] for k in ("quality_tokens", "quality_topk"))
    for ax in (left, middle):
        ax.set_xticks(range(len(places)), [label for _, _, label in places])
        ax.set_xlim(-0.6, len(places) - 0.4)
        ax.set_xlabel("row: a context, or w and a window (tokens)")
    _line(left, 0.0, "")
    _gate_above(left, acceptance["nll_increase_at_most"], "nats")
    left.set_ylabel("NLL increase (nats per token)")
    left.set_title(f"{tokens} fixed tokens: NLL increase")
    middle.set_ylim(
        min(middle.get_ylim()[0], acceptance["topk_overlap_at_least"]), 1.05
    )
    middle.set_ylim(bottom=middle.get_ylim()[0] - 0.1)
    _forbid(
        middle,
        below=acceptance["topk_overlap_at_least"],
        text=f"gate: at least {acceptance['topk_overlap_at_least']:.2f}",
    )
    middle.set_ylabel(f"overlap of the top {topk} tokens (share)")
    middle.set_title(f"{tokens} fixed tokens: top-{topk} overlap")
    lines = _natural(right, record)
    _legend(figure, record, lines)
    return figure


def _natural(ax: Axes, record: Json) -> list[Line2D]:
    """KL (filled) and NLL increase (crosses) on natural text."""
    natural = record["natural_text_quality"]
    ax.set_title("Natural text")
    ax.set_xlabel("residual window (tokens)")
    if natural is None:
        ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center")
        return []
    windows: set[int] = set()
    names = _candidates(record)
    for index, (name, colour, mark) in enumerate(names):
        ours = [c for c in natural["candidates"] if c["candidate_id"] == name]
        windows |= {c["residual_length"] for c in ours}
        at = [c["residual_length"] * _beside(index, len(names)) for c in ours]
        for key, style, marker in (("kl", "-", mark), ("nll_increase", "--", "x")):
            ax.errorbar(
                at,
                [c[key] for c in ours],
                yerr=[c[f"{key}_standard_error"] or 0 for c in ours],
                color=colour,
                linestyle=style,
                marker=marker,
                capsize=3,
            )
    _line(ax, 0.0, "")
    if windows:
        _ticks(ax, sorted(windows))
    ax.set_ylabel("against DynamicCache (nats per token)")
    ax.set_title(f"{natural['scored_tokens']:,} tokens of natural text")
    return [
        Line2D([], [], color="black", linestyle="-", label="KL (right)"),
        Line2D(
            [],
            [],
            color="black",
            linestyle="--",
            marker="x",
            label="NLL increase (right)",
        ),
    ]


# ---- rows ---------------------------------------------------------------------------


def _all_rows(record: Json) -> list[Json]:
    matrices = [record["measurement_matrix"]] + [
        further["measurement_matrix"] for further in record["further_candidates"]
    ]
    return [row for matrix in matrices for row in matrix]


def _rows(record: Json, name: str, role: str = "") -> list[Json]:
    """One candidate's rows, the shortest context and window first."""
    rows = [
        row
        for row in _all_rows(record)
        if row["candidate_id"] == name and role in ("", row["matrix_role"])
    ]
    return sorted(rows, key=lambda row: (row["context_length"], row["residual_length"]))


def _candidates(record: Json) -> list[tuple[str, str, str]]:
    """(candidate, colour, mark) of every candidate that has a row; the required one first."""
    names = list(dict.fromkeys(row["candidate_id"] for row in _all_rows(record)))
    return [
        (name, PALETTE[COLOURS[i % len(COLOURS)]], MARKS[i % len(MARKS)])
        for i, name in enumerate(names)
    ]


def _required(record: Json) -> str:
    """The candidate that the decision is about."""
    return str(record["candidate_family"]["id"])


def _place(row: Json) -> tuple[str, int, str]:
    if row["matrix_role"] == CONTEXT:
        return CONTEXT, row["context_length"], f"{row['context_length']:,}"
    return WINDOW, row["residual_length"], f"w {row['residual_length']}"


def _places(record: Json) -> list[tuple[str, int, str]]:
    """Every row's place on a common axis: contexts, then windows."""
    return sorted({_place(row) for row in _all_rows(record)})


# ---- drawing ------------------------------------------------------------------------


def _row(columns: int, width: float, height: float, **options: Any) -> Any:
    """A figure and its one row of axes."""
    figure, axes = new_figure(1, columns, width, height, **options)
    for ax in axes[0]:
        bare(ax)
    return figure, axes[0]


def _mark(ax: Axes, x: float, y: float, row: Json, colour: str, mark: str) -> None:
    """A row: filled when it was accepted, hollow when not."""
    face = colour if row["eligible"] else "white"
    ax.plot(x, y, mark, color=colour, markerfacecolor=face, markersize=8, zorder=3)


def _notes(record: Json, role: str, place: str) -> dict[int, str]:
    """Under each place of a matrix: what the gates said about the required candidate there."""
    rows = _rows(record, _required(record), role)
    notes = {}
    for row in rows:
        failed = [FAILED[gate] for gate, passed in row["gates"].items() if not passed]
        lines = [f"refused: {', '.join(failed)}"] if failed else ["accepted"]
        if role == WINDOW:
            count = row["candidate"]["overflow_count"]
            lines.insert(0, f"{count} overflow{'s' if count != 1 else ''}")
        notes[row[place]] = "\n".join(lines)
    return notes


def _beside(index: int, count: int) -> float:
    """A factor that moves equal places on a logarithmic axis a little apart."""
    return float(1.04 ** (index - (count - 1) / 2))


def _forbid(
    ax: Axes, text: str, below: float | None = None, above: float | None = None
) -> None:
    """Shades what a gate refuses and draws its edge."""
    bottom, top = ax.get_ylim()
    gate = below if below is not None else above
    assert gate is not None
    if below is not None:
        bottom = min(bottom, gate - 0.08 * (top - gate))
        ax.axhspan(bottom, gate, color=PALETTE["grey"], alpha=0.15, linewidth=0)
    else:
        top = max(top, gate + 0.08 * (gate - bottom))
        ax.axhspan(gate, top, color=PALETTE["grey"], alpha=0.15, linewidth=0)
    ax.axhline(gate, color=PALETTE["vermilion"], linewidth=1.2, linestyle="-.")
    ax.annotate(
        text,
        (0.01, gate),
        xycoords=("axes fraction", "data"),
        xytext=(0, -3 if below is not None else 3),
        textcoords="offset points",
        va="top" if below is not None else "bottom",
        color=PALETTE["vermilion"],
        fontsize=8,
    )
    ax.set_ylim(bottom, top)


def _gate_above(ax: Axes, gate: float, unit: str) -> None:
    """The gate as an edge where it is near the data, in words where it is far above."""
    top = ax.get_ylim()[1]
    if gate <= 3 * max(top, 1e-9):
        _forbid(ax, above=gate, text=f"gate: at most {gate:.2f} {unit}")
        return
    ax.text(
        0.5,
        0.97,
        f"gate: at most {gate:.2f} {unit}, far above this picture",
        transform=ax.transAxes,
        ha="center",
        va="top",
        fontsize=8,
        color=PALETTE["vermilion"],
    )
    ax.set_ylim(top=top + 0.12 * (top - ax.get_ylim()[0]))


def _line(ax: Axes, height: float, text: str) -> None:
    ax.axhline(height, color="black", linewidth=0.8)
    if text:
        ax.annotate(
            text,
            (0.01, height),
            xycoords=("axes fraction", "data"),
            xytext=(0, -3),
            textcoords="offset points",
            va="top",
            fontsize=8,
        )


def _context_axis(ax: Axes, record: Json) -> None:
    notes = _notes(record, CONTEXT, "context_length")
    _ticks(ax, record["workload"]["context_lengths"], notes)
    ax.set_xlabel(f"context (tokens); under it the verdict on {_required(record)}")


def _ticks(
    ax: Axes, values: Sequence[int], notes: Mapping[int, str] | None = None
) -> None:
    """A logarithmic axis that names the measured values and no others, with a note each."""
    ax.set_xscale("log", base=2)
    labels = [
        "\n".join(filter(None, (f"{value:,}", (notes or {}).get(value))))
        for value in values
    ]
    ax.xaxis.set_major_locator(FixedLocator(list(values)))
    ax.xaxis.set_major_formatter(FixedFormatter(labels))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(min(values) / 1.3, max(values) * 1.3)


def _legend(figure: Figure, record: Json, lines: list[Line2D]) -> None:
    """Under the panels: candidates by colour, what filled and hollow mean, line styles."""
    names = [
        Line2D([], [], color=colour, marker=mark, linestyle="-", label=name)
        for name, colour, mark in _candidates(record)
    ]
    hollow = Line2D(
        [],
        [],
        color="black",
        marker="o",
        markerfacecolor="white",
        linestyle="",
        label="hollow: refused by a gate",
    )
    handles = [*names, *lines, hollow]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 6),
        frameon=False,
    )


__all__ = ["capacity", "latency", "quality"]
