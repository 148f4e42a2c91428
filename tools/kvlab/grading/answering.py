"""The student's end of the border: does what the examiner asks, in the kernel of the student's cells.

Called by `examiner`, which has `serve` run there while a test cell runs elsewhere. Never judges anything;
a student can change all of it, and gains nothing: what it says is only an answer, to be checked.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import operator
import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

from kvlab.grading import frames
from kvlab.grading.border import Channel, Gone, Late, Message, Mirror, Refused

FRAMES, FRAME_LENGTH = 12, 4000  # of a traceback that goes back with an error


class CalledBack:
    """A function of the test, as the student's code gets it: an argument to call."""

    def __init__(self, number: int, name: str, answering: Answering) -> None:
        """number  the examiner's, for this function"""
        self._number, self._answering, self.__name__ = number, answering, name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._answering.call_back(self._number, arguments, named)


class Answering:
    """One connection to the examiner, for as long as this process lives."""

    def __init__(self, channel: Channel, namespace: dict[str, Any]) -> None:
        """namespace  the names of the notebook"""
        self._channel, self._namespace = channel, namespace
        self._kept: dict[int, Any] = {}  # what is no data stays here, under a number
        self._number_of: dict[int, int] = {}
        self._called_back: dict[int, CalledBack] = {}
        self._errors = 0
        self._error: BaseException | None = None  # the last one
        self._mirror = Mirror(self._others, self._resolve, even=False)

    def serve(self) -> None:
        """Answers until the examiner says that the test is over."""
        self._mirror = Mirror(self._others, self._resolve, even=False)
        self._called_back = {}
        with contextlib.suppress(Gone):
            while True:
                message, buffers = self._channel.receive()
                if message["do"] == "end":
                    self._error = None
                    return
                self._answer(message, buffers)

    def call_back(
        self, number: int, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """What a function of the test returns."""
        self._send(
            {"do": "back", "number": number},
            {"arguments": arguments, "named": tuple(named.items())},
        )
        while True:
            message, buffers = self._channel.receive()
            if message["do"] == "result":
                return self._mirror.decode(message, buffers, ["value"])["value"]
            if message["do"] == "error":
                self._mirror.decode(message, buffers, [])
                raise _error_from(message)
            self._answer(message, buffers)

    def _answer(self, message: Message, buffers: list[bytearray]) -> None:
        if message.get("forget"):
            self._mirror.forget()
        try:
            given = self._mirror.decode(message, buffers, ["arguments", "named"])
            action = ACTIONS.get(message["do"]) or getattr(self, f"_do_{message['do']}")
            with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                value = action(*given["arguments"], **dict(given["named"]))
            self._send({"do": "result"}, {"value": value})
        except Gone:
            raise
        except BaseException as error:
            self._errors, self._error = self._errors + 1, error
            answer = _message_of(error) | {"number": self._errors}
            if self._mirror.is_lost:
                self._mirror.forget()
                answer["forget"] = True
            self._send(answer, {})

    def _send(self, message: Message, values: dict[str, Any]) -> None:
        buffers = self._mirror.encode(message, values)
        self._channel.send(message, buffers)

    # --- what is no data ---

    def _others(self, value: Any) -> Any:
        if isinstance(value, CalledBack):
            return ["k", value._number, value.__name__]
        number = self._number_of.get(id(value))
        if number is None:
            number = len(self._kept)
            self._kept[number] = value
            self._number_of[id(value)] = number
        kind = "type" if isinstance(value, type) else "object"
        name = getattr(value, "__name__", type(value).__name__)
        return ["h", number, kind, callable(value), str(name)]

    def _resolve(self, node: list[Any]) -> Any:
        tag, rest = node[0], node[1:]
        if tag == "h":
            return self._kept[rest[0]]
        if tag == "m":
            return operator.attrgetter(rest[1])(importlib.import_module(rest[0]))
        if tag == "k":
            number, name = rest
            if number not in self._called_back:
                self._called_back[number] = CalledBack(number, name, self)
            return self._called_back[number]
        raise Refused(f"a value of an unknown kind: {tag}")

    def _do_names(self, *names: str) -> tuple[Any, ...]:
        """The values of the notebook's names; what is missing is an empty tuple."""
        return tuple(
            (self._namespace[n],) if n in self._namespace else () for n in names
        )

    def _do_frames(self, number: int) -> tuple[str, ...]:
        """Where the last error happened, as far as that lies in the notebook's cells."""
        if number != self._errors or self._error is None:
            return ()
        lines = frames.rendered(self._error)
        own = [line for line in lines if line.startswith("Cell In[")]
        return tuple(line[:FRAME_LENGTH] for line in own[-FRAMES:])


def _call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return function(*arguments, **named)


def _setattr(thing: Any, name: str, value: Any) -> None:
    setattr(thing, name, value)


def _enter(thing: Any) -> Any:
    return type(thing).__enter__(thing)


def _leave(thing: Any) -> bool:
    return bool(type(thing).__exit__(thing, None, None, None))


def _next(iterator: Any) -> tuple[Any, ...]:
    for value in iterator:
        return (value,)
    return ()


ACTIONS: dict[str, Callable[..., Any]] = {
    "call": _call,
    "getattr": lambda thing, name: getattr(thing, name),
    "setattr": _setattr,
    "delattr": delattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "contains": operator.contains,
    "len": len,
    "iter": iter,
    "next": _next,
    "repr": repr,
    "str": str,
    "isinstance": lambda thing, kind: isinstance(thing, kind),
    "enter": _enter,
    "leave": _leave,
}


def _message_of(error: BaseException) -> Message:
    """An exception as data: the names of its classes, and its text."""
    try:
        said = str(error)
    except Exception:
        said = ""
    return {
        "do": "error",
        "types": [kind.__name__ for kind in type(error).__mro__],
        "said": said[:20_000],
    }


def _error_from(message: Message) -> Exception:
    """An exception of the test's side, when it called back and failed there."""
    said, names = str(message["said"]), [str(name) for name in message["types"]]
    kinds = (getattr(builtins, name, None) for name in names)
    base: Any = next(
        (k for k in kinds if isinstance(k, type) and issubclass(k, Exception)),
        Exception,
    )
    kind: Any = type(names[0], (base,), {"__str__": lambda self: said})
    error: Exception = kind.__new__(kind)
    error.args = (said,)
    return error


_answering: Answering | None = None


def open_border(namespace: dict[str, Any]) -> None:
    """Takes the connection that this kernel was started with; once."""
    global _answering
    number = int(os.environ.pop("KVLAB_BORDER"))
    _answering = Answering(Channel(socket.socket(fileno=number)), namespace)


def serve() -> None:
    """Answers the examiner until the test is over."""
    assert _answering is not None
    with contextlib.suppress(Late):
        _answering.serve()


__all__ = ["open_border", "serve"]
