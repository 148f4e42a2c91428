"""Makes quanto's compiled code ready, so that no measurement waits for it, or for ever.

Called by `caches` before it builds a quanto cache. Never raises: what is wrong with a compiler shows
where the cache is used.

quanto compiles its code at the first use, inside whatever is being timed. torch guards that with a
file that only its maker removes: one left by a killed process stops every later one without a word.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from pathlib import Path


@lru_cache
def ready() -> None:
    """Compiles or loads quanto's extensions, once for this process; nothing without quanto."""
    with suppress(Exception):
        from optimum.quanto.library.extensions import extension

        for one in extension._extensions.values():
            with suppress(Exception):
                _load(one, Path(one.build_directory))


def _load(extension: object, folder: Path) -> None:
    from filelock import FileLock

    folder.mkdir(parents=True, exist_ok=True)
    # freed by the system when its holder dies; so under it torch's own mark is a dead process's
    with FileLock(folder.with_name(f".{folder.name}-kvlab.lock")):
        (folder / "lock").unlink(missing_ok=True)
        _ = extension.lib  # type: ignore[attr-defined]
