"""`kvlab autograde`, `feedback`, `export` and `bundle`: an instructor's commands.

Called by `kvlab.cli`. Holds no logic of its own: it parses, calls, prints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Many submissions.")

Root = Annotated[Path, typer.Option(help="The course's folder.")]
LabName = Annotated[str, typer.Option("--lab", help="One lab; all when left out.")]
Student = Annotated[str, typer.Option(help="One student; all when left out.")]
Jobs = Annotated[int, typer.Option(help="Processes; 0: one for each core.")]
Database = Annotated[
    str, typer.Option("--db", help="Another gradebook: any SQLAlchemy URL.")
]


def _stop(message: object, code: int = 2) -> typer.Exit:
    typer.secho(str(message), fg="red", err=True)
    return typer.Exit(code)


@app.command()
def autograde(
    lab: LabName = "",
    student: Student = "",
    jobs: Jobs = 0,
    scheduler: Annotated[
        str, typer.Option(help="A dask scheduler, tcp://host:port, instead of --jobs.")
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Grade again what was graded.")
    ] = False,
    db: Database = "",
    root: Root = Path("."),
) -> None:
    """Grade all of submitted/STUDENT/LAB/; goes on where a killed run stopped."""
    from rich.console import Console

    from kvlab import course
    from kvlab.grading import many, summary

    console = Console()
    request = many.Request(student, jobs, scheduler, force, db)
    try:
        labs = course.choose_labs(root.resolve(), lab)
        with summary.progress_on(console, "grading") as step:
            result = many.autograde(
                root.resolve(),
                labs,
                request,
                lambda done, total, row: step(
                    done, total, summary.sentence(row) if row else ""
                ),
            )
    except (course.CourseError, OSError) as error:
        raise _stop(error) from None
    except KeyboardInterrupt:
        raise _stop("stopped; the same command goes on from here", 130) from None
    summary.print_summary(result, console)
    if result.faults:
        raise typer.Exit(2)


@app.command()
def feedback(
    lab: LabName = "",
    student: Student = "",
    jobs: Jobs = 0,
    db: Database = "",
    root: Root = Path("."),
) -> None:
    """Write every student's page to feedback/STUDENT/LAB/; exit 1 when one is missing."""
    from rich.console import Console

    from kvlab import course
    from kvlab.grading import feedback as pages
    from kvlab.grading import summary

    console = Console()
    try:
        labs = [found.name for found in course.choose_labs(root.resolve(), lab)]
        with summary.progress_on(console, "writing feedback") as step:
            written = pages.write_all(
                root.resolve(),
                labs,
                student,
                jobs,
                db,
                lambda done, total, page: step(
                    done, total, f"{page.student} {page.lab}" if page else ""
                ),
            )
    except (course.CourseError, OSError) as error:
        raise _stop(error) from None
    missing = [page for page in written if page.problem]
    console.print(f"{len(written) - len(missing)} pages are in feedback/")
    for page in missing:
        typer.secho(f"{page.student} {page.lab}: {page.problem}", fg="red", err=True)
    if missing:
        raise typer.Exit(1)


@app.command()
def export(
    to: Annotated[
        Path, typer.Option(help="The CSV file; the JSON file is written beside it.")
    ] = Path("grades.csv"),
    lab: LabName = "",
    student: Student = "",
    db: Database = "",
    root: Root = Path("."),
) -> None:
    """Write all scores as CSV and, with the same rows, as JSON."""
    from kvlab import course
    from kvlab.grading import engine, many
    from kvlab.grading import export as tables
    from kvlab.grading.ledger import lines_of

    try:
        if lab:
            course.choose_labs(root.resolve(), lab)
        api = many.open_course(root.resolve(), db)
        with engine.gradebook(api) as book:
            lines = lines_of(root.resolve(), api.coursedir.db_url)
            rows = tables.rows_of(
                book, lines, [lab] if lab else [], [student] if student else []
            )
        paths = tables.write(rows, to)
    except (course.CourseError, OSError) as error:
        raise _stop(error) from None
    typer.echo(f"{len(rows)} rows: {paths[0]}, {paths[1]}")


@app.command()
def bundle(
    to: Annotated[Path, typer.Option(help="The zip.")] = Path("kvlab-students.zip"),
    repo_url: Annotated[
        str, typer.Option(help="Where the first cell fetches the course from.")
    ] = "",
    language: Annotated[str, typer.Option(help="Language of the prose.")] = "en",
    root: Root = Path("."),
) -> None:
    """Pack what students get: no answers, no hidden tests; `make grade` works in it."""
    from kvlab import course
    from kvlab.grading import bundle as packing

    try:
        names = packing.bundle(root.resolve(), to, repo_url, language)
    except (course.CourseError, OSError) as error:
        raise _stop(error) from None
    labs = ", ".join(packing.labs_in(names))
    typer.echo(f"{to}: {len(names)} files, {to.stat().st_size:,} bytes, labs: {labs}")


if __name__ == "__main__":
    app()
