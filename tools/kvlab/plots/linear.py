"""The figures of lab 02: a grid of codes, the error of a linear layer, outliers, clipping.

Called by lab 02 (`plots.linear.staircase(...)`); each function returns a Figure.
Never quantizes anything: it draws the values, codes and errors it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from kvlab.plots import PALETTE, drawing

FLOAT, QUANTIZED, ERROR = PALETTE["blue"], PALETTE["orange"], PALETTE["vermilion"]
GRID = "#D9D9D9"
# Diverging and readable for colour-blind people: blue below zero, orange above.
CODES = LinearSegmentedColormap.from_list(
    "codes", [PALETTE["blue"], "#FFFFFF", PALETTE["orange"]]
)


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _plain(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    """Title on the left, labels, no frame at the top and right."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)


@drawing
def weights_on_grid(weight: Tensor, codes: Tensor, restored: Tensor) -> Figure:
    """Where each weight lands: one panel per row, arrows from float to restored.

    weight, codes, restored  [2, in], one scale for the whole tensor
    """
    figure = _figure(9.5, 4.6)
    panels = figure.subplots(2, 1)
    largest = restored.abs().max()
    step = float(largest / codes.abs().max().float())
    for row, axes in enumerate(panels):
        w, r, c = weight[row], restored[row], codes[row]
        reach = 1.25 * float(torch.maximum(w.abs().max(), r.abs().max()))
        if 2 * reach / step < 40:
            for k in range(-int(reach / step), int(reach / step) + 1):
                axes.axvline(k * step, color=GRID, lw=1.2, zorder=0)
        for a, b in zip(w.tolist(), r.tolist(), strict=True):
            axes.annotate(
                "",
                xy=(b, 0.1),
                xytext=(a, 0.9),
                arrowprops={"arrowstyle": "->", "color": PALETTE["grey"], "lw": 1.3},
            )
        axes.scatter(w, torch.ones(len(w)), s=70, color=FLOAT, zorder=3)
        axes.scatter(
            r, torch.zeros(len(r)), s=70, marker="s", color=QUANTIZED, zorder=3
        )
        for value in w.tolist():
            axes.text(value, 1.2, f"{value:g}", ha="center", va="bottom", fontsize=9)
        labels = dict(zip(r.tolist(), c.tolist(), strict=True))
        for value, code in labels.items():
            axes.text(value, -0.25, f"code {code}", ha="center", va="top", fontsize=9)
        axes.set_ylim(-0.75, 1.75)
        axes.set_xlim(-reach, reach)
        axes.set_yticks([1, 0], ["float", "restored"])
        worst = float((w - r).abs().max() / w.abs().max())
        _plain(
            axes,
            f"Output {row}: largest error is {worst:.1%} of the row's largest weight",
            "weight (grey lines: the values that a code can restore)"
            if 2 * reach / step < 40
            else f"weight (a restorable value every {step:.4f}: too close together to draw)",
        )
    return figure


@drawing
def staircase(x: Tensor, restored: Tensor, scale: float) -> Figure:
    """What comes back for a rising x, near zero and at the end of the range.

    x, restored  [n], x rises from below -128 scales to above 127 scales
    scale        size of one step, in the unit of x
    """
    figure = _figure(10, 5.6)
    panels = figure.subplots(2, 2, sharex="col", height_ratios=[3, 2])
    steps = x / scale
    windows = [
        (-4.6, 4.6, "Near zero: a staircase"),
        (121.4, 131, "At the end: a wall"),
    ]
    for column, (low, high, title) in enumerate(windows):
        here = (steps >= low) & (steps <= high)
        top, bottom = panels[0, column], panels[1, column]
        top.plot(
            steps[here], steps[here], color=FLOAT, lw=1.5, ls="--", label="x itself"
        )
        top.plot(
            steps[here],
            (restored / scale)[here],
            color=QUANTIZED,
            lw=2.4,
            label="restored",
        )
        _plain(top, title, y="restored value (steps)")
        top.legend(frameon=False, loc="upper left")
        error = ((restored - x) / scale)[here]
        bottom.axhspan(-0.5, 0.5, color=PALETTE["sky"], alpha=0.25, lw=0)
        bottom.plot(steps[here], error, color=ERROR, lw=1.6)
        bottom.set_ylim(min(-0.85, float(error.min()) * 1.1), 0.85)
        bottom.set_xlim(low, high)
        _plain(
            bottom,
            "Error: half a step at most"
            if column == 0
            else "Error: grows without limit",
            f"x (steps; one step is {scale:.4g})",
            "error (steps)",
        )
        if high > 127.5:
            for axes in (top, bottom):
                axes.axvspan(127.5, high, color=PALETTE["grey"], alpha=0.15, lw=0)
            top.text(
                (127.5 + high) / 2, low + 0.6, "clipped", ha="center", color="#404040"
            )
    panels[1, 0].text(4.5, 0.55, "band: ± half a step", ha="right", fontsize=9)
    return figure


@drawing
def errors_against_bound(error: Tensor, bound: Tensor) -> Figure:
    """The error of every output as a bar under its bound.

    error  [batch, out], magnitudes; bound [batch, out] or [batch, 1]
    """
    batch, out = error.shape
    limits = bound.expand(batch, out)
    figure = _figure(7.2, 3.8)
    axes = figure.subplots()
    colours = [FLOAT, QUANTIZED, PALETTE["green"], PALETTE["purple"]]
    width = 0.8 / out
    for o in range(out):
        places = [b + (o - (out - 1) / 2) * width for b in range(batch)]
        bars = axes.bar(
            places,
            error[:, o],
            width * 0.86,
            color=colours[o % 4],
            label=f"error of output {o}",
        )
        axes.bar_label(bars, fmt="%.4f", fontsize=9, padding=2)
        axes.hlines(
            limits[:, o],
            [p - width / 2 for p in places],
            [p + width / 2 for p in places],
            color="black",
            lw=2.5,
            label="bound" if o == 0 else "_bound",
        )
    for b in range(batch):
        axes.annotate(
            f"{float(limits[b, 0]):.4f}",
            (b, float(limits[b, 0])),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    axes.set_xticks(range(batch), [f"row {b} of X" for b in range(batch)])
    axes.set_ylim(0, 1.3 * float(limits.max()))
    held = bool((error <= limits).all())
    title = "No error exceeds its bound" if held else "An error exceeds its bound"
    _plain(axes, title, y="|output error| (unit of y)")
    axes.legend(frameon=False, ncols=out + 1, loc="upper left", fontsize=9)
    return figure


@drawing
def error_share_of_bound(shares: Mapping[int, Tensor]) -> Figure:
    """How much of the bound is used up, against the number of inputs.

    shares  number of inputs -> |error| / bound of many outputs
    """
    widths = sorted(shares)
    figure = _figure(7.6, 4.2)
    axes = figure.subplots()
    low, mid, high, most = (
        [float(f(shares[n])) for n in widths]
        for f in (
            lambda v: v.quantile(0.05),
            lambda v: v.median(),
            lambda v: v.quantile(0.95),
            lambda v: v.max(),
        )
    )
    axes.axhline(1, color="black", lw=2.5)
    axes.text(widths[-1], 1.08, "the bound", ha="right", va="bottom")
    axes.fill_between(
        widths, low, high, color=PALETTE["sky"], alpha=0.35, lw=0, label="5 % to 95 %"
    )
    axes.plot(widths, most, "v", color=ERROR, ms=8, label="largest seen")
    axes.plot(widths, mid, "o-", color=FLOAT, lw=2, label="median")
    guide = [mid[0] * (widths[0] / n) ** 0.5 for n in widths]
    axes.plot(widths, guide, ":", color="black", lw=1.5, label="falls like 1 / √inputs")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(widths, [str(n) for n in widths])
    axes.set_ylim(min(low) * 0.8, 2)
    _plain(
        axes,
        "The wider the layer, the looser the bound",
        "inputs of the layer",
        "|error| / bound",
    )
    axes.grid(axis="y", color=GRID, lw=0.6)
    axes.legend(frameon=False, loc="lower left", fontsize=9)
    return figure


@drawing
def outlier_codes(
    per_tensor: Tensor, per_channel: Tensor, errors: Mapping[str, Tensor]
) -> Figure:
    """The codes under one scale and under one scale a row, and the errors they cause.

    per_tensor, per_channel  codes [out, in]
    errors                   label -> largest |error| of each output, [out]
    """
    figure = _figure(11, 4.2)
    grid = figure.add_gridspec(2, 2, width_ratios=[1, 1.15])
    panels = [figure.add_subplot(grid[row, 0]) for row in range(2)]
    axes = figure.add_subplot(grid[:, 1])
    out, inputs = per_tensor.shape
    for panel, codes, title in zip(
        panels,
        (per_tensor, per_channel),
        ("Codes, one scale for the tensor", "Codes, one scale per output"),
        strict=True,
    ):
        panel.imshow(codes, cmap=CODES, vmin=-160, vmax=160, aspect="auto")
        for o in range(out):
            for i in range(inputs):
                panel.text(i, o, f"{int(codes[o, i])}", ha="center", va="center")
        panel.set_xticks(range(inputs), [f"in {i}" for i in range(inputs)])
        panel.set_yticks(range(out), [f"out {o}" for o in range(out)])
        panel.tick_params(length=0)
        _plain(panel, title)
        panel.spines[:].set_visible(False)
        for i in range(1, inputs):
            panel.axvline(i - 0.5, color=GRID, lw=1)
        for o in range(-1, out):
            panel.axhline(o + 0.5, color=GRID, lw=1)
    width = 0.8 / len(errors)
    for k, ((label, values), colour) in enumerate(
        zip(errors.items(), (QUANTIZED, FLOAT), strict=True)
    ):
        places = [o + (k - (len(errors) - 1) / 2) * width for o in range(out)]
        bars = axes.bar(places, values, width * 0.9, color=colour, label=label)
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=9)
    axes.set_yscale("log")
    axes.set_ylim(min(float(v.min()) for v in errors.values()) / 3, 5)
    axes.set_xticks(range(out), [f"output {o}" for o in range(out)])
    _plain(
        axes,
        "Output 0 is rescued, output 1 is not",
        y="largest |output error| (unit of y, log)",
    )
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    return figure


@drawing
def calibration_ranges(
    values: Tensor, cases: Sequence[tuple[str, float, float, float]]
) -> Figure:
    """The range each calibration gives, and which values lie in it.

    values  the values that have to be quantized, any shape
    cases   (label, scale, clipped fraction, largest output error), one line each
    """
    figure = _figure(9.5, 0.95 * len(cases) + 1.5)
    axes = figure.subplots()
    flat = values.flatten()
    reach = 1.12 * max(float(flat.abs().max()), max(128 * case[1] for case in cases))
    for line, (_, scale, share, error) in enumerate(cases):
        low, high = -128 * scale, 127 * scale
        axes.barh(line, high - low, 0.5, low, color=PALETTE["sky"], alpha=0.45)
        inside = (flat >= low - scale / 2) & (flat <= high + scale / 2)
        axes.scatter(
            flat[inside],
            torch.full((int(inside.sum()),), line),
            s=45,
            color=FLOAT,
            zorder=3,
        )
        axes.scatter(
            flat[~inside],
            torch.full((int((~inside).sum()),), line),
            s=60,
            marker="x",
            color=ERROR,
            lw=2,
            zorder=3,
        )
        axes.text(
            1.02,
            line,
            f"{share:.0%} clipped\noutput error {error:.3g}",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=9.5,
        )
    axes.axvline(0, color=GRID, lw=1, zorder=0)
    axes.set_yticks(range(len(cases)), [case[0] for case in cases])
    axes.set_ylim(len(cases) - 0.45, -0.55)
    axes.set_xlim(-reach, reach)
    _plain(axes, "A range that is too small cuts values off", "activation")
    marks = [
        Line2D(
            [], [], color=PALETTE["sky"], alpha=0.45, lw=9, label="range of the codes"
        ),
        Line2D([], [], color=FLOAT, marker="o", ls="", label="in range"),
        Line2D([], [], color=ERROR, marker="x", ls="", mew=2, label="clipped"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False)
    return figure


@drawing
def range_tradeoff(
    ranges: Sequence[float], curves: Mapping[int, tuple[Tensor, Tensor]], peak: float
) -> Figure:
    """Rounding error and clipping error against the range, for several widths in bits.

    ranges  upper ends of the range, in the unit of the values
    curves  bits -> (mean squared rounding error, mean squared clipping error), [n] each
    peak    the largest magnitude among the values
    """
    figure = _figure(8.6, 4.8)
    axes = figure.subplots()
    colours = [ERROR, QUANTIZED, FLOAT]
    clipping = max((c for _, c in curves.values()), key=lambda v: float(v.sum()))
    axes.plot(ranges, clipping.clamp(min=1e-12), color="black", lw=1.8, ls=":")
    for (bits, (rounding, clip)), colour in zip(
        sorted(curves.items()), colours, strict=False
    ):
        total = rounding + clip
        axes.plot(ranges, rounding, color=colour, lw=1.1, ls="--")
        axes.plot(ranges, total, color=colour, lw=2.4)
        best = int(total.argmin())
        axes.plot(ranges[best], total[best], "o", color=colour, ms=9, mec="black")
        axes.annotate(
            f"{bits} bits",
            (ranges[-1], float(total[-1])),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold",
        )
    axes.axvline(peak, color=PALETTE["grey"], lw=1.4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    lowest = min(float((r + c).min()) for r, c in curves.values())
    highest = max(float((r + c).max()) for r, c in curves.values())
    axes.set_ylim(lowest / 6, highest * 12)
    axes.annotate(
        "largest\nmagnitude",
        (peak, lowest / 4),
        xytext=(5, 0),
        textcoords="offset points",
        va="bottom",
        fontsize=9,
    )
    ticks = [t for t in (0.25, 0.5, 1, 2, 4, 8, 16, 32) if ranges[0] <= t <= ranges[-1]]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    _plain(
        axes,
        "Each number of bits has its own best range",
        "end of the range: magnitude that lands on the last code (unit of the values)",
        "mean squared error (unit squared, log)",
    )
    axes.grid(axis="y", color=GRID, lw=0.6)
    grey = PALETTE["grey"]
    marks = [
        Line2D([], [], color=grey, lw=2.4, label="sum of both errors"),
        Line2D([], [], color=grey, lw=1.1, ls="--", label="rounding alone"),
        Line2D([], [], color="black", lw=1.8, ls=":", label="clipping alone"),
        Line2D([], [], color=grey, marker="o", mec="black", ls="", label="best range"),
    ]
    axes.legend(handles=marks, frameon=False, loc="upper left", ncols=4, fontsize=9)
    return figure
