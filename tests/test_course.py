"""The builder: one source, three files, nothing of a student's lost."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest

from kvlab import course

ROOT = Path(__file__).parents[1]
LABS = course.find_labs(ROOT)

SOURCE = """\
# %% [markdown] lang="en"
# # Lab
#
# Read.

# %% [markdown] lang="zh"
# # 实验

# %% nbgrader={"grade_id": "setup", "locked": true}
# the builder puts the first cell here

# %% nbgrader={"grade_id": "todo_1", "solution": true} todo="TODO 1: add"
def add(a, b):
    ### BEGIN SOLUTION
    return a + b
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_todo_1", "grade": true, "points": 20}
with checks.todo(1):
    checks.number(add(1, 2), 3, "add(1, 2)")
    ### BEGIN HIDDEN TESTS
    checks.number(add(1, 5), 6, "add(1, 5)")
    ### END HIDDEN TESTS
"""


@pytest.fixture
def small_course(tmp_path: Path) -> Path:
    """A course of two labs in a folder of its own."""
    shutil.copy(ROOT / "nbgrader_config.py", tmp_path)
    for name in ("01_add", "02_add_again"):
        folder = tmp_path / "solutions" / name
        folder.mkdir(parents=True)
        (folder / f"{name}.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path


def as_committed(path: Path) -> bool:
    """Whether git holds the file as it is: then it is the course's, not a student's."""
    shown = subprocess.run(
        ["git", "show", f"HEAD:{path.relative_to(ROOT)}"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    return shown.returncode == 0 and shown.stdout == path.read_bytes()


def outcomes(report: list[course.Built], root: Path) -> dict[str, str]:
    return {str(b.path.relative_to(root)): b.outcome for b in report}


# --- the committed labs ---------------------------------------------------------------


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rebuilt")
    with course.fresh_build(ROOT, LABS) as built:
        shutil.copytree(built / "solutions", place / "solutions")
        shutil.copytree(built / "notebooks", place / "notebooks")
    return place


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
def test_committed_solution_equals_a_fresh_build(
    lab: course.Lab, rebuilt: Path
) -> None:
    fresh = rebuilt / lab.solution.relative_to(ROOT)
    assert lab.solution.read_bytes() == fresh.read_bytes(), "run make build"


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
def test_committed_release_equals_a_fresh_build(lab: course.Lab, rebuilt: Path) -> None:
    if not (course.is_untouched(lab.release) or as_committed(lab.release)):
        pytest.skip(f"{lab.release.name} has been worked on")
    fresh = rebuilt / lab.release.relative_to(ROOT)
    assert lab.release.read_bytes() == fresh.read_bytes(), "run make build"


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
def test_lab_has_no_faults(lab: course.Lab) -> None:
    assert course.faults(course.read_source(lab.source)) == []


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
def test_release_holds_no_answer_and_no_hidden_test(
    lab: course.Lab, rebuilt: Path
) -> None:
    text = (rebuilt / lab.release.relative_to(ROOT)).read_text(encoding="utf-8")
    assert "BEGIN SOLUTION" not in text
    assert "HIDDEN TESTS" not in text
    assert "Rubric" not in text
    released = {cell.id: cell for cell in nbformat.reads(text, as_version=4).cells}
    hidden_region = re.compile(
        r"^ *### BEGIN HIDDEN TESTS\n.*?### END HIDDEN TESTS *\n?",
        flags=re.DOTALL | re.MULTILINE,
    )
    answers: set[str] = set()
    for cell in course.read_source(lab.source).cells:
        if "BEGIN HIDDEN TESTS" in cell.source:
            visible = hidden_region.sub("", cell.source).strip()
            assert released[cell.id].source.strip() == visible
        for region in re.findall(
            r"### BEGIN SOLUTION\n(.*?)### END", cell.source, flags=re.DOTALL
        ):
            answers |= {line.strip() for line in region.split("\n")}
    lines = {
        line.strip() for cell in released.values() for line in cell.source.split("\n")
    }
    leaked = {line for line in answers & lines if len(line) > 25}
    assert not leaked, f"these lines of an answer reach the student: {leaked}"


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
def test_no_source_file_reaches_the_student(lab: course.Lab, rebuilt: Path) -> None:
    names = [p.name for p in (rebuilt / "notebooks" / lab.name).rglob("*")]
    assert names == [lab.release.name]


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
def test_every_cell_of_the_release_has_a_lasting_id(
    lab: course.Lab, rebuilt: Path
) -> None:
    path = rebuilt / lab.release.relative_to(ROOT)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        marks = cell["metadata"].get("nbgrader")
        if marks:
            assert cell["id"] == marks["grade_id"]


def test_lab_03_shows_its_eight_tests_and_hides_the_others(rebuilt: Path) -> None:
    name = "03_kv_axes_and_window"
    release = (rebuilt / "notebooks" / name / f"{name}.ipynb").read_text()
    source = (ROOT / "solutions" / name / f"{name}.py").read_text()
    visible = {
        "test_key_scale_shape",
        "test_value_scale_shape",
        "test_tokens_are_conserved_over_appends",
        "test_window_partition",
        "test_segments_are_not_rewritten",
        "test_no_overflow_means_no_segment",
        "test_restored_values_are_finite_and_ledgers_agree",
        "test_all_zero_input_keeps_finite_scales",
    }
    assert visible <= set(re.findall(r"def (test_\w+)", release))
    regions = re.findall(
        r"### BEGIN HIDDEN TESTS\n(.*?)### END", source, flags=re.DOTALL
    )
    assert len(regions) == 9
    for region in regions:
        assert json.dumps(region.strip("\n"))[1:-1] not in release


# --- the builder ----------------------------------------------------------------------


def test_two_builds_are_byte_identical(small_course: Path) -> None:
    course.build(small_course)
    first = {p: p.read_bytes() for p in small_course.rglob("*.ipynb")}
    for path in first:
        path.unlink()
    course.build(small_course)
    assert len(first) == 4
    assert {p: p.read_bytes() for p in small_course.rglob("*.ipynb")} == first


def test_a_second_build_writes_nothing(small_course: Path) -> None:
    course.build(small_course)
    again = course.build(small_course)
    assert {b.outcome for b in again} == {"unchanged"}


def test_a_changed_source_replaces_an_untouched_release(small_course: Path) -> None:
    course.build(small_course)
    source = small_course / "solutions" / "01_add" / "01_add.py"
    source.write_text(SOURCE.replace("Read.", "Read this."), encoding="utf-8")
    report = outcomes(course.build(small_course), small_course)
    assert report["notebooks/01_add/01_add.ipynb"] == "written"
    release = small_course / "notebooks" / "01_add" / "01_add.ipynb"
    assert "Read this." in release.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "work",
    ["answer", "output", "added cell", "unreadable", "no stamp"],
)
def test_work_of_a_student_is_never_overwritten(small_course: Path, work: str) -> None:
    course.build(small_course)
    release = small_course / "notebooks" / "01_add" / "01_add.ipynb"
    notebook = nbformat.read(release, as_version=4)
    (todo,) = [c for c in notebook.cells if c.id == "todo_1"]
    if work == "answer":
        todo.source = "def add(a, b):\n    return a + b"
    elif work == "output":
        todo.outputs = [nbformat.v4.new_output("stream", text="hello")]
    elif work == "added cell":
        notebook.cells.append(nbformat.v4.new_markdown_cell("my notes"))
    elif work == "no stamp":
        del notebook.metadata["kvlab"]
    release.write_text(
        "half a file" if work == "unreadable" else nbformat.writes(notebook)
    )
    before = release.read_bytes()
    for name in ("01_add", "02_add_again"):
        source = small_course / "solutions" / name / f"{name}.py"
        source.write_text(SOURCE.replace("Read.", "Read this."), encoding="utf-8")
    report = outcomes(course.build(small_course), small_course)
    assert report["notebooks/01_add/01_add.ipynb"] == "kept"
    assert release.read_bytes() == before
    assert report["notebooks/02_add_again/02_add_again.ipynb"] == "written"


def test_saving_without_a_change_does_not_count_as_work(small_course: Path) -> None:
    course.build(small_course)
    release = small_course / "notebooks" / "01_add" / "01_add.ipynb"
    notebook = nbformat.read(release, as_version=4)
    notebook.metadata["language_info"] = {"name": "python", "version": "3.12.1"}
    release.write_text(nbformat.writes(notebook), encoding="utf-8")
    assert course.is_untouched(release)


def test_the_language_of_the_prose_is_a_choice(small_course: Path) -> None:
    source = small_course / "solutions" / "01_add" / "01_add.py"
    english = course.read_source(source)
    chinese = course.read_source(source, language="zh")
    assert next(c.source for c in english.cells).startswith("# Lab")
    assert next(c.source for c in chinese.cells) == "# 实验"
    code = [
        [c.source for c in nb.cells if c.cell_type == "code"]
        for nb in (english, chinese)
    ]
    assert code[0] == code[1]


def test_the_address_reaches_the_first_cell(small_course: Path) -> None:
    course.build(small_course, repo_url='https://example.org/a"b.git')
    release = small_course / "notebooks" / "01_add" / "01_add.ipynb"
    (setup,) = [
        c for c in nbformat.read(release, as_version=4).cells if c.id == "setup"
    ]
    assert 'REPO_URL = "https://example.org/a\\"b.git"' in setup.source
    compile(setup.source, "setup", "exec")


def test_the_address_in_pyproject_is_kept(small_course: Path) -> None:
    (small_course / "pyproject.toml").write_text(
        '[tool.kvlab]\nrepo-url = "git://x/y"\n'
    )
    course.build(small_course)
    release = small_course / "notebooks" / "01_add" / "01_add.ipynb"
    assert 'REPO_URL = \\"git://x/y\\"' in release.read_text(encoding="utf-8")
    assert {b.outcome for b in course.build(small_course)} == {"unchanged"}


def test_a_language_without_prose_is_refused(small_course: Path) -> None:
    with pytest.raises(course.CourseError, match="no prose in 'fr', only in: en, zh"):
        course.build(small_course, language="fr")


def test_a_folder_that_is_no_course_is_named(tmp_path: Path) -> None:
    with pytest.raises(course.CourseError, match="Run this in the course's folder"):
        course.find_labs(tmp_path)


def test_an_unknown_lab_is_named_with_those_that_exist(small_course: Path) -> None:
    with pytest.raises(course.CourseError, match=r"01_add, 02_add_again"):
        course.build(small_course, "01_ad")


def test_a_repeated_grade_id_is_refused(small_course: Path) -> None:
    source = small_course / "solutions" / "01_add" / "01_add.py"
    source.write_text(SOURCE.replace("test_todo_1", "todo_1"), encoding="utf-8")
    with pytest.raises(course.CourseError, match="'todo_1' is used twice"):
        course.build(small_course)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('"points": 20', '"points": 19', "worth 19 points, not 20"),
        ("BEGIN HIDDEN TESTS", "", "has no hidden tests"),
        ("checks.todo(1)", "checks.todo(2)", "lacks checks.todo(1)"),
        ("TODO 1: add", "TODO 2: add", "numbered [2]"),
        ('"test_todo_1"', '"test_todo_3"', "TODO 1 has no test cell"),
    ],
)
def test_faults_of_a_lab_are_named(
    small_course: Path, old: str, new: str, fault: str
) -> None:
    source = small_course / "solutions" / "01_add" / "01_add.py"
    source.write_text(SOURCE.replace(old, new), encoding="utf-8")
    assert any(fault in text for text in course.faults(course.read_source(source)))


def test_plain_nbgrader_generates_the_same_bytes(small_course: Path) -> None:
    import sys

    course.build(small_course)
    release = small_course / "notebooks" / "01_add" / "01_add.ipynb"
    ours = release.read_bytes()
    release.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "nbgrader", "generate_assignment", "01_add", "--force"],
        cwd=small_course,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert release.read_bytes() == ours
    assert sorted(p.name for p in release.parent.iterdir()) == ["01_add.ipynb"]
