"""Says what this machine runs: versions of Python and of the packages.

Called by the first cell of every notebook. Never imports what it reports on, installs nothing.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import kvlab

SHOWN = ("torch", "transformers", "matplotlib")


def package_version(name: str) -> str | None:
    """The installed version of a package, or None when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions_line() -> str:
    """One line for a notebook's first output."""
    parts = [f"kvlab {kvlab.__version__}", f"Python {platform.python_version()}"]
    parts += [f"{name} {package_version(name) or 'not installed'}" for name in SHOWN]
    return " · ".join(parts)
