"""The examiner's end of the border: names of the student's code that behave like functions and objects here.

Called by `examiner`, which has it run in the kernel of the test cells. Never runs the student's code,
and never lets an answer be more than data: a tensor is a torch.Tensor, a number a number.
"""

from __future__ import annotations

import builtins
import operator
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvlab.grading import frames
from kvlab.grading.border import Channel, Gone, Late, Message, Mirror, Refused

# Functions and classes of these travel to the student's side by their name.
BY_NAME = ("builtins", "math", "numpy", "operator", "torch", "transformers")
SOURCE = "kvlab"  # of what a reply of this kernel brings along
NOBODY = -1  # the number of no object
FRAMES = 20  # of the student's, in a traceback
NESTED = 32  # calls within calls back within calls ...


class KernelDied(BaseException):
    """The student's process has ended during a call. No test can catch it by mistake."""


class CellTimeoutError(BaseException):
    """A call took too long. nbgrader and nbclient call it by this name."""


class AnswerRefused(Exception):
    """What the student's side sent cannot be taken: too much, or not well formed."""


class Remote:
    """Something that lives in the student's process: a function, a class, an object.

    Equality, truth and order never ask the student's side.
    """

    def __init__(self, asking: Asking, number: int, name: str) -> None:
        """number  the student side's, for this thing"""
        object.__setattr__(self, "_kvlab", (asking, number))
        object.__setattr__(self, "__name__", name)
        object.__setattr__(self, "__qualname__", name)

    def __getattr__(self, name: str) -> Any:
        __tracebackhide__ = True
        if name.startswith("__") and name != "__doc__":
            raise AttributeError(name)
        return _ask(self, "getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        __tracebackhide__ = True
        _ask(self, "setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        __tracebackhide__ = True
        _ask(self, "delattr", self, name)

    def __getitem__(self, key: Any) -> Any:
        __tracebackhide__ = True
        return _ask(self, "getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        __tracebackhide__ = True
        _ask(self, "setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        __tracebackhide__ = True
        _ask(self, "delitem", self, key)

    def __contains__(self, key: Any) -> bool:
        __tracebackhide__ = True
        return _ask(self, "contains", self, key) is True

    def __len__(self) -> int:
        __tracebackhide__ = True
        return operator.index(_ask(self, "len", self))

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        __tracebackhide__ = True
        iterator = _ask(self, "iter", self)
        while item := _ask(self, "next", iterator):
            yield item[0]

    def __enter__(self) -> Any:
        __tracebackhide__ = True
        return _ask(self, "enter", self)

    def __exit__(self, *error: object) -> None:
        __tracebackhide__ = True
        _ask(self, "leave", self)

    def __instancecheck__(self, thing: Any) -> bool:
        __tracebackhide__ = True
        is_theirs = isinstance(thing, Remote)
        return is_theirs and _ask(self, "isinstance", thing, self) is True

    def __repr__(self) -> str:
        __tracebackhide__ = True
        return str(_ask(self, "repr", self))

    def __str__(self) -> str:
        __tracebackhide__ = True
        return str(_ask(self, "str", self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{self.__name__} cannot be copied: it is the student's object")


class RemoteFunction(Remote):
    """A function, a class or another callable object of the student's."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls it there; what it returns or raises comes back as data."""
        __tracebackhide__ = True
        return _ask(self, "call", self, *arguments, **named)


def _ask(remote: Remote, action: str, *arguments: Any, **named: Any) -> Any:
    __tracebackhide__ = True
    asking, _ = object.__getattribute__(remote, "_kvlab")
    return asking.ask(action, arguments, named)


class Asking:
    """The connection to the student's process that is there at the moment."""

    def __init__(self, doorway: socket.socket) -> None:
        """doorway  where the connection to each new student's process comes in"""
        self._doorway = doorway
        self._channel: Channel | None = None
        self._remotes: dict[int, Remote] = {}
        self._nodes: dict[int, Any] = {}
        self._functions: dict[int, Callable[..., Any]] = {}
        self._broken: BaseException | None = None
        self._is_asking = False  # between `begin` and `finish`
        self._depth = 0
        self._end = self._until = float("inf")
        self._mirror = self._new_mirror()

    # --- a test cell ---

    def begin(
        self, names: list[str], namespace: dict[str, Any], limits: dict[str, float]
    ) -> str:
        """Puts the student's names into the namespace, as they are at this moment.

        limits   seconds: of one call, and of all calls until `finish`
        returns  "ready", or what is wrong: "gone", "late", "refused"
        """
        self._take_connection()
        self._broken, self._mirror, self._functions = None, self._new_mirror(), {}
        self._is_asking = True
        self._limits = limits
        self._end = time.monotonic() + limits["cell"]
        for name in names:
            namespace.pop(name, None)
        try:
            found = self.ask("names", tuple(names), {})
            for name, value in zip(names, found, strict=True):
                if value:
                    (namespace[name],) = value
        except (KernelDied, CellTimeoutError, Exception) as error:
            for name in names:  # whoever calls one is told why there is none
                namespace[name] = RemoteFunction(self, NOBODY, name)
            return self._state(error)
        return "ready"

    def finish(self) -> str:
        """Ends the test; returns "ready", or why the connection is of no more use."""
        if self._is_asking and self._broken is None and self._channel is not None:
            try:
                self._channel.send({"do": "end"}, [])
            except Gone as error:
                self._broken = error
        self._is_asking = False
        if self._broken is None and self._channel is not None:
            return "ready"
        return self._state(self._broken)

    @staticmethod
    def _state(error: BaseException | None) -> str:
        if isinstance(error, CellTimeoutError):
            return "late"
        return "gone" if isinstance(error, KernelDied | Gone | None) else "refused"

    def _take_connection(self) -> None:
        """Uses the newest connection that waits in the doorway, if one does."""
        self._doorway.setblocking(False)
        while True:
            try:
                _, files, _, _ = socket.recv_fds(self._doorway, 1, 1)
            except (BlockingIOError, OSError):
                return
            if not files:
                return
            if self._channel is not None:
                self._channel.close()
            self._channel = Channel(socket.socket(fileno=files[0]))
            self._remotes, self._nodes = {}, {}

    # --- asking ---

    def ask(
        self, action: str, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """What the student's side answers.

        raises what the student's code raised, as an exception of the same name;
               KernelDied, CellTimeoutError; AnswerRefused
        """
        __tracebackhide__ = True
        if self._broken is not None:
            raise self._broken
        if self._channel is None:
            raise KernelDied("there is no student's process")
        if self._depth >= NESTED:
            raise RecursionError("calls between test and answer are nested too deeply")
        message: Message = {"do": action}
        if self._depth == 0:
            self._until = min(time.monotonic() + self._limits["call"], self._end)
            if self._mirror.is_stale:
                self._mirror.forget()
                message["forget"] = True
        self._depth += 1
        try:
            return self._exchange(message, arguments, named)
        except Late:
            self._break(CellTimeoutError(self._said_late()))
        except Gone:
            said = "this ended the Python process, by an exit or a crash"
            self._break(KernelDied(said))
        except Refused as error:
            self._break(AnswerRefused(f"the answer cannot be looked at: {error}"))
        except KeyboardInterrupt:  # the test cell's own time is up
            self._break(CellTimeoutError(self._said_late()))
        finally:
            self._depth -= 1

    def frames_of(self, number: Any) -> list[str]:
        """Where in the student's cells that error happened; [] when nobody can tell."""
        try:
            found = self.ask("frames", (number,), {})
        except (KernelDied, CellTimeoutError, Exception):
            return []
        found = found if isinstance(found, tuple) else ()
        return [frame for frame in found if isinstance(frame, str)][:FRAMES]

    def _said_late(self) -> str:
        seconds = min(self._limits["call"], self._limits["cell"])
        return f"It was still running after {seconds:g} seconds."

    def _break(self, error: BaseException) -> None:
        """No further question: an answer to an older one could be taken for its own."""
        __tracebackhide__ = True
        self._broken = error
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        raise error from None

    def _exchange(
        self, message: Message, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        __tracebackhide__ = True
        assert self._channel is not None
        values = {"arguments": arguments, "named": tuple(named.items())}
        self._send(message, values)
        while True:
            answer, buffers = self._channel.receive(self._until)
            kind = answer.get("do")
            if kind == "result":
                return self._mirror.decode(answer, buffers, ["value"])["value"]
            if kind == "error":
                if answer.get("forget") is True:
                    self._mirror.forget()
                self._mirror.decode(answer, buffers, [])
                raise _error_from(answer, self)
            if kind != "back":
                raise Refused("a message of an unknown kind")
            self._call_here(answer, buffers)

    def _send(self, message: Message, values: dict[str, Any]) -> None:
        assert self._channel is not None
        buffers = self._mirror.encode(message, values)
        self._channel.send(message, buffers)

    def _call_here(self, message: Message, buffers: list[bytearray]) -> None:
        """Calls a function that the test has passed as an argument."""
        given = self._mirror.decode(message, buffers, ["arguments", "named"])
        try:
            function = self._functions[message["number"]]
            named = dict(given["named"])
            if not all(isinstance(name, str) for name in named):
                raise Refused("an argument whose name is no text")
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"a malformed message ({error})") from None
        try:
            value = function(*given["arguments"], **named)
        except Exception as error:
            types = [kind.__name__ for kind in type(error).__mro__]
            self._send({"do": "error", "types": types, "said": str(error)}, {})
        else:
            self._send({"do": "result"}, {"value": value})

    # --- what is no data ---

    def _new_mirror(self) -> Mirror:
        return Mirror(self._others, self._resolve, even=True)

    def _others(self, value: Any) -> Any:
        if isinstance(value, Remote):
            _, number = object.__getattribute__(value, "_kvlab")
            if self._remotes.get(number) is not value:
                raise KernelDied("it was lost when the student's process ended")
            return self._nodes[number]  # as it came, so that it is seen not to change
        if place := _importable(value):
            return ["m", *place]
        if callable(value):
            number = id(value)
            self._functions[number] = value
            return ["k", number, getattr(value, "__name__", type(value).__name__)]
        raise TypeError(
            f"a {type(value).__name__} cannot be passed to a student's function: "
            "pass numbers, text, tensors, arrays, lists, dicts or functions"
        )

    def _resolve(self, node: list[Any]) -> Any:
        tag = node[0]
        if tag == "k":
            return self._functions[node[1]]
        if tag != "h":
            raise Refused("a value of an unknown kind")
        _, number, _kind, is_callable, name = node
        if number not in self._remotes:
            if type(number) is not int or len(self._remotes) > 100_000:
                raise Refused("too many objects")
            name = name if isinstance(name, str) and name.isidentifier() else "object"
            kind = RemoteFunction if is_callable is True else Remote
            self._remotes[number] = kind(self, number, name[:100])
            self._nodes[number] = node
        return self._remotes[number]


def _importable(value: Any) -> tuple[str, str] | None:
    """Module and name, when the student's side can import the very same thing."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    if module.split(".")[0] not in BY_NAME or module not in sys.modules:
        return None
    try:
        found = operator.attrgetter(name)(sys.modules[module])
    except AttributeError:
        return None
    return (module, name) if found is value else None


# --- exceptions -----------------------------------------------------------------------

KINDS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}


def _error_from(message: Message, asking: Asking) -> Exception:
    """An exception that is caught like the student's, and says the same.

    It is of a class with the same name, made from the nearest built-in one. It is never
    one that only a test can raise, such as checks.Wrong.
    """
    types, said = message.get("types"), message.get("said")
    if not isinstance(types, list) or not types or not isinstance(said, str):
        raise Refused("a malformed message")
    names = [n for n in types if isinstance(n, str) and n.isidentifier()][:50]
    base: Any = next((KINDS[n] for n in names if n in KINDS), Exception)
    if issubclass(base, StopIteration | StopAsyncIteration):
        base = RuntimeError
    kind: Any = type(
        (names or ["Exception"])[0][:100],
        (base,),
        {
            "__str__": lambda self: said,
            "_render_traceback_": _rendered,
            "kvlab_frames": lambda self: asking.frames_of(message.get("number")),
        },
    )
    error: Exception = kind.__new__(kind)
    error.args = (said,)
    return error


def _rendered(error: Any) -> list[str]:
    """For IPython: the test's frames, then those in the student's cells."""
    lines = frames.rendered(error)
    return [*lines[:-1], *error.kvlab_frames(), *lines[-1:]]


# --- in the examiner's kernel ---------------------------------------------------------

_asking: Asking | None = None


def open_border() -> None:
    """Takes the doorway that this kernel was started with; once."""
    global _asking
    from IPython import get_ipython

    number = int(os.environ.pop("KVLAB_BORDER"))
    _asking = Asking(socket.socket(fileno=number))
    get_ipython().events.register("post_run_cell", _tell)


def begin(
    count: int, names: list[str], namespace: dict[str, Any], limits: dict[str, float]
) -> str:
    """Before a test cell: its number, and the student's names."""
    from IPython import get_ipython

    assert _asking is not None
    get_ipython().execution_count = count
    return _asking.begin(names, namespace, limits)


def finish() -> str:
    """After a test cell; a second time says the same."""
    assert _asking is not None
    return _asking.finish()


def _tell(_result: Any) -> None:
    """IPython's hook after a cell that was not silent: the reply says how it ended."""
    from IPython import get_ipython

    payload = {"source": SOURCE, "state": finish()}
    get_ipython().payload_manager.write_payload(payload, single=False)
