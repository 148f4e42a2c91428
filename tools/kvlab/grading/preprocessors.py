"""What this course adds to nbgrader's own steps, as preprocessors for its lists.

Called by nbgrader, for nbgrader_config.py names them: `nbgrader autograde` and `generate_feedback` typed by
hand do the same as `make grade`. Never decides about points: nbgrader does, from the outputs left here.
"""

from __future__ import annotations

import html
import re
import textwrap
from typing import Any

import nbformat
from nbconvert.preprocessors.sanitize import SanitizeHTML
from nbformat import NotebookNode
from nbgrader.api import Gradebook
from nbgrader.preprocessors import NbGraderPreprocessor
from nbgrader.utils import is_grade, is_solution

from kvlab.grading import released
from kvlab.grading.intake import lab_notebook, name_before
from kvlab.grading.repair import repair

TIMED_OUT = "CellTimeoutError"  # nbgrader's own name, in `Execute.error_on_timeout`
KERNEL_DIED = "KernelDied"
PAGE_WIDTH = 96  # characters in a line of nbgrader's feedback page
Resources = dict[str, Any]
Processed = tuple[NotebookNode, Resources]


def is_test(cell: NotebookNode) -> bool:
    """Whether running the cell gives points."""
    return bool(cell.cell_type == "code" and is_grade(cell) and not is_solution(cell))


# --- before the cells run (Autograde.sanitize_preprocessors) --------------------------


class RepairCells(NbGraderPreprocessor):
    """Repairs a damaged notebook; what was done is listed in `kvlab.repairs`."""

    def preprocess(self, nb: NotebookNode, resources: Resources) -> Processed:
        """Works on the whole notebook, with the gradebook's cells as the measure."""
        course = resources["nbgrader"]
        lab, name = course["assignment"], course["notebook"]
        with Gradebook(course["db_url"]) as gradebook:
            cells = released.in_gradebook(gradebook, lab, name)
        solution = lab_notebook(lab, name)
        if solution.is_file():
            notebook = nbformat.read(solution, as_version=4)
            cells = released.in_order_of(cells, released.in_solution_notebook(notebook))
        renamed = name_before(nb)
        notes = [f"The notebook was called {renamed!r}."] if renamed else []
        notes += repair(nb, cells)
        nb.metadata.setdefault("kvlab", NotebookNode())["repairs"] = notes
        return nb, resources


# --- while and after they run (Autograde.autograde_preprocessors) ---------------------


def error_names(cell: NotebookNode) -> list[str]:
    """The class names of the errors among a cell's outputs."""
    return [o.ename for o in cell.get("outputs", []) if o.output_type == "error"]


class FreeOutputs(NbGraderPreprocessor):
    """Makes what a test cell prints cost and earn nothing: only an error decides.

    nbgrader gives 0 for anything on stderr, and takes a number that the cell's last
    line evaluates to for partial credit.
    """

    def preprocess_cell(
        self, cell: NotebookNode, resources: Resources, cell_index: int
    ) -> Processed:
        """Turns stderr into stdout, and a result into something displayed."""
        if is_test(cell):
            for output in cell.outputs:
                if output.output_type == "stream":
                    output["name"] = "stdout"
                elif output.output_type == "execute_result":
                    output["output_type"] = "display_data"
                    output.pop("execution_count", None)
        return cell, resources


# --- when a student is told (GenerateFeedback.preprocessors) --------------------------


class HideHiddenTests(NbGraderPreprocessor):
    """Cuts hidden tests out of what a student gets: from the source and tracebacks."""

    def preprocess_cell(
        self, cell: NotebookNode, resources: Resources, cell_index: int
    ) -> Processed:
        """Leaves of a traceback the message and the frames in the student's own cells."""
        if not is_test(cell):
            return cell, resources
        cell["source"] = released.without_hidden_tests(cell.source)
        for output in cell.outputs:
            if output.output_type == "error":
                frames = [
                    frame
                    for frame in output.traceback
                    if _is_frame_of_another_cell(frame, cell.execution_count)
                ]
                message = f"{output.ename}: {output.evalue}"
                if output.ename == "Wrong":
                    message = output.evalue
                output["traceback"] = [*frames, textwrap.fill(message, PAGE_WIDTH)]
        return cell, resources


COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def _is_frame_of_another_cell(frame: str, execution_count: int | None) -> bool:
    place = re.match(r"Cell In\[(\d+)\]", COLOURS.sub("", frame))
    return place is not None and int(place.group(1)) != execution_count


class EscapeActiveContent(SanitizeHTML):
    """Escapes in outputs and in text what a browser would run, such as <script>."""

    ACTIVE = re.compile(
        r"<\s*/?\s*(script|iframe|object|embed|style|link|meta|base|form|svg|math)\b"
        r"|<[^>]*\son\w+\s*=|(javascript|vbscript)\s*:",
        flags=re.IGNORECASE,
    )
    # fmt: off
    SAFE_TAGS = (
        "a", "abbr", "b", "blockquote", "br", "caption", "code", "del", "div",
        "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i",
        "li", "ol", "p", "pre", "s", "span", "strong", "sub", "sup",
        "table", "tbody", "td", "tfoot", "th", "thead", "tr", "ul",
    )
    # fmt: on

    def __init__(self, **kwargs: Any) -> None:
        """Always on, with the tags that tables and ordinary text need."""
        super().__init__(**kwargs)
        self.enabled = True
        self.tags = list(self.SAFE_TAGS)

    def preprocess_cell(
        self, cell: NotebookNode, resources: Resources, cell_index: int
    ) -> Processed:
        """Outputs are cleaned; text is touched only where it holds something active."""
        if cell.cell_type == "code":
            cell["outputs"] = self.sanitize_code_outputs(cell.outputs)
        elif self.ACTIVE.search(cell.source):
            cell["source"] = html.escape(cell.source, quote=False)
        return cell, resources
