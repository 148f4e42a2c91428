"""One layer of the cache: exact sinks, quantized segments, an exact window.

Used by `kvlab.cache.mixed`, which makes one for each layer of a model. Never changes a token it
has quantized, and touches nothing but the window and one new group when it flushes.

Where a token stands, oldest first:  sinks (exact) | segments (quantized) | window (exact).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvlab.cache.packing import Step
from kvlab.cache.scratch import Scratch
from kvlab.cache.segment import Segment
from kvlab.cache.settings import CacheSettings

# Every segment costs a dozen operations at each step, so there are to be few, yet without much unused
# room, and without ever copying one into a larger one. The first has room for the prompt's groups and
# this share more; a later one for this many groups, or for this share of all before it.
FIRST_SPARE = 1 / 8
LEAST_GROUPS = 8
GROWTH = 1 / 2


@dataclass
class ExactTokens:
    """Sinks and window, in the model's dtype, with room for more: [batch, heads, room, head_dim]."""

    keys: Tensor
    values: Tensor


class Plan:
    """How one layer is restored, prepared once and used until it flushes or changes.

    version       of the shared buffers that it writes into
    keys, values  the shared buffers: [batch, heads, room, head_dim]
    steps         the operations that write sinks and segments into them, in turn
    """

    def __init__(
        self, version: int, keys: Tensor, values: Tensor, steps: list[Step]
    ) -> None:
        self.version, self.keys, self.values = version, keys, values
        self.steps = steps

    def __deepcopy__(self, memo: Any) -> None:
        """A copied layer has other storage: it prepares a plan of its own."""


class MixedAxisLayer(CacheLayerMixin):
    """Keys and Values of one attention layer; `MixedAxisCache` says what each method promises."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, settings: CacheSettings, scratch: Scratch) -> None:
        super().__init__()
        self.settings = settings
        self.scratch = scratch
        self.exact: ExactTokens | None = None
        self.exact_tokens = 0
        self.quantized_tokens = 0
        self.segments: list[Segment] = []
        self._plan: Plan | None = None

    # ---- what it holds --------------------------------------------------------------------------

    @property
    def sink_tokens(self) -> int:
        """Exact tokens at the start."""
        return min(self.settings.sink_tokens, self.exact_tokens)

    @property
    def window_tokens(self) -> int:
        """Exact tokens at the end."""
        return self.exact_tokens - self.sink_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens held: codes, scales, minima, window, sinks."""
        exact = 0
        if self.exact is not None:
            for tensor in (self.exact.keys, self.exact.values):
                exact += tensor[:, :, : self.exact_tokens].nbytes
        return exact + sum(segment.nbytes for segment in self.segments)

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of the storage, unused room included."""
        exact = 0
        if self.exact is not None:
            for tensor in (self.exact.keys, self.exact.values):
                exact += tensor.untyped_storage().nbytes()
        return exact + sum(segment.allocated_nbytes for segment in self.segments)

    def get_seq_length(self) -> int:
        return self.exact_tokens + self.quantized_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older versions of transformers

    # ---- taking tokens in -----------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        for name, states in (("key", key_states), ("value", value_states)):
            axis = getattr(self.settings, f"{name}_axis")
            if axis == "token" and states.shape[-1] % self.settings.group_size:
                raise ValueError(
                    f"{name}_axis 'token' makes groups of {self.settings.group_size} along "
                    f"head_dim, but head_dim is {states.shape[-1]}, no multiple of it: choose a "
                    "group_size that divides it, or the axis 'channel'"
                )
        self.dtype, self.device = key_states.dtype, key_states.device
        self._rows = (key_states.shape[:2], value_states.shape[:2])
        self._make_room(key_states, value_states, 0)
        self.is_initialized = True

    @torch.no_grad()
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes new tokens in and gives all tokens for this step's attention.

        key_states, value_states  [batch, heads, new, head_dim]
        return  [batch, heads, all, head_dim] each. Tokens that this step flushes are still exact
                in it. The tensors are valid until the next update of any layer of the cache:
                layers share the buffer they are restored into
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check(key_states, value_states)
        flushed = self._tokens_to_flush(key_states.shape[2])
        if self.get_seq_length() == 0:
            self._store(key_states, value_states, flushed)
            return key_states, value_states
        if flushed:
            joined = self._joined(key_states, value_states)
            self._store(key_states, value_states, flushed)
            return joined
        self._store(key_states, value_states, 0)
        if not self.segments:
            return self._exact_views(0, self.exact_tokens)
        return self._joined()

    def restored(self) -> tuple[Tensor, Tensor]:
        """All tokens as the next step will see them, in tensors of their own.

        return  [batch, heads, tokens, head_dim] each
        raises  ValueError when the layer is empty
        """
        if self.exact is None:
            raise ValueError("the layer is empty: nothing to restore")
        with torch.no_grad():
            keys, values = self._joined()
        return keys.clone(), values.clone()

    def _check(self, key_states: Tensor, value_states: Tensor) -> None:
        if (key_states.shape[:2], value_states.shape[:2]) == self._rows:
            return
        raise ValueError(
            f"the cache holds [batch, heads] = {[*self._rows[0]]}, but new tokens come as "
            f"{[*key_states.shape[:2]]}: use one cache for one batch, or reset it"
        )

    def _tokens_to_flush(self, new: int) -> int:
        """How many of the oldest tokens of the window leave it when new ones come."""
        exact = self.exact_tokens + new
        over = exact - self.settings.sink_tokens - self.settings.window
        return max(over // self.settings.group_size, 0) * self.settings.group_size

    def _store(self, key_states: Tensor, value_states: Tensor, flushed: int) -> None:
        new = key_states.shape[2]
        if not flushed:
            self._make_room(key_states, value_states, self.exact_tokens + new)
            keys, values = self._exact_views(self.exact_tokens, self.exact_tokens + new)
            keys.copy_(key_states)
            values.copy_(value_states)
            if self.exact_tokens < self.settings.sink_tokens:
                self._plan = None  # it knows of fewer sinks
            self.exact_tokens += new
            return
        sinks = self.settings.sink_tokens
        missing = sinks - self.sink_tokens
        if missing:
            self._store(key_states[:, :, :missing], value_states[:, :, :missing], 0)
            key_states, value_states = (
                key_states[:, :, missing:],
                value_states[:, :, missing:],
            )
        window = self._exact_views(sinks, self.exact_tokens)
        keys = torch.cat((window[0], key_states), dim=2)
        values = torch.cat((window[1], value_states), dim=2)
        self._flush(keys[:, :, :flushed], values[:, :, :flushed])
        self.exact_tokens = sinks
        self._store(keys[:, :, flushed:], values[:, :, flushed:], 0)

    def _flush(self, keys: Tensor, values: Tensor) -> None:
        """Quantizes whole groups: into the last segment, or into a new one when it is full."""
        groups = keys.shape[2] // self.settings.group_size
        if not self.segments or not self.segments[-1].has_room_for(groups):
            before = sum(segment.groups for segment in self.segments)
            room = max(groups, LEAST_GROUPS, int(before * GROWTH))
            if not before:
                room = groups + math.ceil(groups * FIRST_SPARE)
            with torch.inference_mode(False):
                segment = Segment.empty(keys, values, room, self.settings)
            self.segments.append(segment)
        self.segments[-1].append(keys, values)
        self.quantized_tokens += keys.shape[2]
        self._plan = None

    def _make_room(self, keys: Tensor, values: Tensor, tokens: int) -> None:
        """Makes the exact tokens' storage large enough; keeps what is in it."""
        held = self.exact
        if held is not None and tokens <= held.keys.shape[2]:
            return
        settings = self.settings
        self._plan = None
        most = settings.sink_tokens + settings.window + settings.group_size - 1
        room = min(most, max(2 * tokens, 128))
        with torch.inference_mode(False):
            self.exact = ExactTokens(
                *(x.new_empty((*x.shape[:2], room, x.shape[3])) for x in (keys, values))
            )
        if held is not None and self.exact_tokens:
            for old, new in zip(
                (held.keys, held.values),
                self._exact_views(0, self.exact_tokens),
                strict=True,
            ):
                new.copy_(old[:, :, : self.exact_tokens])

    # ---- giving tokens back ---------------------------------------------------------------------

    def _exact_views(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        assert self.exact is not None
        tokens = end - start
        return (
            self.exact.keys.narrow(2, start, tokens),
            self.exact.values.narrow(2, start, tokens),
        )

    def _joined(self, *new: Tensor) -> tuple[Tensor, Tensor]:
        """Sinks, restored segments and window, in the shared buffers.

        new  Keys and Values to put behind them: [batch, heads, new, head_dim] each
        """
        sinks, window = self.sink_tokens, self.window_tokens
        start = sinks + self.quantized_tokens
        held = start + window
        total = held + (new[0].shape[2] if new else 0)
        plan = self._ready_plan(total)
        for step in plan.steps:
            step()
        if window:
            # narrow: half the cost of the slice that says the same
            for out, exact in zip(
                (plan.keys, plan.values),
                self._exact_views(sinks, sinks + window),
                strict=True,
            ):
                out.narrow(2, start, window).copy_(exact)
        for out, states in zip((plan.keys, plan.values), new, strict=False):
            out.narrow(2, held, total - held).copy_(states)
        return plan.keys.narrow(2, 0, total), plan.values.narrow(2, 0, total)

    def _ready_plan(self, total: int) -> Plan:
        """The plan of before while it still holds, or a new one, for some tokens in all."""
        assert self.exact is not None
        plan = self._plan
        if (
            plan is not None
            and plan.version == self.scratch.version
            and total <= plan.keys.shape[2]
        ):
            return plan
        version = -1
        # making a plan can make buffers, after which the views made before are out of date
        while version != self.scratch.version:
            version = self.scratch.version
            keys = self.scratch.rows("keys", self.exact.keys, total)
            values = self.scratch.rows("values", self.exact.values, total)
            steps = self._steps(keys, values)
        self._plan = Plan(version, keys, values, steps)
        return self._plan

    def _steps(self, keys: Tensor, values: Tensor) -> list[Step]:
        """What writes sinks and segments: [batch, heads, room, head_dim] each."""
        steps: list[Step] = []
        sinks = self.sink_tokens
        for out, exact in zip((keys, values), self._exact_views(0, sinks), strict=True):
            if sinks:
                steps.append(partial(out[:, :, :sinks].copy_, exact))
        start = sinks
        for segment in self.segments:
            end = start + segment.tokens
            steps += segment.restoring(
                keys[:, :, start:end], values[:, :, start:end], self.scratch
            )
            start = end
        return steps

    # ---- changing what it holds -----------------------------------------------------------------

    def reset(self) -> None:
        """Empties the layer; its storage goes."""
        self.exact, self.exact_tokens = None, 0
        self.segments, self.quantized_tokens = [], 0
        self._plan = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets tokens from the end: a number below 0 says how many.

        A group that the cut goes through stays quantized as it is and only gets shorter; tokens
        that come later start a group of their own. A flush is not undone.
        raises ValueError for a number above 0
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the number of tokens to remove as a negative number, got "
                f"{tokens_to_remove}"
            )
        remove = -tokens_to_remove
        from_window = min(remove, self.window_tokens)
        self.exact_tokens -= from_window
        remove -= from_window
        if not remove:
            return
        self._plan = None
        while remove and self.segments:
            last = self.segments[-1]
            from_last = min(remove, last.tokens)
            if from_last == last.tokens:
                self.segments.pop()
            else:
                last.keep(last.tokens - from_last)
            self.quantized_tokens -= from_last
            remove -= from_last
        self.exact_tokens = max(self.exact_tokens - remove, 0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes other batch rows, in another order: [new batch] of row numbers."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.exact is not None:
            rows = torch.as_tensor(indices, device=self.exact.keys.device)
            self._on_batch(lambda x: x[rows])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._on_batch(lambda x: x.repeat_interleave(repeats, dim=0))

    @torch.no_grad()
    def _on_batch(self, choose: Callable[[Tensor], Tensor]) -> None:
        if self.exact is None:
            return
        with torch.inference_mode(False):
            self.exact = ExactTokens(choose(self.exact.keys), choose(self.exact.values))
        self._rows = (self.exact.keys.shape[:2], self.exact.values.shape[:2])
        self.segments = [segment.on_batch(choose) for segment in self.segments]
        self._plan = None

    def offload(self) -> None:
        raise NotImplementedError(
            "a MixedAxisCache cannot be offloaded to another device"
        )

    prefetch = offload
