"""What is measured: the texts, and the settings of each table.

Called by `run`. Plain data; it knows no bytes: what spends equal bytes `bytes_held` finds out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvlab.quality.setting import DYNAMIC, FP8, Setting, course, hqq, quanto

TEXTS = ("bread", "catalogue", "lighthouse", "river")
# what is claimed of the course's cache: bits -> (method, its best KL over the course's, at least)
REQUIRED = {4: (("hqq", 5.0), ("quanto", 2.0)), 2: (("hqq", 8.0), ("quanto", 2.0))}


@dataclass(frozen=True)
class Workload:
    """The texts and how much of them.

    prompt_tokens  fed at once, with exact Keys and Values, as a prompt is
    scored_tokens  the tokens after the prompt, each predicted from the true ones before it. The
                   last is never fed: so the cache ends with prompt + scored - 1 tokens
    block          tokens in a row whose mean counts as one observation
    """

    texts: tuple[str, ...] = TEXTS
    prompt_tokens: int = 256
    scored_tokens: int = 384
    block: int = 32
    topk: int = 5

    def __post_init__(self) -> None:
        if self.scored_tokens % self.block:
            raise ValueError(
                f"{self.scored_tokens} scored tokens do not fill blocks of {self.block}"
            )

    @property
    def fed_tokens(self) -> int:
        """Fed after the prompt."""
        return self.scored_tokens - 1


@dataclass(frozen=True)
class EqualBytes:
    """A course setting, and who is to spend the same bytes.

    kv_bits   of the numbers that are not quantized, when bytes are compared: 32 as in the run, or
              16 as on most GPUs. The quality is always that of the run
    rivals    (setting, how many of its group sizes to measure); group and window are searched for
    required  method -> how many times the course's KL the best setting of it must have
    """

    target: Setting
    kv_bits: int
    rivals: tuple[tuple[Setting, int], ...]
    required: tuple[tuple[str, float], ...]

    @property
    def id(self) -> str:
        return f"{self.target.bits} bits, unquantized numbers in {self.kv_bits} bits"


@dataclass(frozen=True)
class Plan:
    """Everything that one command measures.

    table          quality against bytes, on all texts
    equal_bytes    comparisons; their rivals' group and window are searched for
    axes           four combinations of axes for each number of bits, the course's first
    shifts         sizes of the constant that is added to Keys
    shifted        the caches that meet it
    some_texts     how many texts the shift and the variants are measured on
    variants       the course's cache with other numbers, each beside its default
    """

    name: str
    workload: Workload
    table: tuple[Setting, ...]
    equal_bytes: tuple[EqualBytes, ...]
    axes: tuple[tuple[Setting, ...], ...]
    shifts: tuple[float, ...]
    shifted: tuple[Setting, ...]
    some_texts: int
    variants: tuple[Setting, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def four_axes(bits: int) -> tuple[Setting, ...]:
    """Mixed, both per token, both per channel, the wrong way round: the same bytes."""
    token, channel = "token", "channel"
    pairs = ((channel, token), (token, token), (channel, channel), (token, channel))
    return tuple(course(bits, axes=pair) for pair in pairs)


def against_libraries(bits: int) -> tuple[EqualBytes, ...]:
    """The course's default against every axis of the libraries, and against the best in 16 bits."""
    best = ((hqq(bits, 1), 1), (quanto(bits, -1), 1))
    every = ((hqq(bits, 1), 2), (hqq(bits, 0), 1), (quanto(bits, 0), 1), best[1])
    return (
        EqualBytes(course(bits), 32, every, REQUIRED[bits]),
        EqualBytes(course(bits), 16, best, REQUIRED[bits]),
    )


COURSE_TABLE = (
    *(course(bits) for bits in (8, 4, 3, 2)),
    *(course(bits, window=128) for bits in (4, 2)),
    *(course(bits, group=64) for bits in (4, 2)),
)
# more of hqq and quanto comes from the search for equal bytes
LIBRARY_TABLE = (
    FP8,
    hqq(8, 1, window=128),
    hqq(3, 1, window=128),
    hqq(3, 0, window=128),
    quanto(8, -1, window=128),
    quanto(4, -1, window=128),
    quanto(3, -1, window=128),
    quanto(2, -1, window=128),
)

FULL = Plan(
    name="full",
    workload=Workload(),
    table=(DYNAMIC, *LIBRARY_TABLE, *COURSE_TABLE),
    equal_bytes=(*against_libraries(4), *against_libraries(2)),
    axes=(four_axes(4), four_axes(2)),
    shifts=(0.0, 20.0, 100.0),
    shifted=(
        DYNAMIC,
        hqq(4, 1, window=128),
        FP8,
        quanto(4, -1, window=128),
        course(4, axes=("token", "token")),
        course(4),
    ),
    some_texts=2,
    variants=(
        *(course(2, sinks=s) for s in (0, 1, 8)),
        *(course(bits, fits=f) for bits, f in ((4, 0), (2, 0), (2, 1))),
        *(course(2, window=w) for w in (0, 16)),
        course(2, group=16, window=16),
        *(course(k, v) for k, v in ((4, 2), (2, 4), (3, 2))),
    ),
)

QUICK = Plan(
    name="quick",
    workload=Workload(texts=TEXTS[:1]),
    table=(DYNAMIC, FP8, course(8), course(4), course(2)),
    equal_bytes=tuple(
        EqualBytes(
            course(bits), 32, ((hqq(bits, 1), 1), (quanto(bits, -1), 1)), REQUIRED[bits]
        )
        for bits in (4, 2)
    ),
    axes=(four_axes(4),),
    shifts=(0.0, 100.0),
    shifted=(DYNAMIC, FP8, course(4, axes=("token", "token")), course(4)),
    some_texts=1,
    variants=(),
)
PLANS = {plan.name: plan for plan in (FULL, QUICK)}
