"""The examiner: honest work keeps its points whatever it does on the way, and nothing else gains any."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from conftest import ROOT, TINY, Grader, copy_of_course
from hostile import HOSTILE, Hostile
from nbformat import NotebookNode

from kvlab import course
from kvlab.course import Lab
from kvlab.grading import LabResult, examiner, sandbox
from kvlab.grading.answers import replace_answer

pytestmark = [
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning"),
    pytest.mark.filterwarnings("ignore::nbformat.warnings.DuplicateCellId"),
]
confined = pytest.mark.skipif(
    bool(sandbox.why_not()), reason=f"no sandbox here: {sandbox.why_not()}"
)
WRITTEN = shutil.ignore_patterns("submitted", "autograded", "feedback")
Submit = Callable[[str, NotebookNode], Future[LabResult]]


@pytest.fixture(scope="module")
def courses(
    tiny_course: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Lab]]:
    """The course and the lab that each hostile answer belongs to.

    An answer that hangs is waited for four times: two tests, both tried again alone.
    """
    own = tmp_path_factory.mktemp("hostile") / "course"
    shutil.copytree(tiny_course, own, ignore=WRITTEN)
    with (own / "nbgrader_config.py").open("a") as settings:
        settings.write("\nc.Examine.seconds_per_call = 3\n")
    found = {TINY: (own, course.find_labs(own)[0])}
    needed = {hostile.lab for hostile in HOSTILE} - {TINY}
    root = tmp_path_factory.mktemp("course")
    labs = [lab for lab in course.find_labs(ROOT) if lab.name in needed]
    return found | {lab.name: (root, lab) for lab in copy_of_course(root, labs)}


@pytest.fixture(scope="module")
def graded(
    request: pytest.FixtureRequest,
    courses: dict[str, tuple[Path, Lab]],
    grade_soon: Grader,
) -> dict[str, Future[LabResult]]:
    """Each hostile answer in a notebook whose other answers are right, on its way."""
    asked = [
        item.callspec.params["hostile"]
        for item in request.session.items
        if item.path == Path(__file__)
        and "hostile" in getattr(getattr(item, "callspec", None), "params", {})
    ]
    results = {}
    for hostile in asked:
        root, lab = courses[hostile.lab]
        solved = nbformat.read(lab.solution, as_version=4)
        solved.cells = [cell for cell in solved.cells if "nbgrader" in cell.metadata]
        made = replace_answer(solved, hostile.todo, hostile.source)
        results[hostile.name] = grade_soon(root, lab, f"hostile_{hostile.name}", made)
    return results


@confined
@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
def test_hostile_code_gains_nothing_and_costs_its_own_points_only(
    hostile: Hostile, graded: dict[str, Future[LabResult]]
) -> None:
    result = graded[hostile.name].result()
    assert result.problem == ""
    for todo in result.todos:
        wanted = hostile.earns if todo.number == hostile.todo else todo.max_points
        assert todo.points == wanted, (todo.number, todo.state, todo.hint)


def tree(root: Path) -> dict[str, str]:
    """Every file of a course but those that grading writes."""
    written = ("autograded", "feedback", "submitted", "gradebook")
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not str(path.relative_to(root)).startswith(written)
    }


@confined
def test_hostile_code_leaves_nothing_behind_and_touches_no_other_row(
    tiny_course: Path, tiny_lab: Lab, solved: NotebookNode, grade_soon: Grader
) -> None:
    def neighbour(name: str) -> list[tuple[float, str]]:
        result = grade_soon(tiny_course, tiny_lab, name, solved).result()
        return [(todo.points, todo.state) for todo in result.todos]

    before, files = neighbour("before"), tree(tiny_course)
    for name in ("writes_where_grades_are", "leaves_a_daemon", "floods_the_output"):
        (hostile,) = (each for each in HOSTILE if each.name == name)
        made = replace_answer(solved, hostile.todo, hostile.source)
        grade_soon(tiny_course, tiny_lab, f"again_{name}", made).result()
        page = tiny_course / "autograded" / f"again_{name}" / TINY / f"{TINY}.ipynb"
        assert page.stat().st_size < 2_000_000
    assert neighbour("after") == before == [(8, "right"), (6, "right"), (6, "right")]
    assert tree(tiny_course) == files
    assert not [
        p
        for p in psutil.process_iter(["cmdline"])
        if p.info["cmdline"] == ["sleep", "3137"]
    ]
    assert not Path("/tmp/kvlab_was_here").exists()


# --- what a student's kernel never holds -------------------------------------------------

SCAN = """
import re

HIDDEN = re.compile(rb"a large nu[m]ber is not doub[l]ed|sec[r]et_number")
OWN = re.compile(rb"a sma[l]l marker of my own")
own_marker = "a small marker " + "of my own"
found, mine, seen = [], 0, 0


def double(number):
    global mine, seen
    if not seen:
        with open("/proc/self/maps") as maps:
            extents = [l.split() for l in maps if l.split()[1].startswith("r")]
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            for extent, *_ in extents:
                start, end = (int(place, 16) for place in extent.split("-"))
                for place in range(start, end, 2**22):
                    try:
                        memory.seek(place)
                        part = memory.read(min(2**22, end - place))
                    except (OSError, ValueError, OverflowError):
                        break
                    seen += len(part)
                    mine += len(OWN.findall(part))
                    found.extend(HIDDEN.findall(part))
    print("bytes", seen, "mine", mine > 0, "found", len(found))
    return 0
"""


@confined
def test_no_hidden_test_is_in_the_memory_of_the_students_process(
    own_course: Path, tiny_lab: Lab, solved: NotebookNode, grade_soon: Grader
) -> None:
    settings = own_course / "nbgrader_config.py"
    text = settings.read_text().replace("SECONDS_PER_CELL = 5", "SECONDS_PER_CELL = 90")
    settings.write_text(text + "\nc.Examine.seconds_per_call = 90\n")
    lab = course.find_labs(own_course)[0]
    grade_soon(own_course, lab, "scans", replace_answer(solved, 1, SCAN)).result()
    page = own_course / "autograded" / "scans" / TINY / f"{TINY}.ipynb"
    graded = nbformat.read(page, as_version=4)
    said = output_of(graded, "test_todo_1")
    seen, mine, found = re.search(r"bytes (\d+) mine (\w+) found (\d+)", said).groups()  # type: ignore[union-attr]
    assert int(seen) > 20_000_000 and mine == "True"  # it did look, and can find
    assert found == "0"


# --- honest work --------------------------------------------------------------------------


def cell_of(notebook: NotebookNode, grade_id: str) -> NotebookNode:
    return next(
        c
        for c in notebook.cells
        if c.metadata.get("nbgrader", {}).get("grade_id") == grade_id
    )


def output_of(notebook: NotebookNode, grade_id: str) -> str:
    return "".join(
        output.get("text", "") or str(output.get("evalue", ""))
        for output in cell_of(notebook, grade_id).outputs
    )


HONEST = '''
import time

print("in the cell")


class Twice:
    """Something with state."""

    factor = 2


def double(number):
    """Uses what other cells of the student's define."""
    print("doubling", number)
    if isinstance(number, str):
        raise helper(number)
    return Twice.factor * number
'''
HELPER = """
def helper(number):
    return ValueError(f"number is text: {number!r}")
"""


def test_a_graded_notebook_shows_each_output_where_it_belongs(
    tiny_course: Path, tiny_lab: Lab, solved: NotebookNode, grade_soon: Grader
) -> None:
    made = replace_answer(solved, 1, HONEST)
    made.cells.insert(1, nbformat.v4.new_code_cell(HELPER + "\nhelper"))
    made.cells.append(
        nbformat.v4.new_code_cell("test_small_number_is_doubled()\ndouble(21)")
    )
    result = grade_soon(tiny_course, tiny_lab, "honest", made).result()
    assert [todo.points for todo in result.todos] == [8, 6, 6]
    page = tiny_course / "autograded" / "honest" / TINY / f"{TINY}.ipynb"
    graded = nbformat.read(page, as_version=4)
    assert output_of(graded, "todo_1") == "in the cell\n"
    assert output_of(graded, "test_todo_1") == "doubling 2\ndoubling 1234567\n"
    assert output_of(graded, "test_todo_1_errors") == "doubling 1\ndoubling a\n"
    last = graded.cells[-1].outputs
    assert [o.get("text") or o.data["text/plain"] for o in last] == [
        "doubling 2\ndoubling 21\n",
        "42",
    ]
    counts = [c.execution_count for c in graded.cells if c.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert graded.metadata.kvlab.protection in ("sandbox", "process")


def test_an_answer_that_uses_another_todos_answer_is_right(
    tiny_course: Path, tiny_lab: Lab, solved: NotebookNode, grade_soon: Grader
) -> None:
    made = replace_answer(
        solved, 2, "def add_one(number):\n    return double(number) - number + 1"
    )
    result = grade_soon(tiny_course, tiny_lab, "reuses", made).result()
    assert [todo.points for todo in result.todos] == [8, 6, 6]


def test_the_traceback_of_an_error_leads_into_the_students_cell(
    tiny_course: Path, tiny_lab: Lab, solved: NotebookNode, grade_soon: Grader
) -> None:
    made = replace_answer(
        solved, 1, "def double(number):\n    return 2 * nmber  # here"
    )
    grade_soon(tiny_course, tiny_lab, "misspells", made).result()
    page = tiny_course / "autograded" / "misspells" / TINY / f"{TINY}.ipynb"
    (error,) = cell_of(nbformat.read(page, as_version=4), "test_todo_1").outputs
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
    assert (error.ename, error.evalue) == ("NameError", "name 'nmber' is not defined")
    assert "double(2)" in text and "return 2 * nmber  # here" in text
    assert "asking.py" not in text and "answering.py" not in text


def test_figures_are_not_drawn_again_unless_the_course_says_so(
    tiny_course: Path,
    tiny_lab: Lab,
    solved: NotebookNode,
    grade_soon: Grader,
    tmp_path: Path,
) -> None:
    made = copy.deepcopy(solved)
    source = "from kvlab import plots\nplots.show(plots.new_figure(1, 1, 2, 2)[0], alt='a bar')"
    made.cells.append(nbformat.v4.new_code_cell(source))
    own = shutil.copytree(tiny_course, tmp_path / "own", ignore=WRITTEN)
    with (own / "nbgrader_config.py").open("a") as settings:
        settings.write("\nc.Examine.figures = True\n")
    seen = []
    for root in (tiny_course, own):
        grade_soon(root, course.find_labs(root)[0], "draws", made).result()
        page = root / "autograded" / "draws" / TINY / f"{TINY}.ipynb"
        (output,) = nbformat.read(page, as_version=4).cells[-1].outputs
        seen.append(output.get("text") or sorted(output.data))
    assert seen == ["[Figure, not drawn here] a bar\n", ["image/png", "text/plain"]]


def test_a_module_in_the_submission_is_not_imported_by_the_tests(
    tiny_course: Path, tiny_lab: Lab, solved: NotebookNode, grade_soon: Grader
) -> None:
    made = {
        f"{TINY}.ipynb": replace_answer(
            solved, 1, "import notes\n\n\ndef double(number):\n    return notes.ANSWER"
        ),
        "contextlib.py": "raise SystemExit",
        "notes.py": "ANSWER = open('notes.py').read()[:6]",
    }
    result = grade_soon(tiny_course, tiny_lab, "modules", made).result()
    assert [todo.points for todo in result.todos] == [0, 6, 6]
    assert result.todos[0].hint == "double(2) is not twice 2."  # so the file was read


# --- what the lab says ---------------------------------------------------------------------


def notebook_of(*cells: tuple[str, dict[str, object]]) -> NotebookNode:
    return nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(source, metadata=copy.deepcopy(marks))
            for source, marks in cells
        ]
    )


def test_a_student_cannot_replace_what_the_lab_gives() -> None:
    todo, locked = (
        {"todo": "TODO 1: x"},
        {"nbgrader": {"locked": True, "grade_id": "g"}},
    )
    lab = notebook_of(
        ("import torch\nchecks = 1", locked),
        (
            "def f():\n    inner = 2\n\n\nclass C:\n    g = 1\n\n\nA = B, (D, *E) = 1\nchecks = 2\nimport torch",
            todo,
        ),
        ("not_asked = 1", {}),
    )
    assert examiner.asked_for(lab) == ["A", "B", "C", "D", "E", "f"]


def test_cells_of_the_lab_that_lead_to_the_students_code_are_known() -> None:
    cells = (
        "import math\n\n\ndef other(x):\n    return math.sqrt(x)",
        "def half(x):\n    kept = x\n    return double(kept) / 4",
        "with timed() as spent:\n    result = [half(part) for part in (1, 2)]",
        "total = sum(result)",
        "kept = part = 1",
        "double = (",
    )
    assert examiner.those_that_ask(["double"], cells) == {
        "double",
        "half",
        "result",
        "spent",
        "total",
    }


def test_of_a_test_cell_the_student_gets_the_visible_definitions() -> None:
    source = "import math\n\n\n@mark\ndef test():\n    # why\n    pass\n\n\nwith checks:\n    test()\n"
    assert (
        examiner.definitions_in(source)
        == "import math\n\n\n@mark\ndef test():\n    # why\n    pass"
    )
    assert examiner.definitions_in("def (") == ""


def test_without_a_solution_notebook_the_gradebook_says_what_is_asked_for(
    own_course: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_course)
    shutil.rmtree(own_course / "solutions")
    resources = {
        "nbgrader": {
            "assignment": TINY,
            "notebook": TINY,
            "db_url": f"sqlite:///{own_course / 'gradebook.db'}",
        }
    }
    release = nbformat.read(
        own_course / "notebooks" / TINY / f"{TINY}.ipynb", as_version=4
    )
    lab = examiner.lab_of(release, resources)
    cells = examiner.released_cells(resources)
    assert examiner.asked_for(lab, cells) == ["add_one", "double", "is_even"]


def test_kernels_that_do_not_start_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    async def too_late(side: examiner.Side) -> None:
        started.append(side.km)
        raise RuntimeError("it did not answer")

    monkeypatch.setattr(examiner.Side, "_wait_until_ready", too_late)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")])
    with pytest.raises(RuntimeError, match="did not answer"):
        examiner.Examine(sandbox="off").preprocess(
            notebook, {"metadata": {"path": str(tmp_path)}}
        )
    assert len(started) == 2
    assert not any(asyncio.run(manager.is_alive()) for manager in started)
    assert all(manager.context.closed for manager in started)


def test_output_beyond_its_limit_is_cut_and_said() -> None:
    examine = examiner.Examine(text_per_cell=1000, bytes_per_cell=4000)
    side = examiner.Side(examine, nbformat.v4.new_notebook())

    def message(kind: str, **content: object) -> dict[str, object]:
        return {
            "msg_type": kind,
            "content": content,
            "header": {"msg_type": kind},
            "parent_header": {},
        }

    outs: list[NotebookNode] = []
    for _ in range(9):
        side.output(outs, message("stream", name="stdout", text="x" * 700), None, 0)
    text = "".join(out.text for out in outs)
    assert text.count("x") <= 1000 and text.count("[output cut after 1,000 bytes]") == 1
    for _ in range(9):
        side.output(
            outs,
            message("display_data", data={"image/png": "y" * 1500}, metadata={}),
            None,
            0,
        )
    assert sum("data" in out for out in outs) <= 2
    error = nbformat.v4.new_output(
        "error", ename="E", evalue="z" * 10**6, traceback=["w" * 10**6] * 9
    )
    examiner._shorten_error(error)
    assert len(str(error)) < 50_000 and "[cut]" in error.evalue
    assert os.getpid()
