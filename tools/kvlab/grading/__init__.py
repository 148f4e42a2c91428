"""Grades notebooks with nbgrader and shows the outcome.

Called by `kvlab grade` and the tests; nbgrader_config.py names the preprocessors. Never grades by a rule
of its own: nbgrader decides about points, and its gradebook keeps them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.grading.engine import (
        PRACTICE,
        autograde,
        full_marks,
        grade,
        register,
        write_feedback,
    )
    from kvlab.grading.outcome import CellResult, LabResult, TodoResult, WrittenResult
    from kvlab.grading.scoreboard import print_scoreboard, progress_on

__all__ = [
    "PRACTICE",
    "CellResult",
    "LabResult",
    "TodoResult",
    "WrittenResult",
    "autograde",
    "full_marks",
    "grade",
    "print_scoreboard",
    "progress_on",
    "register",
    "write_feedback",
]


def __getattr__(name: str) -> Any:
    """Imports on first use: a kernel that imports `border` must not import nbgrader."""
    if name in __all__:
        for module in ("engine", "outcome", "scoreboard"):
            loaded = importlib.import_module(f"{__name__}.{module}")
            if hasattr(loaded, name):
                return getattr(loaded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
