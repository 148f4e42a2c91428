"""What a cache is told when it is built: bits, axes, group, window, sinks.

Used by every module of `kvlab.cache`. Plain data that checks itself; never touches a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.cache.packing import AXES, BITS, tokens_multiple


@dataclass(frozen=True)
class CacheSettings:
    """How a cache quantizes; wrong ones raise ValueError when they are made.

    key_bits, value_bits  2, 3, 4 or 8
    group_size            values that share one scale and one minimum; also the tokens that leave
                          the window together
    window                high-precision tokens at the end: the window holds between `window` and
                          `window + group_size - 1` of them
    sink_tokens           tokens at the start that stay exact
    key_axis, value_axis  "channel": a group runs along the tokens of one channel;
                          "token": along head_dim of one token
    key_fits              how often the scale and minimum of Keys are fitted to their codes by least
                          squares; 0: they span the range. Values always span it: fitting them was
                          measured and gave nothing
    """

    key_bits: int = 4
    value_bits: int = 4
    group_size: int = 32
    window: int = 32
    sink_tokens: int = 4
    key_axis: str = "channel"
    value_axis: str = "token"
    key_fits: int = 3

    def __post_init__(self) -> None:
        _whole("group_size", self.group_size, least=1)
        _whole("window", self.window, least=0)
        _whole("sink_tokens", self.sink_tokens, least=0)
        _whole("key_fits", self.key_fits, least=0)
        for name in ("key_axis", "value_axis"):
            if getattr(self, name) not in AXES:
                raise ValueError(
                    f"{name} must be one of {AXES}, got {getattr(self, name)!r}"
                )
        for name in ("key_bits", "value_bits"):
            bits = getattr(self, name)
            if bits not in BITS:
                raise ValueError(f"{name} must be one of {BITS}, got {bits!r}")
            multiple = tokens_multiple(bits)
            if self.group_size % multiple:
                raise ValueError(
                    f"group_size {self.group_size} does not fill whole bytes with {name} {bits}: "
                    f"take a multiple of {multiple}"
                )


def _whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"{name} must be a whole number, {least} or more; got {value!r}"
        )
