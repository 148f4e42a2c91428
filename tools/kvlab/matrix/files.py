"""The files of a run: the result, written once and whole, and the partial one while it runs.

Called by `run`. Never overwrites a result and never leaves half a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlab.matrix import schema
from kvlab.matrix.workload import RUN_MODES

Json = dict[str, Any]
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
PARTIAL = ".partial"
WRITING = ".writing-"


class RunRefused(RuntimeError):
    """Nothing was run or written. The message says why and what to do."""


def all_in(folder: Path) -> list[Path]:
    """The results in a folder, whole or not: other kinds of files lie there, too."""
    return sorted(p for mode in RUN_MODES for p in folder.glob(f"{mode}-*.json"))


def result_path(folder: Path, run_mode: str, label: str, force: bool = False) -> Path:
    """Where the result of a run goes.

    An existing file is never overwritten: with `force` the next free numbered sibling.
    raises RunRefused when the label is taken, or is no label
    """
    if not _LABEL.fullmatch(label):
        raise RunRefused(
            f"{label!r} is no run label: letters, digits, - and _ only, 1 or more"
        )
    first = folder / f"{run_mode}-{label}.json"
    if not first.exists():
        return first
    if not force:
        raise RunRefused(
            f"{first} exists, and a result is never overwritten. Choose another label, "
            f"or use --force (in Python force=True) for a sibling {label}.2."
        )
    number = 2
    while (sibling := first.with_name(f"{first.stem}.{number}.json")).exists():
        number += 1
    return sibling


def write_new(path: Path, record: Json) -> None:
    """Writes a result whole, or not at all.

    raises RunRefused when the file has come into being meanwhile
    """
    with _written_beside(path, record) as whole:
        try:
            # a link fails when its name is taken; a rename would overwrite
            os.link(whole, path)
        except FileExistsError:
            raise RunRefused(f"{path} was written by another run meanwhile") from None
        except OSError:  # a file system without links
            if path.exists():
                raise RunRefused(
                    f"{path} was written by another run meanwhile"
                ) from None
            os.replace(whole, path)


class Partial:
    """The finished units of a run, kept in a file beside its result until that is written.

    identity  workload, versions, commit and hardware: units of another identity are refused
    """

    def __init__(self, folder: Path, run_mode: str, label: str, identity: Json) -> None:
        self.path = folder / f".{run_mode}-{label}{PARTIAL}"
        # as it comes back from a file, so that comparing means something
        identity = json.loads(json.dumps(identity))
        self._content: Json = {
            "identity": identity,
            "processes": 0,
            "seconds": 0.0,
            "units": {},
        }
        if self.path.exists():
            self._content = self._read(identity)
        self.resumed_units = len(self._content["units"])
        self._content["processes"] += 1

    def _read(self, identity: Json) -> Json:
        advice = (
            f"Delete {self.path} to measure everything again, or choose another label."
        )
        try:
            content: Json = json.loads(self.path.read_text("utf-8"))
            before = content["identity"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunRefused(
                f"{self.path} cannot be read ({error}). {advice}"
            ) from None
        if before != identity:
            changes = "; ".join(_differences(before, identity))
            raise RunRefused(
                f"{self.path} holds {len(content['units'])} finished units of a run that is "
                f"not this one: {changes}. Go back to what it was, to resume. {advice}"
            )
        return content

    @property
    def process(self) -> int:
        """Which process of this run it is, from 1."""
        return int(self._content["processes"])

    @property
    def seconds(self) -> float:
        """What the finished units took."""
        return float(self._content["seconds"])

    def has(self, unit: str) -> bool:
        return unit in self._content["units"]

    def get(self, unit: str) -> Any:
        return self._content["units"][unit]

    def keep(self, unit: str, value: Any, seconds: float) -> None:
        """Remembers a finished unit, on disk when this returns."""
        self._content["units"][unit] = json.loads(json.dumps(value))
        self._content["seconds"] += seconds
        with _written_beside(self.path, self._content) as whole:
            os.replace(whole, self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def discard_finished(folder: Path, run_mode: str, label: str) -> None:
    """Removes the partial file of a run that was killed after its result was written.

    Else a forced repetition would find every unit done and measure nothing. After a failure the
    partial file stays: a repetition goes on from it.
    """
    left = folder / f".{run_mode}-{label}{PARTIAL}"
    results = [
        folder / f"{run_mode}-{label}.json",
        *folder.glob(f"{run_mode}-{label}.*.json"),
    ]
    newest = max(filter(Path.exists, results), key=_age, default=None)
    if newest is None or not left.exists() or _age(newest) < _age(left):
        return
    if json.loads(newest.read_text("utf-8")).get("failure") is None:
        left.unlink()


def _age(path: Path) -> int:
    return path.stat().st_mtime_ns


@contextlib.contextmanager
def only_run(folder: Path, run_mode: str, label: str) -> Iterator[None]:
    """Holds a label against a second process; the system frees it when one dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / f".{run_mode}-{label}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunRefused(
            f"another process is running the label {label!r} in {folder}; "
            "wait for it or choose another label"
        ) from None
    try:
        # what a killed process was writing; under the lock nobody else is
        for left in folder.glob(f".{run_mode}-{label}{WRITING}*"):
            left.unlink(missing_ok=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            Path(lock.lock_file).unlink()
        lock.release()


def read(path: Path) -> Json:
    """A result; raises ValueError when the file does not fit the schema.

    Where jsonschema is not installed only the version is looked at.
    """
    record: Json = json.loads(path.read_text("utf-8"))
    try:
        wrong = schema.faults(record)
    except ImportError:
        given = record.get("schema_version")
        wrong = [] if given == schema.SCHEMA_VERSION else [f"version {given}"]
    if wrong:
        raise ValueError(f"{path} is no result of this course: {wrong[0]}")
    return record


@contextlib.contextmanager
def _written_beside(path: Path, content: Json) -> Iterator[Path]:
    """A whole temporary file in the same folder, gone afterwards."""
    run_name = path.name.lstrip(".").split(".")[0]
    handle, name = tempfile.mkstemp(prefix=f".{run_name}{WRITING}", dir=path.parent)
    whole = Path(name)
    try:
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            json.dump(content, file, indent=1, ensure_ascii=False, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        whole.chmod(0o644)  # a temporary file is private; a result is not
        yield whole
    finally:
        whole.unlink(missing_ok=True)


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from _differences(
                before.get(key), now.get(key), f"{name}.{key}" if name else key
            )
    elif before != now:
        yield f"{name} was {before!r} and is {now!r}"
