"""Tables, sentences and figures of finished runs, from their JSON alone.

Called by `kvlab matrix report` and lab 06. Never measures, never loads a model, and never judges:
gates and decision are the ones that the run wrote down.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvlab
from kvlab.matrix import files
from kvlab.matrix.workload import CONTEXT, WINDOW, MatrixRole

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table as RichTable

Json = dict[str, Any]
MIB = 2**20
NOT_MEASURED = "not measured"
SIDES = ("baseline", "candidate")
PASS, FAIL = "✓", "✗"
FIGURE = re.compile(rf"[-+(]?\d|[{PASS}{FAIL}]|{NOT_MEASURED}$|none$|$")


class ReportError(ValueError):
    """A file cannot be reported on. The message names it and says why."""


# ---- finding and reading ------------------------------------------------------------


def results_folder() -> Path:
    """The course's folder results/: beside tools/, else in the current folder."""
    course = Path(kvlab.__file__).resolve().parents[2]
    return (course if (course / "tools").is_dir() else Path.cwd()) / "results"


def load(path: str | Path) -> Json:
    """One run, checked against the schema.

    raises ReportError when there is no such file, it is no JSON, or it does not fit
    """
    path = Path(path)
    try:
        return files.read(path)
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise ReportError(f"{path} is no JSON: {error}") from None
    except ValueError as error:
        raise ReportError(str(error)) from None


def saved_runs(folder: str | Path | None = None) -> list[Path]:
    """The measured runs in a folder, the one that finished last first.

    Dry runs and files that cannot be read are passed over.
    """
    found = []
    for path in files.all_in(Path(folder or results_folder())):
        try:
            record = load(path)
        except ReportError:
            continue
        if record["measurement_matrix"]:
            found.append((record["run"]["finished_utc"], path))
    return [path for _, path in sorted(found, reverse=True)]


# ---- tables -------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A table as text, for a terminal (`rich`) and for a notebook (it shows itself).

    columns  headings, with units; the first is the row's name
    notes    sentences under the table
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def _numeric(self) -> list[bool]:
        """Whether a column holds figures, which stand to the right."""
        return [
            any(cells) and all(FIGURE.match(c) for c in cells)
            for cells in (
                [row[number] for row in self.rows]
                for number in range(len(self.columns))
            )
        ]

    def rich(self) -> RichTable:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        styles = {PASS: "green", FAIL: "bold red"}
        shown = RichTable(
            title=self.title,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for number, numeric in enumerate(self._numeric()):
            heading = self.columns[number]
            if numeric:
                # a figure is never broken, so its heading is made as narrow as the figures
                widest = max(len(row[number]) for row in self.rows)
                heading = textwrap.fill(heading, widest, break_long_words=False)
                shown.add_column(Text(heading), justify="right", no_wrap=True)
            else:
                shown.add_column(Text(heading), overflow="fold", no_wrap=number == 0)
        for row in self.rows:
            shown.add_row(*(Text(cell, styles.get(cell[:1], "")) for cell in row))
        return shown

    def _repr_markdown_(self) -> str:
        def line(cells: Sequence[str]) -> str:
            escaped = (cell.replace("|", "\\|").replace("*", "\\*") for cell in cells)
            return f"| {' | '.join(escaped)} |"

        rule = "|" + "".join("---:|" if right else "---|" for right in self._numeric())
        lines = [f"**{self.title}**", "", line(self.columns), rule]
        lines += [line(row) for row in self.rows]
        for note in self.notes:
            lines += ["", note]
        return "\n".join(lines)

    def __str__(self) -> str:
        widths = [
            max(map(len, cells)) for cells in zip(self.columns, *self.rows, strict=True)
        ]

        def line(cells: Sequence[str]) -> str:
            parts = [
                cell.rjust(width) if numeric else cell.ljust(width)
                for cell, width, numeric in zip(
                    cells, widths, self._numeric(), strict=True
                )
            ]
            return "  ".join(parts).rstrip()

        lines = [self.title, line(self.columns), *map(line, self.rows), *self.notes]
        return "\n".join(lines)


def rows_of(record: Json, role: MatrixRole | None = None) -> list[Json]:
    """The measured rows, the required candidate's first; of one role, or of both."""
    matrices = [record["measurement_matrix"]] + [
        further["measurement_matrix"] for further in record["further_candidates"]
    ]
    return [
        row
        for matrix in matrices
        for row in matrix
        if role in (None, row["matrix_role"])
    ]


def run_table(record: Json) -> Table:
    """What was run, and on what."""
    workload, machine, framework = (
        record[name] for name in ("workload", "hardware", "framework")
    )
    versions = ", ".join(
        f"{name} {version}" for name, version in framework.items() if version
    )
    commit = workload["resolved_model_commit"]
    model = f"{workload['model_id']}, {workload['dtype']}"
    if workload["model_overridden"]:
        model += " (not the profile's own model)"
    rows = [
        ("run", f"{record['run_mode']}, label {record['run_label']}"),
        ("finished (UTC)", record["run"]["finished_utc"].replace("T", " ").rstrip("Z")),
        ("workload", f"{workload['profile']}, version {workload['workload_version']}"),
        ("model", model),
        (
            "commit",
            f"{commit[:12]} ({workload['revision_resolution_source']})"
            if commit
            else "not resolved",
        ),
        ("device", _device(record)),
        ("CPU", f"{machine['cpu']}, {_count(machine['threads'], 'thread')}"),
        ("versions", versions),
        ("peaks come from", record["memory_source"] or NOT_MEASURED),
    ]
    return Table("The run", ("what", "value"), tuple(rows))


def plan_table(record: Json) -> Table:
    """The cells that the workload asks for; nothing here was measured."""
    rows = [
        (
            cell["candidate_id"],
            _role(cell["matrix_role"]),
            f"{cell['context_length']:,}",
            f"{cell['max_new_tokens']:,}",
            "none" if cell["residual_length"] is None else str(cell["residual_length"]),
        )
        for cell in record["plan"]
    ]
    columns = ("cache", "matrix", "context (tokens)", "new tokens", "window (tokens)")
    return Table("The plan: what will be measured", columns, tuple(rows))


def memory_table(record: Json, role: MatrixRole) -> Table:
    """Memory of one matrix: the candidates against the baseline.

    Under it stands how often the windows overflowed, as counted in the run.
    """
    rows = []
    for row in rows_of(record, role):
        held = (row[side]["cache_bytes"]["total"] for side in SIDES)
        rows.append(
            (
                *_name(row),
                _signed_mib(row["incremental_peak_saved_bytes"]),
                f"{100 * row['incremental_peak_reduction_ratio']:+.1f}",
                _signed_mib(row["decode_incremental_peak_saved_bytes"]),
                " → ".join(f"{size / MIB:.2f}" for size in held),
                str(row["candidate"]["overflow_count"]),
            )
        )
    columns = (
        "cache",
        _place_heading(role),
        "peak saved (MiB)",
        "of the peak (%)",
        "after prefill (MiB)",
        "cache holds (MiB)",
        "overflows",
    )
    notes = (
        "Saved: DynamicCache's peak minus the candidate's, above what was allocated before "
        "the prompt; of the whole run, and after the prefill. Holds: bytes of the cache "
        "object after the last token, baseline → candidate.",
        *overflow_notes(record, role),
        *_left_out_notes(record, role),
    )
    return Table(f"Memory, {_matrix_title(record, role)}", columns, tuple(rows), notes)


def time_table(record: Json, role: MatrixRole) -> Table:
    """Time of one matrix: the candidates against the baseline."""
    rows = []
    for row in rows_of(record, role):
        both = [row[side] for side in SIDES]
        rows.append(
            (
                *_name(row),
                f"{row['latency_ratio_candidate_over_baseline']:.2f}",
                " → ".join(f"{side['median_ttft_ms']:,.0f}" for side in both),
                " → ".join(f"{side['median_tpot_ms']:,.1f}" for side in both),
                " → ".join(f"{side['largest_gap_ms']:,.0f}" for side in both),
                str(row["candidate"]["overflow_count"]),
            )
        )
    columns = (
        "cache",
        _place_heading(role),
        "time ratio",
        "first token (ms)",
        "per token (ms)",
        "largest gap (ms)",
        "overflows",
    )
    repeats = record["workload"]["measured_repeats"]
    notes = (
        f"Median of {repeats} repeats, baseline → candidate; the gap is the longest wait "
        "between two tokens in any repeat.",
        *overflow_notes(record, role),
    )
    return Table(f"Time, {_matrix_title(record, role)}", columns, tuple(rows), notes)


def _name(row: Json) -> tuple[str, str]:
    """The first two columns of a matrix's row."""
    at = "context_length" if row["matrix_role"] == CONTEXT else "residual_length"
    return row["candidate_id"], f"{row[at]:,}"


def _place_heading(role: MatrixRole) -> str:
    return f"{_role(role)} (tokens)"


def _matrix_title(record: Json, role: MatrixRole) -> str:
    workload = record["workload"]
    if role == CONTEXT:
        fixed = f"window {workload['context_residual_length']}"
        new = workload["context_new_tokens"]
    else:
        fixed = f"context {workload['window_context_length']:,}"
        new = workload["window_new_tokens"]
    return f"{_role(role)} matrix ({fixed}, {new} new tokens)"


def overflow_notes(record: Json, role: MatrixRole) -> tuple[str, ...]:
    """What the recorded overflow counts of one matrix say."""
    rows = [r for r in record["measurement_matrix"] if r["matrix_role"] == role]
    if not rows:
        return ()
    counts = [row["candidate"]["overflow_count"] for row in rows]
    new, name = rows[0]["max_new_tokens"], rows[0]["candidate_id"]
    if not any(counts):
        windows = " and ".join(
            map(str, sorted({row["residual_length"] for row in rows}))
        )
        return (
            f"Overflows counted: none in the {len(rows)} rows of {name}. With a window of {windows} "
            f"and {new} new tokens, of which {new - 1} are fed back, the window never "
            "fills. Only the prompt was quantized, once. So these rows say nothing about "
            "the cost or the error of an overflow.",
        )
    return (
        "Overflows counted: "
        + ", ".join(
            f"{count} with window {row['residual_length']}"
            for row, count in zip(rows, counts, strict=True)
        )
        + f". {new - 1} of the {new} new tokens were fed back.",
    )


def _left_out_notes(record: Json, role: MatrixRole) -> Iterator[str]:
    for further in record["further_candidates"]:
        for cell in further["left_out"]:
            if cell["matrix_role"] == role:
                yield (
                    f"Left out: {cell['candidate_id']} at {cell['context_length']} tokens, "
                    f"window {cell['residual_length']} ({cell['reason']})."
                )
        if further["failure"]:
            failure = further["failure"]
            yield (
                f"{further['id']} failed at {failure['stage']}: {failure['type']}: "
                f"{failure['message']}"
            )


GATES = ("peak_saved", "nll_increase", "topk_overlap", "latency_ratio")


def gates_table(record: Json, candidate_id: str = "") -> Table:
    """Every gate of one candidate's rows, with the figure it was judged by.

    candidate_id  by default the required candidate, which the decision looks at
    """
    required = record["candidate_family"]["id"]
    name = candidate_id or required
    rows = [
        (
            place(row),
            *(_gate(row, gate) for gate in GATES),
            "accepted" if row["eligible"] else "refused",
        )
        for row in rows_of(record)
        if row["candidate_id"] == name
    ]
    limits = record["workload"]["acceptance"]
    columns = (
        "row",
        f"peak saved > {limits['peak_saved_bytes_above'] / MIB:g} MiB",
        f"NLL increase ≤ {limits['nll_increase_at_most']:.2f} nats",
        f"top-{record['workload']['quality_topk']} overlap "
        f"≥ {limits['topk_overlap_at_least']:.2f}",
        f"time ratio ≤ {limits['latency_ratio_at_most']:.2f}",
        "row is",
    )
    if name != required:
        title = f"The gates for {name}, a further candidate: no part of the decision"
        return Table(title, columns, tuple(rows))
    tokens = record["workload"]["quality_tokens"]
    notes = [
        "A row is accepted when it passes all four.",
        f"NLL and overlap come from {tokens} tokens; ± is one standard error.",
    ]
    if tokens - 1 < min(record["candidate_family"]["residual_lengths"]):
        notes.append(
            f"The {tokens - 1} of them that are fed back fill no window, so these two "
            "figures hold no error of an overflow, in any row."
        )
    return Table(f"The gates for {name}", columns, tuple(rows), (" ".join(notes),))


def further_gates_tables(record: Json) -> list[Table]:
    """The gates of every further candidate that was measured."""
    return [
        gates_table(record, further["id"])
        for further in record["further_candidates"]
        if further["measurement_matrix"]
    ]


def _gate(row: Json, gate: str) -> str:
    figure = {
        "peak_saved": _signed_mib(row["incremental_peak_saved_bytes"]),
        "nll_increase": _with_error(
            row["fixed_continuation_nll_delta"],
            row["fixed_continuation_nll_delta_standard_error"],
        ),
        "topk_overlap": f"{row['mean_topk_overlap']:.2f}",
        "latency_ratio": f"{row['latency_ratio_candidate_over_baseline']:.2f}",
    }[gate]
    return f"{PASS if row['gates'][gate] else FAIL} {figure}"


def natural_table(record: Json) -> Table | None:
    """Quality on natural text; None when the run did not get there."""
    quality = record["natural_text_quality"]
    if quality is None:
        return None
    rows = [
        (
            candidate["candidate_id"],
            str(candidate["residual_length"]),
            _with_error(candidate["kl"], candidate["kl_standard_error"], 4, ""),
            _with_error(
                candidate["nll_increase"], candidate["nll_increase_standard_error"], 4
            ),
            _with_error(
                candidate["topk_overlap"],
                candidate["topk_overlap_standard_error"],
                sign="",
            ),
        )
        for candidate in quality["candidates"]
    ]
    topk = record["workload"]["quality_topk"]
    columns = (
        "cache",
        "window (tokens)",
        "KL to the baseline (nats)",
        "NLL increase (nats)",
        f"top-{topk} overlap",
    )
    note = (
        f"{quality['scored_tokens']:,} tokens of {', '.join(quality['texts'])} after prompts "
        f"of {quality['prompt_tokens']}; ± is one standard error: {quality['note']}."
    )
    return Table("Natural text", columns, tuple(rows), (note,))


# ---- the figures published for the GPU profile --------------------------------------

PUBLISHED_MACHINE = "RTX 5070 Ti Laptop GPU, 12 GiB"
PUBLISHED_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


@dataclass(frozen=True)
class Published:
    """One figure that somebody else measured on another machine.

    place  of the row, as `place` calls it
    said   as it was published
    """

    place: str
    what: str
    said: str


PUBLISHED = (
    Published("context 512", "peak", "-18.1 % incremental peak"),
    Published("context 2,048", "peak", "saves 17.3 MiB"),
    Published("context 2,048", "time", "ratio 1.285"),
    Published("context 2,048", "NLL", "+0.375 nats"),
    Published("context 2,048", "overlap", "0.70"),
    Published("context 2,048", "row", "accepted"),
    Published("context 4,096", "peak", "saves 34.5 MiB"),
    Published("context 4,096", "NLL", "+0.973 nats"),
    Published("context 4,096", "overlap", "0.55"),
    Published("context 4,096", "row", "refused"),
    Published("window 16", "time", "ratio 1.60"),
    Published("window 64", "time", "ratio 1.25"),
)


def reference_table(record: Json) -> Table:
    """The published figures beside this run's own, wherever both looked at the same place."""
    own = {place(row): row for row in record["measurement_matrix"]}
    rows = [
        (
            figure.place,
            figure.what,
            figure.said,
            _own_figure(own.get(figure.place), figure.what),
        )
        for figure in PUBLISHED
    ]
    device = record["hardware"]["device"] or "no device"
    notes = (
        f"Published means: measured by others on an {PUBLISHED_MACHINE}, with "
        f"{PUBLISHED_MODEL} in bfloat16. This run: {record['workload']['model_id']} in "
        f"{record['workload']['dtype']} on {device}. Another machine, "
        "and where the model differs another experiment: the columns stand side by side to "
        "be compared in shape, never digit by digit.",
    )
    columns = ("place", "figure", "published, another machine", "this run")
    return Table("Beside the published figures", columns, tuple(rows), notes)


def _own_figure(row: Json | None, what: str) -> str:
    if row is None:
        return NOT_MEASURED
    if what == "peak":
        saved = row["incremental_peak_saved_bytes"]
        share = 100 * abs(row["incremental_peak_reduction_ratio"])
        verb = "saves" if saved > 0 else "costs"
        return f"{verb} {abs(saved) / MIB:.1f} MiB ({share:.1f} % of the baseline's)"
    return {
        "time": f"ratio {row['latency_ratio_candidate_over_baseline']:.2f}",
        "NLL": f"{row['fixed_continuation_nll_delta']:+.3f} nats",
        "overlap": f"{row['mean_topk_overlap']:.2f}",
        "row": "accepted" if row["eligible"] else "refused",
    }[what]


# ---- sentences ----------------------------------------------------------------------


def decision_lines(record: Json) -> list[str]:
    """The decision, what it rests on, and for each refused row the gates that refused it."""
    metrics = record["mechanism_metrics"]
    lines = [
        f"Decision: {record['decision']}",
        f"Evidence: {record['evidence_level']}",
    ]
    if failure := record["failure"]:
        return [
            *lines,
            f"The run failed at {failure['stage']}: {failure['type']}: "
            f"{failure['message']}",
        ]
    if not record["measurement_matrix"]:
        return [*lines, "Nothing was measured: this is the plan of a run."]
    onset = metrics["memory_reduction_onset_context"]
    crossover = metrics["eligible_crossover_context"]
    lines += [
        "Peak memory is saved from "
        + (f"a context of {onset:,} tokens on." if onset else "no context on."),
        "All four gates are passed from "
        + (f"a context of {crossover:,} tokens on." if crossover else "no context on."),
    ]
    if chosen := metrics["selected_candidate"]:
        lines.append(
            f"Selected, as the accepted row that saves most: {place(chosen)}, "
            f"{chosen['incremental_peak_saved_bytes'] / MIB:.2f} MiB of peak."
        )
    for row in record["measurement_matrix"]:
        failed = [gate for gate in GATES if not row["gates"][gate]]
        verdict = "accepted, all gates passed" if row["eligible"] else "refused: "
        reasons = "; ".join(_reason(row, gate, record) for gate in failed)
        lines.append(f"{place(row)}: {verdict}{reasons}")
    return lines


def _reason(row: Json, gate: str, record: Json) -> str:
    """Why a gate refused a row: the figure and the limit."""
    limits = record["workload"]["acceptance"]
    return {
        "peak_saved": f"it saves {_signed_mib(row['incremental_peak_saved_bytes'])} MiB "
        f"of peak, which must be more than {limits['peak_saved_bytes_above'] / MIB:g}",
        "nll_increase": f"NLL rises by {row['fixed_continuation_nll_delta']:.3f} nats, "
        f"at most {limits['nll_increase_at_most']:.2f} is allowed",
        "topk_overlap": f"the top tokens overlap by {row['mean_topk_overlap']:.2f}, "
        f"at least {limits['topk_overlap_at_least']:.2f} is asked",
        "latency_ratio": "it takes "
        f"{row['latency_ratio_candidate_over_baseline']:.2f} times as long, "
        f"at most {limits['latency_ratio_at_most']:.2f} is allowed",
    }[gate]


def capacity_finding(record: Json) -> str:
    """One sentence or two: what the context matrix says about memory."""
    rows = _own_rows(record, CONTEXT)
    if not rows:
        return "No context was measured."
    last = rows[-1]
    name, at = last["candidate_id"], f"{last['context_length']:,} tokens"
    onset = record["mechanism_metrics"]["memory_reduction_onset_context"]
    saved = last["incremental_peak_saved_bytes"]
    share = 100 * abs(last["incremental_peak_reduction_ratio"])
    held = [last[w]["cache_bytes"]["total"] / MIB for w in ("baseline", "candidate")]
    first = (
        f"{name} saves peak memory from {onset:,} tokens on"
        if onset
        else f"{name} saves peak memory at no measured context"
    )
    return (
        f"{first}; at {at} it {'saves' if saved > 0 else 'costs'} {abs(saved) / MIB:.1f} "
        f"MiB ({share:.0f} % of the baseline's incremental peak). The cache itself holds "
        f"{held[1]:.1f} MiB there instead of {held[0]:.1f}."
    )


def latency_finding(record: Json) -> str:
    """What the window matrix says about time."""
    rows = sorted(_own_rows(record, WINDOW), key=lambda row: row["residual_length"])
    if not rows:
        return "No window was measured."
    parts = [
        f"{row['latency_ratio_candidate_over_baseline']:.2f} times as long with window "
        f"{row['residual_length']} ({_count(row['candidate']['overflow_count'], 'overflow')})"
        for row in rows
    ]
    return (
        f"{rows[0]['candidate_id']} takes {', '.join(parts)} as the baseline, at a context "
        f"of {rows[0]['context_length']:,} tokens."
    )


def quality_finding(record: Json) -> str:
    """What the fixed trajectory and the natural text say, with their standard errors."""
    rows = _own_rows(record, CONTEXT) + _own_rows(record, WINDOW)
    if not rows:
        return "No quality was measured."
    worst = max(rows, key=lambda row: row["fixed_continuation_nll_delta"])
    tokens = record["workload"]["quality_tokens"]
    said = (
        f"On {tokens} fixed tokens the largest NLL increase of {worst['candidate_id']} is "
        + _with_error(
            worst["fixed_continuation_nll_delta"],
            worst["fixed_continuation_nll_delta_standard_error"],
        )
        + " nats."
    )
    natural = record["natural_text_quality"]
    if natural is None:
        return said
    ours = [
        c for c in natural["candidates"] if c["candidate_id"] == worst["candidate_id"]
    ]
    if not ours:
        return said
    low, high = (pick(ours, key=lambda c: c["kl"]) for pick in (min, max))
    return (
        f"{said} On {natural['scored_tokens']:,} tokens of natural text its KL to the baseline "
        f"goes from {_with_error(low['kl'], low['kl_standard_error'], 4, '')} (window "
        f"{low['residual_length']}) to "
        f"{_with_error(high['kl'], high['kl_standard_error'], 4, '')} nats (window "
        f"{high['residual_length']})."
    )


def _own_rows(record: Json, role: MatrixRole) -> list[Json]:
    """The required candidate's rows of one matrix, the shortest context first."""
    rows = [row for row in record["measurement_matrix"] if row["matrix_role"] == role]
    return sorted(rows, key=lambda row: (row["context_length"], row["residual_length"]))


# ---- several runs -------------------------------------------------------------------


def comparison_table(records: Sequence[Json]) -> Table:
    """A column a run: what it ran on, its decision, and each row's figures."""
    facts: dict[str, Callable[[Json], str]] = {
        "mode": lambda r: r["run_mode"],
        "model": lambda r: f"{r['workload']['model_id']}, {r['workload']['dtype']}",
        "device": _device,
        "workload version": lambda r: r["workload"]["workload_version"],
        "torch": lambda r: r["framework"]["torch"] or "?",
        "transformers": lambda r: r["framework"]["transformers"] or "?",
        "hqq": lambda r: r["framework"]["hqq"] or "?",
        "decision": lambda r: r["decision"],
        "memory saved from (tokens)": lambda r: _or_none(
            r["mechanism_metrics"]["memory_reduction_onset_context"]
        ),
        "all gates from (tokens)": lambda r: _or_none(
            r["mechanism_metrics"]["eligible_crossover_context"]
        ),
        "accepted rows": lambda r: (
            f"{r['mechanism_metrics']['eligible_candidate_count']} of "
            f"{len(r['measurement_matrix'])}"
        ),
    }
    rows = [
        (name, *(read(record) for record in records)) for name, read in facts.items()
    ]
    by_name = [
        {f"{place(row)}, {row['candidate_id']}": row for row in rows_of(r)}
        for r in records
    ]
    for name in dict.fromkeys(name for named in by_name for name in named):
        rows.append((name, *(_in_short(named.get(name)) for named in by_name)))
    notes = [
        "Rows give: peak saved in MiB; time ratio; NLL increase in nats ± standard error; "
        "overlap; accepted or refused."
    ]
    versions = {record["workload"]["workload_version"] for record in records}
    if len(versions) > 1:
        notes.append(
            f"These runs are of {len(versions)} workload versions "
            f"({', '.join(sorted(versions))}): look at shapes, do not compare digits."
        )
    machines = {record["hardware"]["device"] for record in records}
    if len(machines) > 1:
        notes.append(
            "They ran on different devices: compare ratios, not MiB or seconds."
        )
    columns = ("figure", *_labels(records))
    return Table("The runs side by side", columns, tuple(rows), tuple(notes))


def _labels(records: Sequence[Json]) -> list[str]:
    """Run labels; with the mode where two runs of different modes share one."""
    labels = [record["run_label"] for record in records]
    if len(set(labels)) == len(labels):
        return labels
    return [f"{record['run_mode']}-{record['run_label']}" for record in records]


def _in_short(row: Json | None) -> str:
    if row is None:
        return NOT_MEASURED
    nll = _with_error(
        row["fixed_continuation_nll_delta"],
        row["fixed_continuation_nll_delta_standard_error"],
    )
    return (
        f"{_signed_mib(row['incremental_peak_saved_bytes'])}; "
        f"{row['latency_ratio_candidate_over_baseline']:.2f}; {nll}; "
        f"{row['mean_topk_overlap']:.2f}; {'accepted' if row['eligible'] else 'refused'}"
    )


# ---- the whole report ---------------------------------------------------------------


def tables(record: Json) -> list[Table]:
    """Every table of one run, in the order to read them."""
    if not record["measurement_matrix"]:
        return [run_table(record), plan_table(record)]
    found = [run_table(record)]
    for role in (CONTEXT, WINDOW):
        if rows_of(record, role):
            found += [memory_table(record, role), time_table(record, role)]
    found += [gates_table(record), *further_gates_tables(record)]
    natural = natural_table(record)
    return found + ([natural] if natural else []) + [reference_table(record)]


def print_report(record: Json, console: Console) -> None:
    """The tables of one run, then its decision with the reasons."""
    said: set[str] = set()
    for table in tables(record):
        fresh = tuple(note for note in table.notes if note not in said)
        print_table(replace(table, notes=fresh), console)
        said |= set(fresh)
    for line in decision_lines(record):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_table(table: Table, console: Console) -> None:
    """A table and the notes under it."""
    console.print()
    console.print(table.rich())
    for note in table.notes:
        console.print(note, highlight=False, markup=False, style="dim")
    console.print()


FIGURES = ("capacity", "latency", "quality")


def figures(record: Json) -> dict[str, Figure]:
    """The figures of one run by name; none for a run that measured nothing."""
    from kvlab.plots import matrix as plots

    if not record["measurement_matrix"]:
        return {}
    return {name: getattr(plots, name)(record) for name in FIGURES}


def write_figures(record: Json, folder: Path, stem: str) -> list[Path]:
    """Writes folder/STEM-NAME.png for each figure; returns the paths.

    A figure is made from its JSON, so an older picture of the same name is replaced.
    """
    written = []
    for name, figure in figures(record).items():
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{stem}-{name}.png"
        figure.savefig(path, dpi=110, bbox_inches="tight")
        written.append(path)
    return written


# ---- words and numbers --------------------------------------------------------------


def place(row: Json) -> str:
    """Where a row stands in its matrix: "context 2,048" or "window 16"."""
    if row["matrix_role"] == CONTEXT:
        return f"context {row['context_length']:,}"
    return f"window {row['residual_length']}"


def _role(role: str) -> str:
    return {CONTEXT: "context", WINDOW: "window"}[role]  # type: ignore[index]


def _device(record: Json) -> str:
    machine = record["hardware"]
    if machine["device"] is None:
        return "none: nothing was measured"
    size = machine["total_memory_bytes"]
    return machine["device"] + (f", {size / 2**30:.0f} GiB" if size else "")


def _signed_mib(size: int) -> str:
    return f"{size / MIB:+.2f}"


def _with_error(
    value: float, error: float | None, digits: int = 3, sign: str = "+"
) -> str:
    shown = f"{value:{sign}.{digits}f}"
    return shown if error is None else f"{shown} ± {error:.{digits}f}"


def _or_none(tokens: int | None) -> str:
    return "none" if tokens is None else f"{tokens:,}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
