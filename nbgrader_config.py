"""The course as nbgrader sees it: `nbgrader ...` typed in this folder reads this file.

The same settings serve `make build` and `make grade`, which load this file too.
"""

from pathlib import Path

import zmq
from nbconvert.preprocessors import ClearMetadataPreprocessor, CSSHTMLHeaderPreprocessor
from nbgrader import preprocessors

from kvlab.course import ClearTodos, StampRelease, source_folder
from kvlab.grading import examiner, intake
from kvlab.grading import preprocessors as course

c = get_config()  # type: ignore[name-defined]  # noqa: F821 (given by the loader)

c.CourseDirectory.course_id = "kvlab"
c.CourseDirectory.source_directory = source_folder(Path(__file__).parent).name
c.CourseDirectory.release_directory = "notebooks"
# The .py sources hold the answers: nbgrader must not copy them to students.
c.CourseDirectory.ignore = [
    ".ipynb_checkpoints",
    "*.py",
    "*.pyc",
    "__pycache__",
    ".DS_Store",
]

# A TODO keeps the message of its own cell, and the release remembers how it left.
c.GenerateAssignment.preprocessors = [
    preprocessors.IncludeHeaderFooter,
    preprocessors.LockCells,
    ClearTodos,
    preprocessors.ClearOutput,
    preprocessors.CheckCellMetadata,
    preprocessors.ComputeChecksums,
    preprocessors.SaveCells,
    preprocessors.ClearHiddenTests,
    preprocessors.ClearMarkScheme,
    preprocessors.ComputeChecksums,
    preprocessors.CheckCellMetadata,
    StampRelease,
]

# A submission may come renamed, damaged or from Colab: it is repaired before nbgrader
# looks at it, and `kvlab.repairs` in the graded notebook says what was done.
c.Autograde.pre_convert_hook = intake.prepare
c.Autograde.exporter_class = intake.ReadSubmission
c.Autograde.sanitize_preprocessors = [
    course.RepairCells,
    preprocessors.ClearOutput,
    preprocessors.DeduplicateIds,
    preprocessors.OverwriteKernelspec,
    preprocessors.OverwriteCells,
    preprocessors.CheckCellMetadata,
]
# Student code runs apart from the tests; a cell that ends its kernel costs itself
# only; warnings and prints cost nothing.
c.Autograde.autograde_preprocessors = [
    examiner.Examine,
    course.FreeOutputs,
    preprocessors.IgnorePattern,
    ClearMetadataPreprocessor,
    preprocessors.LimitOutput,
    preprocessors.SaveAutoGrades,
    preprocessors.AssignLatePenalties,
    preprocessors.CheckCellMetadata,
]
# RepairCells has put missing cells back, also where nbgrader's own way gives up.
c.OverwriteCells.add_missing_cells = False

SECONDS_PER_CELL = 60
c.Execute.timeout = SECONDS_PER_CELL
c.Execute.error_on_timeout = {
    "ename": "CellTimeoutError",
    "evalue": f"It was still running after {SECONDS_PER_CELL} seconds.",
    "traceback": [f"It was still running after {SECONDS_PER_CELL} seconds."],
}
# Kernels speak over local TCP ports: encrypted, other users of a machine cannot listen.
if zmq.has("curve"):
    c.KernelManager.transport_encryption = "auto"

# A student gets the hint, never a hidden test, and no script of anybody's.
c.GenerateFeedback.preprocessors = [
    preprocessors.GetGrades,
    course.HideHiddenTests,
    course.EscapeActiveContent,
    CSSHTMLHeaderPreprocessor,
]
