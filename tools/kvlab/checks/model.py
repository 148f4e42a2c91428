"""Checks of lab 05: what attention reads from a quantized layer, what is stored, its bookkeeping.

Called by the test cells of lab 05 (`checks.model`) and by its answer suite.
Never packs and never quantizes: it verifies an answer value by value, and names the mistake.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvlab import checks
from kvlab.checks import Wrong, expect
from kvlab.checks.axes import _capital, _copy, _dtype, _kind, _other, _tokens, numbered

__all__ = [
    "bytes_held",
    "drops",
    "from_lab_04",
    "length",
    "made_state",
    "near_dynamic",
    "reads",
    "refuses_to_drop",
    "restores",
    "same_as_dynamic",
    "selects",
    "stores",
]

State = dict[str, Any]
Answer = Callable[..., Any]

SIDES = ("key", "value")
PARTS = ("q", "scale", "minimum")
LISTS = tuple(f"{side}_{part}_segments" for side in SIDES for part in PARTS)
WINDOWS = tuple(f"{side}_residual" for side in SIDES)
COUNTERS = ("flushed_tokens", "quantized_tokens", "total_tokens")
TOKENS = 2


# --- TODO 1: functions that come from lab 04 ------------------------------------------


@contextlib.contextmanager
def from_lab_04(number: int) -> Iterator[None]:
    """Around tests of functions of lab 04, TODO `number`: a failure says where to go back to."""
    back = f"Go back to lab 04, TODO {number}."
    try:
        yield
    except Wrong as error:
        raise Wrong(f"{error} {back}") from None
    except NameError as error:
        missing = re.search(r"name '(\w+)' is not defined", str(error))
        if missing is None:
            raise
        raise Wrong(
            f"{missing[1]} is missing in this notebook. The cell of TODO 1 needs all five "
            f"functions. {back}"
        ) from None


# --- TODO 2: the quantized tokens as floats -------------------------------------------

SHIFTED_BY = 3  # what `Unpacker` adds to a code, so that a code is not read for a byte
EXTRA = 2  # columns behind the codes, so that `length` is needed


class Unpacker:
    """A stand-in for `unpack`: takes apart what `made_state` stored, and watches the call."""

    def __init__(self, bits: int, head_dim: int) -> None:
        self.bits, self.head_dim = bits, head_dim
        self.calls = 0
        self.fault = ""

    def __call__(self, packed: Tensor, bits: int, length: int) -> Tensor:
        """The codes, uint8 [..., length]."""
        self.calls += 1
        if bits != self.bits:
            self.fault = f"unpack was called with bits {bits}; the state is stored with {self.bits} bits."
        elif length != self.head_dim:
            self.fault = (
                f"unpack was called with length {length}. A row holds one code for each "
                f"channel, so length is head_dim: expected {self.head_dim}."
            )
        return packed[..., :length] - SHIFTED_BY


def made_state(
    segments: Sequence[int],
    window: int,
    bits: int = 4,
    dtype: torch.dtype = torch.float32,
    scale_dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> State:
    """A state of random tensors with the entries of lab 04, no two parts of the same size.

    segments  tokens of each segment, multiples of 2: a Key group has 2 tokens
    window    tokens in the window
    """
    batch, heads, head_dim = [(2, 3, 9), (3, 1, 6), (1, 4, 3), (3, 2, 12)][seed % 4]
    random = torch.Generator().manual_seed(seed)
    state: State = {name: [] for name in LISTS}
    for tokens in segments:
        for side in SIDES:
            shape = (batch, heads, tokens, head_dim)
            codes = torch.randint(0, 2**bits, shape, generator=random)
            junk = torch.randint(0, 99, (*shape[:3], EXTRA), generator=random)
            stored = torch.cat((codes + SHIFTED_BY, junk), dim=3)
            if side == "key":
                shape = (batch, heads, tokens // 2, head_dim)
            else:
                shape = (batch, heads, tokens, head_dim // 3)
            scale = 0.1 + torch.rand(shape, generator=random)
            minimum = 5 * torch.randn(shape, generator=random)
            for part, made in zip(
                PARTS,
                (
                    stored.to(torch.uint8),
                    scale.to(scale_dtype),
                    minimum.to(scale_dtype),
                ),
                strict=True,
            ):
                state[f"{side}_{part}_segments"].append(made)
    for name in WINDOWS:
        made = torch.randn(batch, heads, window, head_dim, generator=random)
        state[name] = made.to(dtype)
    quantized = sum(segments)
    return state | {
        "flushed_tokens": segments[-1] if segments else 0,
        "quantized_tokens": quantized,
        "total_tokens": quantized + window,
    }


def restores(
    restore_segments: Answer,
    state: State,
    bits: int = 4,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Keys and Values of all segments must be code x scale + minimum, in order, in dtype.

    state  as `made_state` makes it
    """
    head_dim = state["key_residual"].shape[3]
    unpack = Unpacker(bits, head_dim)
    before = _copy(state)
    try:
        answer = _watched(unpack, restore_segments, state, bits, dtype, unpack)
    except (NotImplementedError, Wrong):
        raise
    except Exception as error:
        stopped = f"restore_segments stopped with {type(error).__name__}: {error}."
        if not state["key_q_segments"]:
            raise Wrong(
                f"there is no segment yet, and {stopped} Expected tensors with 0 tokens."
            ) from None
        if not unpack.calls:
            raise Wrong(
                f"{stopped} It never called the unpack that it was given. The codes are "
                "packed: call the argument unpack for every segment."
            ) from None
        raise
    _unchanged(before, state, "restore_segments")
    keys, values = _two(answer, "restore_segments", "(keys, values)")
    if state["key_q_segments"]:
        expect(
            unpack.calls > 0,
            "restore_segments never called the unpack that it was given. The codes are packed: "
            "call the argument unpack for every segment.",
        )
    for side, got in zip(SIDES, (keys, values), strict=True):
        _restored_side(side, got, state, dtype)


def _restored_side(side: str, got: Any, state: State, dtype: torch.dtype) -> None:
    name = f"{_capital(side)}s"
    parts = [
        _definition(state, side, n) for n in range(len(state[f"{side}_q_segments"]))
    ]
    window = state[f"{side}_residual"]
    wanted = torch.cat(
        [window[:, :, :0].double(), *(p.total for p in parts)], dim=TOKENS
    )
    expect(
        isinstance(got, Tensor),
        f"the restored {name} are {_kind(got)}; a tensor is expected.",
    )
    if tuple(got.shape) != tuple(wanted.shape):
        raise Wrong(
            f"the restored {name} have shape {tuple(got.shape)}"
            f"{_shape_mistake(got, wanted, window, parts)}. "
            f"Expected {tuple(wanted.shape)}: all quantized tokens, and only they."
        )
    expect(
        got.dtype == dtype,
        f"the restored {name} have dtype {_dtype(got)}; dtype asks for "
        f"{str(dtype).removeprefix('torch.')}.",
    )
    # Two roundings of the result dtype at most, each half an eps of its own term.
    room = torch.cat([window[:, :, :0].double(), *(p.size for p in parts)], dim=TOKENS)
    tolerance = room * torch.finfo(dtype).eps + 1e-6 * room
    if checks.within(got, wanted, tolerance):
        return
    other = _other(side)
    turned = [
        (": the segments are in another order", [p.total for p in parts[::-1]]),
        (": these are the codes, not yet restored", [p.codes for p in parts]),
        (": the minimum is not added", [p.total - p.minimum for p in parts]),
        (": the scale is not applied", [p.codes + p.minimum for p in parts]),
        (
            ": the minimum is added before the scale is applied",
            [(p.codes + p.minimum) * p.scale for p in parts],
        ),
        (
            ": a scale belongs to a run of neighbours, here it is repeated in turn",
            [p.in_turn for p in parts],
        ),
        (
            f": these are {other}",
            [
                _definition(state, other.lower()[:-1], n).total
                for n in range(len(parts))
            ],
        ),
    ]
    for sentence, wrong in turned:
        if checks.within(
            got, torch.cat(wrong, dim=TOKENS), tolerance + 1e-2 * (1 + room)
        ):
            raise Wrong(
                f"the restored {name} are not right{sentence}. "
                "Expected: code x scale + minimum, the segments in the order of the list."
            )
    where = (got.double() - wanted).abs().sub(tolerance).argmax()
    place = tuple(int(n) for n in torch.unravel_index(where, wanted.shape))
    raise Wrong(
        f"the restored {name} are not right: {float(got[place]):.4g} at "
        f"[batch, heads, token, channel] = {list(place)}. "
        "Expected: code x scale + minimum, the segments in the order of the list."
    )


def _shape_mistake(
    got: Tensor, wanted: Tensor, window: Tensor, parts: list[Any]
) -> str:
    if got.ndim != 4 or got.numel() == 0 != wanted.numel():
        return ""
    tokens, right = got.shape[TOKENS], wanted.shape[TOKENS]
    if not parts and got.ndim == 4:
        return ": there is no segment, so there are 0 tokens"
    if got.shape[3] == wanted.shape[3] + EXTRA:
        return ": the codes were not unpacked"
    if tokens == right + window.shape[TOKENS]:
        return ": the window is there too"
    if len(parts) > 1 and tokens == parts[-1].total.shape[TOKENS]:
        return ": only the last segment is there"
    if len(parts) > 1 and tokens == parts[0].total.shape[TOKENS]:
        return ": only the first segment is there"
    return ""


class _definition:
    """One segment of one side in float64: codes, scale, minimum and what they stand for."""

    def __init__(self, state: State, side: str, number: int) -> None:
        stored, scale, minimum = (
            state[f"{side}_{part}_segments"][number].double() for part in PARTS
        )
        self.codes = (stored[..., :-EXTRA] - SHIFTED_BY) % 256  # as uint8 counts
        self.scale, self.minimum = (self._run(part) for part in (scale, minimum))
        self.total = self.codes * self.scale + self.minimum
        self.size = (self.codes * self.scale).abs() + self.minimum.abs()
        turn = [n // m for n, m in zip(self.codes.shape, scale.shape, strict=True)]
        self.in_turn = self.codes * scale.repeat(turn) + minimum.repeat(turn)

    def _run(self, part: Tensor) -> Tensor:
        """Each value of part for every code that shares it."""
        for axis, size in enumerate(self.codes.shape):
            owner = torch.arange(size) * part.shape[axis] // size
            part = part.index_select(axis, owner)
        return part


# --- TODO 3: what attention reads, and what is stored ---------------------------------

RESTORED = 64.5  # channel 1 of a restored token; exact tokens hold whole numbers


class Store:
    """Stand-ins for `restore_prefix` and `append` that lose nothing and watch their calls.

    A restored token is the exact one but for channel 1, which holds RESTORED (Values: minus).
    When the window has grown beyond `keep` + 2 tokens, all but the newest `keep` are stored.
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.fault = ""
        self.appended: list[tuple[State | None, Tensor, Tensor]] = []
        self.returned: list[State] = []

    def restore_prefix(self, state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and Values of all stored tokens, in dtype."""
        if not isinstance(state, dict):
            self.fault = (
                f"restore_prefix was called with {_kind(state)} as state. In the first call "
                "state is None, and there is nothing to restore."
            )
            raise ValueError(self.fault)
        restored = []
        for sign, side in zip((1, -1), SIDES, strict=True):
            window = state[f"{side}_residual"]
            parts = [window[:, :, :0], *state[f"{side}_q_segments"]]
            held = torch.cat([part.to(dtype) for part in parts], dim=TOKENS)
            held[..., 1] = sign * RESTORED
            restored.append(held)
        return restored[0], restored[1]

    def append(self, state: State | None, key: Tensor, value: Tensor) -> State:
        """The next state: the entries of lab 04, with a flush rule of its own."""
        self.appended.append((None if state is None else _copy(state), key, value))
        made: State = {name: [] for name in LISTS}
        for name in LISTS:
            made[name] += [] if state is None else state[name]
        total = key.shape[TOKENS] + (0 if state is None else state["total_tokens"])
        flushed = 0
        for side, new in zip(SIDES, (key, value), strict=True):
            window = f"{side}_residual"
            held = new if state is None else torch.cat((state[window], new), dim=TOKENS)
            many = held.shape[TOKENS] > self.keep + 2
            flushed = held.shape[TOKENS] - self.keep if many else 0
            if flushed:
                codes = held[:, :, :flushed].to(torch.int16)
                made[f"{side}_q_segments"].append(codes)
                made[f"{side}_scale_segments"].append(torch.ones(1))
                made[f"{side}_minimum_segments"].append(torch.zeros(1))
            made[window] = held[:, :, flushed:].clone()
        left = made["key_residual"].shape[TOKENS]
        made |= {
            "flushed_tokens": flushed,
            "quantized_tokens": total - left,
            "total_tokens": total,
        }
        self.returned.append(_copy(made))
        return made


def reads(
    update_layer: Answer,
    arrivals: Sequence[int],
    keep: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """What every step returns for attention: restored tokens, window, new tokens, in order."""
    state: State | None = None
    total = 0
    history: list[tuple[Tensor, Tensor]] = []
    for count in arrivals:
        key, value = numbered(total + 1, count, dtype=dtype)
        history.append((key, value))
        quantized = 0 if state is None else int(state["quantized_tokens"])
        store = Store(keep)
        given = None if state is None else _copy(state)
        answer = _watched(
            store,
            update_layer,
            *(given, key.clone(), value.clone()),
            *(store.restore_prefix, store.append),
        )
        keys, values, _ = _three(answer)
        total += count
        story = _story(quantized, total - count, count)
        both = zip(SIDES, (keys, values), zip(*history, strict=True), strict=True)
        for side, got, arrived in both:
            exact = torch.cat(arrived, dim=TOKENS)
            try:
                _read_side(side, got, exact, quantized, total - count)
            except Wrong as error:
                raise Wrong(f"{story}{error}") from None
        state = Store(keep).append(state, key, value)


def _read_side(side: str, got: Any, exact: Tensor, quantized: int, old: int) -> None:
    """exact  all tokens as they arrived; the first `quantized` are stored, then the window
    up to `old`, the others are new
    """
    dtype, total = exact.dtype, exact.shape[TOKENS]
    name = f"the returned {_capital(side)}s"
    sign = 1 if side == "key" else -1
    expect(
        isinstance(got, Tensor) and got.ndim == 4,
        f"{name} are {_kind(got)}; a tensor [batch, heads, all tokens, head_dim] is expected.",
    )
    found = [round(sign * float(n)) for n in got[0, 0, :, 0]] if got.shape[3] else []
    wanted = list(range(1, total + 1))
    order = "Expected, oldest first: restored tokens, window, new tokens"
    if found != wanted:
        if any(n < 0 for n in found):
            raise Wrong(f"{name} hold {_other(side)}. {order}.")
        missing = [n for n in wanted if n not in found]
        if missing == list(range(old + 1, total + 1)):
            why = ": the new tokens are missing, and this step attends to them too"
        elif found == list(range(old + 1, total + 1)):
            why = ": these are the new tokens alone"
        elif missing and missing == list(range(1, quantized + 1)):
            why = ": the quantized tokens are missing"
        elif missing and missing == list(range(quantized + 1, old + 1)):
            why = ": the window is missing"
        elif not missing and sorted(found) == wanted:
            why = ": the order is not that of their arrival"
        elif len(found) > total:
            why = ": some of them twice"
        else:
            why = ""
        raise Wrong(f"{name} hold {_tokens(found)}{why}. {order}: tokens 1 to {total}.")
    marked = [
        n
        for n, mark in zip(found, got[0, 0, :, 1], strict=True)
        if abs(float(mark)) == RESTORED
    ]
    early = [n for n in marked if n > old]
    if early:
        raise Wrong(
            f"in {name}, {_tokens(early)} come back quantized, and they are new. The step that "
            "brings tokens sees them exact: they are quantized for later steps only."
        )
    early = [n for n in marked if n > quantized]
    if early:
        raise Wrong(
            f"in {name}, {_tokens(early)} come back quantized, and they were in the window. "
            "Read the state as it was before this step, then append."
        )
    bare = [n for n in wanted[:quantized] if n not in marked]
    if bare:
        raise Wrong(
            f"in {name}, {_tokens(bare)} are codes. They must come from restore_prefix(state, "
            "dtype), as floats."
        )
    expect(
        got.dtype == dtype,
        f"{name} have dtype {_dtype(got)}; the model computes in "
        f"{str(dtype).removeprefix('torch.')}, the dtype of key_states.",
    )
    expect(
        torch.equal(got[:, :, quantized:], exact[:, :, quantized:])
        and torch.equal(got[:, :, :quantized, 2:], exact[:, :, :quantized, 2:]),
        f"{name} have the right tokens in the right order, but other values. Restored tokens "
        "come as restore_prefix gives them, all others as the model made them.",
    )


def stores(
    update_layer: Answer,
    arrivals: Sequence[int],
    keep: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Every step hands the new tokens to append, once, and returns the state that it gave."""
    state: State | None = None
    total = 0
    for count in arrivals:
        key, value = numbered(total + 1, count, dtype=dtype)
        store = Store(keep)
        quantized = 0 if state is None else int(state["quantized_tokens"])
        story = _story(quantized, total, count)
        before = None if state is None else _copy(state)
        given = state
        answer = _watched(
            store,
            update_layer,
            *(given, key.clone(), value.clone()),
            *(store.restore_prefix, store.append),
        )
        _, _, after = _three(answer)
        try:
            if before is not None:
                _unchanged(before, given, "update_layer")
            _appended(store, before, (key, value), total)
            _returned(after, store, before)
        except Wrong as error:
            raise Wrong(f"{story}{error}") from None
        total += count
        state = _copy(after)


def _appended(
    store: Store, before: State | None, new: tuple[Tensor, Tensor], old: int
) -> None:
    """append was called once, with the old state and the new tokens as they came."""
    expect(
        bool(store.appended),
        "append was not called, so nothing is stored. Call it once a step.",
    )
    count = new[0].shape[TOKENS]
    wanted = list(range(old + 1, old + count + 1))
    for sign, side, at in ((1, "key", 1), (-1, "value", 2)):
        got = store.appended[0][at]
        if not isinstance(got, Tensor) or got.ndim != 4:
            raise Wrong(
                f"append was given {_kind(got)} as {side}; a tensor is expected."
            )
        found = [round(sign * float(n)) for n in got[0, 0, :, 0]]
        if any(n < 0 for n in found):
            raise Wrong(
                f"append was given {_other(side)} as {side}. It takes (state, key, value)."
            )
        if any(n in found for n in range(1, old + 1)):
            again = [n for n in found if n <= old]
            raise Wrong(
                f"append was given {_tokens(again)} again, which are stored already: they would "
                f"be quantized a second time. Expected the new tokens alone: {_tokens(wanted)}."
            )
        expect(
            found == wanted,
            f"append was given {_tokens(found)}. Expected the new tokens: {_tokens(wanted)}.",
        )
        expect(
            got.dtype == new[at - 1].dtype and torch.equal(got, new[at - 1]),
            f"append was not given the new {side} as it came, but as {_dtype(got)} with other "
            "values. The window keeps tokens as the model made them.",
        )
    expect(
        len(store.appended) == 1,
        f"append was called {len(store.appended)} times in one step. Once is enough: the second "
        "call stores the tokens again.",
    )
    given = store.appended[0][0]
    had = None if before is None else before["total_tokens"]
    got_total = None if given is None else given["total_tokens"]
    expect(
        had == got_total,
        "append was called without the state of the last step, so the earlier tokens are "
        "lost. Hand it the state that update_layer was given.",
    )


def _returned(after: Any, store: Store, before: State | None) -> None:
    """The state that came back is the one that append gave."""
    wanted = store.returned[-1]
    if after is None or (
        isinstance(after, dict) and before is not None and _same(after, before)
    ):
        raise Wrong(
            "the state that comes back is the one from before this step, so the length stays "
            f"{0 if before is None else before['total_tokens']}. Return what append gave."
        )
    expect(
        isinstance(after, dict),
        f"the state that comes back is {_kind(after)}. Return what append gave.",
    )
    expect(
        _same(after, wanted),
        "the state that comes back is not what append gave. Return it as it is: append has "
        "stored the tokens and counted them.",
    )


def _story(quantized: int, old: int, new: int) -> str:
    """ "4 quantized tokens, 2 in the window, 3 new: "."""
    return f"with {quantized} quantized tokens, {old - quantized} in the window and {new} new: "


def _three(answer: Any) -> tuple[Any, Any, Any]:
    if answer is None:
        raise Wrong("update_layer returned None. It must return (keys, values, state).")
    expect(
        isinstance(answer, tuple | list) and len(answer) == 3,
        f"update_layer returned {_kind(answer)}"
        f"{f' of {len(answer)}' if isinstance(answer, tuple | list) else ''}; "
        "the three (keys, values, state) are expected.",
    )
    keys, values, state = answer
    return keys, values, state


def _two(answer: Any, function: str, wanted: str) -> tuple[Any, Any]:
    if answer is None:
        raise Wrong(f"{function} returned None. It must return {wanted}.")
    expect(
        isinstance(answer, tuple | list) and len(answer) == 2,
        f"{function} returned {_kind(answer)}; the pair {wanted} is expected.",
    )
    first, second = answer
    return first, second


def _watched(watcher: Unpacker | Store, call: Answer, *arguments: Any) -> Any:
    """The call's result; a mistake that a stand-in saw comes before what followed from it."""
    try:
        answer = call(*arguments)
    except NotImplementedError:
        raise
    except Exception:
        if watcher.fault:
            raise Wrong(watcher.fault) from None
        raise
    if watcher.fault:
        raise Wrong(watcher.fault)
    return answer


# --- TODO 3 in a real, tiny transformer -----------------------------------------------


@lru_cache(maxsize=1)
def tiny_model() -> Any:
    """A llama with random weights: 2 layers, 4 query heads that share 2 KV heads.

    The same every time, made without a download and without touching the global seed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )
        with torch.random.fork_rng():
            model = LlamaForCausalLM(config).eval()
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights.normal_(0, 0.25, generator=random)
    return model


def tiny_text(batch: int, tokens: int) -> Tensor:
    """Random token ids of the tiny model, int64 [batch, tokens], the same every time."""
    random = torch.Generator().manual_seed(6)
    return torch.randint(2, 61, (batch, tokens), generator=random)


@torch.no_grad()
def tiny_logits(cache: Any, text: Tensor, arrivals: Sequence[int]) -> Tensor:
    """What the tiny model says when a text arrives in parts: [batch, tokens, vocabulary]."""
    from kvlab.matrix.caches import cache_argument

    model = tiny_model()
    held = {cache_argument(model): cache, "use_cache": True}
    parts = text.split(list(arrivals), dim=1)
    return torch.cat([model(input_ids=part, **held).logits for part in parts], dim=1)


def dynamic_logits(text: Tensor, arrivals: Sequence[int]) -> Tensor:
    """The same with the library's DynamicCache."""
    from transformers import DynamicCache

    return tiny_logits(DynamicCache(config=tiny_model().config), text, arrivals)


def _cache_of(update_layer: Answer, restore_prefix: Answer, append: Answer) -> Any:
    """A cache whose layers call the answer with tensors, and count tokens themselves."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    class Layer(CacheLayerMixin):
        is_sliding = False

        def __init__(self) -> None:
            super().__init__()
            self.state: State | None = None
            self.tokens = 0

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.is_initialized = True

        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            answer = update_layer(
                self.state, key_states, value_states, restore_prefix, append
            )
            keys, values, self.state = _three(answer)
            self.tokens += key_states.shape[TOKENS]
            shape = (*key_states.shape[:2], self.tokens, key_states.shape[3])
            for got, name in ((keys, "Keys"), (values, "Values")):
                checks.tensor(got, f"in the model, the returned {name}", shape)
            return keys.contiguous(), values.contiguous()

        def get_seq_length(self) -> int:
            return self.tokens

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.tokens + query_length, 0

        def get_max_length(self) -> int:
            return -1

    return Cache(layers=[Layer() for _ in range(tiny_model().config.num_hidden_layers)])


def same_as_dynamic(
    update_layer: Answer, arrivals: Sequence[int], batch: int = 2
) -> None:
    """With a window longer than the text, the tiny model must say exactly what it says anyway."""
    text = tiny_text(batch, sum(arrivals))
    store = Store(keep=sum(arrivals))
    cache = _cache_of(update_layer, store.restore_prefix, store.append)
    got = tiny_logits(cache, text, arrivals)
    wanted = dynamic_logits(text, arrivals)
    if torch.equal(got, wanted):
        return
    wrong = int((got != wanted).any(dim=2).any(dim=0).int().argmax())
    raise Wrong(
        "in the tiny model nothing is quantized here, and yet the logits differ from those of "
        f"DynamicCache, by up to {float((got - wanted).abs().max()):.2g}, from token {wrong} on "
        f"(calls of {', '.join(map(str, arrivals))} tokens). Expected: the same numbers."
    )


def near_dynamic(
    update_layer: Answer,
    restore_prefix: Answer,
    append: Answer,
    arrivals: Sequence[int],
    at_most: float,
    at_least: float = 0.0,
) -> None:
    """With a real quantizer the tiny model's logits must stay within `at_most`, measured.

    at_least  the least difference, to be sure that quantized tokens were read
    """
    text = tiny_text(2, sum(arrivals))
    got = tiny_logits(_cache_of(update_layer, restore_prefix, append), text, arrivals)
    far = float((got - dynamic_logits(text, arrivals)).abs().max())
    expect(
        far <= at_most,
        f"in the tiny model the logits differ by {far:.2g} from those of DynamicCache. At 8 "
        f"bits they must stay within {at_most:g}.",
    )
    expect(
        far >= at_least,
        "in the tiny model the logits are exactly those of DynamicCache, although tokens have "
        "left the window. Old tokens must come from restore_prefix.",
    )


# --- TODO 4: bookkeeping --------------------------------------------------------------


def length(seq_length: Answer, state: State | None, when: str) -> None:
    """How many tokens a state holds."""
    if state is None:
        _nothing(seq_length, "seq_length", when)
        return
    got = seq_length(state)
    window = state["key_residual"].shape[TOKENS]
    segments = state["key_q_segments"]
    checks.number(
        got,
        sum(part.shape[TOKENS] for part in segments) + window,
        f"seq_length, {when},",
        {
            "these are the tokens of the window alone.": window,
            "these are the quantized tokens alone.": state["quantized_tokens"],
            "this is the number of segments.": len(segments),
            "these are the tokens of the last flush.": state["flushed_tokens"],
            "this is head_dim.": state["key_residual"].shape[3],
        },
        integer=True,
    )


def bytes_held(held_bytes: Answer, state: State | None, when: str) -> None:
    """The bytes of all tensors of a state."""
    if state is None:
        _nothing(held_bytes, "held_bytes", when)
        return
    got = held_bytes(state)
    sizes = {name: sum(t.nbytes for t in state[name]) for name in LISTS}
    sizes |= {name: state[name].nbytes for name in WINDOWS}
    total = sum(sizes.values())
    keys = sum(size for name, size in sizes.items() if name.startswith("key"))

    def without(word: str) -> int:
        return total - sum(size for name, size in sizes.items() if word in name)

    values = [state[name] for name in WINDOWS]
    values += [tensor for name in LISTS for tensor in state[name]]
    checks.number(
        got,
        total,
        f"held_bytes, {when},",
        {
            "the window is not counted.": without("residual"),
            "the minima are not counted.": without("minimum"),
            "the scales are not counted.": without("scale"),
            "neither scales nor minima are counted.": without("scale")
            + without("minimum")
            - total,
            "the codes are not counted.": without("_q_"),
            "these are Keys alone.": keys,
            "these are Keys alone, twice; the Values have scales of another size.": 2
            * keys,
            "these are the values in the tensors, not their bytes.": sum(
                tensor.numel() for tensor in values
            ),
            "this counts 4 bytes for every value.": 4 * sum(t.numel() for t in values),
        },
        integer=True,
    )


def _nothing(count: Answer, name: str, when: str) -> None:
    """A layer without a state holds nothing."""
    try:
        got = count(None)
    except NotImplementedError:
        raise
    except Exception as error:
        raise Wrong(
            f"{name}(None) stopped with {type(error).__name__}: {error}. {_capital(when)} "
            "the state is None: expected 0."
        ) from None
    checks.number(got, 0, f"{name}(None), {when},", integer=True)


def selects(select_rows: Answer, state: State, rows: Sequence[int]) -> None:
    """Every tensor of the state must hold the asked batch rows, in that order."""
    before = _copy(state)
    index = torch.tensor(list(rows))
    after = select_rows(state, index)
    _unchanged(before, state, "select_rows")
    _state_form(after, "select_rows")
    asked = f"select_rows with rows {list(rows)} of {state['key_residual'].shape[0]}"
    for name in LISTS:
        expect(
            len(after[name]) == len(before[name]),
            f"{asked}: {name} has {len(after[name])} segments; it had {len(before[name])}.",
        )
    pairs = [(n, before[n], after[n]) for n in WINDOWS]
    pairs += [
        (f"{n}[{i}]", before[n][i], after[n][i])
        for n in LISTS
        for i in range(len(before[n]))
    ]
    for name, was, now in pairs:
        wanted = [was[row] for row in rows]
        if now.shape == (len(rows), *was.shape[1:]) and all(
            torch.equal(now[i], one) for i, one in enumerate(wanted)
        ):
            continue
        if now.shape == was.shape and torch.equal(now, was):
            why = "still has its old rows"
        elif now.shape[1:] != was.shape[1:]:
            why = f"has shape {tuple(now.shape)}: another dimension than the batch was chosen"
        elif now.shape[0] != len(rows):
            why = f"has {now.shape[0]} rows"
        else:
            why = "has other rows, or the same in another order"
        raise Wrong(
            f"{asked}: {name} {why}. A row of the batch is one sequence, and every tensor "
            "of the state has a part of it: expected row "
            f"{', '.join(map(str, rows))} of each."
        )
    _counters(after, {name: int(before[name]) for name in COUNTERS}, asked)


def drops(drop_newest: Answer, state: State, count: int) -> None:
    """The newest `count` tokens must be gone from the window, and nothing else."""
    before = _copy(state)
    window = before["key_residual"].shape[TOKENS]
    asked = f"drop_newest of {count} with {window} in the window"
    try:
        after = drop_newest(state, count)
    except ValueError as error:
        raise Wrong(
            f"{asked} was refused with ValueError: {error}. Expected: 0 and every number up "
            "to the tokens of the window are accepted."
        ) from None
    _unchanged(before, state, "drop_newest")
    _state_form(after, "drop_newest")
    for name in WINDOWS:
        was, now = before[name], after[name]
        left = now.shape[TOKENS] if now.ndim == 4 else -1
        if left == window - count and torch.equal(now, was[:, :, : window - count]):
            continue
        if count == 0 and left == 0:
            why = ": a slice that ends at -0 ends at 0, and is empty"
        elif left == window - count and torch.equal(now, was[:, :, count:]):
            why = ": the oldest ones are gone, not the newest"
        elif left == count:
            why = ": only the newest ones are left"
        elif left == window:
            why = ": nothing was dropped"
        else:
            why = ""
        raise Wrong(
            f"{asked}: {name} has {left} tokens{why}. Expected its first {window - count}."
        )
    for name in LISTS:
        expect(
            len(after[name]) == len(before[name])
            and all(map(torch.equal, after[name], before[name])),
            f"{asked}: {name} is no longer what it was. Segments stay.",
        )
    counters = {
        "quantized_tokens": int(before["quantized_tokens"]),
        "total_tokens": int(before["total_tokens"]) - count,
    }
    _counters(after, counters, asked)


def refuses_to_drop(drop_newest: Answer, state: State, count: int) -> None:
    """A count below 0 or beyond the window must be refused with a ValueError."""
    window = state["key_residual"].shape[TOKENS]
    checks.refuses(
        drop_newest,
        state,
        count,
        names="count",
        given=count,
        because=f"it is {count}, with {window} in the window",
    )


def _counters(after: State, wanted: dict[str, int], asked: str) -> None:
    for name, number in wanted.items():
        expect(
            int(after[name]) == number,
            f"{asked}: {name} is {int(after[name])}; expected {number}.",
        )


def _state_form(state: Any, function: str) -> None:
    if state is None:
        raise Wrong(f"{function} returned None. It must return the new state.")
    expect(
        isinstance(state, dict),
        f"{function} returned {_kind(state)}; a state, a dict, is expected.",
    )
    missing = [n for n in (*LISTS, *WINDOWS, *COUNTERS) if n not in state]
    expect(not missing, f"the state from {function} lacks {', '.join(missing)}.")
    for name in (*LISTS, *WINDOWS):
        held = state[name] if name in LISTS else [state[name]]
        expect(
            isinstance(held, list | tuple) and all(isinstance(t, Tensor) for t in held),
            f"in the state from {function}, {name} is {_kind(state[name])}.",
        )


def _same(one: State, other: State) -> bool:
    """Whether two states hold the same values."""
    if any(name not in one for name in (*LISTS, *WINDOWS, *COUNTERS)):
        return False
    return (
        all(torch.equal(one[n], other[n]) for n in WINDOWS)
        and all(int(one[n]) == int(other[n]) for n in COUNTERS)
        and all(
            len(one[n]) == len(other[n]) and all(map(torch.equal, one[n], other[n]))
            for n in LISTS
        )
    )


def _unchanged(before: State, after: Any, function: str) -> None:
    expect(
        isinstance(after, dict) and _same(after, before),
        f"{function} changed the state that it was given. Return new lists and tensors; the "
        "old state must stay as it was.",
    )
