"""A process that does one thing at a time for another process, and may die without harm to it.

Called by `many` on this machine and, through dask, on others: nbgrader changes its process's folder and
environment, so it cannot run in threads. Never keeps anything of a task but what makes the next one fast.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from kvlab.grading import prefork, sandbox

START_SECONDS = 300.0  # to import nbgrader, on a machine that is busy
ATTEMPTS = 2
READY = "ready"


class WorkerDied(Exception):
    """The process ended, or was ended, before it answered; the message says how."""


class WorkerUnusable(Exception):
    """The process cannot start, so no task can be done; the message says why."""


class Worker:
    """One such process, and a folder for its temporary files."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        """Starts it; `call` waits until it is ready.

        modules  what its kernels will import; imported while it starts
        """
        self.scratch = prefork.new_folder("kvlab-worker-")
        self.scratch.chmod(0o711)  # kernels may be other users, with sockets below it
        self._errors = self.scratch / "errors.txt"
        ours, theirs = Pipe()
        self._connection: Connection[Any, Any] = ours
        given = f"{theirs.fileno()}, {list(modules)!r}"
        code = f"from kvlab.grading import worker; worker.serve({given})"
        with theirs, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"TMPDIR": str(self.scratch), "PYTHONPATH": _path()},
                start_new_session=True,  # a Ctrl-C is for the coordinator alone
            )
        self._is_ready = False

    def call(
        self, function: Callable[[Any], Any], argument: Any, seconds: float
    ) -> Any:
        """What the function returns there.

        raises WorkerDied, also when it took longer than `seconds`; WorkerUnusable
        """
        try:
            if not self._is_ready:
                self._wait_until_ready()
            self._connection.send((function, argument))
            if not self._connection.poll(seconds):
                raise WorkerDied(f"it took longer than {seconds:.0f} seconds")
            return self._connection.recv()
        except (EOFError, ConnectionError) as end:
            raise WorkerDied(self._how_it_ended()) from end

    def let_go(self) -> None:
        """Tells it to end when it has nothing to do any more."""
        self._connection.close()

    def close(self) -> None:
        """Ends it and removes its folder."""
        self.let_go()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10 if self._is_ready else 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def kill(self) -> None:
        """Ends it at once, whatever it does."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.close()

    def _wait_until_ready(self) -> None:
        try:
            if not self._connection.poll(START_SECONDS):
                raise WorkerUnusable(
                    f"a grading process did not start within {START_SECONDS:.0f} seconds"
                )
            self._connection.recv()
        except (EOFError, ConnectionError):
            lines = self._errors.read_text(errors="replace").strip().split("\n")
            raise WorkerUnusable(
                f"a grading process cannot start: {lines[-1] or self._how_it_ended()}"
            ) from None
        self._is_ready = True

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        if code < 0:
            return f"it was ended by signal {signal.Signals(-code).name}"
        return f"it ended with exit status {code}"


def serve(number: int, modules: Sequence[str] = ()) -> None:
    """The process's own loop: does what it is told until the other side is gone.

    number   the file descriptor of its end of the pipe
    modules  what its kernels will import
    """
    os.set_inheritable(number, False)  # a student's kernel must not have it
    connection: Connection[Any, Any] = Connection(number)
    if modules:
        with contextlib.suppress(sandbox.SandboxMissing):
            prefork.begin(sandbox.wanted("on"), modules)
    import nbgrader.api

    from kvlab.grading import task  # noqa: F401 (what takes seconds is done first)

    # nbgrader opens its gradebook a dozen times a submission. It has the same address for
    # each of them, so the statements that SQLAlchemy has compiled can be kept.
    nbgrader.api.create_engine = cache(nbgrader.api.create_engine)
    connection.send(READY)
    with open(os.devnull, "wb") as nowhere:  # kernels inherit it and may write a lot
        os.dup2(nowhere.fileno(), 2)
    try:
        while True:
            function, argument = connection.recv()
            connection.send(function(argument))
    except (EOFError, ConnectionError):
        pass  # the coordinator has what it wanted, or was killed


def _path() -> str:
    """Where the other process finds this package: where this one did."""
    here = str(Path(__file__).parents[2])
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))


# --- one for each thread --------------------------------------------------------------

_own = threading.local()
_open: set[Worker] = set()
_lock = threading.Lock()
_no_more = threading.Event()
_modules: tuple[str, ...] = ()


def in_own_process(
    function: Callable[[Any], Any], argument: Any, seconds: float
) -> Any:
    """What the function returns in this thread's worker, which stays for the next call.

    raises WorkerDied when two workers died of it, WorkerUnusable when none starts
    """
    attempt = 1
    while True:
        worker = _worker_of_this_thread()
        try:
            return worker.call(function, argument, seconds)
        except (WorkerDied, WorkerUnusable) as error:
            with _lock:
                _open.discard(worker)
            worker.kill()
            if attempt == ATTEMPTS or isinstance(error, WorkerUnusable):
                raise
            attempt += 1


def _worker_of_this_thread() -> Worker:
    worker: Worker | None = getattr(_own, "worker", None)
    with _lock:
        if _no_more.is_set():
            raise WorkerUnusable("the run is being ended")
        if worker is None or worker not in _open:
            try:
                worker = _own.worker = Worker(_modules)
            except OSError as error:
                raise WorkerUnusable(f"no process can be started: {error}") from None
            _open.add(worker)
    return worker


@contextlib.contextmanager
def workers(modules: Sequence[str] = ()) -> Iterator[None]:
    """Ends all workers of this process afterwards: gently, unless something was raised.

    modules  what the kernels of all of them will import
    """
    global _modules
    _no_more.clear()
    _modules = tuple(modules)
    try:
        yield
    except BaseException:
        close_all(at_once=True)
        raise
    close_all()


@atexit.register
def close_all(at_once: bool = False) -> None:
    """Ends every worker of this process."""
    with _lock:
        _no_more.set()
        open_now = list(_open)
        _open.clear()
    for worker in open_now:
        if at_once:
            worker.kill()
        else:
            worker.let_go()
    for worker in open_now:
        worker.close()
