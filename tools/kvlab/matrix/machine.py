"""What the run ran on: versions, hardware, and what the driver says about clocks.

Called by `run`. Names no host, no user and no path: the files are meant to be shared.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvlab import __version__
from kvlab.runtime import package_version

Json = dict[str, Any]


def framework() -> Json:
    """The versions that a figure depends on; None for what is not installed."""
    return {
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "transformers": package_version("transformers"),
        "hqq": package_version("hqq"),
        "optimum_quanto": package_version("optimum-quanto"),
        "kvlab": __version__,
    }


def hardware(device: str) -> Json:
    """The device that runs the model: "cuda", "cpu", or "" for none (a dry run)."""
    import torch

    cuda = torch.cuda.is_available()
    common = {
        "cuda_available": cuda,
        "cuda": torch.version.cuda,
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device == "cuda" and cuda:
        properties = torch.cuda.get_device_properties(0)
        return common | {
            "device": properties.name,
            "total_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
        }
    return common | {
        "device": _cpu_name() if device == "cpu" else None,
        "total_memory_bytes": _main_memory() if device == "cpu" else None,
        "compute_capability": None,
    }


def device_notes(device: str) -> Json:
    """Clocks, heat and load at this moment; None where nothing tells."""
    notes: Json = dict.fromkeys(
        ("temperature_c", "clock_mhz", "power_mw", "load_average_1_minute")
    )
    if device == "cuda":
        import torch

        for name, ask in (
            ("temperature_c", torch.cuda.temperature),
            ("clock_mhz", torch.cuda.clock_rate),
            ("power_mw", torch.cuda.power_draw),
        ):
            # needs the driver's own package, which need not be there
            with suppress(Exception):
                notes[name] = ask()
    with suppress(OSError, AttributeError):
        notes["load_average_1_minute"] = round(os.getloadavg()[0], 2)
    return notes


_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+")
_PATH = re.compile(r"(?<![\w/:.>])(?:[A-Za-z]:)?[\\/](?:[^\s\\/:'\",;()]+[\\/]?)+")


def without_names(text: str) -> str:
    """A message without host name, user name, addresses and paths."""
    text = _PATH.sub("<path>", _URL.sub("<url>", text))
    for place in (Path.home(), Path.cwd(), Path(sys.prefix), tempfile.gettempdir()):
        if len(str(place)) > 1:
            text = text.replace(str(place), "<path>")
    with suppress(Exception):
        text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "<host>", text)
    with suppress(Exception):
        text = re.sub(rf"\b{re.escape(getpass.getuser())}\b", "<user>", text)
    return text


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _main_memory() -> int | None:
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
