"""`kvlab quality ...`: quality against bytes from a terminal.

Called by `kvlab.cli`. Holds no logic of its own: it parses, calls, prints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Quality against bytes.")


@app.callback()
def describe() -> None:
    """Quality against bytes: quantized caches on a real model, at equal bytes too."""


@app.command()
def run(
    label: Annotated[
        str, typer.Option(help="Names the file; a label is used once.")
    ] = "local",
    results: Annotated[Path, typer.Option(help="The folder of the files.")] = Path(
        "results"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="One text and fewer caches.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="A taken label gets a numbered sibling.")
    ] = False,
) -> None:
    """Measure, or go on where a killed run stopped; write one JSON file and its figures."""
    from kvlab import quality
    from kvlab.matrix import RunRefused
    from kvlab.models import ModelError

    plan = quality.QUICK if quick else quality.FULL
    try:
        path = quality.run(label, results, plan=plan, force=force)
    except (RunRefused, ModelError) as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from None
    report([path])


@app.command()
def schema() -> None:
    """Print the JSON Schema of a result: what results/quality.schema.json holds."""
    from kvlab.quality.schema import schema_text

    typer.echo(schema_text(), nl=False)


@app.command()
def report(
    result: Annotated[list[Path], typer.Argument(help="Files of runs.")],
    figures: Annotated[
        Path | None,
        typer.Option(help="Folder of the figures; by default beside each file."),
    ] = None,
) -> None:
    """Print the tables of finished runs and write their figures; loads no model."""
    from rich.console import Console

    from kvlab.quality import report as reports

    console = Console()
    for path in result:
        try:
            record = reports.load(path)
        except reports.ReportError as error:
            typer.secho(str(error), fg="red", err=True)
            raise typer.Exit(2) from None
        console.rule(path.name)
        reports.print_report(record, console)
        for written in reports.write_figures(record, figures or path.parent, path.stem):
            console.print(f"wrote {written}", highlight=False, soft_wrap=True)
