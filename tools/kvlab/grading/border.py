"""What travels between the examiner's process and the student's: plain data, and never code.

Called by `examiner`, which has one end run in each kernel. Never unpickles, never evaluates, and imports
nothing that the student's side names.
"""

from __future__ import annotations

import bisect
import json
import math
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

Node = Any  # a piece of a message: a JSON scalar, or a list that begins with a tag
Message = dict[str, Any]

MANY = 1500  # shared things; looking for changes in them takes about a millisecond
NOWHERE = -1  # the memory of a tensor without elements
SMALL = 2**63  # larger integers travel as text
DIGITS = 16_384  # of the largest integer, in hexadecimal
WHOLE = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Limits:
    """How much one message may hold.

    text    bytes of its JSON part
    bytes   of all tensors and arrays in it, and of one of them when it is spread out
    nodes   values, counted one by one
    depth   of lists within lists
    """

    text: int = 4 * 2**20
    bytes: int = 64 * 2**20
    nodes: int = 200_000
    depth: int = 64


class Refused(Exception):
    """A message breaks a limit or is not well formed; the message says how."""


class Gone(Exception):
    """The other side has closed the connection."""


class Late(Exception):
    """The other side did not answer in time."""


# --- messages on a socket -------------------------------------------------------------
#
# [length of the JSON part][number of buffers][length of each buffer] JSON buffers

HEAD = struct.Struct(">II")
LENGTH = struct.Struct(">Q")


class Channel:
    """Sends and receives messages on a connected socket."""

    def __init__(self, sock: socket.socket, limits: Limits | None = None) -> None:
        """Takes over the socket."""
        self._sock, self.limits = sock, limits or Limits()

    def send(self, message: Message, buffers: list[memoryview]) -> None:
        """Sends one message; raises Refused when it is too large, Gone."""
        text = json.dumps(message).encode()
        self._check(len(text), [len(b) for b in buffers])
        head = HEAD.pack(len(text), len(buffers))
        lengths = b"".join(LENGTH.pack(len(b)) for b in buffers)
        try:
            self._sock.settimeout(None)
            self._sock.sendall(head + lengths + text)
            for buffer in buffers:
                self._sock.sendall(buffer)
        except OSError as error:
            raise Gone(str(error)) from None

    def receive(self, until: float | None = None) -> tuple[Message, list[bytearray]]:
        """The next message.

        until  time.monotonic() at which waiting ends
        raises Refused, Gone, Late
        """
        size, count = HEAD.unpack(self._take(HEAD.size, until))
        if count > self.limits.nodes:
            raise Refused(f"a message of {count:,} buffers")
        lengths = [
            LENGTH.unpack(self._take(LENGTH.size, until))[0] for _ in range(count)
        ]
        self._check(size, lengths)
        text = self._take(size, until)
        buffers = [self._take(length, until) for length in lengths]
        try:
            message = json.loads(text.decode())
        except (ValueError, RecursionError) as error:
            raise Refused(f"a message that is no JSON ({error})") from None
        if not isinstance(message, dict):
            raise Refused("a message that is no JSON object")
        return message, buffers

    def close(self) -> None:
        """Ends the connection."""
        self._sock.close()

    def _take(self, size: int, until: float | None) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                if until is not None:
                    left = until - time.monotonic()
                    if left <= 0:
                        raise Late("no answer in time")
                    self._sock.settimeout(left)
                else:
                    self._sock.settimeout(None)
                got = self._sock.recv_into(view)
            except TimeoutError:
                raise Late("no answer in time") from None
            except OSError as error:
                raise Gone(str(error)) from None
            if not got:
                raise Gone("the other side has closed the connection")
            view = view[got:]
        return data

    def _check(self, text: int, buffers: list[int]) -> None:
        if text > self.limits.text:
            raise Refused(f"a message of {text:,} bytes")
        if sum(buffers) > self.limits.bytes:
            raise Refused(f"tensors of {sum(buffers):,} bytes")


# --- the memory that both sides share by copy -------------------------------------------
#
# A list, dict, set or stretch of memory that has crossed the border exists on both sides
# under one number. Each message brings along what has changed since the last one, so both
# sides see what they would see in one process: an argument that was changed, a view of the
# caller's memory, a list that grew after it was returned.

Containers = (list, dict, set)


@dataclass
class Memory:
    """A stretch of bytes; tensors and arrays are views of it.

    keeper  what owns the bytes
    synced  what the other side has
    """

    view: memoryview
    keeper: Any
    synced: bytes = b""


def _address(view: memoryview) -> int:
    import numpy

    return int(numpy.frombuffer(view, numpy.uint8).ctypes.data)


@dataclass
class Held:
    """A container that both sides hold.

    synced  its content as the other side has it
    parts   the very objects that it then held, and so holds on to
    places  their identities; compared at every message, so by numbers
    """

    number: int
    container: Any
    synced: Node = None
    parts: list[Any] = field(default_factory=list)
    places: list[int] | None = None

    def has_changed(self) -> bool:
        """Whether it holds other objects, or in other places, than when last asked."""
        held = self.container
        parts = [*held, *held.values()] if isinstance(held, dict) else list(held)
        places = [*map(id, parts)]
        if places == self.places:
            return False
        self.parts, self.places = parts, places
        return True


@dataclass
class Mirror:
    """Turns values into nodes and back.

    others   gives the node of a value that is no data
    resolve  gives the value of such a node; None when there is none
    even     this side's numbers for what it shares are even, the other side's odd
    """

    others: Callable[[Any], Node]
    resolve: Callable[[list[Any]], Any]
    even: bool
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Nothing is shared yet."""
        self.forget()
        self._next = 0 if self.even else 1

    def forget(self) -> None:
        """From now on, what crossed before is new again."""
        self.is_lost = False
        self._held: dict[int, Held] = {}
        self._waiting: list[Held] = []
        self._number_of: dict[int, int] = {}  # id(container) -> number
        self._memories: dict[int, Memory] = {}
        self._at: dict[int, int] = {}  # address -> number
        self._starts: list[int] = []  # the addresses, in order
        self._size = 0

    @property
    def is_stale(self) -> bool:
        """Whether both sides had better forget: something went wrong, or it is a lot."""
        many = len(self._held) + len(self._memories) > MANY
        return self.is_lost or many or self._size > self.limits.bytes

    def _new_number(self) -> int:
        self._next += 2
        return self._next

    # --- out ---

    def encode(self, message: Message, values: dict[str, Any]) -> list[memoryview]:
        """Puts values into a message, and what else the other side must know.

        returns the buffers to send along
        raises Refused, and what `others` raises; then nothing is shared any more
        """
        try:
            return self._encode(message, values)
        except BaseException:
            self.forget()
            self.is_lost = True
            raise

    def _encode(self, message: Message, values: dict[str, Any]) -> list[memoryview]:
        self._nodes = 0
        self._new: set[int] = set()
        for name, value in values.items():
            message[name] = self._node(value, 0)
        contents: dict[int, Node] = {}
        self._waiting = waiting = list(self._held.values())
        while waiting:  # the content of a container may hold one that is new
            held = waiting.pop()
            if not held.has_changed():
                continue
            content = self._content(held.container)
            if content != held.synced:
                held.synced = content
                contents[held.number] = [_kind(held.container), content]
        buffers, memories = [], []
        for number, memory in self._memories.items():
            bytes_now = bytes(memory.view)
            if number in self._new or bytes_now != memory.synced:
                memory.synced = bytes_now
                memories.append(number)
                buffers.append(memoryview(bytes_now))
        message["held"] = [[number, *content] for number, content in contents.items()]
        message["memory"] = memories
        return buffers

    def _content(self, container: Any) -> Node:
        if isinstance(container, dict):
            items = list(container.items())
            return [[self._node(k, 1), self._node(v, 1)] for k, v in items]
        return [self._node(value, 1) for value in list(container)]

    def _count(self, depth: int) -> None:
        self._nodes += 1
        if self._nodes > self.limits.nodes:
            raise Refused(f"more than {self.limits.nodes:,} values")
        if depth > self.limits.depth:
            raise Refused(f"values nested more than {self.limits.depth} deep")

    def _node(self, value: Any, depth: int) -> Node:
        self._count(depth)
        kind = type(value)
        if value is None or kind is bool or kind is str or kind is float:
            return value
        if isinstance(value, float) and not _is_numpy(value):
            return float(value)
        if isinstance(value, int) and not _is_numpy(value):
            return _whole(int(value))
        if isinstance(value, str) and not _is_numpy(value):
            return str.__str__(value)
        if isinstance(value, Containers):
            return ["o", self._number(value)]
        if isinstance(value, tuple):
            return self._tuple(value, depth)
        for encode in (self._number_node, self._torch_node, self._numpy_node):
            node = encode(value)
            if node is not None:
                return node
        if isinstance(value, bytes | bytearray):
            return ["b", bytes(value).hex()]
        if isinstance(value, frozenset):
            return ["fz", *(self._node(v, depth + 1) for v in value)]
        if isinstance(value, range | slice):
            tag = "r" if isinstance(value, range) else "sl"
            parts = (value.start, value.stop, value.step)
            return [tag, *(self._node(part, depth + 1) for part in parts)]
        if value is Ellipsis:
            return ["..."]
        return self.others(value)

    def _number(self, container: Any) -> int:
        number = self._number_of.get(id(container))
        if number is None:
            number = self._new_number()
            self._hold(number, container)
        return number

    def _hold(self, number: int, container: Any) -> None:
        if len(self._held) > self.limits.nodes:
            raise Refused("too many lists and dicts in one call")
        self._number_of[id(container)] = number
        self._held[number] = Held(number, container)
        self._waiting.append(self._held[number])

    def _tuple(self, value: tuple[Any, ...], depth: int) -> Node:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Size):
            return ["size", *map(int, value)]
        return ["t", *(self._node(v, depth + 1) for v in tuple.__iter__(value))]

    def _number_node(self, value: Any) -> Node:
        if isinstance(value, complex) and not _is_numpy(value):
            return ["c", value.real, value.imag]
        if isinstance(value, Fraction):
            return ["q", _whole(value.numerator), _whole(value.denominator)]
        if isinstance(value, Decimal):
            text = str(value)
            return ["d", text] if len(text) <= DIGITS else None
        return None

    def _torch_node(self, value: Any) -> Node:
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        if isinstance(value, torch.dtype):
            return ["dt", str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["dv", str(value)]
        if isinstance(value, torch.Tensor):
            return self._tensor(torch, value)
        return None

    def _tensor(self, torch: Any, value: Any) -> Node:
        plain = value.detach().as_subclass(torch.Tensor)
        usable = plain.layout is torch.strided and not plain.is_quantized
        if (
            not usable
            or plain.device.type != "cpu"
            or plain.is_conj()
            or plain.is_neg()
        ):
            if plain.is_conj() or plain.is_neg():
                return self._tensor(torch, plain.resolve_conj().resolve_neg())
            return None
        name, shape = str(plain.dtype).removeprefix("torch."), list(plain.shape)
        grad = bool(value.requires_grad)
        if not plain.numel():
            return ["z", NOWHERE, name, 0, shape, list(plain.stride()), grad]
        size = plain.element_size()
        storage, first = plain.untyped_storage(), plain.storage_offset() * size
        low, high = 0, storage.nbytes()
        if high > self.limits.bytes // 8:  # a part of something large: only that part
            steps = zip(plain.shape, plain.stride(), strict=True)
            low, high = first, first + sum((n - 1) * s for n, s in steps) * size + size
        found = self._known(storage.data_ptr() + low, high - low)
        if found is None:
            raw = torch.empty(0, dtype=torch.uint8)
            raw.set_(storage, low, (high - low,), (1,))
            start = storage.data_ptr() + low
            found = self._share(memoryview(raw.numpy()), raw, start)
        number, shift = found
        offset = first - low + shift
        return ["z", number, name, offset, shape, list(plain.stride()), grad]

    def _numpy_node(self, value: Any) -> Node:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return None
        if isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
            return ["s", value.dtype.str, value.tobytes().hex()]
        if not isinstance(value, numpy.ndarray) or value.dtype.kind not in "biufc":
            return None
        name, shape = value.dtype.str, list(value.shape)
        if not value.size:
            return ["n", NOWHERE, name, 0, shape, list(value.strides)]
        base = value
        while isinstance(base.base, numpy.ndarray):
            base = base.base
        if not base.flags.c_contiguous:
            base = value = numpy.array(value, copy=True)
        flat = base.view(numpy.ndarray).reshape(-1).view(numpy.uint8)
        if flat.nbytes > self.limits.bytes // 8:
            low, high = numpy.lib.array_utils.byte_bounds(value)
            whole = int(flat.ctypes.data)
            flat = flat[low - whole : high - whole]
        place = int(flat.ctypes.data)
        found = self._known(place, flat.nbytes)
        if found is None:
            found = self._share(memoryview(flat), flat, place)
        number, shift = found
        start = value.__array_interface__["data"][0] - place
        return ["n", number, name, start + shift, shape, list(value.strides)]

    def _known(self, start: int, size: int) -> tuple[int, int] | None:
        """The number of the memory that holds these bytes, and where in it they begin."""
        at = bisect.bisect_right(self._starts, start) - 1
        if at < 0:
            return None
        number = self._at[self._starts[at]]
        inside = start - self._starts[at]
        fits = inside + size <= len(self._memories[number].view)
        return (number, inside) if fits else None

    def _share(self, view: memoryview, keeper: Any, start: int) -> tuple[int, int]:
        """Memory that the other side does not know yet."""
        if len(view) > self.limits.bytes:
            raise Refused(f"a tensor of {len(view):,} bytes")
        number = self._new_number()
        self._remember(number, Memory(view, keeper), start)
        self._new.add(number)
        return number, 0

    def _remember(self, number: int, memory: Memory, start: int) -> None:
        self._size += len(memory.view)
        if self._size > 4 * self.limits.bytes:
            raise Refused(f"tensors of {self._size:,} bytes in one call")
        self._memories[number] = memory
        if start not in self._at:
            bisect.insort(self._starts, start)
        self._at[start] = number

    # --- in ---

    def decode(
        self, message: Message, buffers: list[bytearray], names: Iterable[str]
    ) -> dict[str, Any]:
        """The values of a message, after what it says about shared memory was done.

        raises Refused
        """
        self._nodes = 0
        try:
            self._take_memory(message["memory"], buffers)
            self._take_held(message["held"])
            return {name: self._value(message[name], 0) for name in names}
        except (
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            OverflowError,
            AttributeError,
            RuntimeError,
            RecursionError,
            ZeroDivisionError,
            ArithmeticError,
        ) as error:
            raise Refused(
                f"a malformed message ({type(error).__name__}: {error})"
            ) from None

    def _take_memory(self, numbers: list[int], buffers: list[bytearray]) -> None:
        if len(numbers) != len(buffers):
            raise Refused("a malformed message")
        for number, content in zip(numbers, buffers, strict=True):
            known = self._memories.get(_int(number))
            if known is None:
                self._check_number(number)
                if not content:
                    raise Refused("memory of no bytes")
                view, keeper = _allocate(content)
                memory = Memory(view, keeper, bytes(content))
                self._remember(number, memory, _address(view))
            elif len(known.view) != len(content):
                raise Refused("memory that changes its size")
            else:
                if not known.view.readonly:
                    known.view[:] = content
                known.synced = bytes(content)

    def _take_held(self, entries: list[Any]) -> None:
        for number, kind, _ in entries:
            known = self._held.get(_int(number))
            if known is None:
                self._check_number(number)
                self._hold(number, {"list": list, "dict": dict, "set": set}[kind]())
            elif _kind(known.container) != kind:
                raise Refused("a container that changes its kind")
        for number, _, content in entries:
            held = self._held[number]
            self._fill(held.container, content)
            held.synced = content
            held.has_changed()

    def _fill(self, container: Any, content: list[Any]) -> None:
        if isinstance(container, dict):
            items = {self._value(k, 1): self._value(v, 1) for k, v in content}
            if items.keys() == container.keys() and list(items) == list(container):
                for (
                    key,
                    value,
                ) in items.items():  # an unchanged value stays the object it is
                    container[key] = value
                return
            container.clear()
            container.update(items)
        elif isinstance(container, list):
            container[:] = [self._value(node, 1) for node in content]
        else:
            values = {self._value(node, 1) for node in content}
            container.clear()
            container.update(values)

    def _check_number(self, number: Any) -> None:
        theirs = 1 if self.even else 0
        if number % 2 != theirs or number in self._held or number in self._memories:
            raise Refused("a number that is taken")

    def _value(self, node: Node, depth: int) -> Any:
        self._count(depth)
        if isinstance(node, WHOLE):
            return node
        tag, rest = node[0], node[1:]
        if tag == "o":
            return self._held[_int(rest[0])].container
        if tag == "t":
            return tuple(self._value(n, depth + 1) for n in rest)
        if tag == "z":
            return self._tensor_value(*rest)
        if tag == "n":
            return self._array_value(*rest)
        if tag == "fz":
            return frozenset(self._value(n, depth + 1) for n in rest)
        if tag in ("r", "sl"):
            parts = [self._value(n, depth + 1) for n in rest]
            return range(*parts) if tag == "r" else slice(*parts)
        if tag in PLAIN:
            return PLAIN[tag](*rest)
        return self.resolve(node)

    def _tensor_value(
        self,
        number: int,
        name: str,
        offset: int,
        shape: list[int],
        strides: list[int],
        wants_grad: bool,
    ) -> Any:
        import torch

        dtype = _dtype(name)
        size = dtype.itemsize
        steps = [_int(s) * size for s in strides]
        memory = self._extent(number, offset, shape, steps, size)
        if memory is None:
            value = torch.empty_strided(shape, strides, dtype=dtype)
        else:
            raw = memory.keeper
            if not isinstance(raw, torch.Tensor):
                raw = torch.from_numpy(raw) if not memory.view.readonly else None
            if raw is None:
                raise Refused("memory that cannot be written")
            start = offset + raw.storage_offset()
            if start % size:
                raise Refused("a tensor between two places")
            value = torch.empty(0, dtype=dtype).set_(
                raw.untyped_storage(), start // size, shape, strides
            )
            if dtype is torch.bool and not self._holds_truths(value):
                raise Refused("a truth value that is neither 0 nor 1")
        if wants_grad is True and (dtype.is_floating_point or dtype.is_complex):
            value.requires_grad_()
        return value

    @staticmethod
    def _holds_truths(value: Any) -> bool:
        import torch

        bytes_of = torch.empty(0, dtype=torch.uint8).set_(
            value.untyped_storage(),
            value.storage_offset(),
            value.shape,
            value.stride(),
        )
        return bool((bytes_of <= 1).all())

    def _array_value(
        self, number: int, name: str, offset: int, shape: list[int], strides: list[int]
    ) -> Any:
        import numpy

        dtype = numpy.dtype(name)
        if dtype.kind not in "biufc":
            raise Refused(f"an array of {name}")
        memory = self._extent(number, offset, shape, strides, dtype.itemsize)
        if memory is None:
            return numpy.empty(shape, dtype)
        value = numpy.ndarray(shape, dtype, memory.view, offset, strides)
        if dtype.kind == "b" and (value.view(numpy.uint8) > 1).any():
            raise Refused("a truth value that is neither 0 nor 1")
        return value

    def _extent(
        self,
        number: int,
        offset: int,
        shape: list[int],
        steps: list[int],
        size: int,
    ) -> Memory | None:
        """The memory of a view, which lies inside it; None when it has no element.

        raises Refused, also when the view would be endless as a copy
        """
        if len(shape) != len(steps) or len(shape) > 32 or _int(offset) < 0:
            raise Refused("a tensor of a strange shape")
        if any(_int(n) < 0 for n in shape):
            raise Refused("a tensor of a negative size")
        if math.prod(shape) * size > self.limits.bytes:
            raise Refused(f"a tensor of {math.prod(shape) * size:,} bytes")
        if 0 in shape:
            if any(not 0 <= _int(s) < 2**40 for s in steps) or max(shape) >= 2**31:
                raise Refused("a tensor of a strange shape")
            return None
        memory = self._memories[_int(number)]
        ends = [(n - 1) * _int(s) for n, s in zip(shape, steps, strict=True)]
        low = offset + sum(end for end in ends if end < 0)
        high = offset + sum(end for end in ends if end > 0) + size
        if low < 0 or high > len(memory.view):
            raise Refused("a tensor outside its memory")
        return memory


def _kind(container: Any) -> str:
    return next(
        name
        for name, kind in (("list", list), ("dict", dict), ("set", set))
        if isinstance(container, kind)
    )


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _int(value: Any) -> int:
    if type(value) is not int:
        raise Refused("a number was expected")
    return value


def _whole(value: int) -> Node:
    if -SMALL < value < SMALL:
        return value
    text = hex(value)
    if len(text) > DIGITS:
        raise Refused("an integer of too many digits")
    return ["i", text]


def _large(text: str) -> int:
    if len(text) > DIGITS:
        raise Refused("an integer of too many digits")
    return int(text, 16)


def _any_whole(node: Node) -> int:
    return _int(node) if isinstance(node, int) else _large(node[1])


def _decimal(text: str) -> Decimal:
    if len(text) > DIGITS:
        raise Refused("a decimal of too many digits")
    return Decimal(text)


def _numpy_scalar(name: str, content: str) -> Any:
    import numpy

    dtype = numpy.dtype(name)
    data = bytes.fromhex(content)
    if dtype.kind not in "biufc" or len(data) != dtype.itemsize:
        raise Refused(f"a number of {name}")
    if dtype.kind == "b" and data not in (b"\0", b"\1"):
        raise Refused("a truth value that is neither 0 nor 1")
    return numpy.frombuffer(data, dtype)[0]


def _dtype(name: str) -> Any:
    import torch

    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype) or name.startswith("q"):
        raise Refused(f"a tensor of {name}")
    return dtype


def _device(name: str) -> Any:
    import torch

    return torch.device(name)


def _size(*lengths: int) -> Any:
    import torch

    return torch.Size([_int(n) for n in lengths])


def _allocate(content: bytearray) -> tuple[memoryview, Any]:
    """Writable memory with this content, and its owner: a tensor where torch is there."""
    if torch := sys.modules.get("torch"):
        raw = torch.empty(len(content), dtype=torch.uint8)
        view = memoryview(raw.numpy())
        view[:] = content
        return view, raw
    if numpy := sys.modules.get("numpy"):
        flat = numpy.frombuffer(content, numpy.uint8)
        return memoryview(content), flat
    return memoryview(content), content


PLAIN: dict[str, Callable[..., Any]] = {
    "i": _large,
    "c": lambda real, imaginary: complex(real, imaginary),
    "q": lambda a, b: Fraction(_any_whole(a), _any_whole(b)),
    "d": _decimal,
    "s": _numpy_scalar,
    "b": lambda text: bytes.fromhex(text),
    "dt": _dtype,
    "dv": _device,
    "size": _size,
    "...": lambda: Ellipsis,
}
