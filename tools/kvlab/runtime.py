"""Says what this machine is and runs: hardware, and the versions of Python and of the packages.

Called by the first cell of every notebook (`versions_line`), by `matrix` (what a result records)
and by `preflight`. Never imports transformers or hqq, installs nothing, and never gives a host
name, a user name or a path away.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import kvlab

SHOWN = ("torch", "transformers", "matplotlib")


def package_version(name: str) -> str | None:
    """The installed version of a package, or None when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@lru_cache
def source_sha256(package: str) -> str:
    """The digest of every module in one of the course's packages, such as "checks"."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parent / package).glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def versions_line() -> str:
    """One line for a notebook's first output."""
    parts = [f"kvlab {kvlab.__version__}", f"Python {platform.python_version()}"]
    parts += [f"{name} {package_version(name) or 'not installed'}" for name in SHOWN]
    return " · ".join(parts)


def framework_versions() -> dict[str, str | None]:
    """Versions that a measurement depends on; None where a package is not installed."""
    return {
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "transformers": package_version("transformers"),
        "hqq": package_version("hqq"),
        "optimum_quanto": package_version("optimum-quanto"),
        "kvlab": kvlab.__version__,
    }


def hardware(device: str) -> dict[str, Any]:
    """The machine, and the device on it that runs the model.

    device  "cuda", "cpu", or "" for none: then device and total_memory_bytes are None
    return  cuda_available, cuda (the version torch was built for, or None), device (name of
            the GPU or the CPU's model), total_memory_bytes (of that device),
            compute_capability ("8.9"; None without a GPU), cpu, cpu_cores (that this process
            may use), threads (that torch uses on the CPU)
    """
    import torch

    facts: dict[str, Any] = {
        "cuda_available": torch.cuda.is_available(),
        "cuda": torch.version.cuda,
        "device": cpu_model() if device == "cpu" else None,
        "total_memory_bytes": memory_bytes() if device == "cpu" else None,
        "compute_capability": None,
        "cpu": cpu_model(),
        "cpu_cores": cpu_cores(),
        "threads": torch.get_num_threads(),
    }
    if device == "cuda" and facts["cuda_available"]:
        gpu = torch.cuda.get_device_properties(0)
        facts |= {
            "device": gpu.name,
            "total_memory_bytes": gpu.total_memory,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
        }
    return facts


def cpu_model() -> str:
    """The CPU's model as its maker names it, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass  # not Linux
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        told = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if told:
            return told
    return platform.processor() or platform.machine() or "unknown"


def cpu_cores() -> int:
    """How many cores this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """The machine's memory, or None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
