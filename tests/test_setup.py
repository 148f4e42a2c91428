"""The set-up: Makefile, constraints, conda environment, style, and what lies at the top."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {
    ".ci",
    ".gitattributes",
    ".github",
    ".gitignore",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "environment.yml",
    "nbgrader_config.py",
    "notebooks",
    "pyproject.toml",
    "results",
    "solutions",
    "tests",
    "tools",
}


# What a make tells the makes below it: `make test` would say which folder each enters.
OF_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in OF_MAKE}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )  # type: ignore[call-overload]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and line[0] != "#")
    return {canonicalize_name(name): version for name, version in pins.items()}


def committed() -> list[str]:
    if shutil.which("git") is None:
        pytest.skip("git is missing")
    listed = run("git", "ls-files")
    if listed.returncode:
        pytest.skip("not a git checkout")
    return listed.stdout.splitlines()


def test_every_installed_package_has_the_version_of_constraints() -> None:
    pins = constraints()
    # What pip itself brings into a new environment is not the course's business.
    bare = {"kvlab", "pip", "setuptools"}
    installed = {
        canonicalize_name(d.metadata["Name"]): d.version.split("+")[0]
        for d in distributions(
            path=[p for p in sys.path if p.endswith("site-packages")]
        )
    }
    # PyPI's builds of torch bring these along on other machines, at versions of torch's.
    of_torch = re.compile(r"^(nvidia|cuda|triton|pytorch-triton)\b|^appnope$")
    wrong = {
        name: (version, pins.get(name))
        for name, version in installed.items()
        if name not in bare
        and pins.get(name) != version
        and not (of_torch.match(name) and name not in pins)
    }
    assert not wrong, f"installed, constraints.txt: {wrong}"


def test_torch_is_pinned_to_the_tested_version() -> None:
    assert constraints()["torch"] == "2.13.0"


def test_conda_installs_what_the_makefile_installs() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip,) = [d["pip"] for d in environment["dependencies"] if isinstance(d, dict)]
    makefile = (ROOT / "Makefile").read_text()
    extras = re.search(r"^EXTRAS := (\S+)$", makefile, flags=re.MULTILINE)
    command = re.search(r"pip install (.*)$", makefile, flags=re.MULTILINE)
    assert extras and command
    options = command.group(1).replace("'", "").replace("$(EXTRAS)", extras.group(1))
    for line in pip:
        assert line in options
    assert len(pip) == options.count("--constraint") + options.count("--editable")


def test_constraints_know_every_package_that_conda_asks_for() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip,) = [d["pip"] for d in environment["dependencies"] if isinstance(d, dict)]
    wanted = re.search(r"\.\[(.+)\]", " ".join(pip))
    assert wanted
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(wanted.group(1).split(",")) <= set(project["optional-dependencies"])
    pins = constraints()
    asked = list(project["dependencies"])
    for extra in wanted.group(1).split(","):
        asked += project["optional-dependencies"][extra]
    missing = [r for r in asked if canonicalize_name(Requirement(r).name) not in pins]
    assert not missing, f"no version in constraints.txt for {missing}"


def test_make_alone_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = set(re.findall(r"^\.PHONY: ([a-z-]+)$", makefile, flags=re.MULTILINE))
    shown = run("make", "--no-print-directory")
    assert shown.returncode == 0
    listed = {line.split()[0] for line in shown.stdout.splitlines()[1:]}
    assert listed == phony


def test_an_old_python_gets_one_clear_line(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2\nexit 1\n')
    old.chmod(0o755)
    tried = run("make", "setup", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert tried.returncode != 0
    assert "needs Python 3.11 or newer" in tried.stdout
    assert "Python 3.9.2" in tried.stdout
    assert len(tried.stdout.splitlines()) == 1
    assert not (tmp_path / "venv").exists()


def test_a_missing_python_gets_one_clear_line(tmp_path: Path) -> None:
    tried = run("make", "setup", "PYTHON=no-such-python", f"VENV={tmp_path / 'venv'}")
    assert tried.returncode != 0
    assert "There is no no-such-python" in tried.stdout


def test_the_environment_is_made_again_when_its_inputs_are_newer(
    tmp_path: Path,
) -> None:
    def plans(stamp_is_newer: bool) -> str:
        stamp = tmp_path / "venv" / ".complete"
        stamp.parent.mkdir(exist_ok=True)
        stamp.touch()
        import os

        moment = (ROOT / "pyproject.toml").stat().st_mtime
        moment = max(moment, (ROOT / "constraints.txt").stat().st_mtime)
        moment += 5 if stamp_is_newer else -5
        os.utime(stamp, (moment, moment))
        python = tmp_path / "venv" / "bin" / "python"
        python.parent.mkdir(exist_ok=True)
        if not python.exists():
            python.symlink_to(sys.executable)
        return run("make", "--dry-run", "setup", f"VENV={tmp_path / 'venv'}").stdout

    assert "pip install" not in plans(stamp_is_newer=True)
    assert "pip install" in plans(stamp_is_newer=False)


def test_style_is_clean() -> None:
    for command in (["ruff", "check", "."], ["ruff", "format", "--check", "."]):
        checked = run(sys.executable, "-m", *command)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_types_are_clean() -> None:
    checked = run(sys.executable, "-m", "mypy")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_nothing_else_stands_at_the_top_level() -> None:
    top = {name.split("/")[0] for name in committed()}
    assert top <= TOP_LEVEL, f"not in the plan of the house: {top - TOP_LEVEL}"


def test_every_module_begins_with_its_purpose_and_its_callers() -> None:
    for path in sorted((ROOT / "tools" / "kvlab").rglob("*.py")):
        text = path.read_text()
        if path.name == "first_cell.py" or len(text.splitlines()) < 10:
            continue
        assert text.startswith('"""'), path
        head = text.split('"""')[1]
        assert len([line for line in head.split("\n") if line.strip()]) >= 2, path
        assert re.search("Called |Used ", head), path


def test_ci_runs_the_readme_s_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    readme = (ROOT / "README.md").read_text()
    assert "make test" in script
    assert "make test" in readme
    assert script.rstrip().endswith("make test")
