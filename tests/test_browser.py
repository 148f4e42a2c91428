"""What a person sees in a real browser: JupyterLab with a lab open, and the formgrader."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from playwright.sync_api import Locator, Page, expect, sync_playwright
from rich.console import Console

from kvlab import course, grading
from kvlab.grading.answers import replace_answer

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium")
LAB = "03_kv_axes_and_window"
SCREENSHOTS = os.environ.get("KVLAB_SCREENSHOTS")  # a folder, from the course's root

expect.set_options(timeout=60_000)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is missing: make system installs it"
)


@pytest.fixture(scope="module")
def jupyterlab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a JupyterLab over a copy of the course."""
    place = tmp_path_factory.mktemp("course")
    for name in ("nbgrader_config.py", "pyproject.toml"):
        shutil.copy(ROOT / name, place)
    for name in ("solutions", "notebooks"):
        shutil.copytree(ROOT / name, place / name)
    home = tmp_path_factory.mktemp("home")
    scripts = str(Path(sys.executable).parent)
    environment = os.environ | {
        "HOME": str(home),
        "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
    }
    log = (home / "log").open("w")
    options = ["--no-browser", "--allow-root", "--ServerApp.port=0"]
    options += ["--IdentityProvider.token=", "--ServerApp.password="]
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyter", "lab", *options],
        cwd=place,
        env=environment,
        stdout=log,
        stderr=log,
    )
    try:
        yield wait_for_server(home / "runtime", server, home / "log")
    finally:
        server.terminate()
        server.wait(20)


def wait_for_server(runtime: Path, server: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(240):
        for found in runtime.glob("jpserver-*.json"):
            return str(json.loads(found.read_text())["url"])
        assert server.poll() is None, log.read_text()
        time.sleep(0.25)
    raise AssertionError(f"JupyterLab did not start: {log.read_text()}")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    quiet += ["--disable-component-update", "--disable-sync", "--no-first-run"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=quiet)
        opened = browser.new_page(viewport={"width": 1400, "height": 1000})
        opened.set_default_timeout(60_000)
        yield opened
        browser.close()


def keep(page: Page | Locator, name: str) -> None:
    """Saves a screenshot where KVLAB_SCREENSHOTS says, for a person to look at."""
    if SCREENSHOTS:
        page.screenshot(path=str(ROOT / SCREENSHOTS / f"{name}.png"))


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The solved lab 03, run from top to bottom, as a page."""
    (lab,) = course.choose_labs(ROOT, LAB)
    notebook = nbformat.read(lab.solution, as_version=4)
    NotebookClient(notebook, timeout=300).execute()
    html, _ = HTMLExporter(template_name="lab").from_notebook_node(notebook)
    path = tmp_path_factory.mktemp("rendered") / "lab.html"
    path.write_text(html, encoding="utf-8")
    return path


def test_the_rendered_lab_shows_its_figures_with_alternative_texts(
    rendered: Path, page: Page
) -> None:
    page.set_viewport_size({"width": 1000, "height": 1250})
    page.route(re.compile("^http"), lambda route: route.abort())
    page.goto(rendered.as_uri())
    pictures = page.locator(".jp-OutputArea img")
    assert pictures.count() >= 4
    for picture in pictures.all():
        assert len(picture.get_attribute("alt") or "") > 40
        width = picture.evaluate("image => image.naturalWidth")
        assert width > 300
    expect(page.locator("h1")).to_have_count(1)
    pictures.first.scroll_into_view_if_needed()
    keep(page, "lab")
    page.unroute_all()


def test_the_scoreboard_names_the_mistake(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real grading of three labs as a student may leave them half-way."""
    root = tmp_path / "course"
    for name in ("solutions", "notebooks"):
        shutil.copytree(ROOT / name, root / name)
    shutil.copy(ROOT / "nbgrader_config.py", root)
    labs = [
        lab
        for lab in course.find_labs(root)
        if course.is_graded(course.read_source(lab.source))
    ]
    for lab in labs:
        shutil.copy(root / "solutions" / lab.name / lab.solution.name, lab.release)
    swap = ROOT / "tests" / "answers" / LAB / "wrong" / "key_axis_swapped.py"
    release = labs[2].release
    notebook = nbformat.read(release, as_version=4)
    notebook = replace_answer(notebook, 1, swap.read_text().split("\n", 3)[3])
    unsolved = "raise NotImplementedError('TODO 3: ...')"
    unsolved = f"def append_and_partition(*given):\n    {unsolved}\n"
    notebook = replace_answer(notebook, 3, unsolved)
    release.write_text(course.notebook_text(notebook), encoding="utf-8")
    monkeypatch.chdir(root)  # where `make grade` runs
    results = grading.grade(root, labs)
    console = Console(record=True, width=92, file=io.StringIO(), force_terminal=True)
    grading.print_scoreboard(results, console)
    shown = console.export_text(clear=False)
    assert "feedback" in shown
    for result in results[:2]:
        assert (result.points, result.max_points) == (20, 20)
    states = [todo.state for todo in results[2].todos]
    assert states == ["wrong", "right", "not attempted"]
    assert "head_dim" in results[2].todos[0].hint
    svg = console.export_svg(title="make grade")
    page.set_viewport_size({"width": 1150, "height": 1400})
    page.set_content(re.sub(r"url\(.https?:[^)]*\)", "local('monospace')", svg))
    keep(page.locator("svg").first, "scoreboard")


def test_a_lab_opens_runs_and_validates_in_jupyterlab(
    jupyterlab: str, page: Page
) -> None:
    page.goto(f"{jupyterlab}lab/tree/notebooks/{LAB}/{LAB}.ipynb?reset")
    expect(page.locator("h1").filter(has_text="Lab 03")).to_be_visible()
    # The kernel is ready when the status bar says so; then run the first code cell.
    expect(page.get_by_text(re.compile(r"Python 3 .*\| Idle"))).to_be_visible()
    setup = page.locator(".jp-CodeCell").first
    setup.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    expect(setup.get_by_text(re.compile(r"kvlab \d.*torch 2\.13"))).to_be_visible()
    keep(page, "jupyterlab")
    page.get_by_role("button", name="Validate").first.click()
    failed = page.locator(".jp-Dialog").get_by_text(re.compile("failed", re.IGNORECASE))
    expect(failed.first).to_be_visible(timeout=120_000)


def test_the_formgrader_lists_the_labs(jupyterlab: str, page: Page) -> None:
    page.goto(f"{jupyterlab}formgrader")
    for lab in course.find_labs(ROOT):
        expect(page.get_by_text(lab.name).first).to_be_visible()
    keep(page, "formgrader")
