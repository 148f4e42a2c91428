"""Packs what students get into a zip: everything that they need, no answer, no hidden test.

Called by `kvlab bundle`. Takes only what is listed here, builds the notebooks afresh, and writes nothing when
a line of an answer or of a hidden test is found in what it packed. Never touches a notebook of the course.
"""

from __future__ import annotations

import copy
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from kvlab import course
from kvlab.course import CourseError, Lab
from kvlab.grading import released
from kvlab.grading.engine import solution_of

TOP = "kv-cache-quantization-lab"  # the folder that the zip unpacks to
RELEASED = "released"  # the labs as `make grade` compares with them
PARTS = (
    ".github/pictures",
    ".gitignore",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "environment.yml",
    "nbgrader_config.py",
    "pyproject.toml",
    "tools/kvlab",
)
ENDINGS = (".png", ".py")  # in the folders among them, beside what lies in data/
TOGETHER = 3  # lines
LONG_ENOUGH = 40  # characters: what is shorter stands in many places by chance
MOMENT = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can hold
BEGIN, END = "BEGIN SOLUTION", "END SOLUTION"


def bundle(root: Path, to: Path, repo_url: str = "", language: str = "en") -> list[str]:
    """Writes the zip; returns the names in it, in order.

    repo_url, language  as in `make build`
    raises CourseError when something in it would give an answer away
    """
    labs = course.find_labs(root)
    files = dict(_parts(root))
    secrets: dict[Run, str] = {}
    with course.fresh_build(root, labs, repo_url, language) as fresh:
        for path in sorted((fresh / "notebooks").rglob("*")):
            if path.is_file():
                files[path.relative_to(fresh).as_posix()] = path.read_bytes()
        for lab in labs:
            folder = fresh / "solutions" / lab.name
            own = Lab(lab.name, lab.source, folder / lab.solution.name, lab.release)
            solution = solution_of(own)
            for name, content in _released(folder, own, solution):
                files[name] = content
            secrets |= dict.fromkeys(secret_runs(solution), lab.name)
    leaks = list(_leaks(files, secrets))
    if leaks:
        raise CourseError(
            "nothing was packed, for it would give something away:\n" + "\n".join(leaks)
        )
    to.parent.mkdir(parents=True, exist_ok=True)
    beside = to.with_name(f".{to.name}.new")
    _zip(files, beside)
    beside.replace(to)
    return sorted(files)


def _parts(root: Path) -> Iterator[tuple[str, bytes]]:
    for part in PARTS:
        place = root / part
        inside = sorted(place.rglob("*")) if place.is_dir() else [place]
        for path in inside:
            name = path.relative_to(root).as_posix()
            wanted = path == place or path.suffix in ENDINGS or "/data/" in name
            if path.is_file() and not path.is_symlink() and wanted:
                yield name, path.read_bytes()


def _released(
    folder: Path, lab: Lab, solution: NotebookNode
) -> Iterator[tuple[str, bytes]]:
    """What takes the place of solutions/LAB."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix not in (".py", ".ipynb"):
            name = path.relative_to(folder).as_posix()
            yield f"{RELEASED}/{lab.name}/{name}", path.read_bytes()
    text = course.notebook_text(without_answers(solution))
    yield f"{RELEASED}/{lab.name}/{lab.name}.ipynb", text.encode()


def without_answers(solution: NotebookNode) -> NotebookNode:
    """The solution notebook with nothing between the marks of answers and hidden tests.

    Registered in a gradebook it gives the cells that the solution gives, with the tests
    as students see them.
    """
    notebook = copy.deepcopy(solution)
    for cell in notebook.cells:
        cell["source"] = released.without_hidden_tests(
            "\n".join(line for line, secret in _marked(cell.source) if not secret)
        )
        if cell.cell_type == "code":
            cell |= {"outputs": [], "execution_count": None}
    return notebook


def _marked(source: str) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it stands inside an answer (its marks do not)."""
    inside = False
    for line in source.split("\n"):
        if END in line:
            inside = False
        yield line, inside
        if BEGIN in line:
            inside = True


# --- what must not get out ------------------------------------------------------------

Run = tuple[str, ...]  # lines that follow each other, without blank ones


def secret_runs(solution: NotebookNode) -> set[Run]:
    """Lines of answers and hidden tests, by threes; a short answer as a whole.

    A single line stands in other places by chance, three that follow each other do not.
    """
    found: set[Run] = set()
    for cell in solution.cells:
        for region in _secret_regions(cell.source):
            lines = _plain_lines("\n".join(region))
            runs = _runs(lines, TOGETHER) if len(lines) > TOGETHER else {tuple(lines)}
            found |= {run for run in runs if len("".join(run)) >= LONG_ENOUGH}
    seen = _plain_lines(_text_of(without_answers(solution)))
    return found - {run for n in range(1, TOGETHER + 1) for run in _runs(seen, n)}


def _text_of(notebook: NotebookNode) -> str:
    return "\n".join(cell.source for cell in notebook.cells)


def _secret_regions(source: str) -> Iterator[list[str]]:
    """What stands between the marks: of answers and of hidden tests."""
    region: list[str] | None = None
    for line in source.split("\n"):
        if END in line or released.HIDDEN_END in line:
            yield region or []
            region = None
        elif BEGIN in line or released.HIDDEN_BEGIN in line:
            region = []
        elif region is not None:
            region.append(line)


SAYS_NOTHING = re.compile(r"""\W*|["']\w+["'],?""")  # brackets, a name in a list


def _plain_lines(text: str) -> list[str]:
    lines = map(str.strip, text.split("\n"))
    return [line for line in lines if not SAYS_NOTHING.fullmatch(line)]


def _runs(lines: Sequence[str], length: int) -> set[Run]:
    return {tuple(lines[i : i + length]) for i in range(len(lines) - length + 1)}


def _leaks(files: Mapping[str, bytes], secrets: Mapping[Run, str]) -> Iterator[str]:
    """One sentence for each thing that must not be there."""
    for name, content in files.items():
        text = content.decode("utf-8", "replace")
        if name.endswith(".ipynb"):
            text = _text_of(nbformat.reads(text, as_version=4))
            if _holds_hidden_tests(text):
                yield f"{name} holds hidden tests"
        lines = _plain_lines(text)
        for length in range(1, TOGETHER + 1):
            for run in sorted(_runs(lines, length) & secrets.keys()):
                where = f"an answer or hidden test of {secrets[run]}"
                yield f"{name} holds lines of {where}: {' | '.join(run)}"


def _holds_hidden_tests(text: str) -> bool:
    return re.search(rf"###\s*{released.HIDDEN_BEGIN}", text) is not None


def _zip(files: Mapping[str, bytes], path: Path) -> None:
    """The same bytes for the same files, whenever and wherever it is made."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(f"{TOP}/{name}", MOMENT)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, files[name], compresslevel=9)


def labs_in(names: Sequence[str]) -> list[str]:
    """The labs that a bundle holds, from the names in it."""
    found = (re.match(rf"{RELEASED}/([^/]+)/\1\.ipynb$", name) for name in names)
    return sorted(match.group(1) for match in found if match)
