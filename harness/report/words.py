"""Numbers in words: what people read; exact values stand beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_FLOP_UNITS = ("", "k", "M", "G", "T", "P")


class Unit(StrEnum):
    """What a number counts, and so how it is written."""

    BYTES = "bytes"
    FLOPS = "flops"
    SECONDS = "s"
    RATIO = "ratio"  # so many times
    BOUND = "bound"  # 1.25, an end of an interval of ratios
    SHARE = "share"  # 41%
    UTILISATION = "utilisation"  # 41.3%
    RATE = "rate"  # 2,048 a second
    COUNT = "count"
    VALUE = "value"  # as it is


def in_words(value: float, unit: Unit) -> str:
    """Return `value` as people write it; bytes and counts are integers."""
    return _WRITTEN[unit](value)


def human_bytes(count: int) -> str:
    """Return `count` bytes in the largest binary unit that leaves at least 1."""
    value, unit = _scaled(count, 1024, _BYTE_UNITS)
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def human_flops(count: int) -> str:
    """Return `count` FLOPs in the largest decimal unit that leaves at least 1."""
    value, unit = _scaled(count, 1000, _FLOP_UNITS)
    return f"{value:.2f} {unit}" if unit else str(count)


def _scaled(count: int, base: int, units: Sequence[str]) -> tuple[float, str]:
    power = 0
    while count >= base ** (power + 1) and power + 1 < len(units):
        power += 1
    return count / base**power, units[power]


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


_WRITTEN: dict[Unit, Callable[[float], str]] = {
    Unit.BYTES: lambda value: human_bytes(int(value)),
    Unit.FLOPS: lambda value: human_flops(int(value)),
    Unit.SECONDS: _seconds,
    Unit.RATIO: lambda value: f"{value:.2f}\N{MULTIPLICATION SIGN}",
    Unit.BOUND: lambda value: f"{value:.2f}",
    Unit.SHARE: lambda value: f"{value:.0%}",
    Unit.UTILISATION: lambda value: f"{value:.1%}",
    Unit.RATE: lambda value: f"{value:,.0f}",
    Unit.COUNT: lambda value: f"{value:,}",
    Unit.VALUE: lambda value: f"{value:.4g}",
}
