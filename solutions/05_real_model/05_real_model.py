# %% [markdown] lang="en"
# # Lab 05 · In a real model
#
# In labs 03 and 04 you quantized Keys and Values that somebody had captured.
# Nobody used the result to write a sentence. In this lab your own functions
# become the cache of a language model that runs on your machine. It writes a
# text with them, you measure how much worse it predicts, and at the end you
# break it on one axis and not on the other.
#
# **After this lab you can**
#
# - say what a model asks of its cache, and in which order a layer has to read
#   and to store;
# - build a cache for transformers out of your own quantizer, so that greedy
#   decoding and beam search work with it;
# - compare caches on the same text, with bytes, time and a standard error;
# - show a friend why the axis of the scales matters, with one picture.
#
# **You need** lab 04 (packed codes, groups, whole groups leave the window). Its
# functions are pasted here as TODO 1.
#
# **Time** about 90 minutes. **Difficulty** 3 of 5; TODO 3 has the fewest lines
# and the most ways to go wrong. **Points** 20, for the four TODOs. The three
# written questions are outside these points: a person reads your answers.

# %% nbgrader={"grade_id": "setup", "locked": true}
# the builder puts kvlab/first_cell.py here

# %% nbgrader={"grade_id": "given_imports", "locked": true}
import contextlib
import importlib.util
import json
import math
import os
import textwrap
import time
import warnings
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import kvlab.checks.groups
import kvlab.checks.model
import kvlab.plots.model
import torch
from torch import Tensor

# %% [markdown] lang="en"
# ## 1 · What a model asks of its cache
#
# A transformer with 30 layers has a cache with 30 parts, one for each layer.
# When the model runs over new tokens, every layer computes their Keys and
# Values, hands them to *its* part of the cache, and gets back what attention
# shall read: the Keys and Values of **all** tokens so far. In transformers the
# whole traffic is a handful of methods. The class `CacheLayerMixin` lists them:
#
# | method of a layer | the model or `generate` calls it to | who writes it here |
# |---|---|---|
# | `update(key_states, value_states)` | hand over new tokens, and get all of them back | you: TODO 2 and 3 |
# | `get_seq_length()` | know how many tokens are there, so that the new ones get the right positions | you: TODO 4 |
# | `get_mask_sizes(query_length)` | build the attention mask: how many Keys will come back | given: length + new tokens |
# | `get_max_length()` | know whether there is a limit | given: -1, no limit |
# | `reorder_cache(beam_idx)` | keep the best sequences of a beam search | you: TODO 4 |
# | `crop(-n)` | take back tokens that were only a guess | you: TODO 4 |
# | `reset()` | start again with an empty cache | given: forget the state |
#
# Nobody asks *how* a layer stores its tokens. So it may store packed codes, as
# long as `update` gives floats back.
#
# Two things to remember from labs 03 and 04. The order of the dimensions is
# `[batch, heads, tokens, head_dim]`. And what a layer holds is the **state** of
# lab 04: a dictionary with segments (codes, scales, minima), a window, and
# three counters.

# %% [markdown] lang="en"
# ## TODO 1 · Bring your functions
#
# Copy five functions from your lab 04 into the next cell: `pack` and `unpack`
# (TODO 1 there), `quantize_key_groups` and `quantize_value_groups` (TODO 2),
# `append_by_groups` (TODO 3). Replace the whole cell. Nothing is new, so a
# function that was right there is right here.
#
# If your lab 04 lies in its usual place, this cell can print the three cells
# for you to copy.

# %%
SHOW_MY_LAB_04 = False  # True prints your code

lab_04 = Path("../04_packed_groups/04_packed_groups.ipynb")
if not lab_04.is_file():
    print("No lab 04 beside this lab. Open yours and copy from there.")
elif not SHOW_MY_LAB_04:
    print("Your lab 04 is there. SHOW_MY_LAB_04 = True prints what to copy.")
else:
    for cell in json.loads(lab_04.read_text(encoding="utf-8"))["cells"]:
        grade_id = cell["metadata"].get("nbgrader", {}).get("grade_id")
        if grade_id in ("todo_1", "todo_2", "todo_3"):
            print("".join(cell["source"]), end="\n\n\n")

# %% nbgrader={"grade_id": "todo_1", "solution": true} todo="TODO 1: bring your functions from lab 04"
def pack(codes: Tensor, bits: int) -> Tensor:
    """Lab 04, TODO 1: 8 / bits codes in each byte."""
    ### BEGIN SOLUTION
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8, got {bits}")
    if codes.numel() and int(codes.max()) >= 2**bits:
        raise ValueError(
            f"codes must be below {2**bits} at {bits} bits, "
            f"got {int(codes.max())}"
        )
    per_byte = 8 // bits
    missing = -codes.shape[-1] % per_byte
    filled = torch.nn.functional.pad(codes, (0, missing))
    parts = filled.unflatten(-1, (-1, per_byte))
    packed = torch.zeros_like(parts[..., 0])
    for place in range(per_byte):
        packed |= parts[..., place] << (place * bits)
    return packed
    ### END SOLUTION


def unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """Lab 04, TODO 1: the codes that were packed, `length` of them."""
    ### BEGIN SOLUTION
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8, got {bits}")
    if packed.shape[-1] != math.ceil(length * bits / 8):
        raise ValueError(
            f"length {length} at {bits} bits does not take "
            f"{packed.shape[-1]} bytes"
        )
    mask = 2**bits - 1
    parts = [(packed >> down) & mask for down in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)[..., :length]
    ### END SOLUTION


def quantize_key_groups(
    key: Tensor, bits: int = 4, group_size: int = 32, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """Lab 04, TODO 2: codes, scale and minimum, groups along tokens."""
    ### BEGIN SOLUTION
    if key.ndim != 4:
        raise ValueError(
            "key must be [batch, heads, tokens, head_dim], "
            f"got shape {tuple(key.shape)}"
        )
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8, got {bits}")
    tokens = key.shape[2]
    if group_size < 1 or tokens % group_size:
        raise ValueError(
            f"group_size must divide the {tokens} tokens, got {group_size}"
        )
    largest = 2**bits - 1
    groups = key.float().unflatten(2, (-1, group_size))
    low = groups.amin(dim=3, keepdim=True)
    high = groups.amax(dim=3, keepdim=True)
    scale = ((high - low) / largest).clamp(min=eps).half()
    minimum = low.half()
    steps = (groups - minimum.float()) / scale.float()
    codes = steps.round().clamp(0, largest).to(torch.uint8)
    return codes.flatten(2, 3), scale.squeeze(3), minimum.squeeze(3)
    ### END SOLUTION


def quantize_value_groups(
    value: Tensor, bits: int = 4, group_size: int = 32, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """Lab 04, TODO 2: codes, scale and minimum, groups along head_dim."""
    ### BEGIN SOLUTION
    if value.ndim != 4:
        raise ValueError(
            "value must be [batch, heads, tokens, head_dim], "
            f"got shape {tuple(value.shape)}"
        )
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8, got {bits}")
    head_dim = value.shape[3]
    if group_size < 1 or head_dim % group_size:
        raise ValueError(
            f"group_size must divide head_dim {head_dim}, got {group_size}"
        )
    largest = 2**bits - 1
    groups = value.float().unflatten(3, (-1, group_size))
    low = groups.amin(dim=4, keepdim=True)
    high = groups.amax(dim=4, keepdim=True)
    scale = ((high - low) / largest).clamp(min=eps).half()
    minimum = low.half()
    steps = (groups - minimum.float()) / scale.float()
    codes = steps.round().clamp(0, largest).to(torch.uint8)
    return codes.flatten(3, 4), scale.squeeze(4), minimum.squeeze(4)
    ### END SOLUTION


def append_by_groups(
    state: dict | None,
    new_key: Tensor,
    new_value: Tensor,
    residual_length: int,
    group_size: int,
    quantize_key,
    quantize_value,
) -> dict:
    """Lab 04, TODO 3: the state after new tokens; whole groups flush."""
    ### BEGIN SOLUTION
    segments = [
        f"{side}_{part}_segments"
        for side in ("key", "value")
        for part in ("q", "scale", "minimum")
    ]
    if state is None:
        lists = {name: [] for name in segments}
        keys, values = new_key, new_value
        quantized = 0
    else:
        lists = {name: list(state[name]) for name in segments}
        keys = torch.cat([state["key_residual"], new_key], dim=2)
        values = torch.cat([state["value_residual"], new_value], dim=2)
        quantized = state["quantized_tokens"]

    too_many = max(0, keys.shape[2] - residual_length)
    flushed = too_many // group_size * group_size
    if flushed:
        parts = (
            *quantize_key(keys[:, :, :flushed]),
            *quantize_value(values[:, :, :flushed]),
        )
        for name, part in zip(segments, parts, strict=True):
            lists[name].append(part)

    return lists | {
        "key_residual": keys[:, :, flushed:].clone(),
        "value_residual": values[:, :, flushed:].clone(),
        "flushed_tokens": flushed,
        "quantized_tokens": quantized + flushed,
        "total_tokens": quantized + keys.shape[2],
    }
    ### END SOLUTION


# %% [markdown] lang="en"
# **Tested:** `pack` and `unpack`, as in lab 04.
#
# **Why:** everything below is stored through them.
#
# **Expected:** the codes 5 and 3 at 4 bits are the byte 53, and what goes in
# comes out.

# %% nbgrader={"grade_id": "test_todo_1", "grade": true, "points": 1}
def test_two_codes_are_one_byte():
    codes = torch.tensor([5, 3], dtype=torch.uint8)
    checks.groups.packs(pack, codes, bits=4)
    checks.groups.round_trip(pack, unpack, codes, 4)


with checks.todo(1):
    with checks.model.from_lab_04(1):
        test_two_codes_are_one_byte()
    ### BEGIN HIDDEN TESTS
    with checks.model.from_lab_04(1):
        for bits in (2, 4, 8):
            for shape in [(2**bits,), (3, 7), (2, 3, 4, 6)]:
                codes = checks.groups.some_codes(*shape, bits=bits, seed=bits)
                checks.groups.packs(pack, codes, bits)
                checks.groups.round_trip(pack, unpack, codes, bits)
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** the two quantizers: which way the groups run, and every code.
#
# **Why:** a swapped axis still runs, and it is just what this lab is about.
#
# **Expected:** Keys along tokens, Values along head_dim.

# %% nbgrader={"grade_id": "test_todo_1_groups", "grade": true, "points": 2}
def test_which_way_the_groups_run():
    given = checks.groups.example(2, 3, 8, 12, seed=1)
    checks.groups.quantizes_keys(quantize_key_groups, given, 4, group_size=4)
    checks.groups.quantizes_values(
        quantize_value_groups, given, 4, group_size=4
    )


with checks.todo(1):
    with checks.model.from_lab_04(2):
        test_which_way_the_groups_run()
    ### BEGIN HIDDEN TESTS
    with checks.model.from_lab_04(2):
        for seed, bits in enumerate((2, 4, 8)):
            given = checks.groups.example(1, 4, 6, 9, seed=40 + seed)
            checks.groups.quantizes_keys(
                quantize_key_groups, given, bits, group_size=2
            )
            checks.groups.quantizes_values(
                quantize_value_groups, given, bits, group_size=3
            )
            given = given / 8 + 100
            checks.groups.nearest_keys(
                quantize_key_groups, given, bits, group_size=3
            )
            checks.groups.nearest_values(
                quantize_value_groups, given, bits, group_size=3
            )
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** `append_by_groups`: the window and the segments after every call.
#
# **Why:** a token that is lost here is lost for the whole text.
#
# **Expected:** only whole groups leave, the oldest first, and no segment
# changes.

# %% nbgrader={"grade_id": "test_todo_1_append", "grade": true, "points": 1}
def test_whole_groups_leave():
    checks.groups.window(append_by_groups, [5, 1, 1, 6], 2, 3)
    checks.groups.segments(append_by_groups, [5, 6], 2, 3)


with checks.todo(1):
    with checks.model.from_lab_04(3):
        test_whole_groups_leave()
    ### BEGIN HIDDEN TESTS
    with checks.model.from_lab_04(3):
        for residual, size in ((1, 2), (4, 4), (3, 1)):
            checks.groups.window(
                append_by_groups, [7, *[1] * 5, 3], residual, size
            )
            checks.groups.segments(
                append_by_groups, [7, *[1] * 5, 3], residual, size
            )
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# ## 2 · Floats out of packed segments
#
# Attention wants floats. So the layer has to undo, in every step, what it did
# when it stored: `unpack` the codes of each segment, and `restore` them. The
# function `restore` is the one that lab 04 gave you.

# %% nbgrader={"grade_id": "given_restore", "locked": true}
def restore(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Floats: codes x scale + minimum. Each scale serves a run of codes.

    codes           uint8 [batch, heads, tokens, head_dim], not packed
    scale, minimum  the same number of dimensions; sizes that divide those
    return          float32, shaped like codes
    """
    for axis in range(codes.ndim):
        run = codes.shape[axis] // scale.shape[axis]
        scale = scale.repeat_interleave(run, dim=axis)
        minimum = minimum.repeat_interleave(run, dim=axis)
    return codes.float() * scale.float() + minimum.float()


# %% [markdown] lang="en"
# ## TODO 2 · Restore all segments
#
# A state has three lists a side, `key_q_segments`, `key_scale_segments`,
# `key_minimum_segments`, and the same for `value`. The i-th entries of the
# three belong together, and the oldest segment is the first. The lists can be
# empty: then there are no quantized tokens, and the result is a tensor with 0
# tokens. Batch, heads and `head_dim` can be read off the window, `key_residual`
# and `value_residual`, even when it is empty.
#
# `unpack` is an argument here, so that a wrong TODO 1 does not cost this TODO
# its points. Call the argument.

# %% nbgrader={"grade_id": "todo_2", "solution": true} todo="TODO 2: restore all segments"
def restore_segments(
    state: dict, bits: int, dtype: torch.dtype, unpack
) -> tuple[Tensor, Tensor]:
    """The quantized tokens of a layer as floats, oldest first.

    state   as append_by_groups returns it, with packed codes
    bits    of a code: 2, 4 or 8
    dtype   of the result; compute in float32 and convert at the end
    unpack  unpack(packed, bits, length) gives the codes, uint8
    return  keys, values: each [batch, heads, quantized tokens, head_dim],
            without the window; state is not changed
    """
    # for Keys, then for Values:
    # 1. take the three lists of segments
    # 2. of each segment, unpack the codes (how many has a row?) and restore
    # 3. join the segments along tokens; without any, 0 tokens
    # 4. dtype
    ### BEGIN SOLUTION
    sides = []
    for side in ("key", "value"):
        window = state[f"{side}_residual"]
        parts = [window[:, :, :0].to(dtype)]
        for packed, scale, minimum in zip(
            state[f"{side}_q_segments"],
            state[f"{side}_scale_segments"],
            state[f"{side}_minimum_segments"],
            strict=True,
        ):
            codes = unpack(packed, bits, window.shape[3])
            parts.append(restore(codes, scale, minimum).to(dtype))
        sides.append(torch.cat(parts, dim=2))
    return sides[0], sides[1]
    ### END SOLUTION


# %% [markdown] lang="en"
# **Tested:** every value of states with one, two and more segments. The codes
# are stored in a way of the test's own, and the `unpack` that you are given
# fits it.
#
# **Why:** segments in another order are another text.
#
# **Expected:** `code x scale + minimum`, all segments, in the order of the
# lists.

# %% nbgrader={"grade_id": "test_todo_2", "grade": true, "points": 3}
def test_two_segments_in_order():
    state = checks.model.made_state(segments=[4, 2], window=3)
    checks.model.restores(restore_segments, state)


with checks.todo(2):
    test_two_segments_in_order()
    ### BEGIN HIDDEN TESTS
    for seed, segments in enumerate([[2], [6, 4], [2, 4, 2, 8], [4, 4]]):
        for bits in (8, 4, 2):
            state = checks.model.made_state(
                segments, window=1 + seed, bits=bits, seed=10 + seed
            )
            checks.model.restores(restore_segments, state, bits)
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** a state without segments, an empty window, half precision.
#
# **Why:** the first tokens of every text meet a layer that has nothing to
# restore.
#
# **Expected:** 0 tokens, all other sizes as they are, and the dtype that was
# asked for.

# %% nbgrader={"grade_id": "test_todo_2_edges", "grade": true, "points": 2}
def test_no_segment_yet():
    state = checks.model.made_state(segments=[], window=3)
    checks.model.restores(restore_segments, state)


def test_half_precision():
    state = checks.model.made_state([2, 2], window=1, dtype=torch.float16)
    checks.model.restores(restore_segments, state, dtype=torch.float16)


with checks.todo(2):
    test_no_segment_yet()
    test_half_precision()
    ### BEGIN HIDDEN TESTS
    for seed, dtype in enumerate(
        (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ):
        for segments, window in (([], 4), ([4, 6], 0), ([2], 3)):
            state = checks.model.made_state(
                segments, window, dtype=dtype, seed=20 + seed
            )
            checks.model.restores(restore_segments, state, dtype=dtype)
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# ## 3 · One step of a layer
#
# Now the heart: `update`. The layer holds a state, new tokens come, and two
# things have to happen.
#
# 1. **Read.** Attention gets the quantized tokens, restored; then the window;
#    then the new tokens. The window and the new tokens are exact, and the order
#    is the order of arrival.
# 2. **Store.** The new tokens are appended. This may make the window too long,
#    and then a whole group is quantized.
#
# The order matters. A token that is quantized in this step is still read exact
# in it. This is why a long prompt costs nothing in quality while it is read:
# all its tokens are new in the same step. The quantized caches of transformers
# work that way, too.

# %%
plots.show(
    plots.model.step(quantized=8, window=7, new=1, flushed=4),
    alt="Three rows of numbered tokens. Stored before the step: tokens 1 to 8 "
    "as packed codes, 9 to 15 in the window. Attention reads 1 to 8 restored, "
    "9 to 15 from the window and the new token 16, all in order. Stored after "
    "the step: 1 to 12 as packed codes, 13 to 16 in the window.",
)

# %% [markdown] lang="en"
# **What to see.** The window keeps at least 4 tokens here and groups have 4.
# With token 16 the window is full: tokens 9 to 12 leave it. In this step
# attention still reads them exact (middle row, yellow); from the next step on
# it reads them restored. Codes are drawn flat, because they take less room.

# %% [markdown] lang="en"
# ## TODO 3 · Read, then store
#
# Write the step as a function. It gets two functions as arguments: one that
# restores (TODO 2), and one that appends (TODO 1). Use these two, and the
# window of the state; do not look at the segments.

# %% nbgrader={"grade_id": "todo_3", "solution": true} todo="TODO 3: one step of a layer"
def update_layer(
    state: dict | None,
    key_states: Tensor,
    value_states: Tensor,
    restore_prefix,
    append,
) -> tuple[Tensor, Tensor, dict]:
    """What attention reads in this step, and the state after it.

    state           None in the first step, else what the last step returned
    key_states,     new tokens, [batch, heads, new, head_dim]
    value_states
    restore_prefix  restore_prefix(state, dtype) gives keys, values of all
                    quantized tokens, [batch, heads, quantized, head_dim] in
                    dtype; quantized may be 0; state must not be None
    append          append(state, key, value) gives the next state; state may
                    be None
    return          keys, values: [batch, heads, all tokens, head_dim], dtypes
                    of key_states and value_states: the quantized tokens,
                    the window, the new tokens; and the next state
    """
    # 1. no state: the new tokens are all there is to read
    # 2. else: restored tokens, key_residual or value_residual, new tokens
    # 3. append the new tokens, once, to the state that came in
    ### BEGIN SOLUTION
    keys, values = key_states, value_states
    if state is not None:
        old_keys, old_values = restore_prefix(state, key_states.dtype)
        keys = torch.cat([old_keys, state["key_residual"], keys], dim=2)
        values = torch.cat(
            [old_values, state["value_residual"], values], dim=2
        )
    return keys, values, append(state, key_states, value_states)
    ### END SOLUTION


# %% [markdown] lang="en"
# **Tested:** what comes back in every step: a prompt, single tokens, several
# tokens, before and after a flush. The two functions that you are given lose
# nothing, but mark what they restore.
#
# **Why:** the model reads whatever you return, and does not complain.
#
# **Expected:** all tokens once, oldest first. Only tokens that were quantized
# *before* this step come restored.

# %% nbgrader={"grade_id": "test_todo_3", "grade": true, "points": 3}
def test_what_attention_reads():
    checks.model.reads(update_layer, arrivals=[7, 1, 1, 1, 4, 1], keep=3)


with checks.todo(3):
    test_what_attention_reads()
    ### BEGIN HIDDEN TESTS
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        checks.model.reads(update_layer, [9, 1, 1, 1, 1, 2], 2, dtype)
    checks.model.reads(update_layer, [1] * 12, 1)
    checks.model.reads(update_layer, [2, 11, 3], 4)
    checks.model.reads(update_layer, [5, 1, 3], 40)
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** what is stored: what `append` was given, and which state comes
# back.
#
# **Why:** a restored token that is appended again is quantized a second time,
# and its error grows with every step.
#
# **Expected:** the new tokens go to `append`, once, as they came; its result is
# the next state.

# %% nbgrader={"grade_id": "test_todo_3_stored", "grade": true, "points": 2}
def test_what_is_stored():
    checks.model.stores(update_layer, arrivals=[7, 1, 1, 1, 4, 1], keep=3)


with checks.todo(3):
    test_what_is_stored()
    ### BEGIN HIDDEN TESTS
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        checks.model.stores(update_layer, [9, 1, 1, 1, 1, 2], 2, dtype)
    checks.model.stores(update_layer, [1] * 9, 1)
    checks.model.stores(update_layer, [5, 1, 3], 40)
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** your step inside a transformer: a llama with two layers and random
# weights, made on the spot. First with a window longer than the text, so that
# nothing is quantized; then, hidden, with a real quantizer at 8 bits.
#
# **Why:** the mask, the positions and your tokens have to fit together.
#
# **Expected:** without quantization the logits of `DynamicCache`, the same
# numbers. At 8 bits they differ by at most 0.1. (Measured with a right answer:
# 0.03. The logits go from -6 to 5, and at 4 bits they would differ by more.)

# %% nbgrader={"grade_id": "test_todo_3_model", "grade": true, "points": 1}
def test_logits_are_those_of_dynamic_cache():
    checks.model.same_as_dynamic(update_layer, arrivals=[9, 1, 1, 1, 5])


with checks.todo(3):
    test_logits_are_those_of_dynamic_cache()

    ### BEGIN HIDDEN TESTS
    def quantized_8_bits(tokens: Tensor, along: int) -> tuple:
        """Groups of 4 along a dimension: codes, scale, minimum."""
        groups = tokens.unflatten(along, (-1, 4))
        minimum = groups.amin(dim=along + 1).half()
        span = groups.amax(dim=along + 1) - minimum.float()
        scale = (span / 255).clamp(min=1e-5).half()
        low, step = (
            part.float().repeat_interleave(4, dim=along)
            for part in (minimum, scale)
        )
        codes = ((tokens - low) / step).round().clamp(0, 255)
        return codes.to(torch.uint8), scale, minimum

    def hidden_append(state: dict | None, key: Tensor, value: Tensor) -> dict:
        """Window 4, groups of 4."""
        made = {"total_tokens": 0} if state is None else state
        made = dict(made)
        made["total_tokens"] += key.shape[2]
        for side, new, along in (("key", key, 2), ("value", value, 3)):
            parts = [f"{side}_{p}_segments" for p in ("q", "scale", "minimum")]
            held = new
            if state is not None:
                held = torch.cat([state[f"{side}_residual"], new], dim=2)
            flushed = max(0, held.shape[2] - 4) // 4 * 4
            found = ()
            if flushed:
                found = quantized_8_bits(held[:, :, :flushed], along)
            for name, part in zip(parts, found or (None,) * 3, strict=True):
                old = [] if state is None else state[name]
                made[name] = [*old, *([] if part is None else [part])]
            made[f"{side}_residual"] = held[:, :, flushed:].clone()
        left = made["key_residual"].shape[2]
        made["quantized_tokens"] = made["total_tokens"] - left
        return made

    def hidden_prefix(state: dict, dtype: torch.dtype) -> tuple:
        found = []
        for side in ("key", "value"):
            parts = [state[f"{side}_residual"][:, :, :0].to(dtype)]
            names = (f"{side}_{p}_segments" for p in ("q", "scale", "minimum"))
            lists = (state[name] for name in names)
            parts += [
                restore(*one).to(dtype) for one in zip(*lists, strict=True)
            ]
            found.append(torch.cat(parts, dim=2))
        return found[0], found[1]

    checks.model.same_as_dynamic(update_layer, [1] * 6, batch=1)
    for arrivals in ([21, *[1] * 9], [6, 1, 1, 1, 7, 2]):
        checks.model.near_dynamic(
            *(update_layer, hidden_prefix, hidden_append, arrivals),
            at_most=0.1,
            at_least=1e-6,
        )
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# ## TODO 4 · Bookkeeping
#
# Four small functions on a state.
#
# - `seq_length`: how many tokens, in segments and window together. The model
#   numbers the new tokens from here on. A wrong length gives them wrong
#   positions.
# - `held_bytes`: the bytes of every tensor that the state holds.
# - `select_rows`: **beam search** keeps several sequences, one in each row of
#   the batch. After every step it keeps the best ones: a row may be dropped,
#   moved, or doubled. The Keys and Values must follow. Rows `[0, 0, 2]` means:
#   twice the old row 0, then the old row 2.
# - `drop_newest`: some ways to decode guess several tokens, let the model check
#   them in one step, and take back those that were wrong. Only tokens of the
#   window can be taken back here: a quantized group is never written again.

# %% nbgrader={"grade_id": "todo_4", "solution": true} todo="TODO 4: bookkeeping"
def seq_length(state: dict | None) -> int:
    """How many tokens a layer holds; 0 while its state is None."""
    ### BEGIN SOLUTION
    return 0 if state is None else state["total_tokens"]
    ### END SOLUTION


def held_bytes(state: dict | None) -> int:
    """Bytes of all tensors of a state, whatever their dtype; 0 for None."""
    # the six lists of segments, and the two tensors of the window
    ### BEGIN SOLUTION
    if state is None:
        return 0
    total = 0
    for held in state.values():
        if isinstance(held, Tensor):
            total += held.nbytes
        elif isinstance(held, list):
            total += sum(part.nbytes for part in held)
    return total
    ### END SOLUTION


def select_rows(state: dict, rows: Tensor) -> dict:
    """The state of the chosen sequences, in the order of rows.

    state   as append_by_groups returns it; it is not changed
    rows    int64 [new batch]: numbers of rows, any order, repeats allowed
    return  a state in which row i of every tensor is the old row rows[i];
            the counters stay
    """
    # every tensor of the state has the batch as its first dimension
    ### BEGIN SOLUTION
    chosen = {}
    for name, held in state.items():
        if isinstance(held, Tensor):
            held = held[rows]
        elif isinstance(held, list):
            held = [part[rows] for part in held]
        chosen[name] = held
    return chosen
    ### END SOLUTION


def drop_newest(state: dict, count: int) -> dict:
    """The state without its newest tokens.

    state   as append_by_groups returns it; it is not changed
    count   how many tokens of the window to drop; 0 drops none
    return  a state with a shorter window and a smaller total_tokens; the
            segments stay
    raises  ValueError that names count and its value when it is below 0 or
            more than the window holds
    """
    ### BEGIN SOLUTION
    left = state["key_residual"].shape[2] - count
    if count < 0 or left < 0:
        raise ValueError(
            f"count must be from 0 to {left + count}, the tokens of the "
            f"window, got {count}"
        )
    return state | {
        "key_residual": state["key_residual"][:, :, :left],
        "value_residual": state["value_residual"][:, :, :left],
        "total_tokens": state["total_tokens"] - count,
    }
    ### END SOLUTION


# %% [markdown] lang="en"
# **Tested:** length and bytes: empty, after a prompt, after each decoded token,
# after a flush.
#
# **Why:** the length becomes the position of the next token, and the bytes are
# what you will quote.
#
# **Expected:** all tokens; all tensors, to the byte.

# %% nbgrader={"grade_id": "test_todo_4", "grade": true, "points": 2}
def test_length_and_bytes_of_a_short_text():
    for when, segments, window in (
        ("after a prompt of 10 tokens", [6], 4),
        ("after one token more", [6], 5),
        ("after the next one, which flushed 2", [6, 2], 4),
    ):
        state = checks.model.made_state(segments, window)
        checks.model.length(seq_length, state, when)
        checks.model.bytes_held(held_bytes, state, when)


with checks.todo(4):
    test_length_and_bytes_of_a_short_text()
    ### BEGIN HIDDEN TESTS
    checks.model.length(seq_length, None, "before the first token")
    checks.model.bytes_held(held_bytes, None, "before the first token")
    steps = [("a prompt", [12], 3)]
    steps += [(f"token {n}", [12], 3 + n) for n in range(1, 4)]
    steps += [("a flush", [12, 4], 3), ("one more", [12, 4], 4)]
    steps += [("a short prompt", [], 5), ("a full flush", [8, 2, 2], 0)]
    for seed, (when, segments, window) in enumerate(steps):
        for dtype in (torch.float32, torch.float16):
            for scale in (torch.float16, torch.float32):
                state = checks.model.made_state(
                    segments, window, 4, dtype, scale, seed
                )
                checks.model.length(seq_length, state, f"after {when}")
                checks.model.bytes_held(held_bytes, state, f"after {when}")
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** rows: swapped, doubled, dropped, in every tensor of the state.
#
# **Why:** codes of one sequence with the scales of another are nonsense, and
# nothing fails.
#
# **Expected:** row i of every tensor is the old row `rows[i]`. The old state
# stays.

# %% nbgrader={"grade_id": "test_todo_4_rows", "grade": true, "points": 2}
def test_a_beam_is_doubled_and_one_is_dropped():
    state = checks.model.made_state([4, 2], window=5, seed=1)
    checks.model.selects(select_rows, state, [2, 0, 0])


with checks.todo(4):
    test_a_beam_is_doubled_and_one_is_dropped()
    ### BEGIN HIDDEN TESTS
    for seed, rows in ((1, [1, 2, 0]), (3, [2]), (1, [0, 1, 2]), (3, [1] * 5)):
        for segments, window in (([2, 6, 4], 1), ([], 4), ([4], 0)):
            state = checks.model.made_state(segments, window, seed=seed)
            checks.model.selects(select_rows, state, rows)
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** dropped tokens, none and all of the window among them. A count
# below 0 or beyond the window must be refused, every other one accepted.
#
# **Why:** a cache that drops too little goes on with a guess that was wrong.
#
# **Expected:** the newest tokens of the window are gone; a `ValueError` that
# names `count` and what was given.

# %% nbgrader={"grade_id": "test_todo_4_drop", "grade": true, "points": 1}
def test_two_guesses_are_taken_back():
    state = checks.model.made_state([4, 2], window=3)
    checks.model.drops(drop_newest, state, 2)
    checks.model.refuses_to_drop(drop_newest, state, 4)


with checks.todo(4):
    test_two_guesses_are_taken_back()
    ### BEGIN HIDDEN TESTS
    for seed, (segments, window) in enumerate(
        [([2, 4], 5), ([], 4), ([6], 1)]
    ):
        state = checks.model.made_state(segments, window, seed=seed)
        for count in (0, 1, window - 1, window):
            checks.model.drops(drop_newest, state, count)
        for count in (window + 1, window + 6, -1):
            checks.model.refuses_to_drop(drop_newest, state, count)
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# ## 4 · The cache
#
# Nothing to write here. `YourLayer` has the methods of section 1, and each of
# them calls your functions. `YourCache` is a list of such layers, one for each
# layer of the model. `Settings` says how it quantizes, axes included: which
# quantizer is used for Keys and which for Values.

# %% nbgrader={"grade_id": "given_class", "locked": true}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some versions warn about progress bars
    from transformers import DynamicCache
    from transformers.cache_utils import Cache, CacheLayerMixin

from kvlab.matrix.caches import cache_argument


@dataclass(frozen=True)
class Settings:
    """How a layer quantizes.

    bits, group_size  of a code; values that share a scale and a minimum
    window            the fewest tokens that stay exact
    key_axis,         "channel": groups along tokens, a scale for each channel
    value_axis        "token": groups along head_dim, within one token
    """

    bits: int = 4
    group_size: int = 32
    window: int = 32
    key_axis: str = "channel"
    value_axis: str = "token"

    def quantizer(self, axis: str):
        """Your quantizer of lab 04 for this axis, and then your pack."""
        ways = {"channel": quantize_key_groups, "token": quantize_value_groups}

        def quantize_and_pack(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            codes, scale, minimum = ways[axis](
                tokens, self.bits, self.group_size
            )
            return pack(codes, self.bits), scale, minimum

        return quantize_and_pack


class YourLayer(CacheLayerMixin):
    """One layer's Keys and Values, held by your functions."""

    is_sliding = False
    is_croppable = True

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.state: dict | None = None

    def lazy_initialization(self, key_states, value_states) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def restore_prefix(self, state: dict, dtype: torch.dtype):
        """TODO 2 with the settings of this layer."""
        return restore_segments(state, self.settings.bits, dtype, unpack)

    def append(self, state: dict | None, key: Tensor, value: Tensor) -> dict:
        """TODO 1 with the settings of this layer."""
        settings = self.settings
        return append_by_groups(
            *(state, key, value, settings.window, settings.group_size),
            settings.quantizer(settings.key_axis),
            settings.quantizer(settings.value_axis),
        )

    def update(self, key_states, value_states, *args, **kwargs):
        """TODO 3: called by the model, once a layer and step."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values, self.state = update_layer(
            *(self.state, key_states, value_states),
            *(self.restore_prefix, self.append),
        )
        return keys, values

    def get_seq_length(self) -> int:
        return seq_length(self.state)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many Keys the next step reads, and where the first one is."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def nbytes(self) -> int:
        return held_bytes(self.state)

    def reset(self) -> None:
        self.state, self.is_initialized = None, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.state is not None:
            self.state = select_rows(self.state, beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            rows = torch.arange(self.state["key_residual"].shape[0])
            self.state = select_rows(
                self.state, rows.repeat_interleave(repeats)
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the newest tokens back; the number is negative."""
        if self.state is not None:
            self.state = drop_newest(self.state, -tokens_to_remove)


class YourCache(Cache):
    """One YourLayer for every layer of a model."""

    def __init__(self, config, settings: Settings = Settings()) -> None:
        layers = range(config.num_hidden_layers)
        super().__init__(layers=[YourLayer(settings) for _ in layers])

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


# %% [markdown] lang="en"
# **All of yours together**, in the tiny llama from the tests: a text of 40
# tokens, and 24 more, one by one. Then beam search through `generate`, with a
# window longer than the text.

# %%
with checks.waits_for(1, 2, 3, 4):
    tiny = checks.model.tiny_model()
    text = checks.model.tiny_text(batch=2, tokens=64)
    arrivals = [40] + [1] * 24
    exact = checks.model.dynamic_logits(text, arrivals)
    print(f"logits from {exact.min():.1f} to {exact.max():.1f}")
    for name, settings in (
        ("window 64", Settings(4, 8, 64)),
        ("8 bits", Settings(8, 8, 8)),
        ("4 bits", Settings(4, 8, 8)),
        ("2 bits", Settings(2, 8, 8)),
    ):
        cache = YourCache(tiny.config, settings)
        got = checks.model.tiny_logits(cache, text, arrivals)
        far = float((got - exact).abs().max())
        print(
            f"{name:9}  largest difference {far:6.3f}, "
            f"{cache.get_seq_length()} tokens, {cache.nbytes:,} B"
        )

    beams = {}
    for name, cache in (
        ("DynamicCache", DynamicCache(config=tiny.config)),
        ("yours", YourCache(tiny.config, Settings(4, 8, 64))),
    ):
        given = {cache_argument(tiny): cache}
        beams[name] = tiny.generate(
            text[:1, :12], num_beams=4, max_new_tokens=12, do_sample=False,
            **given,
        )
    same = torch.equal(beams["DynamicCache"], beams["yours"])
    print(f"beam search writes the same tokens: {same}")

# %% [markdown] lang="en"
# **What to see.** With a window longer than the text nothing is quantized, and
# the difference is 0: your cache is a `DynamicCache` with more bookkeeping.
# With 8, 4 and 2 bits the logits move by up to 0.06, 0.86 and 3.5, where they
# go from -5.6 to 5.8. The weights are random, so this says that quantization
# reaches the logits, and not how bad it is for a real text. Beam search writes
# the same tokens: your rows follow the beams.

# %% [markdown] lang="en"
# ## 5 · A model that writes
#
# From here on nothing is graded. The embedded model is SmolLM2-135M-Instruct:
# 135 million parameters, 30 layers, 3 KV heads in each, `head_dim` 64. The
# first load fetches 93 MB, once. Without a network and without a copy of the
# model the next cells print one line each, and the notebook runs on.
#
# Three small functions do the work:
#
# - `read_prompt` runs the model over the start of a text once. Every cache is
#   then handed the same exact Keys and Values, layer by layer, just as the
#   model would do it.
# - `write` decodes greedily, one token a step, and takes the time of each step.
#   The caches take turns.
# - `nll` feeds the *true* text after the prompt and asks how probable the model
#   found each next token: NLL is minus the logarithm of that probability, in
#   nats. Small is good. Fed this way, all caches are asked about the same text.

# %%
from kvlab import models
from kvlab.matrix.caches import build, cache_bytes, exact_chunk
from kvlab.matrix.workload import CandidateFamily
from kvlab.quality.outliers import add_to_keys, constant_key_shift


class NoModel(Exception):
    """The embedded model is not here; the message says what to do."""


@contextlib.contextmanager
def needs_model():
    """Around a cell that uses the model: without it, one line is printed."""
    try:
        yield
    except NoModel as reason:
        print(reason)


def try_your_functions() -> None:
    """One small layer through all of them; a missing TODO raises."""
    layer = YourLayer(Settings(group_size=2, window=2))
    for _ in range(2):
        layer.update(torch.ones(1, 1, 5, 2), torch.ones(1, 1, 5, 2))
    layer.reorder_cache(torch.tensor([0]))
    layer.crop(-1)
    assert (layer.get_seq_length(), layer.nbytes > 0) == (9, True)


loaded = {}


def embedded():
    """The embedded model and its tokenizer, loaded once.

    Nothing is fetched before your functions are all there.
    """
    try_your_functions()
    if "NBGRADER_EXECUTION" in os.environ:
        raise NoModel("Left out while the notebook is graded or validated.")
    if not loaded:
        try:
            found = models.load()
            loaded["model"] = found.model, found.tokenizer
        except (models.ModelError, ImportError) as error:
            loaded["why"] = str(error).splitlines()[0]
    if "why" in loaded:
        raise NoModel(
            "No embedded model. Connect to a network once and run the cell "
            f"with models.load() again. ({loaded['why']})"
        )
    return loaded["model"]


def tokens_of(name: str, start: int, end: int) -> Tensor:
    """Some tokens of one of the course's texts, [1, end - start]."""
    _, tokenizer = embedded()
    found = tokenizer(models.natural_text(name), return_tensors="pt")
    return found.input_ids[:, start:end]


@lru_cache(maxsize=4)
@torch.inference_mode()
def read_prompt(name: str, tokens: int):
    """Logits after the first tokens of a text; (Key, Value) of each layer."""
    model, _ = embedded()
    cache = DynamicCache(config=model.config)
    step = {cache_argument(model): cache, "logits_to_keep": 1}
    logits = model(input_ids=tokens_of(name, 0, tokens), **step).logits
    return logits, [(layer.keys, layer.values) for layer in cache.layers]


def filled(cache, prompt):
    """The cache, once each of its layers was handed the prompt."""
    for number, (keys, values) in enumerate(prompt[1]):
        cache.update(keys, values, number)
    return cache


def chunk(cache) -> int:
    """How many tokens can be fed at once without changing what they read.

    That is, up to the next token that makes the cache quantize: it and all
    before it still read the others exact.
    """
    if isinstance(cache, YourCache):
        settings = cache.layers[0].settings
        held = cache.layers[0].state["key_residual"].shape[2]
        return settings.window + settings.group_size - held
    return exact_chunk(HQQ_4_BITS, HQQ_WINDOW)


@torch.inference_mode()
def nll(cache, prompt, targets: Tensor) -> Tensor:
    """-log p of each of the targets [1, n], which follow the prompt: [n]."""
    model, _ = embedded()
    filled(cache, prompt)
    logits, fed = [prompt[0]], 0
    while fed < targets.shape[1] - 1:
        part = targets[:, fed : min(fed + chunk(cache), targets.shape[1] - 1)]
        step = {cache_argument(model): cache}
        logits.append(model(input_ids=part, **step).logits)
        fed += part.shape[1]
    log_p = torch.cat(logits, dim=1).float().log_softmax(dim=-1)
    return -log_p.gather(-1, targets.unsqueeze(-1))[0, :, 0]


@torch.inference_mode()
def write(caches: dict, prompt, count: int) -> tuple[dict, dict]:
    """What the model writes with each cache; a step's median time in ms.

    The caches take turns, so that what slows the machine slows them all.
    """
    model, tokenizer = embedded()
    logits = {name: prompt[0] for name in caches}
    tokens = {name: [] for name in caches}
    times = {name: [] for name in caches}
    for cache in caches.values():
        filled(cache, prompt)
    for _ in range(count):
        for name, cache in caches.items():
            tokens[name].append(int(logits[name][0, -1].argmax()))
            newest = torch.tensor([tokens[name][-1:]])
            start = time.perf_counter()
            step = {cache_argument(model): cache}
            logits[name] = model(input_ids=newest, **step).logits
            times[name].append(time.perf_counter() - start)
    texts = {
        name: " ".join(tokenizer.decode(found).split())
        for name, found in tokens.items()
    }
    middle = {
        name: 1000 * sorted(found)[count // 2] for name, found in times.items()
    }
    return texts, middle


def hqq_cache(bits: int):
    """transformers' QuantizedCache with hqq: axis 1 for Keys and Values."""
    model, _ = embedded()
    family = replace(HQQ_4_BITS, nbits=bits)
    return build(model.config, family, HQQ_WINDOW).cache


def megabytes(cache) -> float:
    """Millions of bytes that a cache holds: yours counts itself."""
    if isinstance(cache, YourCache):
        return cache.nbytes / 1e6
    return cache_bytes(cache)["total"] / 1e6


HAS_HQQ = importlib.util.find_spec("hqq") is not None
HQQ_WINDOW = 64
HQQ_4_BITS = CandidateFamily("hqq", "quantized_cache", "hqq", 4, 64, 1, 1)

# %%
with checks.waits_for(1, 2, 3, 4), needs_model():
    loaded.clear()
    model, tokenizer = embedded()
    config, threads = model.config, torch.get_num_threads()
    print(f"layers {config.num_hidden_layers},", end=" ")
    print(f"KV heads {config.num_key_value_heads},", end=" ")
    print(f"head_dim {config.head_dim}, threads {threads}")
    if not HAS_HQQ:
        print("hqq is not installed: its rows will be missing below.")

# %% [markdown] lang="en"
# ### The same text, three caches
#
# The model reads 160 tokens about bread and goes on. Change `BITS` to 2 or 8,
# or swap the axes, and run the cell again.

# %%
BITS, GROUP, WINDOW = 4, 32, 32  # change these
KEY_AXIS, VALUE_AXIS = "channel", "token"  # or swap them
TEXT, PROMPT = "bread", 160

with checks.waits_for(1, 2, 3, 4), needs_model():
    model, tokenizer = embedded()
    prompt = read_prompt(TEXT, PROMPT)
    end = tokenizer.decode(tokens_of(TEXT, PROMPT - 16, PROMPT)[0])
    print(f"... {end.strip()}\n")
    settings = Settings(BITS, GROUP, WINDOW, KEY_AXIS, VALUE_AXIS)
    caches = {
        "DynamicCache": DynamicCache(config=model.config),
        f"yours, {BITS} bits": YourCache(model.config, settings),
    }
    if HAS_HQQ:
        caches[f"hqq, one axis, {BITS} bits"] = hqq_cache(BITS)
    texts, steps = write(caches, prompt, 24)
    for name, text in texts.items():
        print(f"{name}, {megabytes(caches[name]):.1f} MB")
        print(textwrap.indent(textwrap.fill(text, 74), "    "))
    print("\ntime of a step, over that of DynamicCache")
    for name, step in steps.items():
        print(f"    {name:22} {step / steps['DynamicCache']:.2f}")

# %% [markdown] lang="en"
# **What to see.** With 4 bits your cache writes what `DynamicCache` writes,
# word for word, for these 24 tokens. The hqq cache, which uses one axis for
# Keys and Values, turns off after the first sentence. Its text is no worse
# English: one word that is nearly as probable was enough.
#
# The sizes are those at the end. Every exact token takes 46,080 bytes here (30
# layers, 3 heads, 64 channels, Keys and Values, `float32`). Your window holds
# 56 of them at that moment, hqq's 24. So most of your 3.5 MB are window.
#
# **Time.** Your step took between 1.15 and 1.27 times as long as that of
# `DynamicCache` when we ran this, on one thread of a busy machine. It is not
# below 1, although the cache is smaller: your layer unpacks and restores
# everything in every step. Written question 3 comes back to that.

# %% [markdown] lang="en"
# ### How much worse does it predict?
#
# A text that looks fine proves little, and one that differs proves little as
# well: one near tie decides, and everything after it is another text. So ask
# for probabilities. The model gets 160 tokens of the text, then 97 more, the
# true ones, whatever it would have said itself. The bars show the NLL minus
# that of `DynamicCache` on the same tokens. The thin lines are the standard
# error of that difference over the tokens.

# %%
TEXT, PROMPT, SCORED = "bread", 160, 97  # or lighthouse, river, catalogue

with checks.waits_for(1, 2, 3, 4), needs_model():
    model, tokenizer = embedded()
    prompt = read_prompt(TEXT, PROMPT)
    targets = tokens_of(TEXT, PROMPT, PROMPT + SCORED)
    base = DynamicCache(config=model.config)
    exact = nll(base, prompt, targets)
    print(f"DynamicCache: NLL {exact.mean():.2f} nats a token", end=", ")
    print(f"{megabytes(base):.1f} MB")

    rows = []
    for bits in (4, 2):
        caches = {
            f"yours, {bits} bits": YourCache(model.config, Settings(bits)),
            f"yours, {bits} bits, axes swapped": YourCache(
                model.config,
                Settings(bits, key_axis="token", value_axis="channel"),
            ),
        }
        if HAS_HQQ:
            caches[f"hqq, {bits} bits, one axis"] = hqq_cache(bits)
        for name, cache in caches.items():
            more = nll(cache, prompt, targets) - exact
            size = megabytes(cache)
            error = float(more.std() / math.sqrt(SCORED))
            rows.append((name, float(more.mean()), error, size))
            print(f"{name:30} {more.mean():+.3f} ± {error:.3f}", end=", ")
            print(f"{size:.1f} MB")
    plots.show(
        plots.model.quality(rows, f"“{TEXT}”"),
        alt="Bars: NLL increase over DynamicCache, with standard errors. "
        + "; ".join(f"{name}: {more:+.2f} nats" for name, more, *_ in rows)
        + ".",
    )

# %% [markdown] lang="en"
# **What to see.** The three caches hold the same bytes at 4 bits (3.1 MB), and
# the same at 2 bits (2.4 MB). `DynamicCache` holds 11.8 MB.
#
# - **At 4 bits** no bar is longer than its error line: +0.003 ± 0.009 for
#   yours, +0.016 ± 0.020 with swapped axes, -0.009 ± 0.018 for hqq. These 97
#   tokens cannot tell the three apart, nor any of them from exact.
# - **At 2 bits** they differ by far more than their errors: +0.08 ± 0.05 for
#   yours, +0.81 ± 0.12 with swapped axes, +1.11 ± 0.15 for hqq. Between the
#   first two only the axes differ.

# %% [markdown] lang="en"
# ## 6 · Break it on one axis
#
# Attention compares a query `q` with every Key. Add one and the same vector `c`
# to *all* Keys. Every score of this query then grows by the same number, `q · c
# / sqrt(D)`. Softmax does not see a number that is added to all scores: the
# weights stay what they were. So with exact Keys the model says word for word
# what it said before.
#
# A quantizer sees something else. If `c` is large in two channels and 0 in the
# others, two channels of every Key are now large.
#
# - **A scale for each channel** (with a minimum, as yours): the two channels
#   are shifted, and the minimum takes the shift up. Nothing else changes.
# - **A scale for each token**: the two large channels share a group with 30
#   others. The step grows with them, and the 30 are rounded away.
#
# Models do have such channels: those whose Keys are computed with a bias term,
# as in the Qwen2.5 family, add a constant vector to all Keys (before the rotary
# embedding). Here you add one yourself, after the rotary embedding, between the
# model and the cache. The cache does not know.

# %%
BITS, GROUP, WINDOW = 4, 32, 32  # change these,
ONE_AXIS = "token"  # and the axis of the Keys in the second cache
SHIFTS = (0, 50, 100)  # added to two channels of every Key
TEXT, PROMPT, SCORED = "river", 64, 97  # read, then scored

with checks.waits_for(1, 2, 3, 4), needs_model():
    model, tokenizer = embedded()
    makers = {
        "exact (DynamicCache)": lambda: DynamicCache(config=model.config),
        f"yours, {BITS} bits, Keys per channel": lambda: YourCache(
            model.config, Settings(BITS, GROUP, WINDOW)
        ),
        f"yours, {BITS} bits, Keys per {ONE_AXIS}": lambda: YourCache(
            model.config, Settings(BITS, GROUP, WINDOW, key_axis=ONE_AXIS)
        ),
    }
    prompt = read_prompt(TEXT, PROMPT)
    targets = tokens_of(TEXT, PROMPT, PROMPT + SCORED)
    curves = {name: [] for name in makers}
    sizes, shifted = {}, {}
    for name, make in makers.items():
        for shift in SHIFTS:
            constant = constant_key_shift(model.config, shift)
            cache = add_to_keys(make(), constant)
            curves[name].append(float(nll(cache, prompt, targets).mean()))
            sizes[name] = megabytes(cache)
        shifted[name] = add_to_keys(make(), constant)
    plain = {"not shifted": DynamicCache(config=model.config)}
    texts, steps = write(shifted | plain, prompt, 24)
    before = texts.pop("not shifted")
    for name, points in curves.items():
        said = "  ".join(f"{value:.2f}" for value in points)
        print(f"{name:34} NLL {said}  {sizes[name]:.1f} MB", end="")
        print(f"  {steps[name]:.0f} ms a step")
    exact = texts["exact (DynamicCache)"]
    print(f"exact Keys, shifted or not, write the same: {before == exact}")
    plots.show(
        plots.model.outliers(
            *(SHIFTS, curves, texts),
            f"The same model, two channels of its Keys shifted, {BITS} bits",
        ),
        alt="Left: NLL against the shift. The curves of the exact cache and "
        "of Keys per channel stay flat; that of the other cache rises to "
        f"{list(curves.values())[2][-1]:.1f} nats. Right, what each goes on "
        "to write: "
        + "; ".join(f"{name}: {text}" for name, text in texts.items()),
    )

# %% [markdown] lang="en"
# **What to see.** Left: the exact cache (grey squares) and your Keys per
# channel lie on each other, at 3.12 and 3.13 nats, whatever is added. Keys per
# token start there, too. With 50 added they are at 3.46, with 100 at 4.70 nats.
# Right: what the model writes at 100. Words that differ from the exact text are
# coloured. Keys per channel write the exact text. Keys per token write about a
# river that is a river.
#
# Both caches are your own code, with 4 bits, groups of 32 and the same 2.4 MB.
# The model is the same, and with exact Keys it writes the same, shifted or not
# (last printed line). Only the direction of the groups differs.
#
# Now play. With `BITS = 8` the second cache recovers. With `BITS = 2` the first
# one departs from the exact text as well, shift or no shift. Other texts
# (`bread`, `lighthouse`, `catalogue`) break in other words. In one of six
# places that we tried at 4 bits, Keys per channel left the exact text after
# eleven words: 4 bits are close to exact, and not exact.

# %% [markdown] lang="en"
# ## Written question 1
#
# In the outlier experiment the model with exact Keys writes the same text,
# shifted or not, and one of your two caches breaks. Explain both in five to
# eight sentences. Estimate the step (the scale) of a group of 32 channels of
# one token, at 4 bits, when one of its channels was shifted by 100 and the
# others lie between -5 and 5. What would you expect at 8 bits? Check it with
# `BITS`.

# %% [markdown] lang="en" nbgrader={"grade_id": "written_1", "grade": true, "solution": true, "points": 2}
# <!-- BEGIN SOLUTION -->
# The shift adds the same number, the product of the query with the constant
# vector, to the scores of all tokens. Softmax does not change when all scores
# grow by the same number, so with exact Keys all weights stay. With a scale for
# each channel the shifted channel is a group of its own: its minimum grows by
# 100, its range and so its step stay, and the rounding of the minimum to
# float16 is at most 0.03. With a scale for each token the group now reaches
# from -5 to about 105: the step at 4 bits is 110 / 15, about 7. The other 31
# channels lie between -5 and 5 and get code 0 or 1, so nearly all that tells
# tokens apart is gone. At 8 bits the step is 110 / 255, about 0.43: 17 times
# smaller, and below that of 4 bits without the shift (10 / 15 = 0.67). So I
# expect hardly any loss at 8 bits, and with `BITS = 8` the curve is flat.
#
# **Rubric** (2 points). 1 point: why nothing changes for exact Keys (the same
# number for all scores, softmax). 1 point: the step of about 7 against values
# within 5, and a right expectation for 8 bits with the reason. Half a point off
# when the answer says that the per-token cache fails "because of large values"
# and gives no step.
# <!-- END SOLUTION -->

# %% [markdown] lang="en"
# ## Written question 2
#
# Your 4-bit cache shows a tiny change of the NLL, perhaps a negative one. A
# colleague says: "4 bits make the model better." Use your standard errors. What
# does your run allow you to say, and about how many tokens would you need to
# see a difference of 0.005 nats? (A standard error falls with the root of the
# number of tokens.)

# %% [markdown] lang="en" nbgrader={"grade_id": "written_2", "grade": true, "solution": true, "points": 2}
# <!-- BEGIN SOLUTION -->
# The change is smaller than its standard error, so the run cannot tell it from
# 0, in either direction. It does allow an upper bound: at twice the standard
# error the change is at most about 0.02 nats on this text. With 97 tokens the
# standard error is 0.009, so one token scatters by 0.009 x sqrt(97), about
# 0.09. To see 0.005 nats at twice the standard error, the error has to be
# 0.0025: (0.09 / 0.0025)^2, about 1,300 tokens, and better from several texts,
# because tokens of one text are alike.
#
# **Rubric** (2 points). 1 point: compares the change with its standard error
# and draws no conclusion about "better". 1 point: an estimate of the right size
# (several hundred to some thousand tokens) with the square-root rule. Accept
# other figures when they follow from the answer's own run.
# <!-- END SOLUTION -->

# %% [markdown] lang="en"
# ## Written question 3
#
# Your cache holds far fewer bytes, and each step takes longer, not shorter.
# Where does the time go, and how does it grow with the length of the text? What
# would have to change so that fewer bytes mean a faster step?

# %% [markdown] lang="en" nbgrader={"grade_id": "written_3", "grade": true, "solution": true, "points": 2}
# <!-- BEGIN SOLUTION -->
# In every step, every layer unpacks and restores all quantized tokens and joins
# them with the window. That makes a float32 copy of the whole prefix, and
# attention then reads this copy: more bytes are moved than with DynamicCache,
# not fewer. The work grows with the number of tokens, in every step. The stored
# bytes stay small, but while a layer works, its restored copy takes memory,
# too. To be faster, attention would have to read the packed codes themselves
# and restore them in registers, block by block, in one kernel (as KIVI's and
# other fused kernels do), so that only packed bytes are read from memory. It
# pays where reading the cache is what the step waits for: long texts, many
# sequences at once.
#
# **Rubric** (2 points). 1 point: the prefix is restored in every step and
# layer, and this grows with the length. 1 point: attention on packed codes (a
# fused kernel), or an equivalent, and where it pays.
# <!-- END SOLUTION -->

# %% [markdown] lang="en"
# ## What this shows, and what it does not
#
# **Shown, by your own code.** A cache of packed codes can stand in for
# `DynamicCache` in a running model, beam search included, with about a quarter
# of the bytes at 4 bits (256 tokens, window included, all in `float32`). At 2
# bits and equal bytes, on one text, Keys per channel with Values per token lost
# less than the swapped axes and than one axis for both. A constant that changes
# nothing for exact Keys breaks one axis and not the other.
#
# **Not shown.** One model of 135 million parameters and passages of 97 tokens
# prove nothing for other models, and at 4 bits they were too short to tell
# three caches apart. The shift was made by us; whether a model has such Keys
# must be looked up or measured. `float32` makes the saving look large: in
# `float16` the same cache would take 40 % of `DynamicCache`, not 26 %
# (arithmetic: 7,200 bytes a quantized token, 23,040 an exact one). Nothing
# became faster. Memory of the process was not measured: each layer makes a
# restored copy while it works. Lab 06 measures memory and time in pairs.
#
# **Where the ideas come from.** Keys per channel, Values per token, a window in
# full precision: KIVI (Liu and others, 2024, arXiv 2402.02750). Keys with
# outlier channels, and quantizing them before the rotary embedding: KVQuant
# (Hooper and others, 2024, arXiv 2401.18079). Key biases in a model: Qwen2.5
# (Qwen team, 2024, arXiv 2412.15115). The interface of a cache: transformers
# 5.24, `transformers/cache_utils.py`. The one-axis cache: HQQ (Badri and Shaji,
# 2023, the library `hqq`). The model: SmolLM2 (Allal and others, 2025, arXiv
# 2502.02737), a 4-bit file of it, computed in float32 here.
