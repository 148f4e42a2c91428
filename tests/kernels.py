"""Kernels for the tests of `prefork` and `sandbox`: run code in one, see what it prints."""

from __future__ import annotations

import ast
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

from kvlab.grading import prefork


class Kernel:
    """One kernel, started by the provisioner, with settings of its own."""

    def __init__(self, **config: Any) -> None:
        """config  the provisioner's traits; cwd and env go to the kernel"""
        start = {name: config.pop(name) for name in ("cwd", "env") if name in config}
        self.manager = AsyncKernelManager(kernel_name="python3")
        prefork.choose(self.manager, **config)
        self._notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell()])
        self._client = NotebookClient(
            self._notebook, km=self.manager, timeout=60, allow_errors=True
        )
        self._client.start_new_kernel(**start)
        self._client.start_new_kernel_client()

    def outputs(self, code: str) -> list[Any]:
        """What a cell with this code puts out."""
        cell = nbformat.v4.new_code_cell(code)
        self._client.execute_cell(cell, 0)
        return list(cell.outputs)

    def run(self, code: str) -> str:
        """What it prints, errors included."""
        return "".join(
            o.get("text") or f"{o.get('ename')}: {o.get('evalue')}"
            for o in self.outputs(code)
        )

    def value(self, expression: str) -> Any:
        """A value that can be written as Python text."""
        said = self.run(f"print(ascii({expression}))")
        return ast.literal_eval(said.strip())

    def is_alive(self) -> bool:
        """Whether its process runs."""
        return bool(run_sync(self.manager.is_alive)())

    def interrupt(self) -> None:
        """As the stop button does."""
        run_sync(self.manager.interrupt_kernel)()

    def close(self) -> None:
        """Ends it."""
        self._client._cleanup_kernel()
