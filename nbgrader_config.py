"""The course as nbgrader sees it: `nbgrader ...` typed in this folder reads this file.

The same settings serve `make build` and `make grade`, which load this file too.
"""

from kvlab.course import ClearTodos, StampRelease
from nbgrader import preprocessors

c = get_config()  # noqa: F821 (given by the loader)

c.CourseDirectory.course_id = "kvlab"
c.CourseDirectory.source_directory = "solutions"
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
