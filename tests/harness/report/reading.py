"""Reads numbers back out of what reports write, without the code that wrote them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from statistics import median
from typing import Any

_SCALES = {
    "B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4,
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "s": 1, "ms": 1e-3, "%": 1e-2, "×": 1,  # noqa: RUF001 (times)
}  # fmt: skip
_NUMBER = re.compile(r"(-?[\d,]+(?:\.\d+)?(?:e[+-]?\d+)?) ?([A-Za-z%×]*)")  # noqa: RUF001 (times)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A number of a page: what it says, its exact value, and where that stands in which record."""

    text: str
    value: str
    path: str
    owner: str


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Shown] = []
        self._row = ""
        self._open: dict[str, str] | None = None
        self._text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "tr":
            self._row = given.get("data-t", "")
        if tag == "data":
            self._open, self._text = given, ""

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "tr":
            self._row = ""
        if tag == "data" and self._open is not None:
            owner = self._open.get("data-t", self._row)
            self.found.append(
                Shown(text=self._text, value=self._open["value"], path=self._open["data-p"], owner=owner)
            )
            self._open = None


def numbers_of(page: str) -> list[Shown]:
    parser = _Page()
    parser.feed(page)
    return parser.found


def at(record: Mapping[str, Any], path: str) -> float:
    """Return the number at `path` in a record as JSON, the quotient at `a : b`, or what that leaves of 1."""
    if path.startswith("1 - "):
        return 1 - at(record, path.removeprefix("1 - "))
    values: list[float] = [_one(record, each) for each in path.split(" : ")]
    return values[0] / values[1] if len(values) > 1 else values[0]


def pooled(records: Sequence[Mapping[str, Any]], owner: str, path: str) -> float:
    """Return a speed at the median step time of all twins like the owner's, times the owner's ratio."""

    def twin(record: Mapping[str, Any]) -> tuple[Any, ...]:
        options = {key: value for key, value in record["experiment"].items() if key not in {"ac", "chunk"}}
        return record["environment_id"], json.dumps(options)

    (own,) = [record for record in records if record["trial_id"] == owner]
    alike = [record for record in records if record["time"] is not None and twin(record) == twin(own)]
    samples = [sample for record in alike for sample in record["time"]["samples_s"]["twin"]]
    time = own["time"]
    step_s = median(samples) * time["ratio_to_baseline"]["median"]
    speed: float = at(own, path.removeprefix("pooled ")) * time["step_time_s"]["median"] / step_s
    return speed


def counted(records: Sequence[Mapping[str, Any]], path: str) -> int:
    """Return what `count records` and `count status=oom` stand for."""
    key, _, wanted = path.removeprefix("count ").partition("=")
    return len(records) if key == "records" else sum(record[key] == wanted for record in records)


def agrees(text: str, value: float) -> bool:
    """Whether a number in words is `value`, rounded to the digits it has."""
    found = _NUMBER.fullmatch(text)
    assert found, text
    digits, unit = found[1].replace(",", ""), found[2]
    scale = _SCALES[unit]
    mantissa, _, power = digits.partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(power or 0)
    half = 0.5 * 10**-decimals
    if unit in {"s", "ms"} or (unit == "" and "." in digits):  # three or four significant digits
        half = max(half, abs(float(digits)) * 5e-4)
    return math.isclose(float(digits) * scale, value, rel_tol=1e-12, abs_tol=half * scale * (1 + 1e-9))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number below a JSON object, lists left out, by its path joined with underscores."""
    for key, item in value.items():
        name = f"{path}_{key}".replace(".", "_").removeprefix("_")
        if isinstance(item, dict):
            yield from leaves(item, name)
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield name, item


def _one(record: Mapping[str, Any], path: str) -> Any:
    value: Any = record
    for key in path.split("/"):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value
