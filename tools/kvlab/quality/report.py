"""Tables and figures of a quality result, from its JSON alone.

Called by `kvlab quality report`. Never measures and never loads a model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.matrix.report import ReportError, Table, print_table
from kvlab.quality import estimates, schema
from kvlab.quality.setting import FITS

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

Json = dict[str, Any]
MB = 1e6
FIGURES = ("against_bytes", "outliers")


def load(path: str | Path) -> Json:
    """A result, checked against the schema where jsonschema is installed.

    raises ReportError when there is no such file, it is no JSON, or it does not fit
    """
    path = Path(path)
    try:
        record: Json = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise ReportError(f"{path} is no JSON: {error}") from None
    try:
        wrong = schema.faults(record)
    except ImportError:
        given = record.get("schema_version"), record.get("kind")
        wrong = [] if given == (schema.SCHEMA_VERSION, "quality") else [f"is {given}"]
    if wrong:
        raise ReportError(f"{path} is no quality result of this course: {wrong[0]}")
    return record


def rows_by_id(record: Json) -> dict[str, Json]:
    return {row["id"]: row for row in record["rows"]}


# ---- tables -------------------------------------------------------------------------

HEADINGS = ("cache", "MB", "KL (nats)", "NLL increase", "top-5 overlap")
SHORT = (
    f"b bits (Keys/Values), g group, w window, s sinks, f fits of the Keys' scale ({FITS} "
    "where nothing is said)"
)


def tables(record: Json) -> list[Table]:
    """Every table, in the order to read them."""
    found = [quality_table(record)]
    found += [equal_bytes_table(record, one) for one in record["equal_bytes"]]
    found += [axes_table(record, ids) for ids in record["axes"] if ids]
    if record["shifts"]["caches"]:
        found.append(shift_table(record))
    if record["variants"]["rows"]:
        found.append(variants_table(record))
    return [*found, claims_table(record)]


def quality_table(record: Json) -> Table:
    """Every cache of the plan, and those that cannot be, with the reason."""
    rows = rows_by_id(record)
    shown = dict.fromkeys(record["table"])
    for comparison in record["equal_bytes"]:
        shown |= dict.fromkeys(comparison["rivals"])
    cells = [_cells(rows[name]) for name in sorted(shown, key=_place(record))]
    work, impossible = record["workload"], record["impossible"]
    return Table(
        "Quality against bytes",
        HEADINGS,
        tuple(cells),
        (
            SHORT,
            f"{len(work['texts'])} texts, {work['prompt_tokens']} prompt tokens, then "
            f"{work['scored_tokens']} predictions of each text. MB: what the whole cache holds "
            "at the end, in 1,000,000 bytes. NLL and KL in nats a token.",
            f"± is the standard error over blocks of {work['block']} tokens.",
            *(f"Cannot be: {one['id']} ({one['reason']})." for one in impossible),
        ),
    )


def _place(record: Json) -> Callable[[str], int]:
    """Settings of one family stand together, families in the order of the table."""
    families = list(dict.fromkeys(row["family"] for row in record["rows"]))
    rows = rows_by_id(record)
    return lambda name: families.index(rows[name]["family"])


def equal_bytes_table(record: Json, comparison: Json) -> Table:
    """The course's cache beside every library setting that holds as many bytes."""
    rows = rows_by_id(record)
    course = rows[comparison["course"]]
    kind = "held" if comparison["kv_bits"] == 32 else "held_in_16_bits"
    best = {one["id"]: one for one in comparison["best"]}
    cells = []
    for name in (comparison["course"], *comparison["rivals"]):
        shown, _, *figures = _cells(rows[name])
        times = f"{rows[name]['kl']['mean'] / course['kl']['mean']:.2f}"
        if name in best:
            error = best[name]["kl_ratio"]["standard_error_blocks"]
            times += f"±{error or 0:.2f}"
        size = f"{rows[name]['bytes'][kind] / MB:.2f}"
        cells.append((shown, size, *figures[:2], times))
    notes = [
        f"best {one['method']}: {one['kl_ratio']['ratio']:.2f} times the course's KL, from "
        f"{min(one['kl_ratio']['by_text']):.2f} to {max(one['kl_ratio']['by_text']):.2f} "
        f"in single texts; wanted {one['required_ratio']:g}"
        for one in comparison["best"]
    ]
    return Table(
        f"At equal bytes: {comparison['id']}",
        (*HEADINGS[:4], "KL over the course's"),
        tuple(cells),
        tuple(notes),
    )


def axes_table(record: Json, ids: Sequence[str]) -> Table:
    """Four combinations of axes of the course's cache."""
    rows = rows_by_id(record)
    return Table(
        f"Axes of the course's cache, the same bytes: {rows[ids[0]]['bits']} bits",
        ("Keys/Values", *HEADINGS[1:]),
        tuple(
            (rows[name]["family"].removeprefix("course "), *_cells(rows[name])[1:])
            for name in ids
        ),
    )


def shift_table(record: Json) -> Table:
    """A constant added to Keys: NLL increase and KL of each cache, against its size."""
    rows, shifts = rows_by_id(record), record["shifts"]
    cells = []
    for cache in shifts["caches"]:
        if not cache["rows"]:
            continue
        for metric, name in (("nll_increase", "NLL increase"), ("kl", "KL")):
            means = [
                on_texts(record, rows[row], shifts["texts"])[metric]
                for row in cache["rows"]
            ]
            # + 0.0, so that nothing reads -0.0000
            figures = (f"{round(m['mean'], 4) + 0.0:+.4f}" for m in means)
            cells.append((_short(rows[cache["rows"][0]]), name, *figures))
    return Table(
        "A constant added to two channels of every Key after the rotary embedding",
        ("cache", "nats a token", *(f"+{size:g}" for size in shifts["sizes"])),
        tuple(cells),
        (f"{len(shifts['texts'])} texts; against DynamicCache without the constant.",),
    )


def variants_table(record: Json) -> Table:
    """The course's cache with other numbers, beside its default, on the same texts."""
    rows, variants = rows_by_id(record), record["variants"]
    defaults = [name for name in record["table"] if _is_default(rows[name])]
    return Table(
        "Variants of the course's cache",
        HEADINGS,
        tuple(
            _cells(rows[name] | on_texts(record, rows[name], variants["texts"]))
            for name in (*defaults, *variants["rows"])
        ),
        (f"On {len(variants['texts'])} texts.",),
    )


def claims_table(record: Json) -> Table:
    """What is claimed of the course's cache, and whether this run shows it."""
    return Table(
        "Claims",
        ("holds", "claim", "found"),
        tuple(
            ("✓" if one["holds"] else "✗", one["claim"], one["found"])
            for one in record["claims"]
        ),
    )


def on_texts(record: Json, row: Json, names: Sequence[str]) -> Json:
    """A row's means over some of its texts."""
    chosen = [text for text in row["by_text"] if text["text"] in names]
    tokens = record["workload"]["scored_tokens"]
    return {
        metric: estimates.over_texts([text[metric] for text in chosen], tokens)
        for metric in estimates.METRICS
    }


def _is_default(row: Json) -> bool:
    told = row["setting"]
    return row["family"] == "course mixed" and (
        told["group"],
        told["window"],
        told["sinks"],
        told["fits"],
    ) == (32, 32, 4, FITS)


def _cells(row: Json) -> tuple[str, ...]:
    kl, nll, overlap = (row[metric] for metric in estimates.METRICS)
    return (
        _short(row),
        f"{row['bytes']['held'] / MB:.2f}",
        f"{kl['mean']:.2g}±{_error(kl):.1g}",
        f"{nll['mean']:+.3f}±{_error(nll):.3f}",
        f"{overlap['mean']:.3f}±{_error(overlap):.3f}",
    )


def _short(row: Json) -> str:
    """A row's name in few letters: "course mixed 4b g32 w32 s4"."""
    told = row["setting"]
    parts = [row["family"]]
    if told["group"]:
        parts += [f"{row['bits']}b", f"g{told['group']}", f"w{told['window']}"]
    if told["method"] == "course":
        parts.append(f"s{told['sinks']}")
        if told["fits"] != FITS:
            parts.append(f"f{told['fits']}")
    return " ".join(parts)


def _error(mean: Json) -> float:
    return float(mean["standard_error_blocks"] or 0.0)


# ---- the whole report ---------------------------------------------------------------


def print_report(record: Json, console: Console) -> None:
    """Every table with its notes."""
    for table in tables(record):
        print_table(table, console)


def figures(record: Json) -> dict[str, Figure]:
    """The figures by name."""
    from kvlab.plots import quality as plots

    return {name: getattr(plots, name)(record) for name in _drawable(record)}


def _drawable(record: Json) -> Iterable[str]:
    return FIGURES if record["shifts"]["caches"] else FIGURES[:1]


def write_figures(record: Json, folder: Path, stem: str) -> list[Path]:
    """Writes folder/STEM-NAME.png for each figure; returns the paths.

    A figure is made from its JSON, so an older picture of the same name is replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures(record).items():
        path = folder / f"{stem}-{name.replace('_', '-')}.png"
        figure.savefig(path, dpi=110, bbox_inches="tight")
        written.append(path)
    return written
