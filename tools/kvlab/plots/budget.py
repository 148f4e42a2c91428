"""The figures of lab 01: phases, heads, memory, concurrency, pages, the decode bound.

Called by the lab's notebook as `plots.budget.stacked_memory(...)` and so on. Computes no
budget: sizes and rates come in as lists, from the reader's own functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    MultipleLocator,
    NullLocator,
)

from kvlab.plots import PALETTE, drawing

PALE = "#E6E6E6"
# One colour, line and marker for each number of bits, in every figure of the lab.
OF_BITS: dict[int, dict[str, Any]] = {
    16: {"color": PALETTE["blue"], "linestyle": "-", "marker": "o"},
    8: {"color": PALETTE["green"], "linestyle": "--", "marker": "s"},
    4: {"color": PALETTE["vermilion"], "linestyle": "-.", "marker": "^"},
    2: {"color": PALETTE["black"], "linestyle": ":", "marker": "D"},
}


@drawing
def prefill_and_decode(prompt: int = 6, answer: int = 4) -> Figure:
    """Which tokens' Keys and Values each step computes, and which it reads.

    prompt  tokens of the prompt
    answer  tokens of the answer; the last one is never fed back
    """
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.add_subplot()
    steps = [(0, prompt)] + [(prompt + n, prompt + n + 1) for n in range(answer - 1)]
    for row, (cached, end) in enumerate(steps):
        for token in range(end):
            new = token >= cached
            _tile(axes, token, row, PALETTE["orange" if new else "sky"])
            axes.text(
                token + 0.5,
                row + 0.5,
                "new" if new else "read",
                ha="center",
                va="center",
                fontsize=9,
            )
        axes.text(
            prompt + answer - 0.8,
            row + 0.5,
            f"{end - cached} new, {cached} read  →  answer token {row + 1}",
            va="center",
            fontsize=10,
        )
    axes.set_xlim(0, prompt + answer + 3.6)
    axes.set_ylim(len(steps), 0)
    axes.set_xticks([n + 0.5 for n in range(prompt + answer - 1)])
    axes.set_xticklabels([str(n + 1) for n in range(prompt + answer - 1)])
    axes.set_yticks([n + 0.5 for n in range(len(steps))])
    axes.set_yticklabels(["prefill", *(f"decode {n}" for n in range(1, answer))])
    axes.set_xlabel("token position (prompt, then answer)", loc="left")
    axes.set_ylabel("step")
    axes.set_title("One prefill step fills the cache; every decode step adds one token")
    _bare(axes)
    return figure


@drawing
def grouped_heads(query_heads: int = 8, groups: Sequence[int] = (8, 2, 1)) -> Figure:
    """How query heads share KV heads: a panel for each number of KV heads."""
    figure = Figure(figsize=(9, 2.7), layout="constrained")
    names = {query_heads: "Multi-head", 1: "Multi-query"}
    panels = figure.subplots(1, len(groups))
    for axes, kv_heads in zip(panels, groups, strict=True):
        share = query_heads // kv_heads
        for head in range(kv_heads):
            middle = head * share + (share - 1) / 2
            for query in range(head * share, (head + 1) * share):
                axes.plot([query, middle], [1, 0], color=PALETTE["grey"], zorder=1)
            square = Rectangle((middle - 0.32, -0.16), 0.64, 0.32, zorder=2)
            square.set(facecolor=PALETTE["orange"], edgecolor="black")
            axes.add_patch(square)
        axes.scatter(
            range(query_heads),
            [1] * query_heads,
            s=130,
            color=PALETTE["blue"],
            edgecolor="black",
            zorder=2,
        )
        axes.set_xlim(-0.7, query_heads - 0.3)
        axes.set_ylim(-0.4, 1.3)
        axes.set_xticks([])
        axes.set_yticks([0, 1])
        axes.set_yticklabels(
            ["KV heads\n(cached)", "query heads\n(not cached)"]
            if axes is panels[0]
            else []
        )
        name = names.get(kv_heads, "Grouped-query")
        plural = "s" if kv_heads > 1 else ""
        axes.set_title(f"{name}: {kv_heads} KV head{plural}", fontsize=11)
        _bare(axes)
    figure.suptitle(f"The same {query_heads} query heads, fewer and fewer KV heads")
    return figure


@drawing
def stacked_memory(
    contexts: Sequence[int],
    weights_gib: float,
    reserve_gib: float,
    cache_gib: Mapping[str, Sequence[float]],
    capacity_gib: float,
    title: str,
) -> Figure:
    """Weights, reserve and cache on top of each other, against the context length.

    contexts   tokens of one request
    cache_gib  panel title -> GiB of the whole cache at each context
    """
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    panels = figure.subplots(1, len(cache_gib), sharey=True, squeeze=False)[0]
    floor = weights_gib + reserve_gib
    top = floor + max(max(sizes) for sizes in cache_gib.values())
    for axes, (name, cache) in zip(panels, cache_gib.items(), strict=True):
        flat = [1.0] * len(contexts)
        axes.stackplot(
            contexts,
            [weights_gib * one for one in flat],
            [reserve_gib * one for one in flat],
            cache,
            colors=[PALETTE["blue"], PALETTE["grey"], PALETTE["orange"]],
            labels=["weights", "reserve", "KV cache"],
            edgecolor="white",
        )
        axes.axhline(
            capacity_gib,
            color="black",
            linestyle="--",
            linewidth=1.5,
            label=f"the card:\n{capacity_gib:g} GiB",
        )
        full = _crossing(contexts, [floor + size for size in cache], capacity_gib)
        if full is not None:
            axes.plot([full], [capacity_gib], "o", color="black", markersize=8)
            axes.annotate(
                f"full at {full:,.0f} tokens",
                (full, capacity_gib),
                xytext=(0.42, 0.88),
                textcoords="axes fraction",
                ha="center",
                arrowprops={"arrowstyle": "->"},
                fontsize=10,
            )
        axes.set_title(name, fontsize=11)
        axes.set_xlabel("context length of each request (tokens)")
        axes.set_xlim(contexts[0], contexts[-1])
        axes.set_ylim(0, top * 1.02)
        axes.xaxis.set_major_locator(MultipleLocator(2**14))
        axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
        _light(axes)
    panels[0].set_ylabel("memory (GiB)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside right center", frameon=False
    )
    figure.suptitle(title)
    return figure


@drawing
def measured(
    tokens: Sequence[int],
    formula_bytes: Sequence[int],
    tensor_bytes: Mapping[str, Sequence[int]],
    title: str,
) -> Figure:
    """Bytes of the tensors of a real cache beside those of the formula.

    tokens        tokens in the cache after each step
    tensor_bytes  panel title -> bytes in the cache's tensors after each step
    """
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, len(tensor_bytes), sharey=True, squeeze=False)[0]
    for axes, (name, sizes) in zip(panels, tensor_bytes.items(), strict=True):
        axes.bar(
            tokens,
            [size / 2**10 for size in sizes],
            width=0.8,
            color=PALETTE["sky"],
            label="bytes of the cache's tensors (measured)",
        )
        axes.plot(
            tokens,
            [size / 2**10 for size in formula_bytes],
            "o",
            color=PALETTE["vermilion"],
            markersize=4,
            label="the formula (yours)",
        )
        axes.set_title(name, fontsize=11)
        axes.set_xlabel("tokens seen by the model")
        _light(axes)
    panels[0].set_ylabel("KV cache (KiB)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(title)
    return figure


@drawing
def concurrency(
    contexts: Sequence[int], requests: Mapping[int, Sequence[int]], title: str
) -> Figure:
    """How many requests fit against the context length, a line for each width.

    requests  bits of a stored value -> requests that fit at each context
    """
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for bits, counts in requests.items():
        fits = [(x, n) for x, n in zip(contexts, counts, strict=True) if n >= 1]
        if not fits:
            continue
        axes.plot(
            [x for x, _ in fits],
            [n for _, n in fits],
            markersize=6,
            linewidth=2,
            label=f"{bits} bits",
            **OF_BITS[bits],
        )
        if len(fits) < len(contexts):
            x, count = fits[-1]
            axes.annotate(
                "beyond,\nnone fits",
                (x, count),
                xytext=(11, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=OF_BITS[bits]["color"],
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(contexts)))
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
    axes.set_xlabel("context length of each request (tokens)")
    axes.set_ylabel("requests at the same time")
    axes.set_title(title)
    axes.legend(title="a cached value takes", frameon=False, loc="upper right")
    _light(axes)
    return figure


@drawing
def paging(lengths: Mapping[str, int], longest: int, block: int) -> Figure:
    """The same requests in reserved stretches of memory, and in blocks.

    lengths  name of a request -> tokens it really holds
    longest  tokens that are reserved for every request when there are no blocks
    block    tokens of a block
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colors = dict(
        zip(lengths, ("blue", "orange", "green", "purple", "sky"), strict=False)
    )
    for row, (name, length) in enumerate(lengths.items()):
        left.add_patch(_hatched(0, row, longest))
        left.add_patch(_box(0, row, length, PALETTE[colors[name]]))
        _letter(left, length / 2, row, name)
    reserved, used = longest * len(lengths), sum(lengths.values())
    left.set_title(
        f"Reserved for the longest answer:\n{reserved} tokens taken, {used} used",
        fontsize=11,
    )
    blocks = _blocks_as_they_are_taken(lengths, block)
    per_row = longest // block
    for row in range(len(lengths)):
        for column in range(per_row):
            free = Rectangle((column * block, row + 0.1), block, 0.8)
            free.set(facecolor="white", edgecolor=PALETTE["grey"], linestyle=":")
            right.add_patch(free)
    for place, (name, filled) in enumerate(blocks):
        row, column = divmod(place, per_row)
        x = column * block
        right.add_patch(_hatched(x, row, block))
        right.add_patch(_box(x, row, filled, PALETTE[colors[name]]))
        _letter(right, x + block / 2, row, name)
    taken = block * len(blocks)
    right.set_title(
        f"In blocks of {block} tokens, taken when needed:\n"
        f"{taken} tokens taken, {used} used",
        fontsize=11,
    )
    for axes in (left, right):
        axes.set_xlim(0, longest)
        axes.set_ylim(len(lengths), 0)
        axes.set_xlabel("place in memory (tokens)")
        axes.set_xticks(range(0, longest + 1, block))
        axes.set_yticks([])
        _bare(axes)
    left.set_ylabel("rows of memory")
    handles = [
        Patch(facecolor=PALE, edgecolor=PALETTE["grey"], hatch="////", label="wasted"),
        Patch(
            facecolor="white", edgecolor=PALETTE["grey"], linestyle=":", label="free"
        ),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(f"Four requests (A to {list(lengths)[-1]}), two ways to place them")
    return figure


@drawing
def decode_rate(
    batches: Sequence[int],
    rates: Mapping[int, Sequence[float]],
    fitting: Mapping[int, int],
    title: str,
) -> Figure:
    """The bound on tokens a second, of the whole batch and of one request.

    rates    bits of a cached value -> tokens a second of the whole batch
    fitting  bits of a cached value -> the largest batch that fits on the card
    """
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    whole, single = figure.subplots(1, 2)
    for bits, speeds in rates.items():
        style = OF_BITS[bits]
        inside = [n for n, batch in enumerate(batches) if batch <= fitting[bits]]
        for axes, values in (
            (whole, list(speeds)),
            (single, [s / b for s, b in zip(speeds, batches, strict=True)]),
        ):
            axes.plot(batches, values, color=style["color"], linewidth=1, alpha=0.35)
            axes.plot(
                [batches[n] for n in inside],
                [values[n] for n in inside],
                color=style["color"],
                linestyle=style["linestyle"],
                linewidth=2.5,
                label=f"{bits} bits",
            )
            if inside:
                last = inside[-1]
                axes.plot(
                    [batches[last]],
                    [values[last]],
                    color=style["color"],
                    marker=style["marker"],
                    markersize=8,
                )
    for axes in (whole, single):
        axes.set_xscale("log", base=2)
        ticks = [2**n for n in range(12) if batches[0] <= 2**n <= batches[-1]]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("batch (requests at the same time)")
        axes.set_ylim(bottom=0)
        _light(axes)
    whole.set_ylabel("tokens per second, at most")
    whole.set_title("the whole batch", fontsize=11)
    single.set_title("one request of the batch", fontsize=11)
    handles, _ = whole.get_legend_handles_labels()
    handles.append(
        Line2D(
            [], [], color=PALETTE["grey"], alpha=0.5, label="does not fit on the card"
        )
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(title)
    return figure


def _blocks_as_they_are_taken(
    lengths: Mapping[str, int], block: int
) -> list[tuple[str, int]]:
    """Name and filled tokens of every block, when the requests grow side by side."""
    taken = []
    for start in range(0, max(lengths.values()), block):
        for name, length in lengths.items():
            if length > start:
                taken.append((name, min(block, length - start)))
    return taken


def _crossing(xs: Sequence[float], ys: Sequence[float], height: float) -> float | None:
    """The first x at which the line through the points reaches the height."""
    points = list(zip(xs, ys, strict=True))
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 < height <= y1:
            return x0 + (x1 - x0) * (height - y0) / (y1 - y0)
    return None


def _tile(axes: Axes, x: float, y: float, color: str) -> None:
    square = Rectangle((x + 0.04, y + 0.08), 0.92, 0.84)
    square.set(facecolor=color, edgecolor="black", linewidth=0.6)
    axes.add_patch(square)


def _box(x: float, row: float, width: float, color: str) -> Rectangle:
    box = Rectangle((x, row + 0.1), width, 0.8)
    box.set(facecolor=color, edgecolor="black", linewidth=0.8)
    return box


def _letter(axes: Axes, x: float, row: float, name: str) -> None:
    plate = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none"}
    axes.text(x, row + 0.5, name, ha="center", va="center", fontsize=10, bbox=plate)


def _hatched(x: float, row: float, width: float) -> Rectangle:
    box = _box(x, row, width, PALE)
    box.set(hatch="////", edgecolor=PALETTE["grey"])
    return box


def _thousands(value: float, _position: object) -> str:
    """1024 tokens as 1k, as readers of context lengths know it."""
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def _light(axes: Axes) -> None:
    """A quiet frame: no top and right line, a pale grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)


def _bare(axes: Axes) -> None:
    """A drawing rather than a diagram: no frame, no tick marks."""
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)
