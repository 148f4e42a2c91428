"""Measures what the course costs on this machine: seconds and memory of each solved lab.

Called by `kvlab bench`. Never judges by time: it prints what it measured beside the aim.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import nbformat
import zmq
from nbclient import NotebookClient
from rich.table import Table
from traitlets.config import Config

from kvlab.course import Lab
from kvlab.runtime import cpu_cores

AIM_SECONDS = 30
AIM_GIB = 1.5
# Linux counts ru_maxrss in KiB, macOS in bytes.
PEAK_MEMORY = """
import resource, sys
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(peak * (1 if sys.platform == "darwin" else 1024))
"""


@dataclass(frozen=True)
class LabCost:
    """What one run of a solved notebook took, kernel start included."""

    lab: str
    seconds: float
    peak_bytes: int


def encryption() -> str:
    """How kernels may encrypt what they say over local ports; ipykernel warns of "disabled"."""
    return "auto" if zmq.has("curve") else "disabled"


def measure_lab(lab: Lab) -> LabCost:
    """Runs the solved notebook top to bottom in a kernel of its own.

    raises nbclient.exceptions.CellExecutionError when a cell fails
    """
    notebook = nbformat.read(lab.solution, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(PEAK_MEMORY))
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(lab.solution.parent)}},
        config=Config(KernelManager={"transport_encryption": encryption()}),
    )
    started = time.perf_counter()
    client.execute()
    seconds = time.perf_counter() - started
    peak = int(notebook.cells[-1].outputs[0].text)
    return LabCost(lab.name, seconds, peak)


def cost_table(costs: list[LabCost]) -> Table:
    """The measurements beside what the course aims at."""
    table = Table(title=f"One run of each solved lab, {cpu_cores()} CPU cores")
    table.add_column("lab")
    table.add_column(f"seconds (aim < {AIM_SECONDS})", justify="right")
    table.add_column(f"peak GiB (aim < {AIM_GIB})", justify="right")
    for cost in costs:
        table.add_row(
            cost.lab,
            _against(cost.seconds, AIM_SECONDS, ".1f"),
            _against(cost.peak_bytes / 2**30, AIM_GIB, ".2f"),
        )
    return table


def _against(measured: float, aim: float, form: str) -> str:
    """The figure, marked where it is above the aim."""
    return f"{measured:{form}}" + (" above" if measured > aim else "")
