"""Figures of lab 03: outlier channels, shared scales, errors by axis, the window, its bytes.

Called by the notebook of lab 03 (`plots.axes`).
Never quantizes and never moves a token: it draws what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from kvlab.plots import PALETTE, bare, drawing, new_figure

CHANNEL, TOKEN = PALETTE["blue"], PALETTE["orange"]
WINDOW = PALETTE["yellow"]
# Neighbouring segments must be told apart; each also carries its number.
SEGMENTS = (PALETTE["sky"], PALETTE["blue"], PALETTE["green"], PALETTE["purple"])


# --- what the tensors look like -------------------------------------------------------


@drawing
def magnitudes(keys: Tensor, values: Tensor, marked: int = 4) -> Figure:
    """Heat maps of |Key| and |Value|, tokens down, the channels of all heads across.

    Beside each map stands the size of every token: the root of its sum of squares,
    the average over heads.

    keys, values  [1, heads, tokens, head_dim]
    marked        how many of the largest channels carry their number
    """
    figure, axes = new_figure(2, 2, 11.5, 7.4, sharey=True, width_ratios=(9, 1.2))
    heads, tokens, head_dim = keys.shape[1:]
    pairs = ((keys, "Key"), (values, "Value"))
    for (ax, beside), (held, name) in zip(axes, pairs, strict=True):
        # [heads, tokens, head_dim] to [tokens, heads x head_dim]
        flat = held[0].detach().float().abs().transpose(0, 1).flatten(1)
        top = float(flat.quantile(0.999))
        image = ax.imshow(
            flat, aspect="auto", cmap="cividis", vmin=0, vmax=top, interpolation="none"
        )
        typical = flat.mean(dim=0)
        for channel in typical.topk(marked).indices.tolist():
            ax.annotate(
                f"{channel % head_dim}",
                (channel, -0.5),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                arrowprops={"arrowstyle": "-", "linewidth": 0.8},
            )
        ratio = float(typical.max() / typical.median())
        ax.set_title(
            f"{name}s: the largest channel is {ratio:.1f} times the median channel",
            pad=20,
        )
        ax.set_ylabel("token (position)")
        ax.set_xticks(
            [head * head_dim + c for head in range(heads) for c in (0, 16, 32, 48)],
            [str(c) for _ in range(heads) for c in (0, 16, 32, 48)],
        )
        for head in range(heads):
            if head:
                ax.axvline(head * head_dim - 0.5, color="white", linewidth=1.2)
            ax.text(
                head * head_dim + 2,
                tokens - 3,
                f"head {head}",
                color="white",
                fontweight="bold",
                bbox={
                    "facecolor": "black",
                    "alpha": 0.6,
                    "edgecolor": "none",
                    "pad": 2,
                },
            )
        sizes = held[0].detach().float().norm(dim=-1).mean(dim=0)
        beside.plot(sizes, range(tokens), color=PALETTE["black"], linewidth=1)
        beside.plot(sizes[0], 0, marker="o", color=PALETTE["vermilion"])
        beside.annotate(
            "token 0",
            (float(sizes[0]), 0),
            xytext=(2, -14),
            textcoords="offset points",
            fontsize=8,
        )
        beside.set_xlim(0, float(sizes.max()) * 1.1)
        beside.set_title("size of token", fontsize=10, pad=20)
        bare(beside)
        figure.colorbar(image, ax=[ax, beside], label=f"|{name}| (no unit)", pad=0.01)
    axes[-1, 0].set_xlabel("channel within its head (no unit)")
    axes[-1, 1].set_xlabel("size (no unit)")
    return figure


# --- who shares a scale ---------------------------------------------------------------


@drawing
def sharing(tokens: int = 6, channels: int = 7) -> Figure:
    """Two grids of values: one scale per channel, and one scale per token."""
    figure, axes = new_figure(1, 2, 10, 3.9)
    colours = [
        PALETTE[name]
        for name in ("blue", "orange", "green", "vermilion", "sky", "purple", "yellow")
    ]
    titles = ("Keys: one scale per channel", "Values: one scale per token")
    for ax, title in zip(axes[0], titles, strict=True):
        per_channel = title.startswith("Keys")
        for t in range(tokens):
            for c in range(channels):
                colour = colours[(c if per_channel else t) % len(colours)]
                cell = Rectangle((c, t), 1, 1, facecolor=colour, alpha=0.45)
                cell.set_edgecolor("white")
                ax.add_patch(cell)
        for n in range(channels if per_channel else tokens):
            at = (n, tokens + 0.5) if per_channel else (channels + 0.5, n)
            colour = colours[n % len(colours)]
            box = Rectangle(at, 1, 1, facecolor=colour, edgecolor="black", linewidth=1)
            ax.add_patch(box)
            ax.text(
                at[0] + 0.5,
                at[1] + 0.5,
                f"s{n}",
                ha="center",
                va="center",
                fontsize=9,
                bbox={
                    "facecolor": "white",
                    "edgecolor": "none",
                    "pad": 1,
                    "alpha": 0.7,
                },
            )
        ax.set_xlim(-0.1, channels + 1.7)
        ax.set_ylim(tokens + 1.7, -0.1)
        ax.set_aspect("equal")
        ax.set_title(title)
        ax.set_xlabel("channel (head_dim)")
        ax.set_ylabel("token")
        ax.set_xticks([c + 0.5 for c in range(channels)], map(str, range(channels)))
        ax.set_yticks([t + 0.5 for t in range(tokens)], map(str, range(tokens)))
        ax.tick_params(length=0)
        for spine in ax.spines.values():
            spine.set_visible(False)
    return figure


@drawing
def quantized(
    given: Tensor,
    codes: Tensor,
    scale: Tensor,
    title: str,
    first_token: int = 0,
    first_channel: int = 0,
) -> Figure:
    """A part of one head: the values, the scale of each value, the codes, the error.

    given, codes                [tokens, channels] of one head
    scale                       broadcastable to them
    first_token, first_channel  where the part begins, for the axes
    """
    # Places by hand: solving for them takes a second with this many parts.
    figure, axes = new_figure(1, 4, 12, 3.9, sharey=True, layout=None)
    figure.subplots_adjust(left=0.05, right=0.99, top=0.85, bottom=0.05, wspace=0.06)
    held, step = given.detach().float(), scale.detach().float()
    error = (codes.float() * step - held) / step
    top = float(codes.abs().max())
    panels: tuple[tuple[Tensor, str, str, float, float], ...] = (
        (held.abs(), "magnitude", "cividis", 0.0, float(held.abs().max())),
        (step.expand_as(held), "its scale", "cividis", 0.0, float(step.max())),
        (codes.float(), "its code", "PuOr", -top, top),
        (error, "its error, in scales", "PuOr", -0.5, 0.5),
    )
    for ax, (picture, name, colours, low, high) in zip(axes[0], panels, strict=True):
        image = ax.imshow(picture, cmap=colours, vmin=low, vmax=high, aspect="auto")
        bar = figure.colorbar(image, ax=ax, location="bottom", shrink=0.9, pad=0.18)
        if name == "its code":
            bar.set_ticks([-top, 0, top])
        ax.set_title(name, fontsize=11)
        ax.set_xlabel("channel")
        tokens, channels = held.shape
        ax.set_xticks(
            range(0, channels, 2), range(first_channel, first_channel + channels, 2)
        )
        ax.set_yticks(range(0, tokens, 2), range(first_token, first_token + tokens, 2))
        if name == "its code":
            for t in range(held.shape[0]):
                for c in range(held.shape[1]):
                    code = int(codes[t, c])
                    ax.text(
                        c,
                        t,
                        str(code),
                        ha="center",
                        va="center",
                        fontsize=7,
                        color="white" if abs(code) > 0.75 * top else "black",
                    )
    axes[0, 0].set_ylabel("token")
    figure.suptitle(title)
    return figure


# --- what each axis costs -------------------------------------------------------------


@drawing
def axis_errors(
    panels: Mapping[str, Mapping[str, tuple[float, float]]], ylabel: str
) -> Figure:
    """Bars: the error of each axis on Keys and on Values, one panel a measure.

    panels  title -> {"Keys": (per channel, per token), "Values": (...)}, in percent
    """
    figure, axes = new_figure(1, len(panels), 10, 4.1, sharey=True)
    width = 0.36
    for ax, (title, groups) in zip(axes[0], panels.items(), strict=True):
        for place, (_, pair) in enumerate(groups.items()):
            bars = (
                (pair[0], -width / 2, CHANNEL, "", "one scale per channel"),
                (pair[1], width / 2, TOKEN, "//", "one scale per token"),
            )
            for height, shift, colour, hatch, label in bars:
                bar = ax.bar(
                    place + shift,
                    height,
                    width * 0.94,
                    color=colour,
                    hatch=hatch,
                    edgecolor="white",
                    label=label if place == 0 else None,
                )
                ax.bar_label(bar, fmt="%.1f", padding=2)
        ax.set_xticks(range(len(groups)), list(groups))
        ax.set_title(title)
        ax.margins(y=0.2)
        bare(ax)
    axes[0, 0].set_ylabel(ylabel)
    axes[0, 0].legend(frameon=False, loc="upper right")
    return figure


@drawing
def shifted(
    shifts: Sequence[float], per_channel: Sequence[float], per_token: Sequence[float]
) -> Figure:
    """Lines: error of the attention weights against a constant added to the Keys.

    per_channel, per_token  share of the attention weight that moved, in percent
    """
    figure, axes = new_figure(1, 1, 7.6, 4.1)
    ax = axes[0, 0]
    lines = (
        (per_token, TOKEN, "s", "--", "one scale per token"),
        (per_channel, CHANNEL, "o", "-", "one scale per channel"),
    )
    for heights, colour, marker, style, label in lines:
        ax.plot(
            shifts, heights, color=colour, marker=marker, linestyle=style, label=label
        )
        ax.annotate(
            label,
            (shifts[-1], heights[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            color="black",
            va="center",
            fontsize=9,
        )
    ax.set_xlabel("constant added to two channels of every Key (no unit)")
    ax.set_ylabel("attention weight moved (%)")
    ax.set_title("Attention with 4-bit Keys, after a shift that softmax ignores")
    ax.set_ylim(bottom=0)
    bare(ax)
    return figure


# --- the window -----------------------------------------------------------------------


@drawing
def timeline(
    steps: Sequence[tuple[str, Sequence[Sequence[int]], Sequence[int]]], window: int
) -> Figure:
    """One row a call: every token is in a numbered segment or in the window.

    steps  (label of the call, tokens of each segment, tokens of the window)
    """
    last = max(max([*w, *(n for s in parts for n in s)]) for _, parts, w in steps)
    figure, axes = new_figure(
        1, 1, min(12.0, 2.6 + 0.46 * last), 1.5 + 0.42 * len(steps)
    )
    ax = axes[0, 0]
    seen: set[int] = set()
    for row, (_, parts, kept) in enumerate(steps):
        cells = [
            (n, SEGMENTS[i % len(SEGMENTS)], i) for i, p in enumerate(parts) for n in p
        ]
        cells += [(n, WINDOW, -1) for n in kept]
        new = {n for n, _, _ in cells} - seen
        seen |= new
        for number, colour, segment in cells:
            box = Rectangle(
                (number - 0.5, row - 0.42),
                1,
                0.84,
                facecolor=colour,
                edgecolor="white",
                linewidth=1.5,
            )
            ax.add_patch(box)
            if number in new:
                ax.plot(
                    (number - 0.4, number + 0.4),
                    (row + 0.34, row + 0.34),
                    color="black",
                    linewidth=2,
                )
            ax.text(
                number,
                row,
                "w" if segment < 0 else str(segment),
                ha="center",
                va="center",
                fontsize=9,
                color="white" if colour == PALETTE["blue"] else "black",
            )
    ax.set_xlim(0.4, last + 0.6)
    ax.set_ylim(len(steps) - 0.4, -0.6)
    ax.set_xticks(range(1, last + 1))
    ax.set_yticks(range(len(steps)), [label for label, _, _ in steps])
    ax.set_xlabel("token, in order of arrival")
    ax.set_ylabel("call of append_and_partition")
    ax.set_title(f"Where every token is, residual_length {window}")
    ax.legend(
        handles=[
            Patch(color=WINDOW, label="w: window, as it came"),
            Patch(color=SEGMENTS[0], label="number: its segment, quantized"),
            Line2D([], [], color="black", linewidth=2, label="arrived in this call"),
        ],
        frameon=False,
        loc="upper right",
    )
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return figure


PARTS = {
    "Key codes": (PALETTE["blue"], ""),
    "Key scales": (PALETTE["sky"], "//"),
    "Value codes": (PALETTE["vermilion"], ""),
    "Value scales": (PALETTE["orange"], "//"),
}


@drawing
def decode_bytes(
    bars: Mapping[str, Mapping[str, float]],
    raw_per_token: float,
    tokens: Sequence[int],
    raw_total: Sequence[float],
    stored_total: Sequence[float],
) -> Figure:
    """Left: bytes of one quantized token by part. Right: the whole cache as it grows.

    bars           title -> part (see PARTS) -> bytes per token
    raw_per_token  bytes of one token in half precision
    tokens, raw_total, stored_total  the cache after each call, in bytes
    """
    figure, axes = new_figure(1, 2, 11, 4.3)
    left, right = axes[0]
    for place, parts in enumerate(bars.values()):
        floor = 0.0
        for name, size in parts.items():
            colour, hatch = PARTS[name]
            left.bar(
                place,
                size,
                0.6,
                bottom=floor,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                label=name if place == 0 else None,
            )
            floor += size
        left.text(
            place,
            floor + 0.012 * raw_per_token,
            f"{floor:,.0f} B",
            ha="center",
            va="bottom",
        )
    left.axhline(raw_per_token, color="black", linewidth=1.4)
    left.text(
        -0.42,
        raw_per_token * 1.02,
        f"float16: {raw_per_token:,.0f} B",
        ha="left",
        va="bottom",
    )
    left.set_xticks(range(len(bars)), list(bars))
    left.set_xlim(-0.45, len(bars) - 0.55)
    left.set_ylabel("bytes per token (B)")
    left.set_title("One quantized token, all heads of one layer")
    left.margins(y=0.24)
    handles, labels = left.get_legend_handles_labels()
    left.legend(handles[::-1], labels[::-1], frameon=False, loc="center left")
    right.plot(
        tokens,
        [b / 1024 for b in raw_total],
        color="black",
        label="float16, no quantization",
    )
    right.plot(
        tokens,
        [b / 1024 for b in stored_total],
        color=PALETTE["blue"],
        linestyle="--",
        label="your state: codes, scales, window",
    )
    larger = [
        n for n, a, b in zip(tokens, raw_total, stored_total, strict=True) if b > a
    ]
    if larger and larger[0] != tokens[0]:
        place = list(tokens).index(larger[0])
        right.annotate(
            f"from {larger[0]} tokens on\nit is the larger one",
            (larger[0], stored_total[place] / 1024),
            xytext=(-10, -60),
            textcoords="offset points",
            ha="left",
            arrowprops={"arrowstyle": "->"},
        )
    right.set_xlabel("tokens in the cache")
    right.set_ylabel("bytes of one layer (KiB)")
    right.set_title("The cache while it decodes token by token")
    right.set_ylim(bottom=0)
    right.legend(frameon=False, loc="upper left")
    for ax in (left, right):
        bare(ax)
    return figure


__all__ = [
    "axis_errors",
    "decode_bytes",
    "magnitudes",
    "quantized",
    "sharing",
    "shifted",
    "timeline",
]
