"""A notebook alone, as in Colab or a bare Jupyter: the first cell brings what is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

from kvlab import course

ROOT = Path(__file__).parents[1]
LABS = course.find_labs(ROOT)
# Lab 05 puts a cache into a model: it needs transformers, which the bare environment lacks.
BARE_LABS = [lab for lab in LABS if lab.name != "05_real_model"]
BARE = ROOT / ".venv-bare"


@pytest.fixture(scope="session")
def bare_python() -> Path:
    """A Python with torch, matplotlib and ipykernel and nothing else; kept between runs."""
    constraints = ROOT / "constraints.txt"
    python = BARE / "bin" / "python"
    stamp = BARE / ".complete"
    if not (stamp.exists() and stamp.stat().st_mtime > constraints.stat().st_mtime):
        shutil.rmtree(BARE, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(BARE)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        install += ["--constraint", str(constraints), "torch", "matplotlib"]
        subprocess.run([*install, "ipykernel"], check=True, capture_output=True)
        stamp.touch()
    return python


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The course as it stands here, as a git repository that can be cloned."""
    if shutil.which("git") is None:
        pytest.skip("git is missing")
    place = tmp_path_factory.mktemp("repository")
    shutil.copytree(
        ROOT / "tools",
        place / "tools",
        ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
    )
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "The course"]):
        subprocess.run([*git, *command], cwd=place, check=True)
    return place


@pytest.fixture(scope="session")
def built_with_address(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    place = tmp_path_factory.mktemp("with-address")
    with course.fresh_build(ROOT, LABS, repo_url=str(repository)) as built:
        shutil.copytree(built / "notebooks", place / "notebooks")
    return place / "notebooks"


def execute(notebook: NotebookNode, python: Path, folder: Path) -> NotebookNode:
    """Runs every cell in a kernel of `python`, in `folder`, with an empty HOME."""
    with tempfile.TemporaryDirectory() as home:
        return execute_at_home(notebook, python, folder, Path(home))


def execute_at_home(
    notebook: NotebookNode, python: Path, folder: Path, home: Path
) -> NotebookNode:
    kernel = home / "kernels" / "bare"
    kernel.mkdir(parents=True)
    launch = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": launch, "display_name": "bare", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    specs = KernelSpecManager(kernel_dirs=[str(home / "kernels")])
    manager = AsyncKernelManager(kernel_name="bare", kernel_spec_manager=specs)
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=300,
        allow_errors=True,
        resources={"metadata": {"path": str(folder)}},
    )
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
    client.execute(env=environment)
    return notebook


def outputs(cell: NotebookNode, kind: str) -> list[NotebookNode]:
    return [o for o in cell.get("outputs", []) if o.output_type == kind]


@pytest.mark.parametrize("lab", BARE_LABS, ids=lambda lab: lab.name)
def test_a_student_notebook_alone_runs_in_a_bare_environment(
    lab: course.Lab, built_with_address: Path, bare_python: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "alone"
    folder.mkdir()
    shutil.copy(built_with_address / lab.name / lab.release.name, folder)
    notebook = nbformat.read(folder / lab.release.name, as_version=4)
    execute(notebook, bare_python, folder)
    failed = {}
    for cell in notebook.cells:
        for error in outputs(cell, "error"):
            failed[cell.id] = error.ename
        streams = outputs(cell, "stream")
        assert not [s.text for s in streams if s.name == "stderr"], cell.id
    tests = course.test_cells(notebook)
    assert set(failed.values()) == ({"NotImplementedError"} if tests else set()), failed
    assert set(failed) == set(tests)
    (setup,) = [c for c in notebook.cells if c.id == "setup"]
    assert "torch 2.13.0" in setup.outputs[0].text
    assert "transformers not installed" in setup.outputs[0].text


def first_cells(repo_url: str, times: int = 1) -> NotebookNode:
    cell = nbformat.v4.new_code_cell(course.first_cell(repo_url))
    copies = [nbformat.v4.new_code_cell(cell.source) for _ in range(times)]
    return nbformat.v4.new_notebook(cells=copies)


def test_the_first_cell_can_run_again_and_again(
    repository: Path, bare_python: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "alone"
    folder.mkdir()
    execute(first_cells(str(repository)), bare_python, folder)
    # A second kernel, no address that works: what was fetched is enough.
    again = execute(first_cells(str(tmp_path / "gone"), 2), bare_python, folder)
    for cell in again.cells:
        assert not outputs(cell, "error")
        assert "kvlab" in cell.outputs[0].text
    assert [p.name for p in folder.iterdir()] == ["kv-cache-quantization-lab"]


def test_the_first_cell_installs_nothing(
    repository: Path, bare_python: Path, tmp_path: Path
) -> None:
    def installed() -> str:
        command = [str(bare_python), "-m", "pip", "freeze"]
        return subprocess.run(command, capture_output=True, text=True).stdout

    folder = tmp_path / "alone"
    folder.mkdir()
    before = installed()
    execute(first_cells(str(repository)), bare_python, folder)
    assert installed() == before


@pytest.mark.parametrize(
    ("address", "says"),
    [("", "put the address of the course"), ("/no/such/place", "could not fetch")],
)
def test_a_notebook_that_cannot_be_set_up_says_what_to_do_in_one_line(
    address: str, says: str, bare_python: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "alone"
    folder.mkdir()
    (cell,) = execute(first_cells(address), bare_python, folder).cells
    (error,) = outputs(cell, "error")
    assert len(error.traceback) == 1
    assert "\n" not in error.traceback[0]
    assert says in error.traceback[0]
    assert not outputs(cell, "stream")
    assert list(folder.iterdir()) == []


def test_inside_the_course_s_folder_nothing_is_fetched(bare_python: Path) -> None:
    folder = ROOT / "notebooks" / LABS[0].name
    before = sorted(folder.iterdir())
    (cell,) = execute(first_cells(""), bare_python, folder).cells
    assert not outputs(cell, "error")
    assert sorted(folder.iterdir()) == before
