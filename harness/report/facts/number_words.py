"""Numbers in words: what people read; exact values stand next to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SPACES = "\t\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{IDEOGRAPHIC SPACE}"
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_FLOP_UNITS = ("", "k", "M", "G", "T", "P")
_SHORTEST_S = 0.9995  # rounds to 1 s, and as 1e+03 ms would not be read
_WHOLE = 99.95
_LEAST_WHOLE_RATE = 100


class NumberUnit(StrEnum):
    """The unit of a number, which decides how it is written."""

    BYTES = "bytes"
    FLOPS = "flops"
    SECONDS = "s"
    RATIO = "ratio"  # so many times
    BOUND = "bound"  # 1.25, an end of an interval of ratios
    SHARE = "share"  # 41%
    UTILISATION = "utilisation"  # 41.3%
    RATE = "rate"  # 2,048 a second
    POINTS = "points"  # 24.1, a difference of percents
    COUNT = "count"
    VALUE = "value"  # as it is


def printable(text: str) -> str:
    """Return `text` without colours of terminals, and with other characters that nobody sees as escapes.

    Its lines stay: a carriage return, as progress bars write it, ends one.
    """
    lines = _COLOURS.sub("", text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join(map(escaped, lines))


def escaped(text: str) -> str:
    r"""Return `text` on one line, with escapes (`\x1b`) for invisible characters and those that move text."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in _SPACES else each.encode("unicode_escape").decode()
        for each in text
    )


def shortened(text: str, most: int) -> str:
    """Return no more than `most` characters of `text`, and how many more there are."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def in_words(value: float, unit: NumberUnit) -> str:
    """Return `value` as people write it; bytes and counts are integers."""
    return _WRITTEN[unit](value)


def and_more(count: int) -> str:
    """Return ` and 3 more`; nothing where there are none."""
    return f" and {count} more" if count > 0 else ""


def human_bytes(count: int) -> str:
    """Return `count` bytes in the largest binary unit that leaves at least 1."""
    value, unit = _scaled(count, 1024, _BYTE_UNITS, digits=1)
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def human_flops(count: int) -> str:
    """Return `count` FLOPs in the largest decimal unit that leaves at least 1."""
    value, unit = _scaled(count, 1000, _FLOP_UNITS, digits=2)
    return f"{value:.2f} {unit}" if unit else str(count)


def _scaled(count: int, base: int, units: Sequence[str], *, digits: int) -> tuple[float, str]:
    power = 0
    while round(count / base**power, digits if power else 0) >= base and power + 1 < len(units):
        power += 1
    return count / base**power, units[power]


def _seconds(value: float) -> str:
    """Return three digits; more where they stand before the point."""
    scaled, unit = (value, "s") if value >= _SHORTEST_S else (value * 1e3, "ms")
    return f"{scaled:,.0f} {unit}" if scaled >= _WHOLE else f"{scaled:.3g} {unit}"


_WRITTEN: dict[NumberUnit, Callable[[float], str]] = {
    NumberUnit.BYTES: lambda value: human_bytes(int(value)),
    NumberUnit.FLOPS: lambda value: human_flops(int(value)),
    NumberUnit.SECONDS: _seconds,
    NumberUnit.RATIO: lambda value: f"{value:.2f}\N{MULTIPLICATION SIGN}",
    NumberUnit.BOUND: lambda value: f"{value:.2f}",
    NumberUnit.SHARE: lambda value: f"{value:.0%}",
    NumberUnit.UTILISATION: lambda value: f"{value:.1%}",
    NumberUnit.POINTS: lambda value: f"{value:.2f}",
    NumberUnit.RATE: lambda value: f"{value:,.0f}" if value >= _LEAST_WHOLE_RATE else f"{value:.3g}",
    NumberUnit.COUNT: lambda value: f"{value:,}",
    NumberUnit.VALUE: lambda value: f"{value:.4g}",
}
