# %% [markdown] lang="en"
# # Lab 01 · The memory budget
#
# A language model that serves many people needs memory for its weights. It also needs
# memory for what it remembers of every conversation: the **KV cache**. The weights
# have one size. The cache grows with every token of every request, and at some point
# it is the cache that decides how many people you can serve. In this lab you compute
# both, to the byte.
#
# **After this lab you can**
#
# - compute how many bytes the weights of a model take at 16, 8 or 4 bits;
# - compute how many bytes the KV cache of any batch and context length takes, and
#   check the formula on the tensors of a real model;
# - say how many requests fit on a card, and what limits them;
# - bound the number of tokens per second that a card can decode;
# - say what such a budget does *not* tell you.
#
# **You need** to know how to write a Python function, and what Queries, Keys and
# Values are in the attention of a transformer. No GPU and no download is needed.
#
# **Time** 60 to 90 minutes. **Difficulty** 1 of 5: every answer is one to five lines,
# and the care is in the units. **Points** 20, for the four TODOs. The two written
# questions are outside these points: a person reads your answers.
#
# **How it works.** There are four TODO cells. Replace the line
# `raise NotImplementedError(...)` by your code. Run the cell, then run the test cells
# under it. A wrong answer gets a sentence that says what you did and what is wanted.
# The four TODOs do not depend on each other. The pictures appear as soon as the
# functions that they need are there.

# %% nbgrader={"grade_id": "setup", "locked": true}
# the builder puts kvlab/first_cell.py here

# %% [markdown] lang="en"
# ## 1 · The model and the card of this lab
#
# All figures of this lab belong to one model and one card. You can change them at the
# end.
#
# **The model** has the shape of Llama 3.1 8B: 32 layers, 32 query heads, 8 KV heads,
# `head_dim` 128, hidden size 4,096, feed-forward size 14,336 (Table 3 of the Llama 3
# report, arXiv:2407.21783), and a vocabulary of 128,256 tokens (its published
# `config.json`). Mistral 7B has the same layers, heads and `head_dim` (Table 1 of
# arXiv:2310.06825), so it has the same cache.
#
# **The card** has 24 GiB of memory, which it reads at 300 GB per second. The data
# sheet of an NVIDIA L4 says "24 GB", which means 24 GiB (section 2), and 300 GB/s.
#
# **The reserve** is memory that you keep free for everything else: the libraries' own
# buffers, intermediate results, memory lost between allocations. Here it is 2 GiB.
# That is an assumption, not a measurement.
#
# The next cell writes this down. It also counts the parameters, from the shapes of
# the matrices.

# %% nbgrader={"grade_id": "given_numbers", "locked": true}
import inspect
import math
from importlib.util import find_spec

import kvlab.checks.budget
import kvlab.plots.budget
import torch

GB = 10**9
GiB = 2**30

HIDDEN, FEED_FORWARD, VOCABULARY = 4096, 14336, 128256
QUERY_HEADS = 32
SHAPE = {"layers": 32, "kv_heads": 8, "head_dim": 128}

# Matrices for Queries and output, for Keys and Values, for the feed-forward
# part; then the two norms of a layer.
kv_width = SHAPE["kv_heads"] * SHAPE["head_dim"]
attention = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * kv_width
layer = attention + 3 * HIDDEN * FEED_FORWARD + 2 * HIDDEN
# All layers, the token table at the start and at the end, the last norm.
PARAMETERS = SHAPE["layers"] * layer + 2 * VOCABULARY * HIDDEN + HIDDEN

CARD_BYTES = 24 * GiB
BANDWIDTH = 300 * GB  # bytes per second
RESERVE = 2 * GiB

print(f"{PARAMETERS:,} parameters")

# %% [markdown] lang="en"
# ## 2 · Bit, byte, GB, GiB
#
# A **byte** is 8 bits. Memory is handed out in whole bytes.
#
# **GB** and **GiB** are not the same. 1 GB is 10⁹ bytes. 1 GiB is 2³⁰ bytes, which is
# 1,073,741,824. So a GiB is 7.4 % larger. Papers, disks and bandwidths mostly use GB.
# PyTorch's and the driver's messages use GiB or MiB. The memory of a card is sold as
# "24 GB", but the chips hold 24 GiB.
#
# 7 % sounds small. On this card it is 1.8 GB: more than three requests with 4,096
# tokens each, as you will see. So in this course every function returns **bytes**, as
# a whole number, and you divide by `GB` or `GiB` only to print.

# %%
print(f"24 GiB = {24 * GiB:,} bytes = {24 * GiB / GB:.2f} GB")
print(f"24 GB  = {24 * GB:,} bytes = {24 * GB / GiB:.2f} GiB")
print(f"the difference: {24 * (GiB - GB) / GB:.2f} GB")

# %% [markdown] lang="en"
# ## 3 · The weights
#
# A model with $P$ parameters, each stored in $b$ bits, takes
#
# $$\text{bytes} = \left\lceil \frac{P \cdot b}{8} \right\rceil$$
#
# - $P$: number of parameters;
# - $b$: bits per parameter: 32 for float32, 16 for float16 and bfloat16, 8 for int8,
#   4 for a 4-bit format;
# - $\lceil\;\rceil$: round up to a whole byte, once, at the end. Parameters share
#   bytes: two 4-bit parameters lie in one.
#
# Real 4-bit files are larger than this. They also store scales (the step sizes of the
# quantization) and metadata. If you know how much that is, you can put it into $b$:
# a format with a 16-bit scale for every 32 parameters of 4 bits needs
# 4 + 16/32 = 4.5 bits per parameter. So `bits` need not be a whole number.

# %% nbgrader={"grade_id": "todo_1", "solution": true} todo="TODO 1: compute the bytes of the weights"
def weight_bytes(parameters: int, bits: float) -> int:
    """Bytes that the weights of a model take, without scales and metadata.

    parameters  number of parameters, positive
    bits        bits per parameter, positive; 16, 8, 4, also 4.5
    return      whole bytes, as an int; the last byte may be partly filled
    raises      ValueError that names the argument and its value, when
                parameters or bits is zero or negative
    """
    # 1. refuse parameters and bits that are not positive
    # 2. the bits of all parameters together
    # 3. bytes: round up once, and return an int
    ### BEGIN SOLUTION
    if parameters <= 0:
        raise ValueError(f"parameters must be positive, got {parameters}")
    if bits <= 0:
        raise ValueError(f"bits must be positive, got {bits}")
    return math.ceil(parameters * bits / 8)
    ### END SOLUTION


# %% [markdown] lang="en"
# **Tested:** the number of bytes, and that it is a whole number.
#
# **Why:** every budget starts here, and the two usual mistakes (bits for bytes, GB for
# bytes) are wrong by factors.
#
# **Expected:** 7 billion parameters at 4 bits take 3,500,000,000 bytes (3.26 GiB);
# 3 parameters at 4 bits take 2 bytes.

# %% nbgrader={"grade_id": "test_todo_1", "grade": true, "points": 3}
def test_seven_billion_parameters_at_four_bits():
    got = weight_bytes(7_000_000_000, 4)
    checks.budget.weights(got, parameters=7_000_000_000, bits=4)


def test_the_last_byte_counts_as_a_whole_one():
    got = weight_bytes(3, 4)
    checks.budget.weights(got, parameters=3, bits=4)


with checks.todo(1):
    test_seven_billion_parameters_at_four_bits()
    test_the_last_byte_counts_as_a_whole_one()
    ### BEGIN HIDDEN TESTS
    def test_every_width_and_remainder():
        for bits in (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64):
            for parameters in (1, 2, 3, 5, 7, 11, 1_000_003, 7_615_616_512):
                got = weight_bytes(parameters, bits)
                checks.budget.weights(got, parameters=parameters, bits=bits)

    def test_a_width_that_is_not_whole():
        # The last one: one 16-bit scale for every 16,384 parameters of 2 bits.
        for bits in (4.5, 2.25, 1.625, 2 + 16 / 16384):
            for parameters in (1, 3, 4, 96, 8_030_261_248):
                got = weight_bytes(parameters, bits)
                checks.budget.weights(got, parameters=parameters, bits=bits)

    def test_by_name_and_on_large_models():
        for parameters in (70_553_706_496, 405_853_388_800):
            got = weight_bytes(bits=16, parameters=parameters)
            checks.budget.weights(got, parameters=parameters, bits=16)

    test_every_width_and_remainder()
    test_a_width_that_is_not_whole()
    test_by_name_and_on_large_models()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** arguments that make no sense.
#
# **Why:** a budget with a minus sign in it looks like a number and is none. A message
# that names the argument saves the search.
#
# **Expected:** `ValueError`; its message holds the name of the argument and its value.

# %% nbgrader={"grade_id": "test_todo_1_errors", "grade": true, "points": 1}
def test_bits_must_be_positive():
    checks.refuses(
        weight_bytes,
        parameters=1000,
        bits=0,
        names="bits",
        because="it is 0",
        given=0,
    )


with checks.todo(1):
    test_bits_must_be_positive()
    ### BEGIN HIDDEN TESTS
    def test_what_else_is_refused_and_what_is_not():
        for parameters in (0, -1, -7_000_000_000):
            checks.refuses(
                weight_bytes,
                parameters=parameters,
                bits=4,
                names="parameters",
                because=f"it is {parameters}",
                given=parameters,
            )
        for bits in (-4, -0.5):
            checks.refuses(
                weight_bytes,
                parameters=1000,
                bits=bits,
                names="bits",
                because=f"it is {bits}",
                given=bits,
            )
        checks.accepts(
            weight_bytes,
            because="one parameter of one bit",
            parameters=1,
            bits=1,
        )
        checks.accepts(
            weight_bytes,
            because="half a bit a parameter",
            parameters=9,
            bits=0.5,
        )

    test_what_else_is_refused_and_what_is_not()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# ### What the weights take on this card

# %%
with checks.waits_for(1):
    sizes = {
        bits: weight_bytes(PARAMETERS, bits) for bits in (32, 16, 8, 4.5, 4)
    }
    print("bits per parameter     GB     GiB   share of the card")
    for bits, size in sizes.items():
        share = size / CARD_BYTES
        print(f"{bits:18} {size / GB:6.2f} {size / GiB:7.2f} {share:19.0%}")

# %% [markdown] lang="en"
# At 32 bits the weights do not fit. At 16 bits they take 62 % of the card. What is
# left is for the reserve and the cache.

# %% [markdown] lang="en"
# ## 4 · Where the cache comes from: prefill and decode
#
# A decoder model writes one token at a time. To write a token it needs the Keys and
# Values of **all** tokens before it. They do not change any more, so it computes them
# once and keeps them. What it keeps is the KV cache.
#
# - **Prefill.** All tokens of the prompt go through the model in one step. This fills
#   the cache, and the end of it is the first token of the answer. The work grows with
#   the prompt. *Long prompt: the first token comes late.* The wait until it is there is
#   the **time to first token** (TTFT).
# - **Decode.** Then every step takes one token, adds its Key and Value to the cache,
#   and reads the whole cache. *Long answer: the whole takes long*, since there is one
#   step for each token. The average time of such a step is the **time per output
#   token** (TPOT).

# %%
plots.show(
    plots.budget.prefill_and_decode(prompt=6, answer=4),
    alt="A grid of steps and token positions. The prefill step computes six "
    "tokens at once. Each of three decode steps computes one new token and "
    "reads all before it.",
)

# %% [markdown] lang="en"
# **What to see.** A prompt of 6 tokens and an answer of 4. Prefill computes six Keys and
# Values at once. Each decode step computes one and reads all the others. After the
# last step the cache holds 9 tokens: the last token of the answer was never fed back.

# %% [markdown] lang="en"
# ## 5 · Fewer KV heads than query heads
#
# Attention has several heads. Each query head asks a question of its own. In the first
# transformers each had Keys and Values of its own, too. Newer models let a *group* of
# query heads share one KV head: **grouped-query attention** (GQA, arXiv:2305.13245).
#
# Queries are used in the step that makes them and then dropped. Only Keys and Values
# are kept. So the cache counts **KV heads**, not query heads. Our model has 32 query
# heads and 8 KV heads: its cache is 4 times smaller than it would be with 32.

# %%
plots.show(
    plots.budget.grouped_heads(query_heads=8, groups=(8, 2, 1)),
    alt="Three drawings of eight query heads: with eight KV heads, one "
    "each; with two KV heads, four query heads to each; with one KV head "
    "for all eight.",
)

# %% [markdown] lang="en"
# **What to see.** Eight query heads with 8, 2 and 1 KV heads. The cache holds only what
# stands in the lower row: here 8, 2 or 1 pairs of vectors per token and layer.

# %% [markdown] lang="en"
# ## 6 · The bytes of the cache
#
# For every request, every token and every layer, the cache holds one Key vector and
# one Value vector for each KV head. Each vector has `head_dim` values. So
#
# $$\text{bytes} = 2 \cdot B \cdot T \cdot L \cdot H \cdot D \cdot s$$
#
# - $2$: Keys and Values;
# - $B$: `batch`, the number of requests;
# - $T$: `tokens` of each request that are in the cache (prompt and answer so far);
# - $L$: `layers`;
# - $H$: `kv_heads`, KV heads of one layer;
# - $D$: `head_dim`, values in one vector;
# - $s$: `bytes_per_value`: 4 for float32, 2 for float16 and bfloat16, 1 for 8 bits,
#   0.5 for 4 bits, 0.25 for 2 bits.
#
# With $s$ below 1 the product may end in a part of a byte. Round it up, as before.

# %% nbgrader={"grade_id": "todo_2", "solution": true} todo="TODO 2: compute the bytes of the KV cache"
def kv_cache_bytes(
    batch: int,
    tokens: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    bytes_per_value: float,
) -> int:
    """Bytes of the KV cache of a whole batch, over all layers.

    batch            requests at the same time
    tokens           tokens of each request in the cache
    layers           layers of the model
    kv_heads         KV heads of one layer (not query heads)
    head_dim         values in one Key or Value vector
    bytes_per_value  2 for float16, 1 for 8 bits, 0.5 for 4 bits
    return           whole bytes, as an int; a part of a byte is rounded up
    raises           ValueError that names the argument and its value, when
                     any of the six is zero or negative
    """
    # 1. refuse every argument that is not positive
    # 2. how many values there are, in Keys and in Values
    # 3. their bytes: round up once, and return an int
    ### BEGIN SOLUTION
    sizes = {
        "batch": batch,
        "tokens": tokens,
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "bytes_per_value": bytes_per_value,
    }
    for name, size in sizes.items():
        if size <= 0:
            raise ValueError(f"{name} must be positive, got {size}")
    values = 2 * batch * tokens * layers * kv_heads * head_dim
    return math.ceil(values * bytes_per_value)
    ### END SOLUTION


# %% [markdown] lang="en"
# **Tested:** that every size is in the product once, on a small made-up shape and on
# the model of this lab.
#
# **Why:** a forgotten factor gives a number that looks right. Only a shape whose sizes
# all differ shows which factor it was.
#
# **Expected:** one request of 4,096 tokens, 32 layers, 8 KV heads, `head_dim` 128,
# 2 bytes: 536,870,912 bytes (0.5 GiB). Twice the batch: twice that. Twice the batch
# and twice the tokens: four times.

# %% nbgrader={"grade_id": "test_todo_2", "grade": true, "points": 5}
def test_every_size_counts_once():
    shape = {
        "batch": 3,
        "tokens": 7,
        "layers": 5,
        "kv_heads": 11,
        "head_dim": 13,
        "bytes_per_value": 4,
    }
    checks.budget.kv_cache(kv_cache_bytes(**shape), **shape, query_heads=44)


def test_one_request_of_4096_tokens():
    got = kv_cache_bytes(1, 4096, 32, 8, 128, 2)
    checks.budget.kv_cache(
        got,
        batch=1,
        tokens=4096,
        layers=32,
        kv_heads=8,
        head_dim=128,
        bytes_per_value=2,
        query_heads=32,
    )


def test_twice_the_batch_and_twice_the_tokens():
    once = kv_cache_bytes(1, 4096, 32, 8, 128, 2)
    checks.expect(
        kv_cache_bytes(2, 4096, 32, 8, 128, 2) == 2 * once,
        "twice the batch did not give twice the bytes. Expected: batch is one "
        "factor of the product.",
    )
    checks.expect(
        kv_cache_bytes(2, 8192, 32, 8, 128, 2) == 4 * once,
        "twice the batch and twice the tokens did not give four times the "
        "bytes. Expected: each of the two is one factor of the product.",
    )


with checks.todo(2):
    test_every_size_counts_once()
    test_one_request_of_4096_tokens()
    test_twice_the_batch_and_twice_the_tokens()
    ### BEGIN HIDDEN TESTS
    def test_shapes_of_real_models():
        shapes = [  # layers, KV heads, head_dim, query heads
            (24, 2, 64, 14),
            (30, 3, 64, 9),
            (28, 4, 128, 28),
            (80, 8, 128, 64),
            (32, 32, 128, 32),
            (18, 1, 256, 8),
        ]
        for layers, kv_heads, head_dim, query_heads in shapes:
            for batch, tokens in ((1, 1), (5, 300), (17, 8191)):
                for width in (4, 2, 1, 0.5, 0.25, 0.5625):
                    shape = {
                        "batch": batch,
                        "tokens": tokens,
                        "layers": layers,
                        "kv_heads": kv_heads,
                        "head_dim": head_dim,
                        "bytes_per_value": width,
                    }
                    got = kv_cache_bytes(**shape)
                    checks.budget.kv_cache(
                        got, **shape, query_heads=query_heads
                    )

    def test_a_part_of_a_byte_is_rounded_up():
        for tokens, width in ((1, 0.25), (3, 0.25), (5, 0.25), (1, 0.125)):
            shape = {
                "batch": 1,
                "tokens": tokens,
                "layers": 1,
                "kv_heads": 1,
                "head_dim": 1,
                "bytes_per_value": width,
            }
            got = kv_cache_bytes(**shape)
            checks.budget.kv_cache(got, **shape, query_heads=1)
            for name in ("batch", "layers", "kv_heads"):
                several = {**shape, name: 3}
                got = kv_cache_bytes(**several)
                checks.budget.kv_cache(got, **several, query_heads=3)

    def test_random_shapes():
        for seed in range(20):
            dice = torch.Generator().manual_seed(seed)
            batch, tokens, layers, heads, dim, group = (
                int(n) for n in torch.randint(1, 40, (6,), generator=dice)
            )
            got = kv_cache_bytes(batch, tokens, layers, heads, dim, 2)
            checks.budget.kv_cache(
                got,
                batch=batch,
                tokens=tokens,
                layers=layers,
                kv_heads=heads,
                head_dim=dim,
                bytes_per_value=2,
                query_heads=heads * group,
            )

    test_shapes_of_real_models()
    test_a_part_of_a_byte_is_rounded_up()
    test_random_shapes()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** sizes that make no sense.
#
# **Why:** a zero in a product makes the whole budget zero, and you would not see why.
#
# **Expected:** `ValueError`; its message holds the name of the argument and its value.

# %% nbgrader={"grade_id": "test_todo_2_errors", "grade": true, "points": 1}
def test_batch_must_be_positive():
    checks.refuses(
        kv_cache_bytes,
        *(0, 7, 5, 3, 8, 2),
        names="batch",
        because="it is 0",
        given=0,
    )


with checks.todo(2):
    test_batch_must_be_positive()
    ### BEGIN HIDDEN TESTS
    def test_each_of_the_six_is_refused():
        right = {
            "batch": 2,
            "tokens": 7,
            "layers": 5,
            "kv_heads": 3,
            "head_dim": 8,
            "bytes_per_value": 0.5,
        }
        checks.accepts(
            kv_cache_bytes, because="a shape at 4 bits", **right
        )
        smallest = dict.fromkeys(right, 1)
        checks.accepts(
            kv_cache_bytes, because="a shape of ones", **smallest
        )
        for name in right:
            for bad in (0, -1):
                checks.refuses(
                    kv_cache_bytes,
                    names=name,
                    because=f"it is {bad}",
                    given=bad,
                    **{**right, name: bad},
                )
        checks.refuses(
            kv_cache_bytes,
            names="bytes_per_value",
            because="it is -0.5",
            given=-0.5,
            **{**right, "bytes_per_value": -0.5},
        )

    test_each_of_the_six_is_refused()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# ### What the cache takes
#
# One line for the token, one for the request, one for the batch. The last two lines
# show what doubling does, and what grouped-query attention saves.

# %%
with checks.waits_for(2):
    cases = [
        ("1 token", 1, 1, SHAPE["kv_heads"]),
        ("1 request of 4,096 tokens", 1, 4096, SHAPE["kv_heads"]),
        ("2 requests of 4,096 tokens", 2, 4096, SHAPE["kv_heads"]),
        ("2 requests of 8,192 tokens", 2, 8192, SHAPE["kv_heads"]),
        ("the same with 32 KV heads", 2, 8192, QUERY_HEADS),
    ]
    for name, batch, tokens, kv_heads in cases:
        size = kv_cache_bytes(
            batch, tokens, SHAPE["layers"], kv_heads, SHAPE["head_dim"], 2
        )
        print(f"{name:27} {size:14,} bytes {size / GiB:10.4f} GiB")

# %% [markdown] lang="en"
# One token takes 128 KiB in the cache. As text, the same token takes a few bytes.
#
# ### Weights and cache together

# %%
with checks.waits_for(1, 2):
    contexts = list(range(1024, 65537, 1024))
    cache_gib = {
        f"cache at {bits} bits": [
            kv_cache_bytes(4, tokens, **SHAPE, bytes_per_value=bits / 8) / GiB
            for tokens in contexts
        ]
        for bits in (16, 4)
    }
    figure = plots.budget.stacked_memory(
        contexts,
        weights_gib=weight_bytes(PARAMETERS, 16) / GiB,
        reserve_gib=RESERVE / GiB,
        cache_gib=cache_gib,
        capacity_gib=CARD_BYTES / GiB,
        title="Four requests on the card: the weights stay, the cache grows",
    )
    plots.show(
        figure,
        alt="Two stacked area charts of memory against context length, "
        "cache at 16 and at 4 bits. Weights and reserve are flat at 17 GiB. "
        "The cache crosses the card's 24 GiB at 14 thousand tokens with 16 "
        "bits, at 58 thousand with 4.",
    )

# %% [markdown] lang="en"
# **What to see.** Four requests, weights at 16 bits. The weights do not depend on the
# context. The cache grows in a straight line. At 16 bits the card is full at about
# 14,400 tokens per request. At 4 bits the line is four times flatter, and the card is
# full at about 57,700: four times the context on the same card.

# %% [markdown] lang="en"
# ## 7 · The measurement: a real cache, to the byte
#
# So far this is arithmetic. Now you compare it with tensors. The next cell builds a
# small model with the architecture of Qwen2: 5 layers, 12 query heads, 3 KV heads,
# `head_dim` 8. Its weights are random, so nothing is downloaded. Bytes depend on
# shapes, not on what the model has learned.
#
# It gets two prompts of 8 tokens (prefill), then it decodes 32 tokens. After each step
# the cell adds up the bytes of all Key and Value tensors in its cache, a
# `DynamicCache` of the library transformers.
#
# It does this twice. The second model is the same, but 3 of its 5 layers use a
# **sliding window** of 16: in these layers a token looks at itself and the 15 tokens
# before it, and no more. Older Keys and Values are dropped.

# %%
def small_model(sliding_layers):
    """A Qwen2-style model with random weights; the last layers may slide."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=101,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=12,
        num_key_value_heads=3,
        max_position_embeddings=128,
        use_sliding_window=sliding_layers > 0,
        sliding_window=16,
        max_window_layers=5 - sliding_layers,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config).eval()


def cache_tensors(model, batch, prompt, new_tokens):
    """Prefill, then decode; yields the cache's tensors after each step."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    known = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in known else "past_key_values"  # older versions
    dice = torch.Generator().manual_seed(1)
    ids = torch.randint(101, (batch, prompt), generator=dice)
    for _step in range(1 + new_tokens):
        with torch.no_grad():
            output = model(ids, use_cache=True, **{name: cache})
        ids = output.logits[:, -1:].argmax(dim=-1)
        yield [t for each in cache.layers for t in (each.keys, each.values)]

# %%
BATCH, PROMPT, NEW = 2, 8, 32

if find_spec("transformers") is None:
    print(
        "transformers is not installed, so there is nothing to measure. Go on."
    )
else:
    with checks.waits_for(2):
        seen = [PROMPT + step for step in range(1 + NEW)]
        formula = [kv_cache_bytes(BATCH, n, 5, 3, 8, 4) for n in seen]
        measured = {}
        for sliding, name in (
            (0, "every layer keeps every token"),
            (3, "3 of 5 layers keep a window"),
        ):
            measured[name] = []
            model = small_model(sliding)
            for held in cache_tensors(model, BATCH, PROMPT, NEW):
                measured[name].append(sum(t.nbytes for t in held))

        full, window = measured.values()
        print("tokens   formula  every layer full  3 layers slide   (bytes)")
        for n in (0, 1, 2, 8, 16, 32):
            print(f"{seen[n]:6} {formula[n]:9,} {full[n]:17,} {window[n]:15,}")
        equal = sum(a == b for a, b in zip(formula, full, strict=True))
        print(f"\nformula = every layer full in {equal} of {len(seen)} steps")
        kept = sum(t.untyped_storage().nbytes() for t in held)
        print(
            f"memory under the tensors that slide, at the end: {kept:,} bytes"
        )

        figure = plots.budget.measured(
            seen,
            formula,
            measured,
            title="The formula against the tensors of a real cache",
        )
        plots.show(
            figure,
            alt="Two bar charts of cache bytes against tokens, with the "
            "formula as dots. When every layer keeps every token the dots "
            "lie on the bars. When three of five layers slide, the bars "
            "fall below from token 16 on.",
        )

# %% [markdown] lang="en"
# **What to see.** When every layer keeps every token, the formula and the tensors agree to
# the byte, after prefill and after each decode step. With a sliding window in three
# layers they agree up to 15 tokens. From then on the three layers stop growing, and
# the formula is too large.
#
# A sliding layer with window 16 stores 15 tokens, not 16. The sixteenth is the new
# token of the current step, which has just been computed. And even the bytes of the
# tensors are not the memory that is taken: the 15 tokens are a part of a tensor of 16
# that stays in memory as a whole. The last line of the output counts that: 49,152 bytes
# instead of 48,000 (transformers 5.24).
#
# So the formula is exact **when its assumptions hold**. Look into the model's
# configuration before you use it.

# %% [markdown] lang="en"
# ### The bytes of the weights, measured

# %%
if find_spec("transformers") is None:
    print(
        "transformers is not installed, so there is nothing to measure. Go on."
    )
else:
    with checks.waits_for(1):
        model = small_model(sliding_layers=0)
        count = sum(p.numel() for p in model.parameters())
        computed = weight_bytes(count, 32)
        print(f"{count:,} parameters in float32")
        stored = sum(p.nbytes for p in model.parameters())
        print(f"in the tensors  {stored:,} bytes")
        print(f"your formula    {computed:,} bytes")

# %% [markdown] lang="en"
# ## 8 · How many requests fit
#
# The weights are there once, for all requests. So is the reserve. Every request brings
# a cache of its own. What is left after weights and reserve is shared by the caches:
#
# $$n = \max\left(0, \left\lfloor \frac{M - W - R}{C} \right\rfloor\right)$$
#
# - $M$: memory of the card, in bytes;
# - $W$: weights, in bytes;
# - $R$: reserve, in bytes;
# - $C$: cache of **one** request, in bytes;
# - $\lfloor\;\rfloor$: round down. A request that fits only in part does not run.
#
# When the weights alone are too large, the difference is negative. Then nothing fits,
# and the answer is 0.

# %% nbgrader={"grade_id": "todo_3", "solution": true} todo="TODO 3: count the requests that fit"
def max_concurrent_requests(
    memory_bytes: int,
    weight_bytes: int,
    reserve_bytes: int,
    kv_bytes_per_request: int,
) -> int:
    """How many requests fit on the card at the same time.

    memory_bytes          memory of the card, zero or more
    weight_bytes          weights, zero or more; a number here, no function
    reserve_bytes         memory kept free for the rest, zero or more
    kv_bytes_per_request  cache of one request, positive
    return                an int, 0 when nothing fits
    raises                ValueError that names the argument and its value,
                          when one of the first three is negative or the last
                          is zero or negative
    """
    # 1. refuse what the docstring says
    # 2. the bytes that weights and reserve leave
    # 3. whole requests only, and never fewer than 0
    ### BEGIN SOLUTION
    fixed = {
        "memory_bytes": memory_bytes,
        "weight_bytes": weight_bytes,
        "reserve_bytes": reserve_bytes,
    }
    for name, size in fixed.items():
        if size < 0:
            raise ValueError(f"{name} must not be negative, got {size}")
    if kv_bytes_per_request <= 0:
        raise ValueError(
            "kv_bytes_per_request must be positive, got "
            f"{kv_bytes_per_request}"
        )
    room = memory_bytes - weight_bytes - reserve_bytes
    return max(0, room // kv_bytes_per_request)
    ### END SOLUTION


# %% [markdown] lang="en"
# **Tested:** the number of requests on small numbers, on the card of this lab, and on
# a card that is too small.
#
# **Why:** one request too many ends in an out-of-memory error while people wait.
#
# **Expected:** as many as fit whole; one that fills the memory to the last byte still
# fits; 0 when nothing fits, never a negative number.

# %% nbgrader={"grade_id": "test_todo_3", "grade": true, "points": 4}
def test_numbers_to_follow_by_hand():
    got = max_concurrent_requests(1000, 100, 30, 7)
    checks.budget.concurrency(
        got,
        memory_bytes=1000,
        weight_bytes=100,
        reserve_bytes=30,
        kv_bytes_per_request=7,
    )


def test_the_card_of_this_lab():
    server = {
        "memory_bytes": 24 * 2**30,
        "weight_bytes": 16_060_522_496,
        "reserve_bytes": 2 * 2**30,
        "kv_bytes_per_request": 402_653_184,
    }
    got = max_concurrent_requests(**server)
    checks.budget.concurrency(got, **server)


def test_nothing_fits_when_the_weights_are_too_large():
    got = max_concurrent_requests(100, 500, 20, 7)
    checks.budget.concurrency(
        got,
        memory_bytes=100,
        weight_bytes=500,
        reserve_bytes=20,
        kv_bytes_per_request=7,
    )


with checks.todo(3):
    test_numbers_to_follow_by_hand()
    test_the_card_of_this_lab()
    test_nothing_fits_when_the_weights_are_too_large()
    ### BEGIN HIDDEN TESTS
    def test_edges():
        cases = [
            (1000, 100, 200, 7),  # 100 whole requests, to the last byte
            (999, 100, 200, 7),  # one byte less
            (1000, 100, 899, 7),  # room for a part of one request
            (1000, 100, 900, 7),  # no byte left
            (1000, 100, 901, 7),  # one byte too few
            (1000, 100, 893, 7),  # exactly one
            (1000, 1, 2, 997),
            (1000, 1, 30, 323),
            (1000, 50, 1, 9),
            (1, 1, 1, 5),
            (80 * 2**30, 16_060_522_496, 2 * 2**30, 1),
        ]
        for memory, weights, reserve, cache in cases:
            got = max_concurrent_requests(memory, weights, reserve, cache)
            checks.budget.concurrency(
                got,
                memory_bytes=memory,
                weight_bytes=weights,
                reserve_bytes=reserve,
                kv_bytes_per_request=cache,
            )

    def test_random_servers():
        for seed in range(40):
            dice = torch.Generator().manual_seed(seed)
            memory, weights, reserve, cache = (
                int(n) for n in torch.randint(1, 2**31, (4,), generator=dice)
            )
            server = {
                "memory_bytes": 20 * memory,
                "weight_bytes": 10 * weights,
                "reserve_bytes": reserve,
                "kv_bytes_per_request": cache,
            }
            checks.budget.concurrency(
                max_concurrent_requests(**server), **server
            )

    test_edges()
    test_random_servers()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** sizes that make no sense, and zeros that do.
#
# **Why:** a negative reserve would let more requests in than there is memory for.
#
# **Expected:** `ValueError` that names the argument and its value. A reserve of 0 is
# allowed.

# %% nbgrader={"grade_id": "test_todo_3_errors", "grade": true, "points": 1}
def test_the_cache_of_a_request_must_be_positive():
    checks.refuses(
        max_concurrent_requests,
        memory_bytes=1000,
        weight_bytes=100,
        reserve_bytes=30,
        kv_bytes_per_request=0,
        names="kv_bytes_per_request",
        because="it is 0",
        given=0,
    )


with checks.todo(3):
    test_the_cache_of_a_request_must_be_positive()
    ### BEGIN HIDDEN TESTS
    def test_negative_sizes_are_refused_and_zeros_are_not():
        right = {
            "memory_bytes": 1000,
            "weight_bytes": 100,
            "reserve_bytes": 30,
            "kv_bytes_per_request": 7,
        }
        for name in right:
            for bad in (-1, -(2**30)):
                checks.refuses(
                    max_concurrent_requests,
                    names=name,
                    because=f"it is {bad}",
                    given=bad,
                    **{**right, name: bad},
                )
        for name in ("memory_bytes", "weight_bytes", "reserve_bytes"):
            checks.accepts(
                max_concurrent_requests,
                because=f"{name} = 0",
                **{**right, name: 0},
            )
        checks.accepts(
            max_concurrent_requests,
            because="a card that is too small for the weights",
            **{**right, "weight_bytes": 5000},
        )

    test_negative_sizes_are_refused_and_zeros_are_not()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# ### Concurrency against context

# %%
with checks.waits_for(1, 2, 3):
    contexts = [2**n for n in range(9, 18)]
    weights = weight_bytes(PARAMETERS, 16)
    requests = {
        bits: [
            max_concurrent_requests(
                CARD_BYTES,
                weights,
                RESERVE,
                kv_cache_bytes(1, tokens, **SHAPE, bytes_per_value=bits / 8),
            )
            for tokens in contexts
        ]
        for bits in (16, 8, 4, 2)
    }
    print(
        "bits " + "".join(f"{tokens:>9,}" for tokens in contexts) + "  tokens"
    )
    for bits, counts in requests.items():
        print(f"{bits:4} " + "".join(f"{count:9,}" for count in counts))
    plots.show(
        plots.budget.concurrency(
            contexts,
            requests,
            title="Half the bits: twice the requests, or twice the context",
        ),
        alt="Requests at the same time against context length, both on "
        "logarithmic axes: four parallel falling lines for 16, 8, 4 and 2 "
        "bits. At 4 thousand tokens 14, 28, 56 and 112 requests fit.",
    )

# %% [markdown] lang="en"
# **What to see.** Requests that fit on the card, weights at 16 bits. Both axes are
# logarithmic. Every halving of the bits doubles the requests at the same context, or
# the context for the same number of requests. At 128k tokens nothing fits at 16 and
# at 8 bits, one request at 4 bits, three at 2 bits.
#
# These lines count the codes only. A real 4-bit cache also stores scales, and keeps
# its newest tokens in 16 bits. In lab 04 you count those bytes, too.

# %% [markdown] lang="en"
# ### Where the cache lies: paging and shared prefixes
#
# The budget says how many bytes the caches take. It does not say where they lie. When
# a request arrives, nobody knows how long its answer will be. A simple server reserves
# memory for the longest answer allowed. Most of it stays empty.
#
# **Paging** cuts the memory into blocks, for example of 16 tokens each. A request takes
# a block when it needs one and gives all of them back at the end. At most one block of
# each request is partly empty (PagedAttention, arXiv:2309.06180).
#
# **Prefix reuse** goes one step further. Requests that begin with the same text, such
# as a system prompt, have the same Keys and Values for it. With blocks they can share
# them, and the prefix lies in memory once.
#
# Keep the three apart: paging and prefix reuse decide *where* the cache lies and *how
# many copies* there are. Quantization decides *how many bytes* each value takes. They
# can be combined.

# %%
plots.show(
    plots.budget.paging(
        {"A": 37, "B": 12, "C": 50, "D": 22}, longest=64, block=8
    ),
    alt="Left: four requests, each with 64 tokens of memory reserved, more "
    "than half of it wasted. Right: the same requests in blocks of 8 "
    "tokens; nearly half of the memory is free.",
)

# %% [markdown] lang="en"
# **What to see.** Four requests with 121 tokens together. Reserving 64 tokens for each
# takes 256. Blocks of 8 tokens take 136, and the other 120 are free for more requests.

# %% [markdown] lang="en"
# ## 9 · How fast it can decode
#
# Memory also limits speed. In a decode step every request adds one token. For that the
# card must read **all weights**, and **the whole cache of every request**. The
# arithmetic on one token is little. So the time of a step is, at best, the time that
# reading takes.
#
# (Of the token table at the start a step reads one row per token. We count all of it,
# 6.5 % of the weights here, to keep the budget simple.)
#
# The weights are read **once for the whole batch**: a matrix that has arrived in the
# chip is used for all requests of the batch. The caches are different for each
# request, so each is read once. With
#
# - $S$: bandwidth of the memory, in bytes per second;
# - $W$: weights, in bytes;
# - $C$: cache of **one** request, in bytes;
# - $B$: batch, the number of requests,
#
# a step reads $W + B \cdot C$ bytes. It takes at least $(W + B \cdot C) / S$ seconds,
# and it makes $B$ tokens. From this you get an upper bound for the tokens per second
# of the whole batch. Such a bound is called a *roofline*: apart from that table you can
# be slower, not faster.

# %% nbgrader={"grade_id": "todo_4", "solution": true} todo="TODO 4: bound the decode speed"
def decode_tokens_per_second(
    bandwidth_bytes_per_second: float,
    weight_bytes: int,
    kv_bytes: int,
    batch: int,
) -> float:
    """Upper bound of the tokens per second of the whole batch, in decode.

    bandwidth_bytes_per_second  what the memory delivers, positive
    weight_bytes                weights, positive; read once in every step
    kv_bytes                    cache of ONE request, zero or more; every
                                request's cache is read once in every step
    batch                       requests at the same time, positive
    return                      tokens per second, all requests together;
                                a float, not rounded
    raises                      ValueError that names the argument and its
                                value, when kv_bytes is negative or another
                                one is zero or negative
    """
    # 1. refuse what the docstring says
    # 2. the bytes that one step reads, for the whole batch
    # 3. the seconds of a step, the tokens it makes, and from both the rate
    ### BEGIN SOLUTION
    positive = {
        "bandwidth_bytes_per_second": bandwidth_bytes_per_second,
        "weight_bytes": weight_bytes,
        "batch": batch,
    }
    for name, size in positive.items():
        if size <= 0:
            raise ValueError(f"{name} must be positive, got {size}")
    if kv_bytes < 0:
        raise ValueError(f"kv_bytes must not be negative, got {kv_bytes}")
    seconds_per_step = (
        weight_bytes + batch * kv_bytes
    ) / bandwidth_bytes_per_second
    return batch / seconds_per_step
    ### END SOLUTION


# %% [markdown] lang="en"
# **Tested:** the rate on small numbers and on the card of this lab, alone and in a
# batch.
#
# **Why:** weights once, caches each once: this is why batches are cheap, and why long
# contexts make them less cheap.
#
# **Expected:** tokens per second of the whole batch, not steps per second and not
# seconds. One request with 0.5 GiB of cache on this card: about 18.08.

# %% nbgrader={"grade_id": "test_todo_4", "grade": true, "points": 4}
def test_numbers_to_follow_with_a_calculator():
    got = decode_tokens_per_second(1000.0, 60, 7, 5)
    checks.budget.decode_rate(
        got,
        bandwidth_bytes_per_second=1000.0,
        weight_bytes=60,
        kv_bytes=7,
        batch=5,
    )


def test_one_request_and_twelve_on_the_card_of_this_lab():
    for batch in (1, 12):
        server = {
            "bandwidth_bytes_per_second": 300e9,
            "weight_bytes": 16_060_522_496,
            "kv_bytes": 536_870_912,
            "batch": batch,
        }
        got = decode_tokens_per_second(**server)
        checks.budget.decode_rate(got, **server)


with checks.todo(4):
    test_numbers_to_follow_with_a_calculator()
    test_one_request_and_twelve_on_the_card_of_this_lab()
    ### BEGIN HIDDEN TESTS
    def test_a_tiny_cache_leaves_the_weights():
        for batch in (1, 3, 64):
            got = decode_tokens_per_second(900.5, 70, 1, batch)
            checks.budget.decode_rate(
                got,
                bandwidth_bytes_per_second=900.5,
                weight_bytes=70,
                kv_bytes=1,
                batch=batch,
            )

    def test_small_weights_and_long_contexts():
        for weights, cache, batch in (
            (1, 10**9, 7),
            (10**12, 1, 1000),
            (3, 5, 1),
        ):
            got = decode_tokens_per_second(3.35e12, weights, cache, batch)
            checks.budget.decode_rate(
                got,
                bandwidth_bytes_per_second=3.35e12,
                weight_bytes=weights,
                kv_bytes=cache,
                batch=batch,
            )

    def test_random_servers():
        for seed in range(40):
            dice = torch.Generator().manual_seed(seed)
            speed, weights, cache, batch = (
                int(n) for n in torch.randint(2, 1000, (4,), generator=dice)
            )
            server = {
                "bandwidth_bytes_per_second": speed * 10**9,
                "weight_bytes": weights * 10**7,
                "kv_bytes": cache * 10**5,
                "batch": batch,
            }
            checks.budget.decode_rate(
                decode_tokens_per_second(**server), **server
            )

    test_a_tiny_cache_leaves_the_weights()
    test_small_weights_and_long_contexts()
    test_random_servers()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# **Tested:** arguments that make no sense, and an empty cache, which does.
#
# **Why:** a bandwidth of 0 or a batch of 0 has no rate at all.
#
# **Expected:** `ValueError` that names the argument and its value. `kv_bytes=0` is
# allowed: it gives the bound that the weights alone set.

# %% nbgrader={"grade_id": "test_todo_4_errors", "grade": true, "points": 1}
def test_an_empty_batch_has_no_rate():
    checks.refuses(
        decode_tokens_per_second,
        bandwidth_bytes_per_second=1000.0,
        weight_bytes=60,
        kv_bytes=7,
        batch=0,
        names="batch",
        because="it is 0",
        given=0,
    )


def test_an_empty_cache_has_a_rate():
    checks.accepts(
        decode_tokens_per_second,
        because="an empty cache (kv_bytes = 0)",
        bandwidth_bytes_per_second=1000.0,
        weight_bytes=60,
        kv_bytes=0,
        batch=5,
    )


with checks.todo(4):
    test_an_empty_batch_has_no_rate()
    test_an_empty_cache_has_a_rate()
    ### BEGIN HIDDEN TESTS
    def test_the_other_arguments_and_a_batch_of_one():
        right = {
            "bandwidth_bytes_per_second": 1000.0,
            "weight_bytes": 60,
            "kv_bytes": 7,
            "batch": 5,
        }
        for name in right:
            checks.refuses(
                decode_tokens_per_second,
                names=name,
                because="it is -1",
                given=-1,
                **{**right, name: -1},
            )
        for name in ("bandwidth_bytes_per_second", "weight_bytes"):
            checks.refuses(
                decode_tokens_per_second,
                names=name,
                because="it is 0",
                given=0,
                **{**right, name: 0},
            )
        checks.accepts(
            decode_tokens_per_second,
            because="a batch of one",
            **{**right, "batch": 1},
        )

    test_the_other_arguments_and_a_batch_of_one()
    ### END HIDDEN TESTS

# %% [markdown] lang="en"
# ### Batch and cache width against speed

# %%
with checks.waits_for(1, 2, 3, 4):
    batches = list(range(1, 129))
    weights = weight_bytes(PARAMETERS, 16)
    rates, fitting = {}, {}
    for bits in (16, 8, 4, 2):
        one = kv_cache_bytes(1, 4096, **SHAPE, bytes_per_value=bits / 8)
        fitting[bits] = max_concurrent_requests(
            CARD_BYTES, weights, RESERVE, one
        )
        rates[bits] = [
            decode_tokens_per_second(BANDWIDTH, weights, one, batch)
            for batch in batches
        ]
        most = fitting[bits]
        together = rates[bits][most - 1]
        print(
            f"{bits:2} bits: at most {most:3} requests, "
            f"{together:6.0f} tokens/s together, {together / most:.1f} each"
        )
    plots.show(
        plots.budget.decode_rate(
            batches,
            rates,
            fitting,
            title="4,096 tokens of context: larger batches, smaller caches",
        ),
        alt="Left: tokens per second of the whole batch rise with the "
        "batch, further for fewer bits, since more requests fit. Right: "
        "tokens per second of one request fall with the batch; all four "
        "curves end at the same height.",
    )

# %% [markdown] lang="en"
# **What to see.** A mark shows the largest batch that fits on the card. The batch axis is
# logarithmic. Left: a larger batch makes more tokens per second, since the weights are
# read once for all. Right: each single request gets slower, since a step reads more
# caches. That is the trade between throughput and waiting.
#
# A smaller cache helps twice: a step reads less, and more requests fit. At the marks
# each request runs at the same speed, about 12.7 tokens per second. A full card reads
# nearly all of its memory in every step, however many requests share it.
#
# ### Two waits
#
# A person who asks waits twice: for the first token (prefill, TTFT), and for the rest
# (decode: TPOT times the tokens that are left). Prefill reads the weights once for *all* tokens of the prompt, so reading
# is not what limits it. Arithmetic is: about 2 operations per token and parameter of
# the layers (arXiv:2001.08361, section 2.1; the two token tables and the attention
# scores are left out). The data sheet of the
# card promises at most 121 × 10¹² operations per second in 16 bits (242 × 10¹² for matrices
# in which half of the values are zero). The next cell computes the least that both waits
# can be, for one request alone.

# %%
with checks.waits_for(1, 2, 4):
    OPERATIONS_PER_SECOND = 121e12
    weights = weight_bytes(PARAMETERS, 16)
    rows = []
    for prompt, answer in (
        (512, 128),
        (16384, 128),
        (512, 2048),
        (16384, 2048),
    ):
        in_layers = PARAMETERS - 2 * VOCABULARY * HIDDEN
        first = 2 * in_layers * prompt / OPERATIONS_PER_SECOND
        average = prompt + answer // 2  # tokens in the cache, half way
        one = kv_cache_bytes(1, average, **SHAPE, bytes_per_value=2)
        rate = decode_tokens_per_second(BANDWIDTH, weights, one, 1)
        rest = (answer - 1) / rate  # prefill made the first token
        rows.append((prompt, answer, first, first + rest, 1 / rate))
    print("prompt  answer     TTFT   whole answer     TPOT")
    for prompt, answer, first, whole, each in rows:
        print(
            f"{prompt:6,} {answer:7,} {first:6.2f} s {whole:12.1f} s "
            f"{1000 * each:5.0f} ms"
        )

# %% [markdown] lang="en"
# A long prompt delays the first token: it raises the TTFT. A long answer delays the
# end; it has more steps, and each takes one TPOT. The 512 tokens of
# a short prompt take about as long as one or two tokens of the answer, since they
# share one reading of the weights.

# %% [markdown] lang="en"
# ## 10 · Your own server
#
# Change the numbers and run the cell again. Three things to try:
#
# - weights at 4 bits instead of 16: how many more requests fit?
# - the shape of a model that you use (its `config.json` has all the numbers);
# - a card with 80 GiB and 3,350 GB per second.

# %%
with checks.waits_for(1, 2, 3, 4):
    my_parameters, my_weight_bits = PARAMETERS, 16
    my_shape = {"layers": 32, "kv_heads": 8, "head_dim": 128}
    my_tokens, my_cache_bits = 8192, 16
    my_memory, my_reserve, my_bandwidth = 24 * GiB, 2 * GiB, 300 * GB

    my_weights = weight_bytes(my_parameters, my_weight_bits)
    my_cache = kv_cache_bytes(
        1, my_tokens, **my_shape, bytes_per_value=my_cache_bits / 8
    )
    most = max_concurrent_requests(my_memory, my_weights, my_reserve, my_cache)
    print(f"weights            {my_weights / GiB:8.2f} GiB")
    print(f"cache, one request {my_cache / GiB:8.2f} GiB")
    print(f"requests that fit  {most:8,}")
    if most > 0:
        rate = decode_tokens_per_second(
            my_bandwidth, my_weights, my_cache, most
        )
        print(f"tokens per second  {rate:8.1f} at most, all together")

# %% [markdown] lang="en"
# ## Written question 1
#
# You double the context length and the batch. Why does the cache grow
# by four, while the weights stay the same? Say what each of them holds, and one copy
# per what.

# %% [markdown] lang="en" nbgrader={"grade_id": "written_1", "grade": true, "solution": true, "points": 2}
# <!-- BEGIN SOLUTION -->
# The cache holds one Key and one Value vector for every token of every request (in each
# layer and KV head). Its size is a product with batch and tokens as factors. Twice the
# batch doubles the number of requests, twice the context doubles the tokens of each:
# 2 × 2 = 4 times as many vectors.
#
# The weights are a fixed set of numbers that belongs to the model. All tokens of all
# requests use the same copy, so neither batch nor context is a factor. They stay the
# same: times one.
#
# **Rubric** (2 points)
#
# - 1 point: the cache has an entry per token and per request, so both factors multiply
#   (2 × 2). "It grows" without the product: half a point.
# - 1 point: the weights are shared by all requests and tokens; they do not depend on
#   what is processed.
# <!-- END SOLUTION -->

# %% [markdown] lang="en"
# ## Written question 2
#
# Your budget says that 14 requests fit. What does it leave out? Name
# three things that change how much memory is really taken. Say for each whether the
# real number is larger or smaller than the budget's, and why.

# %% [markdown] lang="en" nbgrader={"grade_id": "written_2", "grade": true, "solution": true, "points": 3}
# <!-- BEGIN SOLUTION -->
# Three of these, for example:
#
# - **Sliding windows** (and other layers that do not keep every token): smaller. A
#   sliding layer stops growing at its window, as the measurement showed.
# - **Scales, minimums, metadata and a window in 16 bits** of a quantized cache or
#   quantized weights: larger than codes alone.
# - **The block allocator**: larger, since the last block of each request is partly
#   empty; much larger when the longest answer is reserved for every request.
# - **Prefix reuse**: smaller, since requests share the blocks of a common beginning.
# - **Intermediate results, the libraries' buffers, fragmentation**: larger. The
#   reserve stands for them, but it is a guess. Prefill of a long prompt needs more of
#   it than a decode step. A cache that grows by copying holds the old and the new
#   tensor for a moment.
# - **Requests of different lengths**: smaller than a budget that gives every request
#   the longest context; not all are long at the same time.
#
# **Rubric** (3 points)
#
# - 1 point for each of three things that is named with the right direction and a
#   reason. Half a point when the direction or the reason is missing.
# - Speed and quality are not memory: no point for "it gets slower" or "answers get
#   worse".
# <!-- END SOLUTION -->

# %% [markdown] lang="en"
# ## What this shows, and what it does not
#
# **It shows**
#
# - weights have one size; the cache grows with batch times context, so it is what
#   limits a server with many or long requests;
# - the formula is exact for a cache that keeps every token in every layer: it agreed
#   with the tensors of a real cache to the byte;
# - half the bits of the cache: twice the requests or twice the context, and fewer bytes
#   to read in every step.
#
# **It does not show**
#
# - what is really allocated. A budget is arithmetic, not a measurement: sliding
#   windows, scales, the allocator and intermediate results change it;
# - how fast a server is. The decode bound is a ceiling: it leaves out the time for
#   arithmetic, for restoring quantized values, and for everything around the model;
# - whether answers stay good when the cache has fewer bits. The budget cannot know.
#   That is what the next labs are about. They begin with one linear layer and 8 bits.
