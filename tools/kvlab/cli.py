"""`kvlab ...`: one subcommand for each Makefile target that needs Python.

Called by the Makefile and by people. Holds no logic of its own: it parses, calls, prints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlab.grading.commands import app as grading_app
from kvlab.matrix.commands import app as matrix_app
from kvlab.quality.commands import app as quality_app

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
Root = Annotated[Path, typer.Option(help="The course's folder.")]
LabName = Annotated[str, typer.Option("--lab", help="One lab; all when left out.")]


def fail(message: object) -> typer.Exit:
    """Prints what went wrong in red and gives the exit to raise."""
    typer.secho(str(message), fg="red", err=True)
    return typer.Exit(2)


@app.callback()
def describe() -> None:
    """KV Cache Quantization Lab."""


@app.command()
def build(
    lab: LabName = "",
    repo_url: Annotated[
        str, typer.Option(help="Where the first cell fetches the course from.")
    ] = "",
    language: Annotated[str, typer.Option(help="Language of the prose.")] = "en",
    root: Root = Path("."),
) -> None:
    """Build solutions/LAB/LAB.ipynb and notebooks/LAB/LAB.ipynb from the sources."""
    from kvlab import course

    try:
        report = course.build(root.resolve(), lab, repo_url, language)
    except course.CourseError as error:
        raise fail(error) from None
    for built in report:
        path = built.path.relative_to(root.resolve())
        if built.outcome == "kept":
            typer.secho(
                f"kept       {path} has been worked on and stays as it is. "
                "For the new version, move it away and build again.",
                fg="yellow",
            )
        else:
            typer.echo(f"{built.outcome:10} {path}")


@app.command()
def grade(
    lab: LabName = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 below full marks.")
    ] = False,
    student: Annotated[
        str, typer.Option(help="Whose submission it becomes in the gradebook.")
    ] = "me",
    root: Root = Path("."),
) -> None:
    """Grade the notebooks in notebooks/ as they are now, and print the scoreboard."""
    from rich.console import Console

    from kvlab import course, grading

    console = Console()
    try:
        labs = course.choose_labs(root.resolve(), lab)
    except course.CourseError as error:
        raise fail(error) from None
    with grading.progress_on(console, len(labs)) as progress:
        results = grading.grade(root.resolve(), labs, student, progress)
    grading.print_scoreboard(results, console)
    if course.is_bundle(root.resolve()):
        console.print(
            "These are the visible tests; hidden tests are not part of it. "
            "They run when your work is graded by your instructor."
        )
    if any(result.fault == "course" for result in results):
        raise typer.Exit(2)
    if strict and not grading.full_marks(results):
        raise typer.Exit(1)


@app.command()
def bench(
    lab: LabName = "",
    cache: Annotated[
        bool, typer.Option("--cache", help="Time the caches instead.")
    ] = False,
    root: Root = Path("."),
) -> None:
    """Run each solved notebook once; print its seconds and peak memory."""
    if cache:
        _bench_caches()
        return
    from rich.console import Console

    from kvlab import bench as measurements
    from kvlab import course

    try:
        labs = course.choose_labs(root.resolve(), lab)
    except course.CourseError as error:
        raise fail(error) from None
    costs = []
    for chosen in labs:
        typer.echo(f"running {chosen.name}")
        costs.append(measurements.measure_lab(chosen))
    Console().print(measurements.cost_table(costs))


def _bench_caches() -> None:
    from rich.console import Console

    from kvlab import cache_bench, models

    console = Console()
    try:
        loaded = models.load()
    except models.ModelError as error:
        raise fail(error) from None
    costs = cache_bench.measure(loaded, progress=console.print)
    console.print(cache_bench.table(costs))


@app.command()
def capture() -> None:
    """Make lab 03's file of real Keys and Values from the embedded model."""
    from kvlab import captured

    path = Path(captured.__file__).parent / "data" / captured.FILE_NAME
    captured.capture(path)
    typer.echo(f"wrote {path} ({path.stat().st_size:,} bytes)")


@app.command()
def preflight(
    profile: Annotated[
        str, typer.Option(help="The workload that is to run here.")
    ] = "Q-CUDA-MECHANISM",
    model: Annotated[
        str,
        typer.Option(envvar="KVLAB_MODEL", help="Another model than the profile's."),
    ] = "",
    revision: Annotated[str, typer.Option(envvar="KVLAB_REVISION")] = "main",
    local_files_only: Annotated[
        bool, typer.Option("--local-files-only", envvar="KVLAB_LOCAL_FILES_ONLY")
    ] = False,
) -> None:
    """Say whether this machine can run the paired experiment; exit 2 when it cannot."""
    from kvlab import preflight as checks

    try:
        code = checks.command(profile, model, revision, local_files_only)
    except ValueError as error:
        raise fail(error) from None
    raise typer.Exit(code)


app.add_typer(grading_app)
app.add_typer(matrix_app, name="matrix")
app.add_typer(quality_app, name="quality")


def main() -> None:
    """Entry point of the `kvlab` command."""
    app()
