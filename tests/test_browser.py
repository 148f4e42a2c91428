"""What a person sees in a real browser: JupyterLab with a lab open, and the formgrader."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from kvlab import course

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium")
LAB = "03_kv_axes_and_window"

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


def keep(page: Page, name: str) -> None:
    """Saves a screenshot where KVLAB_SCREENSHOTS says, for a person to look at."""
    folder = os.environ.get("KVLAB_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


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
    keep(page, "validate")


def test_the_formgrader_lists_the_labs(jupyterlab: str, page: Page) -> None:
    page.goto(f"{jupyterlab}formgrader")
    for lab in course.find_labs(ROOT):
        expect(page.get_by_text(lab.name).first).to_be_visible()
    keep(page, "formgrader")
