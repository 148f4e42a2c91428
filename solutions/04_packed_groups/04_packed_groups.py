# %% [markdown] lang="en"
# # Lab 04 · Packed groups
#
# In lab 03 you chose who shares a scale, and the quality was good. The bytes
# were not: the codes lay in `int8`, the packed size was arithmetic, and a cache
# that decoded one token at a time grew larger than `float16`. In this lab you
# make the bytes real. At the end you count what your cache stores, to the byte.
#
# **After this lab you can**
#
# - put two or four codes into one byte, and get them out again;
# - quantize a group of values with a scale and a minimum, and say how far a
#   restored value can be off when both are kept in `float16`;
# - let only whole groups leave the window, and say how many tokens wait in it;
# - count the bytes of a cache by part, and check the count against a formula.
#
# **You need** lab 03 (the axes, the window, segments), and these operators on
# whole numbers: `<<`, `>>`, `&`, `|`. Section 2 says what they do.
#
# **Time** about two hours. **Difficulty** 3 of 5; TODO 2 and TODO 3 take the
# longest. **Points** 20, for the four TODOs. The two written questions are
# outside these points: a person reads your answers.

# %% nbgrader={"grade_id": "setup", "locked": true}
# the builder puts kvlab/first_cell.py here

# %% nbgrader={"grade_id": "given_imports", "locked": true}
import math

import kvlab.checks.groups
import kvlab.plots.groups
import torch
from kvlab import captured
from torch import Tensor

# %% [markdown] lang="en"
# ## 1 · Where lab 03 left off
#
# One Key value in 4 bits, when tokens leave the window one by one:
#
# | part | bytes a value |
# |---|---|
# | the code, a 4-bit number in an `int8` | 1 (half of it empty) |
# | its scale in `float32`, one per channel: with one token, one per value | 4 |
# | together | 5 |
# | the same value in `float16`, not quantized | 2 |
#
# Three things are wrong here, and each gets a TODO. The fourth checks the bill.
#
# | what is wrong | repair | TODO |
# |---|---|---|
# | half of every byte is empty | two 4-bit codes in one byte | 1 |
# | a range around 0 wastes codes when all values lie on one side; a `float32` scale is long | a scale and a minimum, both in `float16`, for each *group* | 2 |
# | a scale serves one token | tokens leave the window in whole groups | 3 |
# | "compressed" was arithmetic | count the bytes of what is stored | 4 |
#
# A **group** is a run of neighbouring values that share one scale and one
# minimum. Its length is `group_size`.

# %% [markdown] lang="en"
# ## 2 · Codes share a byte
#
# A byte has 8 bits. A code of `bits` bits leaves room for `8 / bits` codes in a
# byte: four of 2 bits, two of 4 bits, one of 8 bits. You have to agree on an
# order. Here **the first code takes the lowest bits**, the second the next
# higher ones, and so on.
#
# | operator | does | example |
# |---|---|---|
# | `a << n` | moves the bits up by `n` places, the same as times `2**n` | `3 << 4` is 48 |
# | `a >> n` | moves them down; bits that fall off are lost | `53 >> 4` is 3 |
# | `a & b` | keeps the bits that both have | `53 & 15` is 5 |
# | <code>a &#124; b</code> | has every bit that one of them has | <code>48 &#124; 5</code> is 53 |
#
# So the codes 5 and 3 become the byte `5 | (3 << 4)`, which is 53. To read
# them: `53 & 15` is 5, and `(53 >> 4) & 15` is 3. The number 15 has its lowest
# four bits set; it is called a *mask*. All four operators work on tensors, too.

# %%
plots.show(
    plots.groups.bytes_of_codes(
        {8: [181, 77], 4: [5, 3, 12, 9], 2: [1, 0, 3, 2, 2, 1, 0, 3]}
    ),
    alt="Three rows of two bytes with eight boxes each, one box a bit. At 8 "
    "bits a byte holds one code, at 4 bits two, at 2 bits four. The first code "
    "stands in the lowest bits, drawn at the right end of the byte.",
)

# %% [markdown] lang="en"
# **What to see.** Each box is a bit, each colour a code, and the number in a
# bracket is the place of the code in the tensor. As usual, the lowest bit of a
# byte is drawn at its right end. So code 0 stands on the right, in the lowest
# bits. Two bytes hold two, four or eight codes.

# %% [markdown] lang="en"
# ## TODO 1 · Pack and unpack
#
# Pack along the **last dimension**; all others stay as they are. When the last
# byte is not full, fill it up with codes 0. Someone who unpacks must then know
# how many codes are real: that is `length`.

# %% nbgrader={"grade_id": "todo_1", "solution": true} todo="TODO 1: pack codes into bytes, and unpack them"
def pack(codes: Tensor, bits: int) -> Tensor:
    """Puts 8 / bits codes into each byte, along the last dimension.

    codes   uint8 [..., n], each from 0 to 2**bits - 1
    bits    2, 4 or 8
    return  uint8 [..., ceil(n * bits / 8)]; the first code of a byte in its
            lowest bits; the last byte filled up with codes 0; codes unchanged
    raises  ValueError that names bits and its value when it is not 2, 4 or 8;
            one that names codes and the largest code when it needs more bits
    """
    # 1. refuse bits, then codes that do not fit
    # 2. how many codes share a byte? fill up with zeros to a multiple of it
    # 3. split the last dimension into bytes x codes of a byte
    # 4. move the i-th code of each byte up by i * bits, and join them
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
    """The codes that were packed, without those that filled up the last byte.

    packed  uint8 [..., ceil(length * bits / 8)]
    bits    2, 4 or 8
    length  how many codes the last dimension had
    return  uint8 [..., length], each from 0 to 2**bits - 1
    raises  ValueError that names bits and its value when it is not 2, 4 or 8;
            one that names length and its value when so many codes do not take
            exactly as many bytes as packed has
    """
    # 1. refuse bits, then a length that does not belong to packed
    # 2. move each byte down by 0, bits, 2 * bits ..., and keep bits bits
    # 3. these are the codes of each byte in order: join them, cut to length
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


# %% [markdown] lang="en"
# **Tested:** every bit of the packed bytes; every code that comes out.
#
# **Why:** a byte in another order is read as other codes, without an error.
#
# **Expected:** the first code in the lowest bits, `uint8` in and out. The codes
# 5, 3 at 4 bits are the byte 53.

# %% nbgrader={"grade_id": "test_todo_1", "grade": true, "points": 2}
def test_two_codes_are_one_byte():
    codes = torch.tensor([5, 3], dtype=torch.uint8)
    checks.groups.packs(pack, codes, bits=4)
    checks.groups.unpacks(unpack, torch.tensor([53], dtype=torch.uint8), 4, 2)


def test_what_goes_in_comes_out():
    for bits in (2, 4, 8):
        codes = torch.arange(2**bits).repeat(4).to(torch.uint8)
        checks.groups.round_trip(pack, unpack, codes, bits)


with checks.todo(1):
    test_two_codes_are_one_byte()
    test_what_goes_in_comes_out()

    ### BEGIN HIDDEN TESTS
    def test_every_code_in_every_place():
        every_byte = torch.arange(256).to(torch.uint8)
        for bits in (8, 4, 2):
            codes = checks.groups.some_codes(16, bits=bits, seed=bits)
            checks.groups.packs(pack, codes, bits)
            length = 256 * 8 // bits
            checks.groups.unpacks(unpack, every_byte, bits, length)

    test_every_code_in_every_place()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** lengths that do not fill the last byte, and tensors of more
# dimensions.
#
# **Why:** a cache is `[batch, heads, tokens, head_dim]`, and nobody promises
# that a dimension is even.
#
# **Expected:** the last dimension alone changes. Five codes of 4 bits take 3
# bytes, and unpacking them gives five codes.

# %% nbgrader={"grade_id": "test_todo_1_lengths", "grade": true, "points": 2}
def test_five_codes_take_three_bytes():
    codes = torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)
    checks.groups.packs(pack, codes, bits=4)
    checks.groups.round_trip(pack, unpack, codes, 4)


with checks.todo(1):
    test_five_codes_take_three_bytes()

    ### BEGIN HIDDEN TESTS
    def test_odd_lengths_and_more_dimensions():
        for bits in (4, 2, 8):
            for n in (1, 3, 5, 6, 7, 9):
                codes = checks.groups.some_codes(n, bits=bits, seed=n)
                checks.groups.packs(pack, codes, bits)
                some_bytes = checks.groups.some_codes(
                    math.ceil(n * bits / 8), bits=8, seed=20 + n
                )
                checks.groups.unpacks(unpack, some_bytes, bits, n)
            for shape in [(3, 8), (2, 3, 5, 8), (2, 1, 4, 7)]:
                codes = checks.groups.some_codes(*shape, bits=bits, seed=9)
                checks.groups.packs(pack, codes, bits)
                checks.groups.round_trip(pack, unpack, codes, bits)
            # The same in memory of another order.
            codes = checks.groups.some_codes(5, 6, 3, bits=bits, seed=10)
            checks.groups.packs(pack, codes.transpose(0, 2), bits)

    test_odd_lengths_and_more_dimensions()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** other numbers of bits, codes that are too large, a length that
# does not belong to the bytes. Right input must be accepted.
#
# **Why:** a code 16 at 4 bits would change the code beside it.
#
# **Expected:** a `ValueError` that names the argument and what was given.

# %% nbgrader={"grade_id": "test_todo_1_errors", "grade": true, "points": 1}
def test_three_bits_are_refused():
    codes = torch.tensor([1, 2], dtype=torch.uint8)
    checks.accepts(pack, codes, 4, because="codes 1, 2 at 4 bits")
    checks.refuses(
        pack, codes, 3, names="bits", given=3, because="it is 3"
    )


with checks.todo(1):
    test_three_bits_are_refused()

    ### BEGIN HIDDEN TESTS
    def test_what_else_is_refused():
        codes = torch.tensor([1, 2, 3], dtype=torch.uint8)
        some_bytes = torch.tensor([33, 3], dtype=torch.uint8)
        for bits in (2, 4, 8):
            checks.accepts(
                pack, codes, bits, because=f"codes 1, 2, 3 at {bits} bits"
            )
        for length in (3, 4):
            checks.accepts(
                unpack,
                *(some_bytes, 4, length),
                because=f"{length} codes of 4 bits in 2 bytes",
            )
        for bits in (0, 1, 5, 16, -4):
            for call, more in ((pack, (codes,)), (unpack, (some_bytes,))):
                end = (bits,) if call is pack else (bits, 3)
                checks.refuses(
                    call,
                    *more,
                    *end,
                    names="bits",
                    given=bits,
                    because=f"it is {bits}",
                )
        for bits, largest in ((2, 4), (4, 16), (4, 255)):
            codes = torch.tensor([[1, 0, 2], [3, largest, 1]])
            checks.refuses(
                pack,
                *(codes.to(torch.uint8), bits),
                names="codes",
                given=largest,
                because=f"{largest} does not fit {bits} bits",
            )
        for length in (2, 5, 0, -3):
            checks.refuses(
                unpack,
                *(some_bytes, 4, length),
                names="length",
                given=length,
                because=f"{length} codes of 4 bits do not take 2 bytes",
            )

    test_what_else_is_refused()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **The first real bytes.** One code for each value of a cache of 96 tokens,
# three heads and 64 channels, as `uint8` and packed.

# %%
with checks.waits_for(1):
    for bits in (8, 4, 2):
        random = torch.Generator().manual_seed(bits)
        codes = torch.randint(0, 2**bits, (1, 3, 96, 64), generator=random)
        codes = codes.to(torch.uint8)
        packed = pack(codes, bits)
        same = torch.equal(unpack(packed, bits, 64), codes)
        print(
            f"{bits} bits: {codes.nbytes:,} B as uint8, "
            f"{packed.nbytes:,} B packed, shape {tuple(packed.shape)}, "
            f"the same codes again: {same}"
        )

# %% [markdown] lang="en"
# ## 3 · A minimum beside the scale
#
# In lab 03 the range of a 4-bit code was symmetric, from `-7 * s` to `7 * s`
# (`s` is the scale). When all values of a channel lie on one side of zero, the
# codes of the other side are wasted.
#
# **Asymmetric** quantization starts the range where the values start. For a
# group of values `x`:
#
# | symbol | formula | meaning |
# |---|---|---|
# | `L` | `2**bits - 1` | the largest code: 3, 15 or 255 |
# | `m` | `min x` | the **minimum**: code 0 is restored as `m` |
# | `s` | `(max x - min x) / L` | the **scale**: the step between two codes |
# | `c` | `round((x - m) / s)`, clamped to `0 ... L` | the **code**, in `uint8` |
# | restored | `c * s + m` | off by at most `s / 2` |
#
# All but `L` and `c` have the unit of `x` (Keys and Values have none).
#
# An example at 2 bits, so `L = 3`. The values 13.0, 13.6, 12.4, 14.2 have the
# minimum 12.4 and the scale (14.2 - 12.4) / 3 = 0.6. Their codes are 1, 2, 0,
# 3, and they are restored without any error. With a symmetric 2-bit code (`qmax
# = 1`) the scale is 14.2, every code is 1, and all four values are restored as
# 14.2.
#
# Here is a real channel, with 4 bits: head 1, channel 24 of the Keys that you
# know from lab 03.

# %%
kv = captured.load()
channel = kv.keys[0, 1, 1:33, 24]  # tokens 1 to 32 of an outlier channel
symmetric = [code * float(channel.abs().max()) / 7 for code in range(-7, 8)]
ends = float(channel.min()), float(channel.max())
from_minimum = torch.linspace(*ends, 16).tolist()
plots.show(
    plots.groups.levels(
        channel,
        {
            "symmetric, 15 codes": symmetric,
            "with minimum, 16 codes": from_minimum,
        },
        title="32 Keys of head 1, channel 24, and what 4 bits can restore",
    ),
    alt="Two number lines with the 32 values of a channel as dots, all far "
    "from zero on the same side. On the upper one the restorable values are "
    "spread around zero and three of them lie among the dots. On the lower "
    "one all 16 lie among the dots.",
)
for name, points in (("symmetric", symmetric), ("with minimum", from_minimum)):
    points = torch.tensor(points)
    used = (channel[:, None] - points).abs().argmin(dim=1).unique().numel()
    step = float(points[1] - points[0])
    print(f"{name:12}  step {step:.2f}, codes in use: {used}")

# %% [markdown] lang="en"
# **What to see.** The values (dots) lie on one side of zero. Three of the 15
# symmetric codes fall among them, the others stand for numbers that never
# occur. With a minimum all 16 codes fall among them, and the step is six times
# smaller. It is not free: the minimum has to be stored, too.

# %% [markdown] lang="en"
# ## 4 · Groups
#
# One scale for a whole channel or a whole token is one size of group. A smaller
# group has a smaller range, so a smaller step and a smaller error, and it costs
# more bytes. The direction of a group follows from lab 03:
#
# - **Keys** are grouped **along tokens**: `group_size` neighbouring tokens of
#   *one channel*. A large channel stays by itself. The price: a group is
#   complete only when all of its tokens are there.
# - **Values** are grouped **along head_dim**: `group_size` neighbouring
#   channels of *one token*. A small token stays by itself, and its groups are
#   complete as soon as it arrives.

# %%
plots.show(
    plots.groups.directions(tokens=8, channels=8, group_size=4),
    alt="Two grids of eight tokens by eight channels. In the left grid, Keys, "
    "each group is a vertical run of four tokens in one channel. In the "
    "right grid, Values, each group is a horizontal run of four channels of "
    "one token.",
)

# %% [markdown] lang="en"
# **What to see.** Each outlined run is one group. Both grids have 64 values and
# 16 groups, so both store 16 scales and 16 minima.
#
# **The bytes.** Scale and minimum are kept in `float16`, 16 bits each. They are
# shared by `group_size` values:
#
# ```text
# bits a value = bits + 32 / group_size
# ```
#
# With 4 bits and groups of 64 that is 4.5 bits, 3.56 times less than `float16`.
#
# **The error.** `float16` keeps 11 significant bits. Rounding to it moves a
# number by at most 1/2048 of its size (below 0.00006 its steps no longer
# shrink: by at most 0.00000003). So the stored `m` and `s` are not quite those
# of the formula, and the two ends of the range, `m` and `m + L * s`, move a
# little:
#
# - **Round first, then compute the codes from the rounded `m` and `s`.** Then a
#   value between the two ends is still restored within `s / 2`, for the stored
#   `s`, whatever the rounding did.
# - A value just outside gets the code of that end. It is off by at most what
#   the end has moved: `|m| / 2048` at the lower end, and at most `|m| / 2048 +
#   L * s / 2048` at the upper end.
#
# Codes from the `m` and `s` before rounding are a mistake that is easy to miss.
# *Every* value is then off by what `m` has moved. Take values near 100, as in
# the shifted Keys of lab 03: `m` may move by 0.03. At 8 bits and a range of 2,
# half a step is 0.004.
#
# When the cache itself is in `float16`, `m` is one of its values and is not
# moved at all.

# %% [markdown] lang="en"
# ## TODO 2 · Quantize groups
#
# Two functions, one for each direction. Compute in `float32` whatever the input
# is. `eps` is the smallest scale you allow: a group in which all values are
# equal has the range 0, and a division by 0 gives nan. It is the floor of the
# scale as it is *stored*, so it must be a number that `float16` can hold. The
# `1e-8` of lab 03 would become 0, and so can a floor that is put under the
# range and then divided by 255.

# %% nbgrader={"grade_id": "todo_2", "solution": true} todo="TODO 2: quantize groups with scale and minimum"
def quantize_key_groups(
    key: Tensor, bits: int = 4, group_size: int = 32, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """A scale and a minimum for every group_size tokens of every channel.

    key         [batch, heads, tokens, head_dim], floating point;
                tokens is a multiple of group_size
    bits        2, 4 or 8
    group_size  how many neighbouring tokens of a channel make a group
    eps         the smallest scale, at least 1e-7
    return      codes, uint8, shaped like key, in [0, 2**bits - 1]: the
                nearest under the scale and minimum that are returned;
                scale, float16 [batch, heads, tokens / group_size, head_dim],
                at least eps (as float16);
                minimum, float16, shaped like scale
    raises      ValueError that names the argument and says what was given:
                key (its shape, or how many dimensions it has, when these
                are not four); bits; group_size, when it is below 1 or
                tokens is not a multiple of it
    """
    # 1. refuse bad arguments
    # 2. float32; split tokens into groups x group_size
    # 3. smallest and largest value of each group
    # 4. scale (at least eps) and minimum, both rounded to float16
    # 5. the codes, from the rounded scale and minimum in float32:
    #    subtract, divide, round, clamp, uint8; shaped like key again
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
    """A scale and a minimum for every group_size channels of every token.

    value       [batch, heads, tokens, head_dim], floating point;
                head_dim is a multiple of group_size
    bits        2, 4 or 8
    group_size  how many neighbouring channels of a token make a group
    eps         the smallest scale, at least 1e-7
    return      codes, uint8, shaped like value, in [0, 2**bits - 1]: the
                nearest under the scale and minimum that are returned;
                scale, float16 [batch, heads, tokens, head_dim / group_size],
                at least eps (as float16);
                minimum, float16, shaped like scale
    raises      ValueError that names the argument and says what was given:
                value (its shape, or how many dimensions it has, when these
                are not four); bits; group_size, when it is below 1 or
                head_dim is not a multiple of it
    """
    # The same steps, with the groups along head_dim.
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


# %% [markdown] lang="en"
# **Tested:** Keys: the shapes and dtypes, then every minimum, scale and code of
# every group against the definition.
#
# **Why:** the shape says which way your groups run.
#
# **Expected:** scale and minimum `(batch, heads, tokens / group_size,
# head_dim)`, and every value restored within half a scale (plus what `float16`
# moved the ends of its range).

# %% nbgrader={"grade_id": "test_todo_2", "grade": true, "points": 2}
def test_keys_are_grouped_along_tokens():
    key = checks.groups.example(2, 3, 8, 12, seed=1)
    checks.groups.quantizes_keys(quantize_key_groups, key, 4, group_size=4)


def test_key_example_of_section_3():
    key = torch.tensor([13.0, 13.6, 12.4, 14.2]).reshape(1, 1, 4, 1)
    checks.groups.quantizes_keys(quantize_key_groups, key, 2, group_size=4)


with checks.todo(2):
    test_keys_are_grouped_along_tokens()
    test_key_example_of_section_3()

    ### BEGIN HIDDEN TESTS
    def test_keys_of_other_shapes():
        shapes = {(2, 3, 12, 8): 4, (1, 4, 6, 5): 3, (3, 2, 10, 4): 5}
        shapes |= {(1, 2, 8, 3): 8, (2, 1, 16, 9): 4}
        for seed, (shape, size) in enumerate(shapes.items()):
            key = checks.groups.example(*shape, seed=10 + seed)
            for bits in (4, 2, 8):
                checks.groups.quantizes_keys(
                    quantize_key_groups, key, bits, group_size=size
                )
        key = checks.groups.example(2, 6, 3, 5, seed=20).transpose(1, 2)
        checks.groups.quantizes_keys(quantize_key_groups, key, 4, group_size=3)

    test_keys_of_other_shapes()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** Values: the same, along the other direction.
#
# **Why:** a token must not depend on the tokens beside it.
#
# **Expected:** scale and minimum `(batch, heads, tokens, head_dim /
# group_size)`.

# %% nbgrader={"grade_id": "test_todo_2_values", "grade": true, "points": 2}
def test_values_are_grouped_along_head_dim():
    value = checks.groups.example(2, 3, 8, 12, seed=2)
    checks.groups.quantizes_values(
        quantize_value_groups, value, 4, group_size=4
    )


with checks.todo(2):
    test_values_are_grouped_along_head_dim()

    ### BEGIN HIDDEN TESTS
    def test_values_of_other_shapes():
        shapes = {(2, 3, 8, 12): 4, (1, 4, 5, 6): 3, (3, 2, 4, 10): 5}
        shapes |= {(1, 2, 3, 8): 8, (2, 1, 9, 16): 4, (2, 2, 1, 9): 3}
        for seed, (shape, size) in enumerate(shapes.items()):
            value = checks.groups.example(*shape, seed=30 + seed)
            for bits in (4, 2, 8):
                checks.groups.quantizes_values(
                    quantize_value_groups, value, bits, group_size=size
                )
        value = checks.groups.example(2, 3, 8, 5, seed=40).transpose(2, 3)
        checks.groups.quantizes_values(
            quantize_value_groups, value, 4, group_size=4
        )

    test_values_of_other_shapes()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** groups in which all values are equal, groups of one value, another
# `eps`, half precision input, and values far from 0: each code must be the
# nearest under the scale and the minimum *that you return*.
#
# **Why:** one nan in a cache spoils every later token. And codes that belong to
# another minimum than the stored one are off by the difference.
#
# **Expected:** the scale is at least `eps`. Equal values come back as they
# were, within the rounding of `float16`.

# %% nbgrader={"grade_id": "test_todo_2_edges", "grade": true, "points": 1}
def test_equal_values_come_back():
    same = torch.full((1, 2, 4, 8), 5.25)
    for eps in (1e-5, 1e-3):
        checks.groups.quantizes_keys(
            quantize_key_groups, same, 4, group_size=4, eps=eps
        )
        checks.groups.quantizes_values(
            quantize_value_groups, same, 4, group_size=4, eps=eps
        )


with checks.todo(2):
    test_equal_values_come_back()

    ### BEGIN HIDDEN TESTS
    def test_groups_of_one_and_two():
        for size in (1, 2):
            key = checks.groups.example(1, 3, 4, 6, seed=55)
            checks.groups.quantizes_keys(
                quantize_key_groups, key, 8, group_size=size
            )
            checks.groups.quantizes_values(
                quantize_value_groups, key, 8, group_size=size
            )

    def test_equal_and_nearly_equal_values():
        for number in (0.0, -7.5, 0.3331, 113.7):
            same = torch.full((2, 3, 4, 8), number)
            near = same.clone()
            near[0, :, :, 1::2] += 1e-6
            near[0, :, 1::2] -= 1e-6
            for given in (same, near):
                for eps in (2e-3, 1e-5):
                    checks.groups.quantizes_keys(
                        quantize_key_groups, given, 4, group_size=2, eps=eps
                    )
                    checks.groups.quantizes_values(
                        quantize_value_groups, given, 4, group_size=4, eps=eps
                    )

    def test_codes_belong_to_what_is_stored():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for bits, shift in ((4, 0.0), (8, 0.0), (8, 100.0), (2, -60.0)):
                given = checks.groups.example(1, 2, 8, 16, seed=50)
                given = (given / 8 + shift).to(dtype)
                checks.groups.nearest_keys(
                    quantize_key_groups, given, bits, group_size=8
                )
                checks.groups.nearest_values(
                    quantize_value_groups, given, bits, group_size=8
                )

    test_groups_of_one_and_two()
    test_equal_and_nearly_equal_values()
    test_codes_belong_to_what_is_stored()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** every bad argument of the two docstrings. Right input must be
# accepted.
#
# **Why:** a last group that is too short has to be refused here. TODO 3 will
# see to it that none arrives.
#
# **Expected:** a `ValueError` that names the argument and what was given.

# %% nbgrader={"grade_id": "test_todo_2_errors", "grade": true, "points": 1}
def test_a_partial_group_is_refused():
    for quantize, along in (
        (quantize_key_groups, "tokens"),
        (quantize_value_groups, "channels"),
    ):
        given = checks.groups.example(1, 2, 6, 6, seed=3)
        checks.accepts(
            quantize, given, 4, 3, because=f"6 {along} in groups of 3"
        )
        checks.refuses(
            quantize,
            *(given, 4, 4),
            names="group_size",
            given=4,
            because=f"it is 4, with 6 {along}",
        )


with checks.todo(2):
    test_a_partial_group_is_refused()

    ### BEGIN HIDDEN TESTS
    def test_bits_group_size_and_dimensions():
        for quantize, name in (
            (quantize_key_groups, "key"),
            (quantize_value_groups, "value"),
        ):
            given = checks.groups.example(1, 2, 8, 8, seed=4)
            for bits in (2, 4, 8):
                checks.accepts(
                    quantize, given, bits, 4, because=f"{bits} bits"
                )
            for bits in (0, 3, 16, -4):
                checks.refuses(
                    quantize,
                    *(given, bits, 4),
                    names="bits",
                    given=bits,
                    because=f"it is {bits}",
                )
            for size in (0, -4, 16, 5):
                checks.refuses(
                    quantize,
                    *(given, 4, size),
                    names="group_size",
                    given=size,
                    because=f"it is {size}, with shape (1, 2, 8, 8)",
                )
            for shape in [(8,), (2, 8, 8), (1, 1, 2, 8, 8)]:
                checks.refuses(
                    quantize,
                    *(torch.ones(shape), 4, 4),
                    names=name,
                    given=[shape, len(shape)],
                    because=f"it has {len(shape)} dimensions",
                )

    test_bits_group_size_and_dimensions()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Your groups on real Keys and Values.** Head 0, the first 64 tokens, 4 bits,
# groups of 16. The lower pictures show the scale of each group, the step you
# returned.

# %%
GROUP = 16  # change this: 8, 16, 32 or 64

with checks.waits_for(2):
    shown_keys, shown_values = kv.keys[:, :1, :64], kv.values[:, :1, :64]
    _, key_scale, _ = quantize_key_groups(shown_keys, 4, GROUP)
    _, value_scale, _ = quantize_value_groups(shown_values, 4, GROUP)
    plots.show(
        plots.groups.grouped(
            shown_keys[0, 0],
            key_scale[0, 0],
            shown_values[0, 0],
            value_scale[0, 0],
        ),
        alt="Four heat maps. Above, the values of Keys and Values with the "
        "borders of the groups: vertical runs for Keys, horizontal ones for "
        "Values. Below, the scale of each group: for Keys the first group of "
        "channel 56 is far brighter than all others; for Values the four "
        "groups of token 0 are dark, and channels 16 to 31 are brightest.",
    )

# %% [markdown] lang="en"
# **What to see.** Left, Keys: a group is a vertical strip. Channel 56 is the
# outlier channel: far from 0 for every token but token 0 (dark brown above).
# Below, only its *first* group has a large step, because token 0, which is near
# 0, belongs to it. In the other three groups the minimum takes care of the
# distance, and the steps are as small as those of other channels. One odd token
# spoils one group, no longer a whole channel.
#
# Right, Values: a group is a horizontal strip. Row 0 is dark below: the small
# token 0 has small steps, whatever the other tokens are. Channel 31 makes the
# steps of channels 16 to 31 large, and only those.

# %% nbgrader={"grade_id": "given_restore", "locked": true}
def restore(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Floats: codes x scale + minimum. Each scale serves a run of codes.

    codes           uint8 [batch, heads, tokens, head_dim], not packed
    scale, minimum  the same number of dimensions; sizes that divide those
    """
    for axis in range(codes.ndim):
        run = codes.shape[axis] // scale.shape[axis]
        scale = scale.repeat_interleave(run, dim=axis)
        minimum = minimum.repeat_interleave(run, dim=axis)
    return codes.float() * scale.float() + minimum.float()


def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Outputs of causal attention, as in lab 03; query heads share KV heads."""
    shared = queries.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(shared, dim=1)
    values = values.repeat_interleave(shared, dim=1)
    tokens, head_dim = keys.shape[2:]
    scores = queries @ keys.transpose(2, 3) / math.sqrt(head_dim)
    future = torch.ones(tokens, tokens).triu(1).bool()
    return scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ values


def percent(got: Tensor, wanted: Tensor) -> float:
    """The size of the error as a percentage of the size of what is wanted."""
    return 100 * float((got - wanted).norm() / wanted.norm())


# %% [markdown] lang="en"
# ### Which way, and how large?
#
# First the direction. Both functions accept any tensor of four dimensions, so
# you can group Keys along head_dim and Values along tokens, the wrong way
# round. The error is that of the attention output, in percent, as in lab 03: 64
# tokens of one layer, 4 bits, groups of 32. The bytes are the same in all four
# rows.

# %%
LAYER = kv.layers[0]  # or kv.layers[1]

with checks.waits_for(2):
    one = captured.load(LAYER)
    queries, keys, values = (
        x[:, :, :64] for x in (one.queries, one.keys, one.values)
    )
    output = attention(queries, keys, values)
    ways = (
        ("along tokens", quantize_key_groups),
        ("along head_dim", quantize_value_groups),
    )
    errors = {}
    for way, quantize in ways:
        near = restore(*quantize(keys, 4, 32))
        moved = attention(queries, near, values)
        errors[f"Keys {way}"] = percent(moved, output)
    for way, quantize in ways[::-1]:
        near = restore(*quantize(values, 4, 32))
        moved = attention(queries, keys, near)
        errors[f"Values {way}"] = percent(moved, output)
    print(f"layer {LAYER}: error of the attention output")
    for name, error in errors.items():
        print(f"{name:22} {error:5.1f} %")

# %% [markdown] lang="en"
# **What to see (layer 18).** Keys: 7 % along tokens, 14 % along head_dim.
# Values: 7 % along head_dim, 23 % along tokens. In layer 23 the Keys hardly
# care (13.7 % and 13.9 %), and the Values care even more (7 % and 32 %). The
# axes of lab 03 are never the worse ones here, and mostly by far the better.
#
# Now the size. Keys and Values are both quantized, each its own way, at 2, 4
# and 8 bits with groups of 4, 8, 16, 32 and 64. The star is the rule of lab 03
# on the same tokens: symmetric, one `float32` scale per channel or token.

# %%
with checks.waits_for(2):
    curves = {}
    for bits in (2, 4, 8):
        for size in (4, 8, 16, 32, 64):
            near_keys = restore(*quantize_key_groups(keys, bits, size))
            near_values = restore(*quantize_value_groups(values, bits, size))
            error = percent(attention(queries, near_keys, near_values), output)
            stored = bits + 32 / size
            curves.setdefault(bits, []).append((size, stored, error))

    # Lab 03: symmetric, 4 bits; 32 bits of scale for each run of 64 values.
    key_step = keys.abs().amax(dim=2, keepdim=True) / 7
    value_step = values.abs().amax(dim=3, keepdim=True) / 7
    near_keys = (keys / key_step).round() * key_step
    near_values = (values / value_step).round() * value_step
    error = percent(attention(queries, near_keys, near_values), output)
    plots.show(
        plots.groups.trade_off(curves, symmetric=(4 + 32 / 64, error)),
        alt="Error against bits a value, one curve for each of 2, 4 and 8 "
        "bits. On each curve smaller groups have less error and take more bits. "
        "Where two curves take the same bits, the one with more bits a code "
        "is lower. The symmetric rule of lab 03 lies above the 4-bit curve.",
    )
    for bits, points in curves.items():
        said = "  ".join(f"{size}: {error:.1f} %" for size, _, error in points)
        print(f"{bits} bits, group size and error   {said}")
    print(f"rule of lab 03, 4.5 bits a value   {error:.1f} %")

# %% [markdown] lang="en"
# **What to see (layer 18).**
#
# - **Smaller groups: less error, more bits.** At 4 bits the error goes from 13
#   % (groups of 64, 4.5 bits a value) to 3 % (groups of 4, 12 bits).
# - **Look at equal cost.** 2-bit codes in groups of 8 and 4-bit codes in groups
#   of 16 both take 6 bits a value. The errors are 32 % and 8 %. In this figure
#   it is better to spend a bit on the codes than on more scales.
# - **The minimum pays for itself.** At 4.5 bits a value the symmetric rule of
#   lab 03 (star) has 21 % error, groups of 64 with a minimum have 13 %. A
#   `float16` scale and a `float16` minimum take as much as one `float32` scale.
#
# As in lab 03, this is one layer and one text. Set `LAYER = kv.layers[1]` above
# and run both cells again: at 4 bits, groups of 16 and of 32 then have the same
# error, 16 %. An error that has been through a softmax does not shrink as
# evenly as the steps do.

# %% [markdown] lang="en"
# ## 5 · Only whole groups leave the window
#
# A Key group needs `group_size` tokens. During decoding they come one by one,
# so they have to wait. The rules of lab 03 get one change, in rule 2:
#
# 1. New tokens go behind those of the window, in order.
# 2. Tokens beyond `residual_length` are too many. Of these, **only whole groups
#    flush**: the oldest ones, a multiple of `group_size`. The rest waits.
# 3. All tokens that leave in one call are one new segment, quantized once.
# 4. A segment is never changed again.
#
# With `residual_length` 2 and groups of 3:
#
# | call | arrive | too many | flushed | segments | window |
# |---|---|---|---|---|---|
# | 1 | 1, 2, 3, 4 | 2 | none | | 1, 2, 3, 4 |
# | 2 | 5 | 3 | 1, 2, 3 | [1, 2, 3] | 4, 5 |
# | 3 | 6, 7 | 2 | none | [1, 2, 3] | 4, 5, 6, 7 |
# | 4 | 8 to 13 | 8 | 4 to 9 | [1, 2, 3] [4 to 9] | 10, 11, 12, 13 |
#
# Once `residual_length` tokens have arrived, the window holds between
# `residual_length` and `residual_length + group_size - 1` tokens.

# %% [markdown] lang="en"
# ## TODO 3 · Append and flush by groups
#
# The state is the dictionary of lab 03 with two more lists, for the minima:
#
# | key | holds |
# |---|---|
# | `key_q_segments`, `key_scale_segments`, `key_minimum_segments` | lists: what `quantize_key` returned for each segment |
# | `value_q_segments`, `value_scale_segments`, `value_minimum_segments` | the same for `quantize_value` |
# | `key_residual`, `value_residual` | the window, tensors in the dtype they came in |
# | `flushed_tokens` | tokens that *this* call moved out of the window |
# | `quantized_tokens` | tokens in all segments |
# | `total_tokens` | tokens in all segments and in the window |
#
# `quantize_key(tokens)` and `quantize_value(tokens)` each return three tensors,
# `(codes, scale, minimum)`. The codes may be packed already. Store what comes,
# and do not look inside. As in lab 03 the old state stays as it is, and the
# window is a copy.

# %% nbgrader={"grade_id": "todo_3", "solution": true} todo="TODO 3: append tokens and flush whole groups"
def append_by_groups(
    state: dict | None,
    new_key: Tensor,
    new_value: Tensor,
    residual_length: int,
    group_size: int,
    quantize_key,
    quantize_value,
) -> dict:
    """The state after new tokens; whole groups beyond the window are flushed.

    state            None at the start, else what the last call returned
    new_key,         [batch, heads, tokens, head_dim], the same shape; at
    new_value        least one token, oldest first
    residual_length  the fewest tokens that stay, once so many have arrived
    group_size       tokens leave in multiples of this
    quantize_key,    take tokens [batch, heads, flushed, head_dim] and
    quantize_value   return (codes, scale, minimum); called once a flush each
    return           a new state with the eleven entries listed above; the
                     old one is not changed, and the window is a copy
    raises           ValueError that names the argument and says what was
                     given (the number, the shape or the dtype at fault):
                     residual_length or group_size below 1; new_key or
                     new_value not four-dimensional; shapes of the two not
                     the same; batch, heads, head_dim or dtype of one not as
                     in the state
    """
    # 1. refuse bad arguments
    # 2. put the new tokens behind those of the window (there may be no state)
    # 3. count how many are too many, and how many of these are whole groups
    # 4. if there are any, quantize them, Key and Value, and add one segment
    # 5. what is left is the window; count, and return the new state
    ### BEGIN SOLUTION
    for name, size in (
        ("residual_length", residual_length),
        ("group_size", group_size),
    ):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if new_key.ndim != 4:
        raise ValueError(
            "new_key must be [batch, heads, tokens, head_dim], "
            f"got shape {tuple(new_key.shape)}"
        )
    if new_value.shape != new_key.shape:
        raise ValueError(
            "new_key and new_value must have the same shape, got "
            f"{tuple(new_key.shape)} and {tuple(new_value.shape)}"
        )
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
        for name, new, held in (
            ("new_key", new_key, state["key_residual"]),
            ("new_value", new_value, state["value_residual"]),
        ):
            same = new.dtype == held.dtype and all(
                new.shape[axis] == held.shape[axis] for axis in (0, 1, 3)
            )
            if not same:
                raise ValueError(
                    f"{name} has shape {tuple(new.shape)} and {new.dtype}; "
                    f"the window has {tuple(held.shape)} and {held.dtype}"
                )
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
# As in lab 03 the tests use numbered tokens, and a quantizer that loses
# nothing: token `n` holds `n` in its Key and `-n` in its Value.

# %% nbgrader={"grade_id": "given_stand_ins", "locked": true}
def stand_in(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Takes the place of a quantizer: whole numbers, no loss."""
    return tokens.to(torch.int16), torch.ones(1), torch.zeros(1)


def feed(
    append, arrivals: list[int], residual_length: int, group_size: int
) -> list[dict]:
    """The states after each call, with so many numbered tokens a call."""
    states, state, first = [], None, 1
    for count in arrivals:
        numbers = torch.arange(first, first + count).float()
        key = numbers.reshape(1, 1, count, 1).repeat(1, 2, 1, 3)
        state = append(
            *(state, key, -key, residual_length, group_size),
            *(stand_in, stand_in),
        )
        states.append(state)
        first += count
    return states


# %% [markdown] lang="en"
# **Tested:** after every call, which tokens are in the window and which in the
# segments, value by value, and the three counters.
#
# **Why:** a Key group that is flushed too early has no full `group_size`
# tokens, and one that is flushed late takes window memory.
#
# **Expected:** the window holds the newest tokens, never fewer than
# `residual_length` once so many have come, and never a whole group more.

# %% nbgrader={"grade_id": "test_todo_3", "grade": true, "points": 3}
def test_the_table_of_section_5():
    """Window 2, groups of 3, 4 + 1 + 2 + 6 tokens."""
    states = feed(append_by_groups, [4, 1, 2, 6], 2, 3)
    kept = ([1, 2, 3, 4], [4, 5], [4, 5, 6, 7], [10, 11, 12, 13])
    flushed, quantized = (0, 3, 0, 6), (0, 3, 3, 9)
    for call, state in enumerate(states):
        checks.groups.window_holds(state, kept[call], 2, 3)
        total = kept[call][-1]
        checks.groups.counts(state, flushed[call], quantized[call], total)


with checks.todo(3):
    test_the_table_of_section_5()

    ### BEGIN HIDDEN TESTS
    def test_every_edge_of_the_window():
        for residual, size in ((1, 1), (2, 4), (5, 2), (4, 4), (3, 1)):
            # R + G - 1, R + G and R + G + 1 in one call, then one more.
            for count in range(residual + size - 1, residual + size + 2):
                checks.groups.window(
                    append_by_groups, [count, 1], residual, size
                )
            one_by_one = [1] * (residual + 2 * size + 1)
            checks.groups.window(append_by_groups, one_by_one, residual, size)

    def test_long_prompts_and_mixtures():
        checks.groups.window(append_by_groups, [61, 1, 1, 2], 3, 8)
        checks.groups.window(append_by_groups, [2, 7, 1, 11, 3, 1], 6, 4)
        checks.groups.window(append_by_groups, [3, 2], 100, 2)
        checks.groups.window(append_by_groups, [3, 2, 9], 2, 50)
        for dtype in (torch.float16, torch.bfloat16):
            checks.groups.window(
                append_by_groups, [5, 2, 4], 3, 2, dtype=dtype
            )
        checks.groups.window(
            append_by_groups, [6, 3, 1], 2, 3, batch=1, heads=1, head_dim=5
        )

    test_every_edge_of_the_window()
    test_long_prompts_and_mixtures()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** how segments come about. One for each flush, none without a flush;
# earlier ones equal bit by bit; codes, scale and minimum as the quantizer
# returned them; the old state and the caller's buffers do not matter
# afterwards.
#
# **Why:** quantizing the prefix again costs more the longer the text is.
#
# **Expected:** append, never rewrite.

# %% nbgrader={"grade_id": "test_todo_3_segments", "grade": true, "points": 2}
def test_segments_are_appended():
    """Window 2, groups of 3, 5 + 6 tokens: two segments of 3 and 6."""
    state = feed(append_by_groups, [5, 6], 2, 3)[-1]
    checks.groups.segments_hold(state, [[1, 2, 3], [4, 5, 6, 7, 8, 9]])


with checks.todo(3):
    test_segments_are_appended()

    ### BEGIN HIDDEN TESTS
    def test_segments_of_other_arrivals():
        for residual, size in ((1, 2), (3, 3), (4, 1)):
            for arrivals in ([4, 3, 1, 1], [1] * 9, [23, 1, 5], [2, 2, 2]):
                checks.groups.segments(
                    append_by_groups, arrivals, residual, size
                )

    test_segments_of_other_arrivals()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** every bad argument of the docstring. Right input must be accepted.
#
# **Why:** `torch.cat` joins two dtypes without a word, and the whole window
# changes its dtype.
#
# **Expected:** a `ValueError` that names the argument and what was given.

# %% nbgrader={"grade_id": "test_todo_3_errors", "grade": true, "points": 1}
def test_group_size_must_be_positive():
    key = torch.ones(1, 2, 3, 4)
    checks.accepts(
        append_by_groups,
        *(None, key, key, 2, 3, stand_in, stand_in),
        because="a first call with 3 tokens, window 2, groups of 3",
    )
    checks.refuses(
        append_by_groups,
        *(None, key, key, 2, 0, stand_in, stand_in),
        names="group_size",
        given=0,
        because="it is 0",
    )


with checks.todo(3):
    test_group_size_must_be_positive()

    ### BEGIN HIDDEN TESTS
    def test_sizes_and_shapes():
        key = torch.ones(1, 2, 3, 4)
        checks.accepts(
            append_by_groups,
            *(None, key, key, 1, 1, stand_in, stand_in),
            because="window 1, groups of 1",
        )
        for residual, size in ((0, 2), (-3, 2), (2, -1)):
            name = "group_size" if size < 1 else "residual_length"
            checks.refuses(
                append_by_groups,
                *(None, key, key, residual, size, stand_in, stand_in),
                names=name,
                given=min(residual, size),
                because=f"it is {min(residual, size)}",
            )
        for shape in [(2, 3, 4), (1, 1, 2, 3, 4)]:
            both = torch.ones(shape), torch.ones(shape)
            checks.axes.refuses_pair(
                append_by_groups,
                *(None, *both, 4, 2, stand_in, stand_in),
                given=[shape, len(shape)],
                because=f"both have {len(shape)} dimensions",
            )
        for shape in [(1, 2, 1, 4), (1, 2, 3, 1), (1, 1, 3, 4), (2, 2, 3, 4)]:
            other = torch.ones(shape)
            for both in ((key, other), (other, key)):
                said = " and ".join(str(tuple(x.shape)) for x in both)
                checks.axes.refuses_pair(
                    append_by_groups,
                    *(None, *both, 4, 2, stand_in, stand_in),
                    given=[tuple(key.shape), shape],
                    because=f"Key and Value have shapes {said}",
                )

    def test_what_does_not_fit_the_state():
        key = torch.ones(1, 2, 3, 4)
        state = append_by_groups(None, key, -key, 2, 2, stand_in, stand_in)
        one = torch.ones(1, 2, 1, 4)
        checks.accepts(
            append_by_groups,
            *(state, one, one, 2, 2, stand_in, stand_in),
            because="one more token of the same sizes and dtype",
        )
        for axis, shape in (
            ("batch", (7, 2, 3, 4)),
            ("batch", (2, 2, 3, 4)),
            ("heads", (1, 9, 3, 4)),
            ("heads", (1, 1, 3, 4)),
            ("head_dim", (1, 2, 3, 8)),
            ("head_dim", (1, 2, 3, 1)),
        ):
            other = torch.ones(shape)
            size = shape[("batch", "heads", "", "head_dim").index(axis)]
            checks.axes.refuses_pair(
                append_by_groups,
                *(state, other, other, 2, 2, stand_in, stand_in),
                given=[shape, size],
                because=f"another {axis} than the state's",
            )
        for dtype in (torch.float16, torch.float64, torch.bfloat16):
            other = one.to(dtype)
            checks.axes.refuses_pair(
                append_by_groups,
                *(state, other, other, 2, 2, stand_in, stand_in),
                given=dtype,
                because="another dtype than the state's",
            )
            for name, both in (
                ("new_key", (other, one)),
                ("new_value", (one, other)),
            ):
                checks.refuses(
                    append_by_groups,
                    *(state, *both, 2, 2, stand_in, stand_in),
                    names=name,
                    given=dtype,
                    because="its dtype alone is not the state's",
                )

    test_sizes_and_shapes()
    test_what_does_not_fit_the_state()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Your window at work.** A prompt of 40 tokens, then 88 more, one by one, with
# `residual_length` 32 and groups of 16. For comparison: the window of lab 03,
# and the rule of `QuantizedLayer` in transformers 5.24
# (`transformers/cache_utils.py`). That one quantizes the whole prompt. Then, at
# each call whose new tokens would make the window `residual_length` or longer,
# it restores everything, joins the window and the new tokens to it, quantizes
# all of it again, and starts with an empty window.

# %%
PROMPT, WINDOW, GROUP = 40, 32, 16  # change these

with checks.waits_for(3):
    given_to_quantizer = {"yours": 0, "quantizes all again": 0}

    def counting_stand_in(tokens: Tensor):
        given_to_quantizer["yours"] += tokens.shape[2]
        return stand_in(tokens)

    state, seen = None, 0
    tokens, yours, lab_03, all_again = [], [], [], []
    for count in [PROMPT] + [1] * 88:
        new = torch.zeros(1, 1, count, 2)
        state = append_by_groups(
            *(state, new, new, WINDOW, GROUP),
            *(counting_stand_in, stand_in),
        )
        held = all_again[-1] if all_again else 0
        if seen == 0 or held + count >= WINDOW:
            given_to_quantizer["quantizes all again"] += seen + count
            held = 0
        else:
            held += count
        seen += count
        tokens.append(seen)
        yours.append(state["key_residual"].shape[2])
        lab_03.append(min(WINDOW, seen))
        all_again.append(held)
    plots.show(
        plots.groups.occupancy(
            tokens, yours, lab_03, all_again, WINDOW, GROUP
        ),
        alt="Tokens in the window against tokens that have arrived. Your "
        "window is a saw-tooth between 32 and 47. The rule of lab 03 is flat at 32. "
        "The rule of transformers is a saw-tooth between 0 and 31.",
    )
    for rule, count in given_to_quantizer.items():
        print(f"{rule:20} {count:3} tokens went through the quantizer")
    print(f"fewest and most in your window: {min(yours)} and {max(yours)}")

# %% [markdown] lang="en"
# **What to see.** Your window fills up to 47 tokens. When the next one arrives,
# a group of 16 leaves and 32 stay: it never has fewer than `residual_length`
# and never `group_size` more. In the other saw-tooth the newest tokens, which
# get much of the attention, are all quantized right after each overflow.
#
# The printed lines count work. In your cache every flushed token is quantized
# once. A cache that quantizes everything again at each overflow sends the same
# old tokens through again and again, and the more the longer the text is. It
# has an advantage, too: it needs no list of segments, one tensor is enough.

# %% [markdown] lang="en"
# ## 6 · The ledger
#
# Now you can count what is really there. A tensor knows its size:
# `tensor.nbytes` is the number of its values times the bytes of its dtype. No
# formula with bits, no assumption about dtypes: the ledger adds up what the
# state holds.

# %% [markdown] lang="en"
# ## TODO 4 · Count the bytes
#
# `stored_bytes` counts by part. `times_smaller` compares with `float16`: the
# bytes that *all* tokens of the state, Keys and Values, would take in
# `float16`, divided by all bytes that are stored. Batch, heads and `head_dim`
# can be read off the window, even when it is empty.

# %% nbgrader={"grade_id": "todo_4", "solution": true} todo="TODO 4: count the stored bytes"
def stored_bytes(state: dict) -> dict[str, int]:
    """Bytes of the tensors that a state of TODO 3 holds, by part.

    state   as TODO 3 returns it; its tensors may have any dtype
    return  whole bytes, Keys and Values together, under exactly four names:
            "codes", "scales", "minima" (all segments), "window"
    """
    # 1. for each part, the lists of segments that belong to it
    # 2. add the bytes of every tensor in them
    # 3. the window is not a list
    ### BEGIN SOLUTION
    ledger = {}
    for name, part in (
        ("codes", "q"),
        ("scales", "scale"),
        ("minima", "minimum"),
    ):
        ledger[name] = sum(
            tensor.nbytes
            for side in ("key", "value")
            for tensor in state[f"{side}_{part}_segments"]
        )
    ledger["window"] = (
        state["key_residual"].nbytes + state["value_residual"].nbytes
    )
    return ledger
    ### END SOLUTION


def times_smaller(state: dict) -> float:
    """How many times larger the same tokens would be in float16.

    state   as TODO 3 returns it, with at least one token
    return  bytes of total_tokens Keys and Values in float16 / stored bytes;
            below 1 when the state is larger
    """
    # 1. how many values do total_tokens Keys and Values have?
    # 2. two bytes each, over the sum of stored_bytes
    ### BEGIN SOLUTION
    batch, heads, _, head_dim = state["key_residual"].shape
    values = 2 * batch * heads * state["total_tokens"] * head_dim
    return 2 * values / sum(stored_bytes(state).values())
    ### END SOLUTION


# %% [markdown] lang="en"
# The tests make states of their own. This one is the example of section 4: 4
# bits, groups of 64, `float16` scale and minimum, one segment, no window.

# %% nbgrader={"grade_id": "given_state", "locked": true}
def state_without_window() -> dict:
    """64 tokens, 3 heads, head_dim 64 in one segment; the window is empty."""
    codes = torch.zeros(1, 3, 64, 32, dtype=torch.uint8)  # two in a byte
    key_scale = torch.ones(1, 3, 1, 64, dtype=torch.float16)
    value_scale = torch.ones(1, 3, 64, 1, dtype=torch.float16)
    empty = torch.zeros(1, 3, 0, 64, dtype=torch.float16)
    return {
        "key_q_segments": [codes],
        "key_scale_segments": [key_scale],
        "key_minimum_segments": [key_scale - 1],
        "value_q_segments": [codes + 17],
        "value_scale_segments": [value_scale],
        "value_minimum_segments": [value_scale - 1],
        "key_residual": empty,
        "value_residual": empty.clone(),
        "flushed_tokens": 64,
        "quantized_tokens": 64,
        "total_tokens": 64,
    }


# %% [markdown] lang="en"
# **Tested:** the four parts, to the byte, on states of several segments, shapes
# and dtypes.
#
# **Why:** a ledger that assumes a dtype goes wrong when somebody changes it.
#
# **Expected:** for the state above 12,288 bytes of codes, 768 of scales, 768 of
# minima, 0 of window.

# %% nbgrader={"grade_id": "test_todo_4", "grade": true, "points": 2}
def test_the_ledger_of_one_segment():
    state = state_without_window()
    checks.groups.ledger(stored_bytes(state), state)


with checks.todo(4):
    test_the_ledger_of_one_segment()

    ### BEGIN HIDDEN TESTS
    def test_ledgers_of_other_states():
        for seed, (segments, window) in enumerate(
            [([6], 3), ([4, 2, 8], 5), ([], 4), ([2] * 5, 1)]
        ):
            for window_dtype in (torch.float16, torch.float32):
                for scale_dtype in (torch.float16, torch.float32):
                    state = checks.groups.made_state(
                        segments, window, window_dtype, scale_dtype, seed=seed
                    )
                    checks.groups.ledger(stored_bytes(state), state)

    test_ledgers_of_other_states()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** how many times smaller than `float16` a state is.
#
# **Why:** this is the number people quote, and it is easy to leave the window
# or the minima out of it.
#
# **Expected:** for the state above 16 / 4.5 = 3.56. A window counts on both
# sides.

# %% nbgrader={"grade_id": "test_todo_4_ratio", "grade": true, "points": 1}
def test_four_bits_in_groups_of_64():
    state = state_without_window()
    checks.groups.smaller(times_smaller(state), state)
    checks.expect(
        abs(times_smaller(state) - 16 / 4.5) < 1e-6,
        "4.5 bits a value are 3.56 times less than 16.",
    )


with checks.todo(4):
    test_four_bits_in_groups_of_64()

    ### BEGIN HIDDEN TESTS
    def test_ratios_of_other_states():
        for seed, (segments, window) in enumerate(
            [([6], 3), ([4, 2, 8], 5), ([], 4), ([2] * 5, 1)]
        ):
            for window_dtype in (torch.float16, torch.float32):
                for scale_dtype in (torch.float16, torch.float32):
                    state = checks.groups.made_state(
                        segments, window, window_dtype, scale_dtype, seed=seed
                    )
                    checks.groups.smaller(times_smaller(state), state)

    test_ratios_of_other_states()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# ## 7 · The bill again
#
# Everything together, on real Keys and Values in `float16`: 32 tokens as a
# prompt, 64 more one by one, window 16, as at the end of lab 03. Values are
# always in groups of 64. Keys leave the window, and are grouped, 1, 16 or 32
# tokens at a time. With 1 it is lab 03's rule again.

# %% nbgrader={"grade_id": "given_cache", "locked": true}
def with_packing(quantize, bits: int, group_size: int):
    """A quantizer for TODO 3: your TODO 2, then your TODO 1."""

    def quantize_and_pack(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        codes, scale, minimum = quantize(tokens, bits, group_size)
        return pack(codes, bits), scale, minimum

    return quantize_and_pack


def read(state: dict, side: str, bits: int) -> Tensor:
    """All tokens of one side, "key" or "value": restored segments, window."""
    window = state[f"{side}_residual"]
    names = [f"{side}_{part}_segments" for part in ("q", "scale", "minimum")]
    parts = []
    for packed, scale, minimum in zip(
        *(state[name] for name in names), strict=True
    ):
        codes = unpack(packed, bits, window.shape[3])
        parts.append(restore(codes, scale, minimum))
    return torch.cat([*parts, window.float()], dim=2)


# %%
BITS, PROMPT, WINDOW = 4, 32, 16  # change these

with checks.waits_for(1, 2, 3, 4):
    keys, values = kv.keys.half(), kv.values.half()
    raw = (keys.nbytes + values.nbytes) / keys.shape[2]  # bytes per token
    arrivals = [PROMPT] + [1] * (keys.shape[2] - PROMPT)
    sizes = [PROMPT + n for n in range(len(arrivals))]
    ledgers, growth, final = {}, {}, {}
    for group in (1, 16, 32):
        quantizers = (
            with_packing(quantize_key_groups, BITS, group),
            with_packing(quantize_value_groups, BITS, 64),
        )
        state, totals = None, []
        for size, count in zip(sizes, arrivals, strict=True):
            new = slice(size - count, size)
            state = append_by_groups(
                *(state, keys[:, :, new], values[:, :, new], WINDOW, group),
                *quantizers,
            )
            totals.append(sum(stored_bytes(state).values()))
        ledgers[group] = stored_bytes(state)
        growth[group], final[group] = totals, state
        ratio, held = times_smaller(state), state["key_residual"].shape[2]
        print(
            f"groups of {group:2}: {totals[-1]:6,} B, {ratio:.2f} times "
            f"smaller than float16, {held} tokens in the window"
        )
    plots.show(
        plots.groups.bill(ledgers, growth, sizes, raw),
        alt="Left: stacked bars of the stored bytes. With groups of one token "
        "the scales and minima make the cache larger than float16; with groups of "
        "16 and 32 it is about half of it. Right: bytes against tokens; with "
        "groups of one token the line is steeper than that of float16, with "
        "larger groups it is a saw-tooth that stays far below.",
    )

# %% [markdown] lang="en"
# **What to see.** Left: with groups of one token the scales and minima of Keys
# take more than everything else, and the cache is larger than `float16`, 88
# against 72 KiB. The *same functions* with groups of 16 need 32 KiB. The codes
# are the same blue block: only the sharing has changed. (Look at what a group
# of one stores: the minimum *is* the value, in `float16`, and the code is
# always 0.)
#
# Groups of 32 have fewer scales and minima, and yet more bytes here. The window
# is the reason: it holds 32 tokens at this moment, where groups of 16 have just
# flushed. Right: this changes with every token. A large group gives saw-teeth
# of large steps.
#
# So a group costs in two places: small groups in scales and minima, large ones
# in waiting tokens. The first cost grows with the text, the second does not.
# The next cell looks at longer texts, and at the error.

# %%
with checks.waits_for(1, 2, 3, 4):
    queries = kv.queries
    exact = attention(queries, keys.float(), values.float())
    errors = {}
    for group, state in final.items():
        near_keys, near_values = (
            read(state, side, BITS) for side in ("key", "value")
        )
        output = attention(queries, near_keys, near_values)
        errors[group] = percent(output[:, :, 64:], exact[:, :, 64:])

    # The content does not matter to the bytes: let the same tokens come again.
    quantizers = (
        with_packing(quantize_key_groups, 4, 64),
        with_packing(quantize_value_groups, 4, 64),
    )
    state, ratios = None, {}
    for _ in range(64):
        state = append_by_groups(state, keys, values, 32, 64, *quantizers)
        held = state["key_residual"].shape[2]
        ratios[state["total_tokens"]] = held, times_smaller(state)

    print("error of the attention output, queries of tokens 64 to 95:")
    for group, error in errors.items():
        print(f"groups of {group:2}: {error:.1f} %")
    print("groups of 64, window 32:")
    for total in (96, 384, 1536, 6144):
        held, ratio = ratios[total]
        print(
            f"{total:5,} tokens, {held} in the window: "
            f"{ratio:.2f} times smaller"
        )

# %% [markdown] lang="en"
# **What to see.** The error hardly depends on the group here: 7 to 9 %. (Groups
# of one restore every Key exactly, so their 7 % come from the Values alone.
# Groups of 32 have a longer window at this moment.) The cache went through your
# packing, your groups, your flush, and attention still gets nearly the same.
#
# The last lines use the formula of section 4 as a limit. In groups of 64 a
# quantized value takes 4.5 bits, 3.56 times less than `float16`. With 96 tokens
# the window is a third of all tokens and the cache is 1.9 times smaller. With
# 6,144 tokens it is 3.46 times smaller. When you read that a cache is "3.56
# times smaller", ask for how many tokens.

# %% [markdown] lang="en"
# ## Written question 1
#
# You may spend 6 bits a value, scale and minimum included. Two settings of your
# figure "What a group size costs" take exactly that. Answer in five to eight
# sentences. Which two are they, and which one would you take, by *your*
# figures? Why does halving the group not help as much as two more bits a code?
# What does the figure leave out that matters when tokens come one by one?

# %% [markdown] lang="en" nbgrader={"grade_id": "written_1", "grade": true, "solution": true, "points": 2}
# <!-- BEGIN SOLUTION -->
# 2-bit codes in groups of 8 (2 + 32/8) and 4-bit codes in groups of 16 (4 +
# 32/16). In layer 18 the errors are 32 % and 8 %, so I take 4 bits in groups of
# 16; in layer 23 it is 47 % and 16 %. Two more bits make 16 codes of 4, so the
# step is five times smaller (the range over 15, not over 3), in every group and
# for certain. Halving the group only helps as far as the range of half a group
# is smaller than that of the whole one. For values that scatter evenly it is a
# little smaller, not half. The figure takes 64 tokens at once. It leaves out
# the tokens that wait in the window: up to 15 with groups of 16, up to 7 with
# groups of 8, in full precision. It also shows one layer of one model, and the
# error of one attention output, not what the model then writes.
#
# **Rubric** (2 points). 1 point: both settings, own figures, and the reason:
# the step is range / (2**bits - 1), and the range of a smaller group shrinks
# only a little. 1 point: the waiting tokens (group_size - 1 more in full
# precision), or another cost of decoding that the figure does not show. Half a
# point off when the answer generalises from one layer without saying so.
# <!-- END SOLUTION -->

# %% [markdown] lang="en"
# ## Written question 2
#
# A colleague finds the lists of segments clumsy. She wants to keep one
# quantized tensor instead: whenever a group is complete, restore everything,
# join the new tokens, and quantize all of it again. How much work is that for a
# text of `n` tokens, compared with yours? What happens to the values of an old
# token? Is there a case in which quantizing it again does not change them? What
# does she win?

# %% [markdown] lang="en" nbgrader={"grade_id": "written_2", "grade": true, "solution": true, "points": 2}
# <!-- BEGIN SOLUTION -->
# There is an overflow every g tokens, and the k-th one quantizes about k x g
# tokens, so together about n x n / (2 g), where appending quantizes each token
# once, n in all. An old token is restored and rounded again each time. When the
# groups are the same and the stored minimum and scale are found again, every
# restored value lies on a code already: the rounding gives the same codes, and
# nothing changes. But when the borders of the groups move, or the smallest and
# largest values change in rounding, the new steps are others, and each round
# adds an error of up to half a step. She wins simple storage: one tensor, one
# shape, nothing to join when it is read, and it is easy to cut or to reorder.
#
# **Rubric** (2 points). 1 point: work grows with the square of the text (or:
# with the context at each flush) against once for each token. 1 point: old
# values are rounded again, with the condition under which they stay (same
# groups, same minimum and scale), and one real advantage of a single tensor.
# <!-- END SOLUTION -->

# %% [markdown] lang="en"
# ## What this shows, and what it does not
#
# **Shown, by your own code.** Codes of 2 and 4 bits really share bytes. A group
# with a `float16` scale and minimum restores every value within half a step, or
# within what the rounding of its ends has moved. On two layers of a real model
# it has less error than the symmetric rule of lab 03 at the same bytes. With
# whole groups, a cache that decodes one token at a time stays smaller than
# `float16`. The ledger counts what is stored, and it comes near the formula as
# the text grows.
#
# **Not shown.** The memory of the process: while your cache is read, all tokens
# exist as floats again, and a real kernel would restore them piece by piece.
# Nothing here was faster, and no cell measured time. `float16` ends at 65,504:
# a model with larger Keys would need another dtype for its minima. The error is
# that of one layer; whether the model still writes the same text is the
# question of lab 05, which puts these functions into a real model.
#
# **Where the ideas come from.** Keys in groups along tokens, Values along
# head_dim, asymmetric, with a window in full precision: KIVI (Liu and others,
# 2024, arXiv 2402.02750). `QuantizedLayer` as described in section 5:
# transformers 5.24, `src/transformers/cache_utils.py`; its own docstring says
# that it differs from the paper in how it groups.
