"""Runs a submission in two kernels: the student's cells in one, the test cells in the other, with clean libraries.

Called by nbgrader, for nbgrader_config.py puts `Examine` where its own Execute stood. Never decides about
points, and never runs a line of the student's in the kernel of the tests.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import copy
import json
import os
import re
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from queue import Empty
from typing import Any, Literal

import nbformat
import zmq
import zmq.asyncio
from jupyter_core.utils import run_sync
from nbclient.exceptions import (
    CellExecutionComplete,
    CellTimeoutError,
    DeadKernelError,
)
from nbformat import NotebookNode
from nbgrader.api import Gradebook
from nbgrader.preprocessors import Execute
from nbgrader.utils import compute_checksum, is_locked, is_solution
from traitlets import Bool, Enum, Integer

import kvlab
from kvlab.grading import asking, intake, prefork, released, sandbox
from kvlab.grading.preprocessors import (
    KERNEL_DIED,
    TIMED_OUT,
    Processed,
    Resources,
    error_names,
    is_test,
)
from kvlab.grading.repair import mark_of

End = Literal["ran", "late", "gone"]
MESSAGE_BYTES = 64 * 2**20  # a longer message of a kernel is not even read
TIME_TO_SETTLE = 5.0  # seconds that a kernel has for what takes milliseconds
TIME_TO_ANSWER = 15.0  # before it is given up, also on a machine with much to do
BEGIN = "__import__('kvlab.grading.asking', fromlist=['begin'])"
ANSWER = "__import__('kvlab.grading.answering', fromlist=['serve'])"


class Examine(Execute):
    """nbgrader's Execute, with the student's code in a process of its own."""

    sandbox = Enum(
        ["auto", "on", "off"],
        "auto",
        help="Whether student code runs under bubblewrap. The environment's SANDBOX "
        "overrides it. auto: where bubblewrap works; on: always, or not at all.",
    ).tag(config=True)
    seconds_per_call = Integer(
        20, help="How long one call from a test to the student's code may take."
    ).tag(config=True)
    seconds_in_all = Integer(
        1800, help="How long one submission may take, replays and restarts included."
    ).tag(config=True)
    bytes_per_cell = Integer(
        4 * 2**20, help="How much output of one cell is kept; the rest is cut."
    ).tag(config=True)
    figures = Bool(
        False,
        help="Whether the labs' figures are drawn again. They give no points, and "
        "drawing takes longer than all tests; without it their texts appear.",
    ).tag(config=True)
    text_per_cell = Integer(
        256 * 2**10, help="How much of that may be printed text, in bytes."
    ).tag(config=True)

    def preprocess(
        self, nb: NotebookNode, resources: Resources, km: Any = None
    ) -> Processed:
        """Runs every cell; each one's outputs are those of the kernel it belongs to."""
        run_sync(Examination(self, nb, resources).run)()
        return nb, resources


# --- one kernel -----------------------------------------------------------------------


class Side(Execute):
    """A kernel, and the cells that were run in it."""

    km: Any
    kc: Any

    def __init__(self, examine: Examine, nb: NotebookNode) -> None:
        """nb  a notebook of its own: a kernel's messages cannot reach another's cells"""
        super().__init__(parent=examine)
        self.nb = copy.deepcopy(nb)
        self._most = {"stream": examine.text_per_cell}
        self._most_in_all = examine.bytes_per_cell
        self._figures = "on" if examine.figures else "off"
        self.kernel_name = "python3"
        self._bytes: Counter[str] = Counter()
        self._has_left = self.clear_before_next_output = False
        self.numbered: int | None = None  # what the next cell will be; None: unknown
        self.told: dict[str, Any] = {}  # what the kernel said beside a cell's outputs

    async def open(self, border: socket.socket, **config: Any) -> None:
        """Starts the kernel; `border` is the open socket that it gets."""
        self.resources = {"metadata": {"path": config.pop("cwd")}}
        manager = self.create_kernel_manager()
        manager.context = zmq.asyncio.Context()
        manager.context.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        manager.context.setsockopt(zmq.RECONNECT_IVL, 10)
        prefork.choose(manager, border=border.fileno(), **config)
        try:
            try:
                environment = os.environ | {kvlab.FIGURES: self._figures}
                await self.async_start_new_kernel(env=environment)
            finally:
                border.close()
            self.kc = manager.client()
            self.kc.start_channels()
            self.kc.allow_stdin = False
            await self._wait_until_ready()
        except BaseException:
            await self.close()
            raise

    async def _wait_until_ready(self) -> None:
        """Until the kernel answers on both channels; a first message may be lost."""
        end = asyncio.get_running_loop().time() + self.startup_timeout
        heard = answered = False
        while not (heard and answered):
            if asyncio.get_running_loop().time() > end or not await self._is_alive():
                said = self.km.provisioner.said_at_start() if self.km else ""
                raise DeadKernelError(f"the kernel did not start. {said}".strip())
            self.kc.kernel_info()
            with contextlib.suppress(Empty):
                await self.kc.shell_channel.get_msg(timeout=1)
                answered = True
            with contextlib.suppress(Empty):
                await self.kc.iopub_channel.get_msg(timeout=0.05)
                heard = True

    async def _is_alive(self) -> bool:
        return bool(self.km is not None and await self.km.is_alive())

    async def close(self) -> None:
        """Ends the kernel and all its processes."""
        if self.km is None:
            return
        with contextlib.suppress(Exception):
            # first by itself: the manager looks only ten times a second
            await self.km.provisioner.kill()
            await self.km.provisioner.wait()
            await self.km.shutdown_kernel(now=True)
        if self.kc is not None:
            self.kc.stop_channels()
        context, self.km, self.kc = self.km.context, None, None
        context.destroy(linger=0)

    async def number(self, count: int) -> bool:
        """Numbers the next cell; False when the kernel does not answer."""
        code = f"get_ipython().execution_count = {count}"
        done = await self.quietly(code, seconds=TIME_TO_ANSWER)
        self.numbered = None if done is None else count
        return done is not None

    async def run(self, cell: NotebookNode, index: int) -> End:
        """Runs a cell, with its outputs; says how that ended."""
        self._bytes.clear()
        self._has_left = False
        self.numbered, self.told = None, {}
        try:
            await self.async_execute_cell(cell, index, store_history=True)
        except Exception as end:  # also a message that makes no sense
            _note_end(cell, end, dict(self.error_on_timeout))
            return "gone"
        finally:
            cell["outputs"] = list(map(_presentable, cell.get("outputs", [])))
        if self._has_left:
            _note_end(cell, DeadKernelError("exit() was called"), {})
            return "gone"
        return "late" if TIMED_OUT in error_names(cell) else "ran"

    def on_cell_executed(self, **kwargs: Any) -> None:
        """nbclient's hook: `exit()` in a notebook ends the kernel after the cell."""
        super().on_cell_executed(**kwargs)
        reply = kwargs["execute_reply"]["content"]
        self._has_left = _has_left(reply)
        for part in reply.get("payload", []):
            if part.get("source") == asking.SOURCE:
                self.told = part

    def process_message(self, msg: Any, cell: NotebookNode, cell_index: int) -> Any:
        """nbclient's hook: a message that makes no sense is left out."""
        try:
            return super().process_message(msg, cell, cell_index)
        except CellExecutionComplete:
            raise
        except Exception:
            return None

    async def _async_check_alive(self) -> None:
        """nbclient's own, for a kernel that was given up as well."""
        if self.kc is None:
            raise DeadKernelError("Kernel died")
        await super()._async_check_alive()

    def output(
        self, outs: list[Any], msg: Any, display_id: Any, cell_index: int
    ) -> Any:
        """nbclient's hook: keeps an output while there is room for it."""
        kind, content = msg["msg_type"], msg["content"]
        most = self._most.get(kind, self._most_in_all)
        room = min(most - self._bytes[kind], self._most_in_all - self._bytes.total())
        size = len(json.dumps(content, default=str))
        self._bytes[kind] += size
        if size <= room or kind == "error":  # those are shortened later
            return super().output(outs, msg, display_id, cell_index)
        if room > 0:  # the first that does not fit
            if kind == "stream":
                content["text"] = str(content.get("text", ""))[:room]
                super().output(outs, msg, display_id, cell_index)
            said = f"\n[output cut after {most:,} bytes]\n"
            outs.append(nbformat.v4.new_output("stream", name="stdout", text=said))
        return None

    async def quietly(
        self, code: str, expression: str = "", seconds: float = TIME_TO_SETTLE
    ) -> str | None:
        """Runs code without a trace in the notebook; what the expression then is.

        returns None when the kernel ended or is to end, or did not finish in time
        """
        wanted = {"value": expression} if expression else {}
        message = self.kc.execute(
            code, silent=True, store_history=False, user_expressions=wanted
        )
        content = await self.reply_to(message, seconds)
        if content is None or _has_left(content):
            return None
        value = content.get("user_expressions", {}).get("value", {})
        return str(value.get("data", {}).get("text/plain", ""))

    async def reply_to(self, message: str, seconds: float) -> dict[str, Any] | None:
        """The reply on the shell channel; None when there is none in time."""
        end = asyncio.get_running_loop().time() + seconds
        while True:
            left = end - asyncio.get_running_loop().time()
            if left <= 0 or (left < seconds - 1 and not await self._is_alive()):
                return None
            try:
                found = await self.kc.shell_channel.get_msg(timeout=min(left, 1))
                if found["parent_header"].get("msg_id") == message:
                    return dict(found["content"])
            except Empty:
                continue
            except Exception:  # a message that makes no sense
                return None

    async def outputs_of(self, message: str) -> list[NotebookNode]:
        """What a request prints and displays, until it is done."""
        cell = nbformat.v4.new_code_cell()
        self._bytes.clear()
        while True:
            try:
                found = await self.kc.iopub_channel.get_msg(timeout=None)
            except Exception:  # a message that makes no sense
                return []
            if found["parent_header"].get("msg_id") != message:
                continue
            kind, content = found["msg_type"], found["content"]
            if kind == "status" and content.get("execution_state") == "idle":
                return list(map(_presentable, cell.outputs))
            shown = kind == "stream" and content.get("name") == "stdout"
            if shown or kind in ("display_data", "execute_result"):
                with contextlib.suppress(Exception):
                    self.output(cell.outputs, found, None, 0)


def _has_left(reply: dict[str, Any]) -> bool:
    payload = reply.get("payload", [])
    return any(part.get("source") == "ask_exit" for part in payload)


def _note_end(cell: NotebookNode, end: Exception, late: dict[str, Any]) -> None:
    """Notes on a cell that it was the last of its kernel."""
    error = late
    if not isinstance(end, CellTimeoutError):
        error = {
            "ename": KERNEL_DIED,
            "evalue": "this ended the Python process, by an exit or a crash",
            "traceback": [],
        }
    if not error_names(cell):
        cell.outputs.append(nbformat.v4.new_output("error", **error))


LONGEST_ERROR = 20_000  # characters of an error's text, and of its traceback


def _presentable(output: NotebookNode) -> NotebookNode:
    """The output, when a notebook may hold it; a long error shortened."""
    if output.output_type == "error":
        _shorten_error(output)
    try:
        nbformat.validate(output, ref="output", version=4)
        return output
    except Exception:
        said = "[output left out: it was not well formed]\n"
        return nbformat.v4.new_output("stream", name="stdout", text=said)


def _shorten_error(output: NotebookNode) -> None:
    output["ename"] = str(output.ename)[:200]
    if len(str(output.evalue)) > LONGEST_ERROR:
        output["evalue"] = f"{str(output.evalue)[:LONGEST_ERROR]} [cut]"
    lines, room = [], LONGEST_ERROR
    for line in map(str, output.traceback):
        lines.append(line if len(line) <= room else f"{line[:room]} [cut]")
        room -= len(line)
        if room <= 0:
            break
    output["traceback"] = lines


# --- one submission -------------------------------------------------------------------


@dataclass
class Past:
    """Something that was run in the student's kernel, and is run again in a new one.

    todo       the TODO whose answer it is; None for other cells
    is_demo    whether it is a cell of the lab that only shows something
    is_lethal  whether it ended the kernel of all answers, or had to be stopped there;
               it is not run there again
    is_lethal_alone  the same for the kernel without the other answers
    """

    source: str
    count: int
    todo: int | None = None
    is_demo: bool = False
    is_attempted: bool = False
    is_lethal: bool = False
    is_lethal_alone: bool = False


class Examination:
    """One submission on its way through the two kernels."""

    def __init__(
        self, examine: Examine, nb: NotebookNode, resources: Resources
    ) -> None:
        """nb  the submission, repaired; its outputs are replaced"""
        self.examine, self.nb = examine, nb
        lab = lab_of(nb, resources)
        self._names = asked_for(lab, released_cells(resources))
        self._of_the_lab = {cell.source for cell in lab.cells}
        self._words = set().union(
            *(words_of(c.source) for c in nb.cells if not is_test(c))
        )
        self._asking = those_that_ask(
            self._names, [c.source for c in nb.cells if is_locked(c)]
        )
        self._modules = prefork.packages_of(lab)
        self._folders = folders_of(resources)
        self._confined = sandbox.wanted(examine.sandbox)
        self._scratch = prefork.new_folder("kvlab-grade-")
        self._doorway: socket.socket | None = None
        self._student: Side | None = None
        self._examiner: Side | None = None
        self._alone: tuple[int, Side] | None = None
        self._at_the_door: Side | None = None
        self._waiting: dict[int, socket.socket] = {}
        self._past: list[Past] = []
        self._tested: list[str] = []
        self._count = 0
        self._end = time.monotonic() + examine.seconds_in_all

    async def run(self) -> None:
        """Runs all cells and ends both kernels, whatever happens."""
        try:
            # both come to an end, so that a start which fails leaves no other behind
            for started in await asyncio.gather(
                self._student_side(), self._examiner_side(), return_exceptions=True
            ):
                if isinstance(started, BaseException):
                    raise started
            for index, cell in enumerate(self.nb.cells):
                if cell.cell_type == "code" and cell.source.strip():
                    self._count += 1
                    if time.monotonic() < self._end:
                        await self._run_cell(index, cell)
                    else:
                        self._leave_out(cell)
                elif cell.cell_type == "code":
                    cell["outputs"], cell["execution_count"] = [], None
            own = self.nb.metadata.setdefault("kvlab", NotebookNode())
            own["protection"] = "sandbox" if self._confined else "process"
        finally:
            sides = [self._student, self._examiner, self._alone and self._alone[1]]
            await asyncio.gather(*(side.close() for side in sides if side))
            for each in (self._doorway, *self._waiting.values()):
                if each is not None:
                    each.close()
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _leave_out(self, cell: NotebookNode) -> None:
        seconds = self.examine.seconds_in_all
        said = f"The whole notebook was still running after {seconds} seconds."
        error = nbformat.v4.new_output(
            "error", ename=TIMED_OUT, evalue=said, traceback=[said]
        )
        cell["outputs"], cell["execution_count"] = [error], None

    async def _run_cell(self, index: int, cell: NotebookNode) -> None:
        if is_test(cell):
            await self._run_test(index, cell)
        elif is_locked(cell) and not is_solution(cell):
            await self._run_given(index, cell)
        else:
            await self._run_in_student(index, cell)

    # --- cells of the student ---

    async def _run_in_student(self, index: int, cell: NotebookNode) -> None:
        side = await self._ready_student()
        past = self._as_past(cell)
        self._past.append(past)
        own = copy.deepcopy(cell)
        end = await side.run(own, index)
        cell["outputs"], cell["execution_count"] = own.outputs, self._count
        past.is_lethal = end != "ran"
        if end == "gone":
            await self._lose_student()
        elif end == "ran" and past.is_demo:  # after the student's own it is asked again
            side.numbered = self._count + 1

    def _as_past(self, cell: NotebookNode) -> Past:
        grade_id = mark_of(cell) or ""
        match = released.TODO_OF_CELL.match(grade_id)
        todo = int(match.group(1)) if match and is_solution(cell) else None
        marks = cell.metadata.get("nbgrader", {})
        return Past(
            cell.source,
            self._count,
            todo,
            is_demo=not grade_id and cell.source in self._of_the_lab,
            is_attempted=todo is not None
            and marks.get("checksum") != compute_checksum(cell),
        )

    async def _ready_student(self, *, is_to_run: bool = True) -> Side:
        """The kernel of the student's cells, which answers.

        is_to_run  whether it will run the present cell, and must number it so
        """
        side = await self._student_side()
        known = side.numbered
        if known is not None and (known == self._count or not is_to_run):
            return side
        if await side.number(self._count):
            return side
        await self._lose_student()  # it lives, but it does not answer any more
        side = await self._student_side()
        await side.number(self._count)
        return side

    # --- cells of the lab ---

    async def _run_given(self, index: int, cell: NotebookNode) -> None:
        """A locked cell that gives no points runs on both sides; the examiner's counts."""
        side = await self._ready_student()
        past = Past(cell.source, self._count)
        self._past.append(past)
        past.is_lethal = await side.run(copy.deepcopy(cell), index) != "ran"
        if past.is_lethal:
            await self._lose_student()
        else:
            side.numbered = self._count + 1
        if words_of(cell.source).isdisjoint(self._asking):
            outputs = await self._unasked(index, cell)
        else:
            outputs, _ = await self._examined(index, cell, await self._student_side())
        cell["outputs"], cell["execution_count"] = outputs, self._count
        self._tested.append(cell.source)

    async def _unasked(self, index: int, cell: NotebookNode) -> list[NotebookNode]:
        """The outputs of a cell in the examiner's kernel that asks no student's code."""
        examiner = await self._examiner_side()
        await examiner.number(self._count)
        own = copy.deepcopy(cell)
        if await examiner.run(own, index) == "gone":
            await self._lose_examiner()
        return list(own.outputs)

    async def _run_test(self, index: int, cell: NotebookNode) -> None:
        """A test cell runs in the examiner's kernel.

        When it fails, it is run once more against this TODO's answer alone: another
        answer may have broken the process that they share.
        """
        definitions = definitions_in(released.without_hidden_tests(cell.source))
        if names_bound_in(definitions).isdisjoint(self._words):
            definitions = ""  # no cell of the student's kernel knows of them
        side = await self._ready_student(is_to_run=bool(definitions))
        past = Past(definitions, self._count)
        self._past.append(past)
        await self._again(side, past)
        outputs, state = await self._examined(index, cell, side)
        if state != "ready":
            await self._lose_student()
        todo = self._todo_of(cell)
        if self._may_be_anothers_fault(outputs, todo):
            again, state = await self._examined(
                index, cell, await self._alone_with(todo)
            )
            if state != "ready":
                await self._leave_alone()
            if not _errors(again):
                outputs = again
        cell["outputs"], cell["execution_count"] = outputs, self._count
        self._tested.append(definitions_in(cell.source))

    def _todo_of(self, cell: NotebookNode) -> int | None:
        match = released.TODO_OF_CELL.match(mark_of(cell) or "")
        return int(match.group(1)) if match else None

    def _may_be_anothers_fault(
        self, outputs: list[NotebookNode], todo: int | None
    ) -> bool:
        errors = _errors(outputs)
        others = any(p.is_attempted and p.todo != todo for p in self._past)
        own = any(p.is_attempted and p.todo == todo for p in self._past)
        return bool(errors and others and own) and errors != ["NotImplementedError"]

    async def _examined(
        self, index: int, cell: NotebookNode, side: Side
    ) -> tuple[list[NotebookNode], str]:
        """The outputs of a cell in the examiner's kernel, with a student's side to ask.

        returns the outputs, and "ready" when that side can be asked again
        """
        examiner = await self._examiner_side()
        self._let_in(side)
        side.kc.allow_stdin = False
        serving = side.kc.execute(f"{ANSWER}.serve()", silent=True, store_history=False)
        printed = asyncio.ensure_future(side.outputs_of(serving))
        connection = self._waiting[id(side)]
        watch = asyncio.ensure_future(_hang_up_after(printed, connection))
        limits = {"call": self.examine.seconds_per_call, "cell": self.examine.timeout}
        begin = f"{BEGIN}.begin({self._count}, {self._names!r}, globals(), {limits!r})"
        seconds = self.examine.timeout + TIME_TO_SETTLE
        state = _text(await examiner.quietly("", begin, seconds))
        own = copy.deepcopy(cell)
        ended = await examiner.run(own, index)
        watch.cancel()
        if ended == "gone":
            await self._lose_examiner()
            finished = "gone"
        else:
            finished = examiner.told.get("state") or _text(
                await examiner.quietly("", f"{BEGIN}.finish()")
            )
        if finished == "ready":
            reply = await side.reply_to(serving, TIME_TO_SETTLE)
            if reply is None or _has_left(reply):
                finished = "gone"
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(
                printed, TIME_TO_SETTLE if finished == "ready" else 0.1
            )
        said = printed.result() if printed.done() and not printed.cancelled() else []
        return [*said, *own.outputs], finished if state == "ready" else state

    # --- the kernels ---

    async def _student_side(self) -> Side:
        """The kernel of the student's cells, as it is after all cells so far."""
        while self._student is None:
            side = await self._new_student()
            guilty = await self._first_lethal(
                side, [past for past in self._past if not past.is_lethal]
            )
            if guilty is None:
                self._student = side
            else:
                guilty.is_lethal = True
        return self._student

    async def _alone_with(self, todo: int | None) -> Side:
        """A kernel with the answer to one TODO, and with no other answer."""
        if self._alone is not None and self._alone[0] != todo:
            await self._leave_alone()
        while self._alone is None:
            side = await self._new_student()
            past = [p for p in self._past if p.todo in (None, todo) and not p.is_demo]
            guilty = await self._first_lethal(
                side, [each for each in past if not each.is_lethal_alone]
            )
            if guilty is None:
                self._alone = (todo or 0, side)
            else:
                guilty.is_lethal_alone = True
        else:
            await self._again(self._alone[1], self._past[-1])
        return self._alone[1]

    async def _new_student(self) -> Side:
        ours, theirs = socket.socketpair()
        side = Side(self.examine, self.nb)
        files = self._scratch / "files"
        if not files.exists():
            for folder in self._folders:
                prefork.copy_files(folder, files)
        work = self._scratch / f"work{len(list(self._scratch.iterdir()))}"
        if not self._confined:
            shutil.copytree(files, work)
        try:
            await side.open(
                theirs,
                cwd=str(work if not self._confined else self._scratch),
                confined=self._confined,
                files=str(files),
                modules=self._modules,
            )
        except BaseException:
            ours.close()
            raise
        self._waiting[id(side)] = ours
        await side.quietly(f"{ANSWER}.open_border(globals())", seconds=60)
        return side

    async def _examiner_side(self) -> Side:
        """The kernel of the test cells, with what the cells so far have defined."""
        if self._examiner is None:
            self._doorway, theirs = socket.socketpair()
            side = Side(self.examine, self.nb)
            empty = self._scratch / "examiner"
            empty.mkdir(exist_ok=True)
            await side.open(
                theirs,
                cwd=str(empty),
                confined=self._confined,
                modules=self._modules,
                open_to_view=False,
            )
            await side.quietly(f"{BEGIN}.open_border()", seconds=60)
            for source in self._tested:
                await side.quietly(source, seconds=self.examine.timeout)
            info = self.nb.metadata.get("language_info", {"name": "python"})
            self.nb.metadata["language_info"] = info
            self._examiner, self._at_the_door = side, None
        return self._examiner

    def _let_in(self, side: Side) -> None:
        """Hands the examiner the connection to this student's kernel."""
        if self._at_the_door is side:
            return
        assert self._doorway is not None
        connection = self._waiting[id(side)].fileno()
        socket.send_fds(self._doorway, [b"1"], [connection])
        self._at_the_door = side

    async def _first_lethal(self, side: Side, past: Iterable[Past]) -> Past | None:
        """Runs earlier cells again; the one that ended the kernel, or None."""
        last = None
        for each in past:
            if not await self._again(side, each):
                await self._close_student(side)
                return each
            last = each if each.source else last
        if last is not None and not await side.number(self._count):
            await self._close_student(side)
            return last  # it left a kernel that does not answer
        return None

    async def _again(self, side: Side, past: Past) -> bool:
        if not past.source:
            return True
        if not await side.number(past.count):
            return False
        done = await side.quietly(past.source, seconds=self.examine.timeout)
        return done is not None

    async def _lose_student(self) -> None:
        if self._student is not None:
            await self._close_student(self._student)
            self._student = None

    async def _leave_alone(self) -> None:
        if self._alone is not None:
            await self._close_student(self._alone[1])
            self._alone = None

    async def _close_student(self, side: Side) -> None:
        self._waiting.pop(id(side)).close()
        if self._at_the_door is side:
            self._at_the_door = None
        await side.close()

    async def _lose_examiner(self) -> None:
        if self._examiner is not None:
            await self._examiner.close()
            self._examiner = None
            assert self._doorway is not None
            self._doorway.close()


async def _hang_up_after(served: asyncio.Future[Any], line: socket.socket) -> None:
    """A student's side that stops to answer during a test does not let it wait.

    It also stops when the test is over; then this is called off before it hangs up.
    """
    await asyncio.wait([served])
    await asyncio.sleep(TIME_TO_SETTLE)
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)


def _text(value: str | None) -> str:
    """A kernel's text without its quotes."""
    return value.strip("'\"") if value else "gone"


def _errors(outputs: Iterable[NotebookNode]) -> list[str]:
    return [output.ename for output in outputs if output.output_type == "error"]


# --- what the lab says ----------------------------------------------------------------


def lab_of(notebook: NotebookNode, resources: Resources) -> NotebookNode:
    """The lab's own notebook; without one, the locked cells of what was handed in."""
    course = resources.get("nbgrader", {})
    lab, name = course.get("assignment", ""), course.get("notebook", "")
    solution = intake.lab_notebook(lab, name)
    if solution.is_file():
        return nbformat.read(solution, as_version=4)
    locked = [cell for cell in notebook.cells if is_locked(cell)]
    return nbformat.v4.new_notebook(cells=locked)


def folders_of(resources: Resources) -> list[Path]:
    """Where the submission's own files are; what comes later counts.

    nbgrader copies them beside the graded notebook, but for the kinds that the course
    has it ignore, such as *.py.
    """
    course = resources.get("nbgrader", {})
    handed_in = Path(
        "submitted", course.get("student", ""), course.get("assignment", "")
    )
    beside = resources.get("metadata", {}).get("path")
    found = [handed_in] if course.get("student") and handed_in.is_dir() else []
    return [path.resolve() for path in (*found, *([Path(beside)] if beside else []))]


def released_cells(resources: Resources) -> list[released.ReleasedCell]:
    """The lab's marked cells as the gradebook has them; none without a gradebook."""
    course = resources.get("nbgrader", {})
    if "db_url" not in course:
        return []
    with Gradebook(course["db_url"]) as gradebook:
        return released.in_gradebook(
            gradebook, course["assignment"], course["notebook"]
        )


def asked_for(
    lab: NotebookNode, cells: Iterable[released.ReleasedCell] = ()
) -> list[str]:
    """The names that a student is to define, and that no locked cell defines."""
    given: set[str] = set()
    wanted: set[str] = set()
    for cell in lab.cells:
        if cell.cell_type == "code":
            names = names_bound_in(cell.source)
            if cell.metadata.get("todo"):
                wanted |= names
            elif is_locked(cell):
                given |= names
    for released_cell in cells:
        if released_cell.cell_type == "code" and released_cell.solution:
            wanted |= released_cell.names
    return sorted(wanted - given)


def those_that_ask(names: Iterable[str], sources: Iterable[str]) -> set[str]:
    """The student's names, and those of the lab's that lead to one of them.

    sources  the lab's own cells, in order
    """
    found = set(names)
    for source in sources:
        if not words_of(source).isdisjoint(found):
            found |= _globals_in(source)
    return found


@lru_cache(maxsize=1000)
def _globals_in(source: str) -> frozenset[str]:
    try:
        return frozenset(_globals_of(ast.parse(source)))
    except (SyntaxError, ValueError):
        return frozenset()


def _globals_of(node: ast.AST) -> Iterator[str]:
    """The names that a cell binds, also within its if, for and with."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.FunctionDef | ast.ClassDef):
            yield part.name
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id
        elif not isinstance(part, ast.Lambda | ast.ListComp | ast.GeneratorExp):
            yield from _globals_of(part)


def words_of(source: str) -> set[str]:
    """Everything in a text that may be a name."""
    return set(re.findall(r"[^\W\d]\w*", source))


@lru_cache(maxsize=1000)  # the same lab's for each of its submissions
def names_bound_in(source: str) -> frozenset[str]:
    """Functions, classes and variables that a cell defines at its top level."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return frozenset()
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                part.id
                for target in targets
                for part in ast.walk(target)
                if isinstance(part, ast.Name)
            }
    return frozenset(names)


@lru_cache(maxsize=1000)
def definitions_in(source: str) -> str:
    """The functions, classes and imports at the top level of a cell, and nothing else."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return ""
    kinds = (
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.Import,
        ast.ImportFrom,
    )
    lines = source.split("\n")
    parts = []
    for node in body:
        if isinstance(node, kinds):
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(d.lineno for d in decorators)])
            parts.append("\n".join(lines[first - 1 : node.end_lineno]))
    return "\n\n\n".join(parts)
