"""The sandbox around a student's code: bubblewrap's command line, and how much may be used in it.

Called by `prefork`, which starts kernels in it, and by the examiner, which asks for it. Never starts
a process but the one that tries whether bubblewrap works here.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import kvlab
from kvlab.runtime import cpu_cores

PROGRAM = "bwrap"
SWITCH = "SANDBOX"  # environment: off, on, or auto
HOME = "/tmp/home"
WORK = "/tmp/work"
MIB = 2**20

# The system's own files that programs look at. Not all of /etc: it holds secrets.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
SETTINGS = (
    "/etc/alternatives",
    "/etc/fonts",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
)
# What a kernel in the sandbox may know of the environment it was started from.
ENVIRONMENT = (
    kvlab.FIGURES,
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "MKL_NUM_THREADS",
    "NBGRADER_EXECUTION",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "TZ",
)


class SandboxMissing(Exception):
    """Bubblewrap is not there or does not work; the message says what to do."""


@dataclass(frozen=True)
class Limits:
    """What the processes of one kernel may use; bytes, seconds and counts.

    memory     of one process, beyond the packages that are loaded
    scratch    of each of the writable places, which live in memory
    processes  and threads, together
    """

    memory: int = 4096 * MIB
    scratch: int = 256 * MIB
    file: int = 128 * MIB
    processes: int = 64 + 4 * cpu_cores()  # torch alone starts one for each core
    open_files: int = 1024
    cpu_seconds: int = 900

    @property
    def by_resource(self) -> dict[str, int]:
        """The limits by the names that setrlimit knows them by."""
        return {
            "AS": self.memory,
            "CORE": 0,
            "CPU": self.cpu_seconds,
            "FSIZE": self.file,
            "NOFILE": self.open_files,
            "NPROC": self.processes,
        }


def wanted(default: str = "auto") -> bool:
    """Whether student code goes into the sandbox: `SANDBOX`, or else the default.

    default  on: it must; off: it must not; auto: where bubblewrap works
    raises SandboxMissing when it must and cannot
    """
    said = os.environ.get(SWITCH, "").lower() or default
    if said not in ("on", "off", "auto"):
        raise SandboxMissing(f"{SWITCH}={said} is not known. Say on, off or auto.")
    if said == "off":
        return False
    reason = why_not()
    if reason and said == "on":
        raise SandboxMissing(
            f"The sandbox for student code cannot be used: {reason} "
            f"To grade without it, say {SWITCH}=off: then student code can read and "
            "change every file that you can."
        )
    return not reason


@cache
def why_not() -> str:
    """Why bubblewrap cannot be used here, and what to do; "" when it can."""
    if not sys.platform.startswith("linux"):
        return "bubblewrap runs on Linux only."
    if shutil.which(PROGRAM) is None:
        return "bubblewrap is not installed. Run `make system`, or on Debian and Ubuntu: sudo apt-get install bubblewrap."
    hidden = [place for place in _python() if Path("/tmp") in place.parents]
    if hidden:
        return f"{hidden[0]} lies under /tmp, which is empty in the sandbox: keep the course elsewhere."
    true = shutil.which("true") or "/bin/true"
    tried = subprocess.run(
        [*_apart(), *_visible(()), true], capture_output=True, text=True
    )
    if tried.returncode:
        said = tried.stderr.strip().split("\n")[-1]
        return f"bubblewrap cannot make a sandbox here ({said}). The machine must allow user namespaces."
    return ""


def command(
    program: Sequence[str],
    run: Path,
    more: Sequence[Path] = (),
    preset: Mapping[str, str] | None = None,
) -> list[str]:
    """The command line that starts a program in the sandbox.

    run     the folder of the kernels' sockets, writable there
    more    files and folders that can be read in it, too
    preset  what its environment holds besides the usual
    """
    variables = environment(os.environ) | dict(preset or {})
    return [
        *_apart(),
        *_visible(more),
        *_folders_above([run]),
        *("--bind", str(run), str(run)),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"),
        "--clearenv",
        *(word for item in variables.items() for word in ("--setenv", *item)),
        "--",
        *program,
    ]


def command_for_one(
    program: Sequence[str], run: Path, files: Path, preset: Mapping[str, str]
) -> list[str]:
    """The command line that starts one kernel in a sandbox, without a preloaded process.

    files  what its folder begins with
    """
    limits = Limits()
    limited = [
        "prlimit",
        f"--as={limits.memory + 2048 * MIB}",  # with the packages that it will load
        "--core=0",
        f"--cpu={limits.cpu_seconds}",
        f"--fsize={limits.file}",
        f"--nofile={limits.open_files}",
        f"--nproc={limits.processes}",
    ]
    begin = f'mkdir -p {HOME} {WORK} && cp -r "$0"/. {WORK} && cd {WORK} && exec "$@"'
    words = ["/bin/sh", "-c", begin, str(files), *limited, "--", *program]
    whole = command(words, run, preset=preset)
    place = whole.index("--cap-add")
    user = ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    kept = [word for word in whole[:place] if word != "--unshare-user"]
    for option in ("--uid", "--gid"):
        if option in kept:
            del kept[kept.index(option) : kept.index(option) + 2]
    return [*kept, *user, *whole[place + 2 :]]


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """What a process in the sandbox finds in its environment."""
    kept = {name: given[name] for name in ENVIRONMENT if name in given}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "HOME": HOME,
        "LOGNAME": "student",
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "TMPDIR": "/tmp",
        "TRANSFORMERS_OFFLINE": "1",
        "USER": "student",
    }


def _apart() -> list[str]:
    """No network, no other process, no other user; ends with the one who started it.

    The process that forks needs the right to mount: within its own user namespace
    only, or as root in the namespaces that it shares with nobody. Kernels drop it.
    """
    apart = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    if os.getuid() != 0:
        apart += ["--unshare-user", "--uid", "0", "--gid", "0"]
    return [
        shutil.which(PROGRAM) or PROGRAM,
        *apart,
        *("--hostname", "sandbox"),
        *("--cap-add", "ALL"),
        "--die-with-parent",
        "--new-session",
    ]


def _visible(more: Sequence[Path]) -> list[str]:
    """The file system in the sandbox: what Python needs, read-only, and no more."""
    words: list[str] = []
    for place in SYSTEM:
        path = Path(place)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), place]
        elif path.exists():
            words += ["--ro-bind", place, place]
    places = [*map(Path, SETTINGS), *_python(), *more]
    words += _folders_above(places)
    for path in places:
        words += ["--ro-bind-try", str(path), str(path)]
    words += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    return words


def _folders_above(places: Sequence[Path]) -> list[str]:
    """Every folder on the way to a place, open to all: bubblewrap locks them for root's."""
    folders = {folder for place in places for folder in place.parents}
    words = []
    for folder in sorted(folders - {Path("/"), Path("/tmp"), Path("/usr")}):
        words += ["--perms", "0755", "--dir", str(folder)]
    return words


def _python() -> list[Path]:
    """Where this interpreter and its packages are, in the order they are mounted."""
    package = Path(__file__).parents[1]  # kvlab itself, which may be an editable copy
    places = {
        Path(sys.prefix),
        Path(sys.base_prefix),
        Path(os.path.realpath(sys.executable)).parent,
        Path(sysconfig.get_path("stdlib")),
        package,
        *map(Path, site.getsitepackages()),
    }
    outermost = [
        place
        for place in places
        if not any(other != place and other in place.parents for other in places)
    ]
    system = tuple(Path(place) for place in SYSTEM)
    return sorted(
        place
        for place in outermost
        if place.exists() and not any(s == place or s in place.parents for s in system)
    )
