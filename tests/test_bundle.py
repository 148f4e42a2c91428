"""`kvlab bundle`: what students get holds no answer and no hidden test, and can be graded."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, TINY
from nbformat import NotebookNode
from typer.testing import CliRunner

from kvlab import course
from kvlab.course import ClearTodos, CourseError
from kvlab.grading import bundle, commands, released

LABS = [lab for lab in course.find_labs(ROOT) if lab.solution.is_file()]


@pytest.fixture
def packable(own_course: Path) -> Path:
    """The tiny course, with all that must not be packed beside it."""
    for part in ("LICENSE", "Makefile", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / part, own_course)
    for name in (
        ".git/objects/aa",
        ".grading/ledger.db",
        "autograded/ana/01_tiny/01_tiny.ipynb",
        "submitted/ana/01_tiny/01_tiny.ipynb",
        "tests/answers/01_tiny/right/a.py",
        "tools/kvlab/__init__.py",
        "tools/kvlab/__pycache__/a.cpython-311.pyc",
        "tools/kvlab/data/text.txt",
        "tools/kvlab/notes.md",
        "tools/kvlab.egg-info/PKG-INFO",
    ):
        path = own_course / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return own_course


def packed(root: Path, name: str = "b.zip") -> dict[str, bytes]:
    """What a bundle holds: name -> content."""
    bundle.bundle(root, root / name)
    with zipfile.ZipFile(root / name) as archive:
        return {entry: archive.read(entry) for entry in archive.namelist()}


def test_a_bundle_holds_what_is_listed_and_nothing_else(packable: Path) -> None:
    names = [name.removeprefix(f"{bundle.TOP}/") for name in packed(packable)]
    assert names == [
        "LICENSE",
        "Makefile",
        "README.md",
        "nbgrader_config.py",
        f"notebooks/{TINY}/{TINY}.ipynb",
        "pyproject.toml",
        f"released/{TINY}/{TINY}.ipynb",
        "tools/kvlab/__init__.py",
        "tools/kvlab/data/text.txt",
    ]


def test_a_bundle_holds_no_answer_and_no_hidden_test(packable: Path) -> None:
    for name, content in packed(packable).items():
        assert b"secret_number" not in content, name
        assert b"return 2 * number" not in content, name
        assert b"Rubric" not in content or name.endswith("README.md"), name


def test_a_notebook_that_was_worked_on_is_packed_as_it_was_released(
    packable: Path,
) -> None:
    (lab,) = course.find_labs(packable)
    before = packed(packable)
    shutil.copy(lab.solution, lab.release)
    assert packed(packable) == before
    assert lab.release.read_bytes() == lab.solution.read_bytes()


def test_the_same_course_gives_the_same_bytes(packable: Path) -> None:
    packed(packable, "first.zip")
    (packable / "LICENSE").touch()
    (packable / "LICENSE").chmod(0o600)
    packed(packable, "second.zip")
    first, second = (packable / name for name in ("first.zip", "second.zip"))
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {bundle.MOMENT}
        assert archive.namelist() == sorted(archive.namelist())


@pytest.mark.parametrize(
    "leak",
    [
        "    secret_number = 1234567\n"
        "    checks.expect(double(secret_number) == 2469134, 'a large number')",
        "if isinstance(number, str):\n"
        '  raise ValueError(f"number is text: {number!r}")\n\n'
        "  return 2 * number",
    ],
    ids=["hidden test", "answer"],
)
def test_nothing_is_packed_that_gives_an_answer_away(packable: Path, leak: str) -> None:
    (lab,) = course.find_labs(packable)
    if "secret" in leak:
        lines = re.findall(r"BEGIN HIDDEN TESTS\n(.*?\n.*?)\n", lab.source.read_text())
        leak = lines[0]
    (packable / "tools" / "kvlab" / "reference.py").write_text(f"def f():\n{leak}\n")
    with pytest.raises(CourseError, match=r"reference.py holds lines of .* of 01_tiny"):
        bundle.bundle(packable, packable / "b.zip")
    assert not list(packable.glob("*b.zip*"))


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
def test_without_answers_a_lab_has_the_cells_that_students_have(
    lab: course.Lab,
) -> None:
    solution = nbformat.read(lab.solution, as_version=4)
    given = bundle.without_answers(solution)

    def as_released(notebook: NotebookNode) -> list[str]:
        cleared, _ = ClearTodos().preprocess(copy.deepcopy(notebook), {})
        return [released.without_hidden_tests(cell.source) for cell in cleared.cells]

    assert as_released(given) == as_released(solution)
    text = "\n".join(cell.source for cell in given.cells)
    assert "HIDDEN TESTS" not in text
    assert not re.search(r"BEGIN SOLUTION(?: -->)?\n(?!.*END SOLUTION)", text)


def test_the_command_says_what_it_packed(packable: Path) -> None:
    to = packable / "out" / "students.zip"
    arguments = ["bundle", "--root", str(packable), "--to", str(to)]
    result = CliRunner().invoke(commands.app, arguments)
    assert result.exit_code == 0, result.output
    assert re.search(r"9 files, [\d,]+ bytes, labs: 01_tiny", result.output)


@pytest.mark.skipif(
    not hasattr(course, "source_folder"), reason="the course needs its solutions"
)
def test_make_grade_works_in_a_bundle_and_says_what_is_missing(
    packable: Path, tmp_path: Path
) -> None:
    bundle.bundle(packable, tmp_path / "b.zip")
    shutil.unpack_archive(tmp_path / "b.zip", tmp_path)
    root = tmp_path / bundle.TOP
    assert not (root / "solutions").exists()
    notebook = nbformat.read(root / "notebooks" / TINY / f"{TINY}.ipynb", as_version=4)
    solved = nbformat.read(
        packable / "solutions" / TINY / f"{TINY}.ipynb", as_version=4
    )
    for cell, answer in zip(notebook.cells, solved.cells, strict=True):
        if cell.metadata.get("nbgrader", {}).get("grade_id") in ("todo_1", "todo_2"):
            cell["source"] = answer.source
    nbformat.write(notebook, root / "notebooks" / TINY / f"{TINY}.ipynb")
    command = [sys.executable, "-c", "from kvlab.cli import main; main()", "grade"]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert re.search(r"right +1 +double a number +8 / 8", said.stdout)
    assert re.search(r"not attempted +3 +.* 0 / 6", said.stdout)
    assert "hidden tests are not part of it" in " ".join(said.stdout.split())
