"""Starts kernels quickly: a Jupyter provisioner that has them forked from a preloaded process.

Called by Jupyter, for pyproject.toml registers `kvlab-prefork`, and by the examiner. Never looks into
a notebook. Where a kernel cannot be forked it starts an ordinary one, and `ways` remembers that.
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import contextlib
import importlib.util
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner
from nbformat import NotebookNode
from traitlets import Bool, Integer, List, Unicode

from kvlab.grading import sandbox
from kvlab.grading.zygote import Request, receive, send

NAME = "kvlab-prefork"
GROUP = "jupyter_client.kernel_provisioners"
LAUNCHER = "ipykernel_launcher"
BASE = (  # what a kernel imports before it runs its first cell
    "ipykernel.kernelapp",
    "ipykernel.ipkernel",
    "ipykernel.debugger",
    "IPython.core.completerlib",
    "IPython.core.debugger",
    "IPython.core.logger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "importlib.readers",
    "kvlab.grading.answering",
    "kvlab.grading.asking",
    "kvlab.grading.stream",
    "sqlite3",
    "tornado.platform.asyncio",
)
COURSE = (  # what most labs import; `packages_of` finds the rest
    "kvlab.checks.axes",
    "kvlab.captured",
    "kvlab.plots",
    "kvlab.runtime",
    "matplotlib.backends.backend_agg",
    "matplotlib.pyplot",
    "numpy",
    "torch",
)
MAY_PRELOAD = ("kvlab", "matplotlib", "numpy", "torch", "transformers")
FIRST_USER = 1_000_000_000  # users that no machine has: one for each kernel of root's
log = logging.getLogger(__name__)

ways: dict[str, int] = {}  # how kernels of this process were started, and how many


class CannotFork(Exception):
    """Kernels cannot be forked here; the message says why."""


class Zygote:
    """The preloaded process, seen from outside.

    confined  whether it runs in the sandbox, with all the kernels that come from it
    """

    def __init__(self, confined: bool, modules: Sequence[str] = ()) -> None:
        """Starts it, and does not wait until it has imported what is needed first."""
        if not hasattr(os, "fork") or sys.platform == "darwin":
            raise CannotFork(f"forking is not safe on {sys.platform}")
        self.confined = confined
        self.run = new_folder()
        self.run.chmod(0o711)  # kernels of root's are other users
        self.loaded: set[str] = set()
        self._turn = threading.Lock()
        self._kernels = 0
        self._owner = os.getpid()
        ours, theirs = socket.socketpair()
        program = [
            sys.executable,
            "-c",
            "from kvlab.grading.zygote import main; main()",
            str(theirs.fileno()),
        ]
        # No threads at import; no advice from the debugger that kernels bring along.
        preset = {"OPENBLAS_NUM_THREADS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        if confined:
            program = sandbox.command(program, self.run, preset=preset)
        self._process = subprocess.Popen(
            program,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            cwd="/",
            env=dict(os.environ) | preset,
        )
        theirs.close()
        self._control = ours
        atexit.register(self.close)
        self._begun = [*BASE, *modules]
        send(ours, {"do": "preload", "modules": self._begun})

    def wait(self) -> None:
        """Until it has imported what it began with.

        raises CannotFork when it cannot, or when threads run in it afterwards
        """
        begun, self._begun = self._begun, []
        if begun:
            self._take_in(begun, self._answer())

    def preload(self, modules: Sequence[str]) -> None:
        """Has modules imported that are not yet.

        raises CannotFork when threads run in the process afterwards
        """
        self.wait()
        new = [module for module in modules if module not in self.loaded]
        if new:
            self._take_in(new, self.ask({"do": "preload", "modules": new}))

    def _take_in(self, new: Sequence[str], answer: Request) -> None:
        self.loaded |= set(new)
        if answer["threads"] > 1:
            raise CannotFork(f"importing {', '.join(new)} started threads")
        for module, reason in answer["failed"].items():
            log.info("%s was not preloaded: %s", module, reason)

    def ask(self, request: Request, files: list[int] | None = None) -> Request:
        """The answer to one request.

        raises CannotFork when the process is gone or refuses
        """
        self.wait()
        return self._answer(request, files)

    def _answer(
        self, request: Request | None = None, files: list[int] | None = None
    ) -> Request:
        with self._turn:
            try:
                if request is not None:
                    send(self._control, request, files)
                answer, _ = receive(self._control)
            except (OSError, EOFError) as error:
                raise CannotFork(f"the preloaded process has ended ({error})") from None
        if "error" in answer:
            raise CannotFork(answer["error"])
        return answer

    def alive(self) -> bool:
        """Whether it can be asked, by this process."""
        return self._owner == os.getpid() and self._process.poll() is None

    def new_folder(self) -> Path:
        """An empty folder for the next kernel, which no other kernel sees."""
        self._kernels += 1
        folder = self.run / f"k{self._kernels}"
        folder.mkdir(mode=0o700)
        return folder

    def close(self) -> None:
        """Ends it, every kernel that came from it, and the files between."""
        if self._owner != os.getpid():
            return
        atexit.unregister(self.close)
        self._control.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.run, ignore_errors=True)


def new_folder(prefix: str = "kvlab-") -> Path:
    """A temporary folder that says whose it is; those of processes that died go."""
    for old in Path(tempfile.gettempdir()).glob(f"{prefix}[0-9]*-*"):
        owner = int(re.sub(r"\D.*", "", old.name.removeprefix(prefix)))
        if old.is_dir() and old.stat().st_uid == os.getuid() and not _lives(owner):
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-")).resolve()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


_zygotes: dict[bool, Zygote] = {}
_reasons: dict[bool, str] = {}


def zygote(confined: bool) -> Zygote:
    """The preloaded process of this process, started when there is none.

    raises CannotFork when it cannot be started; it is not tried again
    """
    if confined in _reasons:
        raise CannotFork(_reasons[confined])
    held = _zygotes.get(confined)
    try:
        if held is None or not held.alive():
            _zygotes[confined] = held = Zygote(confined)
        held.wait()
    except (CannotFork, OSError) as error:
        _reasons[confined] = str(error)
        log.warning("Kernels start one by one, which is slower: %s", error)
        raise CannotFork(str(error)) from None
    return held


def begin(confined: bool, modules: Sequence[str]) -> None:
    """Starts the preloaded process already, while this one does something else."""
    with contextlib.suppress(CannotFork, OSError):
        if confined not in _zygotes and confined not in _reasons:
            _zygotes[confined] = Zygote(confined, modules)


def close_all() -> None:
    """Ends the preloaded processes of this process."""
    for confined in list(_zygotes):
        _zygotes.pop(confined).close()


class Forked:
    """A forked kernel, with the methods of subprocess.Popen that Jupyter uses."""

    stdin = stdout = stderr = None

    def __init__(self, origin: Zygote, keeper: int) -> None:
        """keeper  the process that waits for the kernel, numbered as the zygote sees it"""
        self.pid = keeper
        self.returncode: int | None = None
        self._origin = origin

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None:
            try:
                answer = self._origin.ask({"do": "poll", "keeper": self.pid})
                self.returncode = answer["status"]
            except CannotFork:
                self.returncode = -signal.SIGKILL  # it ended with its origin
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("kernel", timeout or 0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Interrupts it, or ends it with all its processes."""
        if number in (signal.SIGKILL, signal.SIGTERM):
            number = signal.SIGTERM  # the keeper's word for: end everything
        try:
            self._origin.ask(
                {"do": "signal", "keeper": self.pid, "signal": int(number)}
            )
        except CannotFork:
            self.poll()

    def kill(self) -> None:
        """Ends it with all its processes."""
        self.send_signal(signal.SIGKILL)

    terminate = kill


class PreforkProvisioner(LocalProvisioner):
    """Forks kernels; as traits it takes what `kernel_provisioner.config` says."""

    confined = Bool(False, help="Whether the kernel runs in the sandbox.")
    open_to_view = Bool(
        True, help="Whether other processes of the same user may look into the kernel."
    )
    modules = List(Unicode(), help="Packages that the kernel finds imported.")
    files = Unicode(
        "", help="A folder whose files the kernel's own folder begins with."
    )
    border = Integer(-1, help="An open socket that the kernel gets, or -1.")

    _folder: Path | None = None
    _origin: Zygote | None = None

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Lets kernel and client meet in a folder that is theirs alone."""
        try:
            origin = zygote(self.confined)
            origin.preload(self.modules)
            self._folder, self._origin = origin.new_folder(), origin
        except CannotFork:
            if self.confined:
                self._folder = new_folder()
        manager = self.parent
        if self._folder is not None:
            # The sockets' folder is locked for others, so they need no encryption.
            manager.transport, manager.ip = "ipc", str(self._folder / "s")
            manager.connection_file = str(self._folder / "kernel.json")
            kwargs["transport_encryption"] = "disabled"
        return await super().pre_launch(**kwargs)

    async def launch_kernel(
        self, cmd: list[str], **kwargs: Any
    ) -> KernelConnectionInfo:
        """Forks the kernel, or starts it as it says when that is impossible."""
        try:
            argv = _launcher_arguments(cmd)
            if self._origin is None:
                raise CannotFork(_reasons.get(self.confined, "no preloaded process"))
            forked = self._forked(argv, kwargs)
        except CannotFork as reason:
            log.warning("This kernel is started anew: %s", reason)
            return await self._start_anew(cmd, kwargs)
        ways["forked"] = ways.get("forked", 0) + 1
        self.process: Any = forked
        self.pid, self.pgid, self.cwd = forked.pid, None, kwargs.get("cwd")
        return self.connection_info

    def _forked(self, argv: list[str], kwargs: dict[str, Any]) -> Forked:
        assert self._folder is not None and self._origin is not None
        environment = dict(kwargs["env"])
        environment.pop("JPY_PARENT_PID", None)
        user, cwd = None, kwargs.get("cwd") or os.getcwd()
        if self.confined:
            environment = sandbox.environment(environment)
            cwd = sandbox.WORK
            if self.files:
                copy_files(Path(self.files), self._folder / "files")
            if os.getuid() == 0:
                user = FIRST_USER + int.from_bytes(os.urandom(4), "big") % FIRST_USER
                os.chown(self._folder / "kernel.json", user, user)
        limits = sandbox.Limits()
        request = {
            "do": "fork",
            "argv": argv,
            "cwd": str(cwd),
            "env": environment,
            "log": str(self._folder / "log"),
            "open_to_view": self.open_to_view,
            "confine": {
                "own": str(self._folder),
                "hidden": str(self._origin.run),
                "home": sandbox.HOME,
                "work": sandbox.WORK,
                "scratch_bytes": limits.scratch,
                "limits": limits.by_resource,
                "user": user,
            }
            if self.confined
            else None,
        }
        files = [self.border] if self.border >= 0 else []
        return Forked(self._origin, self._origin.ask(request, files)["keeper"])

    async def _start_anew(
        self, cmd: list[str], kwargs: dict[str, Any]
    ) -> KernelConnectionInfo:
        if self.border >= 0:
            kwargs["pass_fds"] = [self.border]
            kwargs["env"] = dict(kwargs["env"]) | {"KVLAB_BORDER": str(self.border)}
        if self.confined:
            assert self._folder is not None
            cmd = self._sandboxed(cmd, kwargs)
        ways["started"] = ways.get("started", 0) + 1
        return await super().launch_kernel(cmd, **kwargs)

    def _sandboxed(self, cmd: list[str], kwargs: dict[str, Any]) -> list[str]:
        """The kernel's command, in a sandbox of its own."""
        assert self._folder is not None
        files = self._folder / "files"
        files.mkdir(exist_ok=True)
        if self.files:
            copy_files(Path(self.files), files)
        kwargs["cwd"] = "/"
        more = {"KVLAB_BORDER": kwargs["env"].get("KVLAB_BORDER", "")}
        return sandbox.command_for_one(cmd, self._folder, files, more)

    async def wait(self) -> int | None:
        """Until it has ended; LocalProvisioner looks ten times a second only."""
        while self.process is not None and await self.poll() is None:
            await asyncio.sleep(0.005)
        return await super().wait()

    async def cleanup(self, restart: bool = False) -> None:
        """Removes the folder between kernel and client."""
        await super().cleanup(restart)
        if self._folder is not None and not restart:
            shutil.rmtree(self._folder, ignore_errors=True)

    def said_at_start(self) -> str:
        """What the kernel wrote down when it could not start; "" when it could."""
        note = self._folder / "log" if self._folder else None
        return note.read_text(errors="replace") if note and note.is_file() else ""


def _launcher_arguments(cmd: list[str]) -> list[str]:
    """sys.argv of the kernel that this command would start.

    raises CannotFork when it is another interpreter's, or no IPython kernel
    """
    ours = Path(sys.executable), Path(os.path.realpath(sys.executable))
    program = Path(shutil.which(cmd[0]) or cmd[0])
    same = program in ours or program.parent == ours[0].parent
    if not same or cmd[1:2] == [] or LAUNCHER not in cmd[1:4]:
        raise CannotFork(f"{' '.join(cmd[:3])} is no IPython kernel of this Python")
    place = cmd.index(LAUNCHER)
    file = importlib.util.find_spec(LAUNCHER)
    if file is None or file.origin is None:
        raise CannotFork("ipykernel is not installed beside kvlab")
    return [file.origin, *cmd[place + 1 :]]


def copy_files(
    source: Path, target: Path, most: int = 64 * sandbox.MIB, count: int = 2000
) -> None:
    """Copies ordinary files, so that any user can read them; no links, no notebooks.

    most, count  bytes and files that are copied; the rest is left out
    """
    target.mkdir(mode=0o755, exist_ok=True)
    for folder, folders, names in os.walk(source):
        folders[:] = [name for name in folders if not name.startswith(".")]
        place = target / os.path.relpath(folder, source)
        place.mkdir(mode=0o755, exist_ok=True)
        for name in names:
            path = Path(folder, name)
            if path.is_symlink() or not path.is_file() or path.suffix == ".ipynb":
                continue
            size = path.stat().st_size
            if size <= most and count > 0:
                most, count = most - size, count - 1
                shutil.copyfile(path, place / name)
                (place / name).chmod(0o644)


def packages_of(notebook: NotebookNode) -> list[str]:
    """What a notebook imports and may be imported beforehand: "module" or "module:name".

    Give it the lab's own notebook, not a student's: it is imported unconfined.
    """
    found: dict[str, None] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for module in _imports(cell.source):
                if re.split("[.:]", module)[0] in MAY_PRELOAD:
                    found[module] = None
    return [*COURSE, *found] if found else []


@lru_cache(maxsize=1000)  # the same lab's for each of its submissions
def _imports(source: str) -> tuple[str, ...]:
    found: list[str] = []
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return ()
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                whole = name.name == "*"
                found.append(node.module if whole else f"{node.module}:{name.name}")
    return tuple(found)


def make_known() -> None:
    """Lets Jupyter find the provisioner also where kvlab was installed before it had one."""
    factory = KernelProvisionerFactory.instance()
    point = EntryPoint(NAME, f"{__name__}:{PreforkProvisioner.__name__}", GROUP)
    factory.provisioners.setdefault(NAME, point)


def choose(manager: Any, **config: Any) -> None:
    """Has a kernel manager start its kernel with the provisioner, set up like this."""
    make_known()
    manager.kernel_spec.metadata["kernel_provisioner"] = {
        "provisioner_name": NAME,
        "config": config,
    }
