"""The hostile answers of tests/submissions/hostile, and what each says of itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from conftest import SUBMISSIONS, TINY


@dataclass(frozen=True)
class Hostile:
    """One file of tests/submissions/hostile: an answer, and what it may earn."""

    name: str
    lab: str
    todo: int
    earns: float
    source: str


def read_hostile(path: Path) -> Hostile:
    source = path.read_text(encoding="utf-8")
    said = dict(
        re.findall(r"^# (lab|todo|earns): *(.+?) *$", source, flags=re.MULTILINE)
    )
    return Hostile(
        path.stem,
        said.get("lab", TINY),
        int(said["todo"]),
        float(said["earns"]),
        source,
    )


HOSTILE = [read_hostile(path) for path in sorted(SUBMISSIONS.glob("hostile/*.py"))]
