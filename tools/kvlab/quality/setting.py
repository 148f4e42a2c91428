"""One way to hold a cache: which library, how many bits, which axes, group, window, sinks.

Used by every module of `kvlab.quality`. Plain data that names itself; never touches a tensor.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Method = Literal["dynamic", "hqq", "quanto", "fp8", "course"]
FITS = 3  # what MixedAxisCache does where nothing is said
METHODS: tuple[Method, ...] = ("dynamic", "hqq", "quanto", "fp8", "course")


@dataclass(frozen=True)
class Setting:
    """A cache and everything it is told.

    method      who builds it: transformers' DynamicCache, its hqq, quanto and fp8 layers, or the
                course's MixedAxisCache
    key_bits    of a Key's code; 0 where nothing is quantized
    group       values that share a scale; 0 where there are no groups
    window      hqq and quanto: tokens that are collected exact before everything is quantized
                again. course: exact tokens at the end, at least
    sinks       exact tokens at the start
    fits        course: how often the scale of Keys is fitted by least squares
    key_axis    as the method counts axes: hqq 0 or 1, quanto 0 or -1, course channel or token
    key_shift   added to two channels of every Key (see `kvlab.quality.outliers`)
    """

    method: Method
    key_bits: int = 0
    value_bits: int = 0
    group: int = 0
    window: int = 0
    sinks: int = 0
    key_axis: str = ""
    value_axis: str = ""
    key_shift: float = 0.0
    fits: int = 0

    @property
    def family(self) -> str:
        """Which settings belong to one curve: the method and its axes."""
        if self.method == "dynamic":
            return "DynamicCache"
        if self.method == "fp8":
            return "fp8"
        if self.method == "quanto":
            return f"quanto {self.key_axis}/{self.value_axis}"
        if self.method == "hqq":
            return f"hqq axis {self.key_axis}"
        return f"course {_AXES[self.key_axis, self.value_axis]}"

    @property
    def bits(self) -> str:
        """ "4", or "4/2" where Keys and Values differ; "" where nothing is quantized."""
        if self.key_bits == self.value_bits:
            return str(self.key_bits) if self.key_bits else ""
        return f"{self.key_bits}/{self.value_bits}"

    @property
    def id(self) -> str:
        """How rows, files and the screen name it."""
        parts = [self.family]
        if self.bits and self.method != "fp8":
            parts.append(f"{self.bits} bits")
        if self.group:
            parts += [f"group {self.group}", f"window {self.window}"]
        if self.method == "course":
            parts.append(f"sinks {self.sinks}")
            if self.fits != FITS:
                parts.append(f"fits {self.fits}")
        if self.key_shift:
            parts.append(f"Keys +{self.key_shift:g}")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_AXES = {
    ("channel", "token"): "mixed",
    ("token", "token"): "both per token",
    ("channel", "channel"): "both per channel",
    ("token", "channel"): "wrong way round",
}
DYNAMIC = Setting("dynamic")
FP8 = Setting("fp8", 8, 8, key_axis="tensor", value_axis="tensor")


def hqq(bits: int, axis: int = 1, group: int = 64, window: int = 64) -> Setting:
    """transformers' hqq layer, with one axis for Keys and Values."""
    return Setting(
        "hqq", bits, bits, group, window, key_axis=str(axis), value_axis=str(axis)
    )


def quanto(bits: int, key_axis: int, group: int = 64, window: int = 64) -> Setting:
    """transformers' quanto layer. Key axis -1 with Value axis 0 are KIVI's axes."""
    return Setting(
        "quanto", bits, bits, group, window, key_axis=str(key_axis), value_axis="0"
    )


def course(
    key_bits: int,
    value_bits: int | None = None,
    group: int = 32,
    window: int = 32,
    sinks: int = 4,
    axes: tuple[str, str] = ("channel", "token"),
    fits: int = FITS,
) -> Setting:
    """The course's cache, as it comes where nothing is said."""
    values = key_bits if value_bits is None else value_bits
    return Setting("course", key_bits, values, group, window, sinks, *axes, fits=fits)
