"""`kvlab.runtime`: what it says about this machine, and what it keeps to itself."""

from __future__ import annotations

import getpass
import json
import platform
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from kvlab import runtime


def test_versions_line_names_what_a_notebook_runs_on() -> None:
    line = runtime.versions_line()
    assert f"Python {platform.python_version()}" in line
    assert f"torch {runtime.package_version('torch')}" in line


def test_importing_runtime_imports_no_heavy_package() -> None:
    heavy = ("torch", "transformers", "hqq", "optimum")
    program = (
        f"import sys, kvlab.runtime; print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_framework_versions_hold_every_package_and_none_for_a_missing_one() -> None:
    found = runtime.framework_versions()
    assert found["python"] == platform.python_version()
    assert found["torch"] == metadata.version("torch")
    assert set(found) >= {"transformers", "hqq", "optimum_quanto", "kvlab"}
    assert runtime.package_version("no-such-package") is None


def test_hardware_of_the_cpu() -> None:
    facts = runtime.hardware("cpu")
    assert facts["device"] == facts["cpu"] == runtime.cpu_model()
    assert facts["total_memory_bytes"] == runtime.memory_bytes()
    assert facts["compute_capability"] is None
    assert facts["cpu_cores"] >= 1
    assert facts["threads"] == torch.get_num_threads()


def test_hardware_without_a_device_names_none() -> None:
    facts = runtime.hardware("")
    assert facts["device"] is facts["total_memory_bytes"] is None
    assert set(facts) == set(runtime.hardware("cpu"))


def test_hardware_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="Some GPU", total_memory=12 * 2**30, major=8, minor=9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    facts = runtime.hardware("cuda")
    assert facts["device"] == "Some GPU"
    assert facts["compute_capability"] == "8.9"
    assert facts["total_memory_bytes"] == 12 * 2**30
    assert facts["cpu"] == runtime.cpu_model()


def test_hardware_facts_name_no_host_no_user_and_no_path() -> None:
    said = json.dumps([runtime.hardware("cpu"), runtime.framework_versions()]).lower()
    assert platform.node().lower() not in said or not platform.node()
    assert f'"{getpass.getuser().lower()}' not in said
    assert "/" not in said
