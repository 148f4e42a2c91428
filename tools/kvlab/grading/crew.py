"""Who grades: processes on this machine, or the workers of a dask scheduler.

Called by `many` and `feedback`, which give it functions and data. Never knows what they are about.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvlab.course import CourseError
from kvlab.grading import worker
from kvlab.grading.worker import WorkerDied, WorkerUnusable
from kvlab.runtime import cpu_cores

CONNECT_SECONDS = 10.0  # that a scheduler may take to answer


@dataclass(frozen=True)
class Crew:
    """Somebody to give work to.

    room     how many pieces of work may be under way, those that wait included
    patience seconds after which a piece of work is given up
    is_there whether somebody is left to do it
    """

    executor: Executor
    room: Callable[[], int]
    patience: float
    is_there: Callable[[], bool] = lambda: True

    def submit(
        self, function: Callable[[Any], Any], argument: Any
    ) -> concurrent.futures.Future[Any]:
        """Has the function called in a process that does nothing else meanwhile."""
        return self.executor.submit(
            worker.in_own_process, function, argument, self.patience
        )


@contextlib.contextmanager
def crew(
    jobs: int, scheduler: str, patience: float, modules: Sequence[str] = ()
) -> Iterator[Crew]:
    """A crew on a scheduler when one is named, else of so many processes here.

    modules  what the kernels will import; processes here begin with it at once
    raises CourseError when there can be none
    """
    if scheduler:
        chosen = _on_dask(scheduler, patience)
    else:
        chosen = _here(jobs, patience, modules)
    with chosen as found:
        yield found


def outcome(future: concurrent.futures.Future[Any]) -> Any:
    """What a piece of work gave.

    raises WorkerDied when it was the end of its process, CourseError when no work can
    be done
    """
    try:
        return future.result()
    except WorkerUnusable as error:
        raise CourseError(str(error)) from None
    except (concurrent.futures.CancelledError, ConnectionError, OSError) as error:
        raise CourseError(
            f"the scheduler is gone ({type(error).__name__}). Start it again and repeat "
            "the command: what was graded is kept."
        ) from None
    except WorkerDied:
        raise
    except Exception as error:
        if type(error).__name__ == "KilledWorker":  # dask's word for the same
            raise WorkerDied("the dask workers that tried it ended") from None
        raise


@contextlib.contextmanager
def _here(jobs: int, patience: float, modules: Sequence[str]) -> Iterator[Crew]:
    cores = cpu_cores()
    jobs = max(1, jobs or cores)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // jobs)))
    executor = ThreadPoolExecutor(jobs)
    try:
        with worker.workers(modules):
            yield Crew(executor, lambda: 2 * jobs, patience)
    finally:
        executor.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _on_dask(scheduler: str, patience: float) -> Iterator[Crew]:
    try:
        from distributed import Client
    except ImportError:
        raise CourseError(
            "SCHEDULER needs dask: pip install --constraint constraints.txt distributed"
        ) from None
    try:
        client = Client(scheduler, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise CourseError(
            f"no dask scheduler answers at {scheduler}: {reason}"
        ) from None
    with client:
        if not client.ncores():
            raise CourseError(f"the dask scheduler {scheduler} has no workers")
        yield Crew(
            client.get_executor(pure=False),
            lambda: 2 * max(1, sum(client.ncores().values())),
            patience,
            lambda: bool(client.ncores()),
        )
