"""Figures of lab 04: bits of a byte, groups, error against bits, the window, the stored bytes.

Called by the notebook of lab 04 (`plots.groups`).
Never packs, quantizes or counts: it draws what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from torch import Tensor

from kvlab.plots import PALETTE, bare, drawing, new_figure

__all__ = [
    "bill",
    "bytes_of_codes",
    "directions",
    "grouped",
    "levels",
    "occupancy",
    "trade_off",
]

# Neighbouring codes must be told apart; each also carries its number.
CODES = tuple(PALETTE[name] for name in ("sky", "orange", "green", "purple"))
BY_BITS = {
    2: (PALETTE["vermilion"], "v"),
    4: (PALETTE["blue"], "o"),
    8: (PALETTE["green"], "s"),
}
PARTS = {
    "codes": (PALETTE["blue"], ""),
    "scales": (PALETTE["sky"], "//"),
    "minima": (PALETTE["orange"], "\\\\"),
    "window": (PALETTE["yellow"], ""),
}
BY_GROUP = (
    (PALETTE["vermilion"], ":"),
    (PALETTE["blue"], "--"),
    (PALETTE["green"], "-."),
)


# --- bits of a byte -------------------------------------------------------------------


@drawing
def bytes_of_codes(rows: Mapping[int, Sequence[int]]) -> Figure:
    """One row for each number of bits: two bytes with a box for every bit.

    rows  bits -> the codes of two bytes, in order
    """
    figure, axes = new_figure(1, 1, 10.5, 4.3)
    ax = axes[0, 0]
    for down, (bits, codes) in enumerate(rows.items()):
        per_byte = 8 // bits
        for number, code in enumerate(codes):
            byte, place = divmod(number, per_byte)
            colour = CODES[number % len(CODES)]
            right = byte * 9 + 8 - place * bits  # the lowest bit of a byte is rightmost
            for bit in range(bits):
                box = Rectangle((right - bit - 1, down), 1, 0.55, facecolor=colour)
                box.set_edgecolor("white")
                box.set_alpha(0.75)
                ax.add_patch(box)
                ax.text(
                    right - bit - 0.5,
                    down + 0.28,
                    str(code >> bit & 1),
                    ha="center",
                    va="center",
                    fontsize=11,
                    family="monospace",
                )
            ax.text(
                right - bits / 2,
                down - 0.06,
                f"[{number}]  {code}" if bits > 2 else f"[{number}] {code}",
                ha="center",
                va="bottom",
                fontsize=9,
            )
        for byte in range(2):
            frame = Rectangle((byte * 9, down), 8, 0.55, fill=False, linewidth=1.4)
            ax.add_patch(frame)
    ax.set_xlim(-0.2, 17.2)
    ax.set_ylim(len(rows) - 0.3, -0.45)
    ax.set_yticks([n + 0.28 for n in range(len(rows))], [f"{b} bits" for b in rows])
    ax.set_xticks(
        [n + 0.5 for byte in (0, 9) for n in range(byte, byte + 8)],
        [str(n) for _ in range(2) for n in range(7, -1, -1)],
    )
    ax.tick_params(length=0)
    ax.set_xlabel("bit of byte 0 (left) and of byte 1 (right), lowest bit: 0")
    ax.set_ylabel("size of a code")
    ax.set_title("Two bytes hold two, four or eight codes:  [place in the tensor] code")
    bare(ax, "left", "bottom")
    return figure


# --- a minimum ------------------------------------------------------------------------


@drawing
def levels(
    values: Tensor, restorable: Mapping[str, Sequence[float]], title: str
) -> Figure:
    """Number lines: the values as dots, and what each kind of code can restore as ticks.

    values      [n] of one group
    restorable  name -> every number that some code stands for
    """
    figure, axes = new_figure(
        len(restorable), 1, 10, 1.75 * len(restorable), sharex=True
    )
    for ax, (name, points) in zip(axes[:, 0], restorable.items(), strict=True):
        ax.vlines(points, 0, 0.6, color=PALETTE["blue"], linewidth=1.6)
        ax.plot(
            values,
            [0.9 + 0.07 * (n % 4) for n in range(len(values))],
            linestyle="none",
            marker="o",
            markersize=5,
            color=PALETTE["orange"],
            markeredgecolor="black",
            markeredgewidth=0.4,
        )
        ax.axvline(0, color=PALETTE["grey"], linestyle=":", linewidth=1)
        ax.set_ylim(0, 1.3)
        ax.set_yticks([])
        ax.set_title(name, loc="left", fontsize=10)
        bare(ax, "left")
    axes[-1, 0].set_xlabel("Key value (no unit)")
    marks = [
        Line2D([], [], color=PALETTE["orange"], marker="o", linestyle="none"),
        Line2D([], [], color=PALETTE["blue"], marker="|", linestyle="none", ms=12),
    ]
    axes[0, 0].legend(
        marks, ["a value", "what a code restores"], frameon=False, loc="upper left"
    )
    figure.suptitle(title)
    return figure


# --- groups ---------------------------------------------------------------------------


@drawing
def directions(tokens: int, channels: int, group_size: int) -> Figure:
    """Two grids of values, their groups outlined: along tokens, and along head_dim."""
    figure, axes = new_figure(1, 2, 10, 4.4)
    titles = ("Keys: groups along tokens", "Values: groups along head_dim")
    for ax, title in zip(axes[0], titles, strict=True):
        keys = title.startswith("Keys")
        width, height = (1, group_size) if keys else (group_size, 1)
        for t in range(0, tokens, height):
            for c in range(0, channels, width):
                colour = CODES[(t // height * (2 if keys else 1) + c // width) % 4]
                run = Rectangle((c + 0.06, t + 0.06), width - 0.12, height - 0.12)
                run.set(facecolor=(colour, 0.45), edgecolor="black", linewidth=1.4)
                ax.add_patch(run)
                ax.text(
                    c + width / 2,
                    t + height / 2,
                    "s, m",
                    ha="center",
                    va="center",
                    fontsize=9,
                    rotation=90 if keys else 0,
                )
        ax.set_xlim(-0.1, channels + 0.1)
        ax.set_ylim(tokens + 0.1, -0.1)
        ax.set_aspect("equal")
        ax.set_title(title)
        ax.set_xlabel("channel (head_dim)")
        ax.set_ylabel("token")
        ax.set_xticks([c + 0.5 for c in range(channels)], map(str, range(channels)))
        ax.set_yticks([t + 0.5 for t in range(tokens)], map(str, range(tokens)))
        ax.tick_params(length=0)
        bare(ax, "left", "bottom")
    return figure


@drawing
def grouped(
    keys: Tensor, key_scale: Tensor, values: Tensor, value_scale: Tensor
) -> Figure:
    """Heat maps of one head: the values with the borders of their groups, and the scales.

    keys, values            [tokens, channels]
    key_scale, value_scale  [groups, channels] and [tokens, groups]
    """
    figure, axes = new_figure(2, 2, 11.5, 7.6, layout=None, height_ratios=(1, 1))
    figure.subplots_adjust(
        left=0.06, right=0.97, top=0.93, bottom=0.08, wspace=0.12, hspace=0.32
    )
    pairs = (("Key", keys, key_scale), ("Value", values, value_scale))
    for column, (name, held, scale) in enumerate(pairs):
        above, below = axes[:, column]
        held, scale = held.detach().float(), scale.detach().float()
        tokens, channels = held.shape
        top = float(held.abs().quantile(0.995))
        image = above.imshow(held, cmap="PuOr", vmin=-top, vmax=top, aspect="auto")
        figure.colorbar(image, ax=above, label=f"{name} (no unit)", pad=0.02)
        height, width = tokens // scale.shape[0], channels // scale.shape[1]
        if height > 1:
            for t in range(height, tokens, height):
                above.axhline(t - 0.5, color="black", linewidth=1)
        if width > 1:
            for c in range(width, channels, width):
                above.axvline(c - 0.5, color="black", linewidth=1)
        along = f"{height} tokens" if height > 1 else f"{width} channels"
        above.set_title(f"{name}s, borders every {along}")
        spread = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)
        image = below.imshow(spread, cmap="cividis", vmin=0, aspect="auto")
        figure.colorbar(image, ax=below, label="scale (no unit)", pad=0.02)
        below.set_title(f"the scale of each {name} group")
        for ax in (above, below):
            ax.set_xlabel("channel")
            ax.set_xticks(range(0, channels, 8))
    for ax in axes[:, 0]:
        ax.set_ylabel("token (position)")
    return figure


@drawing
def trade_off(
    curves: Mapping[int, Sequence[tuple[int, float, float]]],
    symmetric: tuple[float, float],
) -> Figure:
    """Error against stored bits, one curve for each number of bits, a dot for each group.

    curves     bits -> (group size, bits a value, error in percent)
    symmetric  bits a value and error of the rule of lab 03
    """
    figure, axes = new_figure(1, 1, 9.2, 5.2)
    ax = axes[0, 0]
    for bits, points in curves.items():
        colour, marker = BY_BITS[bits]
        ax.plot(
            [stored for _, stored, _ in points],
            [error for _, _, error in points],
            color=colour,
            marker=marker,
            label=f"{bits}-bit codes",
        )
        for size, stored, error in points:
            ax.annotate(
                str(size),
                (stored, error),
                xytext=(6, 5),
                textcoords="offset points",
                fontsize=9,
            )
    ax.plot(
        *symmetric,
        marker="*",
        markersize=15,
        color=PALETTE["yellow"],
        markeredgecolor="black",
        linestyle="none",
        label="lab 03: 4 bits, symmetric",
    )
    ax.axvline(16, color="black", linewidth=1, linestyle=":")
    ax.text(15.8, ax.get_ylim()[1] * 0.6, "float16", ha="right", va="top")
    ax.set_yscale("log")
    ticks = [0.1, 0.3, 1, 3, 10, 30, 100]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_ylim(bottom=0.1)
    ax.set_xlim(left=2)
    ax.set_xlabel("stored bits a value, scale and minimum included (bits)")
    ax.set_ylabel("error of the attention output (%), log scale")
    ax.set_title("What a group size costs and what it gives (number: group size)")
    ax.legend(frameon=False, loc="lower left")
    bare(ax)
    return figure


# --- the window -----------------------------------------------------------------------


@drawing
def occupancy(
    tokens: Sequence[int],
    yours: Sequence[int],
    lab_03: Sequence[int],
    all_again: Sequence[int],
    residual_length: int,
    group_size: int,
) -> Figure:
    """Tokens in full precision after each call, under three rules.

    tokens  how many have arrived
    """
    figure, axes = new_figure(1, 1, 9.6, 4.4)
    ax = axes[0, 0]
    lines = (
        (yours, PALETTE["blue"], "-", f"yours: groups of {group_size}"),
        (lab_03, PALETTE["green"], "--", "lab 03: one by one"),
        (all_again, PALETTE["vermilion"], "-.", "transformers: all again"),
    )
    for heights, colour, style, label in lines:
        ax.plot(
            tokens,
            heights,
            color=colour,
            linestyle=style,
            drawstyle="steps-post",
            label=label,
        )
    for height, said in (
        (residual_length, "residual_length"),
        (residual_length + group_size - 1, "residual_length + group_size - 1"),
    ):
        ax.axhline(height, color=PALETTE["grey"], linewidth=0.8, linestyle=":")
        ax.text(
            tokens[-1],
            height + 0.7,
            f"{said} = {height}",
            ha="right",
            va="bottom",
            fontsize=8,
            color="black",
        )
    ax.set_xlabel("tokens that have arrived")
    ax.set_ylabel("tokens in the window")
    ax.set_title("How many tokens are in full precision after each call")
    ax.set_ylim(0, (residual_length + group_size) * 1.32)
    ax.legend(frameon=False, loc="upper left", ncols=3, fontsize=9)
    bare(ax)
    return figure


# --- the bytes ------------------------------------------------------------------------


@drawing
def bill(
    ledgers: Mapping[int, Mapping[str, int]],
    growth: Mapping[int, Sequence[int]],
    tokens: Sequence[int],
    raw_per_token: float,
) -> Figure:
    """Stacked bars of the stored bytes at the end, and all bytes as tokens arrive.

    ledgers        group size -> bytes by part, after the last token
    growth         group size -> bytes after each call
    tokens         how many have arrived after each call
    raw_per_token  bytes of one token in float16
    """
    figure, axes = new_figure(1, 2, 11.5, 4.6)
    left, right = axes[0]
    unit = 1024
    names = ["float16"]
    whole = raw_per_token * tokens[-1] / unit
    left.bar(0, whole, 0.62, color=PALETTE["grey"], edgecolor="white")
    left.text(0, whole, f"{whole:.1f}", ha="center", va="bottom")
    for place, (group, parts) in enumerate(ledgers.items(), start=1):
        floor = 0.0
        for name, (colour, hatch) in PARTS.items():
            size = parts[name] / unit
            left.bar(
                place,
                size,
                0.62,
                bottom=floor,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                label=name if place == 1 else None,
            )
            floor += size
        left.text(place, floor, f"{floor:.1f}", ha="center", va="bottom")
        names.append(f"groups\nof {group}")
    left.axhline(whole, color="black", linewidth=0.8, linestyle=":")
    left.set_xticks(range(len(names)), names)
    left.set_ylabel("bytes of one layer (KiB)")
    left.set_title(f"What is stored after {tokens[-1]} tokens")
    left.margins(y=0.12)
    handles, labels = left.get_legend_handles_labels()
    left.legend(handles[::-1], labels[::-1], frameon=False, loc="upper right")
    right.plot(
        tokens,
        [raw_per_token * n / unit for n in tokens],
        color="black",
        label="float16",
    )
    for (group, totals), (colour, style) in zip(growth.items(), BY_GROUP, strict=False):
        right.plot(
            tokens,
            [total / unit for total in totals],
            color=colour,
            linestyle=style,
            label=f"groups of {group}",
        )
    right.set_xlabel("tokens in the cache")
    right.set_ylabel("bytes of one layer (KiB)")
    right.set_title("The same while it decodes token by token")
    right.set_ylim(bottom=0)
    right.legend(frameon=False, loc="upper left")
    for ax in (left, right):
        bare(ax)
    return figure
