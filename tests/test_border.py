"""What crosses between test and answer: values come back as in one process, and nothing else gets through."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from kvlab.grading import asking, border
from kvlab.grading.answering import Answering
from kvlab.grading.asking import AnswerRefused, Asking, CellTimeoutError, KernelDied
from kvlab.grading.border import Channel

SECONDS = {"call": 30.0, "cell": 60.0}
Pair = namedtuple("Pair", "codes scale")


class Cache:
    """A student's class with state."""

    def __init__(self, size: int) -> None:
        self.size, self.items = size, []

    def add(self, item: Any) -> int:
        self.items.append(item)
        return len(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        return self.items[place]

    def __eq__(self, other: object) -> bool:
        return True


class Border:
    """Both ends in one process; the student's side answers in a thread."""

    def __init__(self, **names: Any) -> None:
        ours, theirs = socket.socketpair()
        doorway, door = socket.socketpair()
        self.theirs = theirs
        self.answering = Answering(Channel(theirs), names)
        self.thread = threading.Thread(target=self.answering.serve, daemon=True)
        self.thread.start()
        self.asking = Asking(door)
        socket.send_fds(doorway, [b"1"], [ours.fileno()])
        ours.close()
        self.names: dict[str, Any] = {}
        self.state = self.asking.begin(list(names), self.names, SECONDS)
        doorway.close()

    def close(self) -> None:
        """Ends the student's side."""
        self.asking.finish()
        self.theirs.close()
        self.thread.join(5)


@pytest.fixture
def same() -> Iterator[Any]:
    """A student's function that returns its argument."""
    link = Border(same=lambda value: value)
    yield link.names["same"]
    link.close()


def call(function: Any, *arguments: Any, **named: Any) -> Any:
    """The call across a border of its own."""
    link = Border(f=function)
    try:
        return link.names["f"](*arguments, **named)
    finally:
        link.close()


VALUES = [
    *(None, True, False, 0, -1, 2**62, 2**63, -(10**400), 0.5, -0.0, math.inf, 1e-320),
    *(
        "",
        "text",
        "\udcff",
        "é𝄞",
        b"",
        b"\x00\xff",
        1j,
        Fraction(1, 3),
        Decimal("0.10"),
    ),
    *([], [1, [2, []]], (), (1, (2,)), {}, {"a": 1, 2: "b", (1, "x"): None, None: 0}),
    *({1, 2}, frozenset({3}), range(2, 9, 3), slice(1, None), Ellipsis),
    *(torch.float16, torch.device("cpu"), torch.Size([2, 0]), np.float32(0.1)),
    *(np.int64(7), np.bool_(True)),
]


@pytest.mark.parametrize(
    "value", VALUES, ids=lambda v: f"{type(v).__name__} {str(v)[:12]}"
)
def test_a_value_comes_back_as_it_was(value: Any, same: Any) -> None:
    got = same(value)
    assert type(got) is type(value)
    assert got == value and repr(got) == repr(value)


def test_nan_stays_nan(same: Any) -> None:
    assert math.isnan(same(math.nan))


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float8_e4m3fn, torch.uint16),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_come_back_bit_by_bit(
    dtype: torch.dtype, same: Any
) -> None:
    raw = torch.arange(2 * 3 * 16, dtype=torch.uint8)
    raw = raw % 2 if dtype is torch.bool else raw
    whole = raw.view(dtype).reshape(2, -1)
    for given in (
        whole,
        whole[:, 1:],
        whole.t(),
        whole[0, 0],
        whole[:0],
        whole[:, ::2],
    ):
        got = same(given)
        assert type(got) is torch.Tensor
        assert (got.dtype, got.shape, got.stride()) == (
            dtype,
            given.shape,
            given.stride(),
        )
        assert got.tolist() == given.tolist() or got.dtype.is_floating_point
        both = [t.contiguous().flatten().view(torch.uint8) for t in (got, given)]
        assert torch.equal(*both)


def test_the_memory_layout_is_what_the_student_sees() -> None:
    def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.stride(), tensor.is_contiguous(), tensor.storage_offset()

    for given in (
        torch.zeros(2, 3, 4).transpose(0, 2),
        torch.zeros(3, 1).expand(3, 5),
        torch.zeros(4, 6)[1:3, 2:],
    ):
        assert call(layout, given) == layout(given)


def test_arrays_come_back_and_share_memory_with_tensors() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)

    def change(tensor: torch.Tensor) -> np.ndarray:
        view = tensor.numpy()[1:, ::2]
        view += 100
        return view

    got = call(change, torch.from_numpy(array))
    assert type(got) is np.ndarray and got.dtype == np.float32
    assert array[1, 0] == 104 and got[0, 0] == 104
    got[0, 0] = -1
    assert array[1, 0] == -1


def test_subclasses_come_back_as_plain_values(same: Any) -> None:
    class Agreeable(torch.Tensor):
        def __eq__(self, other: object) -> bool:  # type: ignore[override]
            return True

    class Seven(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    def returns(kind: str) -> Any:
        return {
            "tensor": torch.ones(2).as_subclass(Agreeable),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "int": Seven(7),
            "tuple": Pair(1, 2),
            "dict": OrderedDict(a=1),
        }[kind]

    link = Border(f=returns)
    f = link.names["f"]
    for kind, plain in {
        "tensor": torch.Tensor,
        "parameter": torch.Tensor,
        "int": int,
        "tuple": tuple,
        "dict": dict,
    }.items():
        assert type(f(kind)) is plain
    assert f("int") != 8
    assert f("parameter").requires_grad
    link.close()


# --- memory and identity ---------------------------------------------------------------


def test_a_changed_argument_is_seen_by_the_caller() -> None:
    def spoil(state: dict[str, Any], key: torch.Tensor, seen: set[int]) -> None:
        state["list"].append(1)
        state["new"] = key[0]
        del state["old"]
        key.mul_(2)
        seen.add(3)

    key, seen = torch.ones(2, 2), {1}
    state: dict[str, Any] = {"list": [], "old": 0}
    held = state["list"]
    call(spoil, state, key, seen)
    assert list(state) == ["list", "new"] and state["list"] is held == [1]
    assert key.sum() == 8 and seen == {1, 3}
    assert state["new"].data_ptr() == key.data_ptr()


def test_a_view_of_the_callers_memory_stays_one() -> None:
    link = Border(view=lambda key: key[:, 1:], copy=lambda key: key[:, 1:].clone())
    key = torch.zeros(2, 3)
    view, copy = link.names["view"](key), link.names["copy"](key)
    key.fill_(9)
    assert view.sum() == 36 and copy.sum() == 0
    link.close()


def test_an_answer_that_is_overwritten_by_the_next_call_is_seen_to_change() -> None:
    memory, log = torch.zeros(2), []

    def overwrite(value: float) -> tuple[torch.Tensor, list[float]]:
        log.append(value)
        return memory.fill_(value), log

    link = Border(f=overwrite)
    first, said = link.names["f"](1.0)
    assert first.tolist() == [1, 1] and said == [1.0]
    second, _ = link.names["f"](2.0)
    assert first.tolist() == second.tolist() == [2, 2] and said == [1.0, 2.0]
    link.close()


def test_the_caller_may_write_into_what_the_student_keeps() -> None:
    kept: list[torch.Tensor] = []
    link = Border(keep=kept.append, total=lambda: float(kept[0].sum()))
    key = torch.zeros(3)
    link.names["keep"](key)
    key += 1
    assert link.names["total"]() == 3
    link.close()


def test_one_object_given_twice_is_one_object_there(same: Any) -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    got = same((shared, {"again": shared}))
    assert got[0] is shared and got[1]["again"] is shared
    assert call(lambda a, b: a is b, shared, shared) is True


def test_much_shared_memory_is_forgotten_on_both_sides(same: Any) -> None:
    for number in range(border.MANY + 200):
        assert same([number]) == [number]
    asking_, _ = object.__getattribute__(same, "_kvlab")
    assert len(asking_._mirror._held) < border.MANY + 200


# --- functions and objects -------------------------------------------------------------


def test_functions_of_the_test_are_called_back_also_nested() -> None:
    log: list[int] = []

    def student(depth: int, report: Any, again: Any) -> int:
        report(depth)
        return depth if depth == 0 else again(depth - 1) + 1

    link = Border(f=student)
    f = link.names["f"]

    def again(depth: int) -> int:
        return f(depth, log.append, again)

    assert again(5) == 5 and log == [5, 4, 3, 2, 1, 0]
    link.close()


def test_an_error_in_a_function_of_the_test_reaches_the_answer_and_comes_back() -> None:
    def refuse(value: int) -> None:
        raise ValueError(f"not {value}")

    def catches(function: Any) -> str:
        try:
            function(3)
        except ValueError as error:
            return f"caught {error}"
        return "nothing"

    assert call(catches, refuse) == "caught not 3"
    with pytest.raises(ValueError, match="not 4"):
        call(lambda function: function(4), refuse)

    def misses(value: int) -> int:
        return {}[value]

    with pytest.raises(KeyError) as caught:
        call(lambda function: function(5), misses)
    assert str(caught.value) == "5"  # as in one process, however often it crosses


def test_a_function_that_comes_back_is_the_same_function(same: Any) -> None:
    def own() -> None:
        """Anything."""

    assert same(own) is own
    relu = torch.nn.functional.relu
    assert call(lambda function: function is relu, relu) is True


def test_a_class_and_its_objects_can_be_used_from_here() -> None:
    link = Border(Cache=Cache)
    kind = link.names["Cache"]
    cache = kind(4)
    assert (cache.size, cache.items, len(cache)) == (4, [], 0)
    assert cache.add(torch.ones(2)) == 1 and torch.equal(cache[0], torch.ones(2))
    cache.size = 7
    assert cache.size == 7 and isinstance(cache, kind) and not isinstance(4, kind)
    assert [t.sum().item() for t in cache] == [2]
    assert cache.items[0].tolist() == [1, 1]
    with pytest.raises(IndexError):
        cache[5]
    with pytest.raises(AttributeError):
        _ = cache.nothing
    link.close()


def test_an_object_is_equal_to_itself_only_whatever_it_says() -> None:
    link = Border(cache=Cache(1), same=lambda value: value)
    cache = link.names["cache"]
    assert cache != 4 and cache is not None and cache != torch.ones(1)
    assert link.names["same"](cache) is cache
    link.close()


def test_names_that_are_not_defined_are_not_there() -> None:
    ours, theirs = socket.socketpair()
    doorway, door = socket.socketpair()
    answering = Answering(Channel(theirs), {"here": [1]})
    threading.Thread(target=answering.serve, daemon=True).start()
    socket.send_fds(doorway, [b"1"], [ours.fileno()])
    asking_, names = Asking(door), {"gone": "an older value"}
    assert asking_.begin(["here", "gone"], names, SECONDS) == "ready"
    assert names == {"here": [1]}
    assert asking_.finish() == "ready"


# --- errors -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [ValueError, KeyError, NotImplementedError, ZeroDivisionError, UnicodeDecodeError],
)
def test_an_error_is_caught_like_the_students_own(kind: type[Exception]) -> None:
    def fails() -> None:
        class Own(kind):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                pass

            def __str__(self) -> str:
                return "what is wrong"

        raise Own

    with pytest.raises(kind) as caught:
        call(fails)
    assert type(caught.value).__name__ == "Own" and str(caught.value) == "what is wrong"


@pytest.mark.parametrize(
    "kind", [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration]
)
def test_no_error_of_the_student_ends_the_test(kind: type[BaseException]) -> None:
    def fails() -> None:
        raise kind("out")

    with pytest.raises(Exception, match="out") as caught:
        call(fails)
    assert not isinstance(caught.value, (SystemExit, KeyboardInterrupt, StopIteration))


def test_what_cannot_be_passed_is_said_to_the_one_who_wrote_the_test(same: Any) -> None:
    with pytest.raises(TypeError, match="a lock cannot be passed"):
        same(threading.Lock())
    assert same(1) == 1  # and the border goes on


# --- a side that does not keep to the rules ----------------------------------------------


def test_an_answer_that_takes_too_long_is_a_timeout_and_so_is_all_after_it() -> None:
    link = Border(f=lambda: time.sleep(0.5))
    link.asking._limits = {"call": 0.05, "cell": 9.0}
    for _ in range(2):
        with pytest.raises(CellTimeoutError, match=r"after 0\.05 seconds"):
            link.names["f"]()
    assert link.asking.finish() == "late"


def test_a_side_that_is_gone_is_said_to_be() -> None:
    link = Border(f=lambda: link.theirs.shutdown(socket.SHUT_RDWR))
    with pytest.raises(KernelDied, match="ended the Python process"):
        link.names["f"]()
    assert link.asking.finish() == "gone"


@pytest.mark.parametrize(
    "make",
    [
        lambda: [0] * 300_000,
        lambda: torch.zeros(2**25),
        lambda: torch.zeros(1).expand(2**27),
        lambda: "x" * 5_000_000,
        lambda: 10**100_000,
    ],
    ids=["values", "tensor", "expanded tensor", "text", "digits"],
)
def test_an_answer_that_is_too_large_is_refused(make: Any) -> None:
    with pytest.raises(Exception, match=r"values|bytes|digits|looked at"):
        call(make)


RESULT: dict[str, Any] = {"do": "result", "value": None, "held": [], "memory": []}
MEMORY = [1, b"\x00" * 8]  # number and content
NONSENSE: dict[str, dict[str, Any]] = {
    "an unknown tag": {"value": ["pickle", "x"]},
    "a node without a tag": {"value": []},
    "a tag that is no text": {"value": [[], 1]},
    "an object as a node": {"value": {"a": 1}},
    "a container nobody sent": {"value": ["o", 77]},
    "a function by its name": {"value": ["m", "os", "system"]},
    "a function nobody passed": {"value": ["k", 5, "f"]},
    "an even number": {"held": [[2, "list", []]], "value": 0},
    "a kind of container": {"held": [[1, "object", []]], "value": 0},
    "a key that changes": {"held": [[1, "list", []], [3, "set", [["o", 1]]]]},
    "a negative size": {"value": ["z", 1, "float32", 0, [-1], [1], False]},
    "a tensor outside": {"value": ["z", 1, "float32", 0, [3], [1], False]},
    "a tensor before": {"value": ["z", 1, "float32", -4, [1], [1], False]},
    "a negative step": {"value": ["z", 1, "float32", 4, [2], [-2], False]},
    "an endless tensor": {"value": ["z", 1, "float32", 0, [2**40], [0], False]},
    "an endless empty one": {
        "value": ["z", 1, "int8", 0, [0, 2**62], [2**62, 1], False]
    },
    "a step that is no number": {"value": ["z", 1, "int8", 0, [1], ["1"], False]},
    "between two places": {"value": ["z", 1, "float32", 1, [1], [1], False]},
    "an unknown dtype": {"value": ["z", 1, "load", 0, [1], [1], False]},
    "a quantized dtype": {"value": ["z", 1, "qint8", 0, [1], [1], False]},
    "memory nobody sent": {"value": ["z", 9, "int8", 0, [1], [1], False]},
    "an array of objects": {"value": ["n", 1, "O", 0, [1], [8]]},
    "an array of records": {"value": ["n", 1, "i4,i4", 0, [1], [8]]},
    "an array outside": {"value": ["n", 1, "<i4", 0, [2, 2], [4, 8]]},
    "a scalar of objects": {"value": ["s", "O", "00" * 8]},
    "digits that are none": {"value": ["i", "0xg"]},
    "division by zero": {"value": ["q", 1, 0]},
    "a frozenset of lists": {"held": [[1, "list", []]], "value": ["fz", ["o", 1]]},
    "nothing of it": {"do": "hello"},
    "an error without a text": {"do": "error", "types": [], "said": None},
    "a call back to nowhere": {
        "do": "back",
        "number": 3,
        "arguments": ["t"],
        "named": ["t"],
    },
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_message_that_breaks_the_rules_is_refused(name: str) -> None:
    message = RESULT | {"memory": [1]} | NONSENSE[name]
    link = Border(f=lambda: None)
    link.answering._send = (  # type: ignore[method-assign]
        lambda *_: link.answering._channel.send(message, [memoryview(MEMORY[1])])
    )
    with pytest.raises(AnswerRefused):
        link.names["f"]()
    with pytest.raises(AnswerRefused):  # and nothing that comes later counts
        link.names["f"]()
    assert link.asking.finish() == "refused"


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff" * 64,
        border.HEAD.pack(2**31, 0),
        border.HEAD.pack(2, 2**31),
        border.HEAD.pack(2, 1) + border.LENGTH.pack(2**62) + b"{}",
        border.HEAD.pack(2, 0) + b"[]",
        border.HEAD.pack(5, 0) + b"\xff\xfe\x00{}",
        border.HEAD.pack(100_000, 0) + b"[" * 100_000,
    ],
)
def test_bytes_that_are_no_message_are_refused(raw: bytes) -> None:
    link = Border(f=lambda: None)
    link.answering._send = lambda *_: link.theirs.sendall(raw)  # type: ignore[method-assign]
    with pytest.raises(AnswerRefused):
        link.names["f"]()


def test_a_truth_value_that_is_neither_is_refused() -> None:
    message = RESULT | {
        "memory": [1],
        "value": ["z", 1, "bool", 0, [8], [1], False],
    }
    link = Border(f=lambda: None)
    link.answering._send = (  # type: ignore[method-assign]
        lambda *_: link.answering._channel.send(message, [memoryview(b"\x02" * 8)])
    )
    with pytest.raises(AnswerRefused, match="neither 0 nor 1"):
        link.names["f"]()


def test_the_students_side_cannot_name_what_the_test_should_import() -> None:
    def tags(node: Any) -> set[str]:
        return (
            {node[0]} | set().union(*map(tags, node[1:]))
            if isinstance(node, list)
            else set()
        )

    link = Border(f=lambda value: value)
    sent: list[dict[str, Any]] = []
    original = link.answering._channel.send

    def note(message: dict[str, Any], buffers: list[memoryview]) -> None:
        sent.append(json.loads(json.dumps(message)))
        original(message, buffers)

    link.answering._channel.send = note  # type: ignore[method-assign]
    link.names["f"]((torch.round, open, Cache, lambda: 0))
    assert set().union(*(tags(m.get("value")) for m in sent)) <= {"t", "h", "k"}
    assert not hasattr(asking, "importlib")
