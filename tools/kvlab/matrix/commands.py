"""`kvlab matrix ...`: the paired experiment from a terminal.

Called by `kvlab.cli`. Holds no logic of its own: it parses, calls, prints.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="The paired experiment.")


class Mode(StrEnum):
    """The run modes, as a choice on the command line."""

    dry_run = "dry_run"
    real_gpu = "real_gpu"
    embedded_cpu = "embedded_cpu"


@app.callback()
def describe() -> None:
    """The paired experiment: DynamicCache against quantized caches."""


@app.command()
def run(
    mode: Annotated[
        Mode, typer.Option(help="dry_run records the plan and loads nothing.")
    ] = Mode.dry_run,
    label: Annotated[
        str, typer.Option(help="Names the file; a label is used once.")
    ] = "local",
    results: Annotated[Path, typer.Option(help="The folder of the files.")] = Path(
        "results"
    ),
    profile: Annotated[
        str, typer.Option(help="The workload; by default the run mode's own.")
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            envvar="KVLAB_MODEL", help="Another model: a hub id, or 'embedded'."
        ),
    ] = "",
    revision: Annotated[
        str, typer.Option(envvar="KVLAB_REVISION", help="Branch, tag or commit.")
    ] = "main",
    local_files_only: Annotated[
        bool,
        typer.Option(
            "--local-files-only",
            envvar="KVLAB_LOCAL_FILES_ONLY",
            help="Look into the hub's cache only (HF_HUB_CACHE says where it is).",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="A taken label gets a numbered sibling.")
    ] = False,
) -> None:
    """Measure, or go on where a killed run stopped; write one JSON file and its figures."""
    from kvlab import matrix
    from kvlab.matrix import report as reports
    from kvlab.matrix.workload import MODE_PROFILE

    try:
        workload = matrix.profile(profile or MODE_PROFILE[mode.value])
        workload = matrix.with_model(workload, model or workload.model_id, revision)
        path = matrix.run(
            mode.value,
            label,
            results,
            workload=workload,
            force=force,
            local_files_only=local_files_only,
        )
    except (matrix.RunRefused, ValueError) as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from None
    except matrix.RunFailed as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(1) from None
    record = matrix.read(path)
    typer.echo(f"decision   {record['decision']}")
    typer.echo(f"evidence   {record['evidence_level']}")
    drawn = reports.write_figures(record, path.parent, path.stem)
    for written in (path, *drawn):
        typer.echo(f"wrote      {written}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a result: what results/matrix.schema.json holds."""
    from kvlab.matrix.schema import schema_text

    typer.echo(schema_text(), nl=False)


@app.command()
def report(
    result: Annotated[
        list[Path], typer.Argument(help="One file of a run, or several to compare.")
    ],
    figures: Annotated[
        Path | None,
        typer.Option(help="Folder of the figures; by default beside each file."),
    ] = None,
) -> None:
    """Print tables, decision and reasons, and write the figures; several files: compare."""
    from rich.console import Console

    from kvlab.matrix import report as reports

    console = Console()
    try:
        records = [reports.load(path) for path in result]
    except reports.ReportError as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from None
    for path, record in zip(result, records, strict=True):
        console.rule(path.name)
        reports.print_report(record, console)
        drawn = reports.write_figures(record, figures or path.parent, path.stem)
        for written in drawn:
            console.print(f"wrote {written}", highlight=False, soft_wrap=True)
    if len(records) > 1:
        reports.print_table(reports.comparison_table(records), console)
