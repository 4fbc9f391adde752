"""Tables of the compatibility page, made of kept results of `bench.compat`: a column a release of torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).parents[1] / "results"
_NEUTRAL = ("neutral", "neutral (tolerance)")
_MISSING = "not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """What one kept result says.

    Fields:
        name: torch and Python, with their versions.
        results: facts, numbers and tests, as `bench.compat` writes them.
    """

    name: str
    results: Mapping[str, Any]


def compatibility_tables() -> str:
    """Return the tables of all kept results, releases of torch from left to right."""
    files = [json.loads(path.read_text("utf-8")) for path in _RESULTS.glob("compat_*-cpu-*.json")]
    return tables([release_of(content) for content in sorted(files, key=_version)])


def release_of(content: Mapping[str, Any]) -> Release:
    """Return what a file of `bench.compat` says."""
    environment = content["environment"]
    torch = environment["torch"].partition("+")[0]
    return Release(name=f"torch {torch}, Python {environment['python']}", results=content["results"])


def tables(releases: list[Release]) -> str:
    """Return markdown: tests by area, facts, numbers that differ, and every test that failed."""
    parts = [
        _table(
            "what runs", releases, _rows(releases, "tests", _passed) | {"trials neutral": _neutral(releases)}
        ),
        _table("fact", releases, _rows(releases, "facts", _fact)),
        _differing(releases),
        _failures(releases),
    ]
    return "\n\n".join(part for part in parts if part)


def _version(content: Mapping[str, Any]) -> list[int]:
    return [int(part) for part in content["environment"]["torch"].partition("+")[0].split(".")]


def _rows(releases: list[Release], part: str, cell: Callable[[Any], str]) -> dict[str, list[str]]:
    names = dict.fromkeys(name for release in releases for name in release.results.get(part, {}))
    found = {name: [release.results.get(part, {}).get(name) for release in releases] for name in names}
    return {
        name: [_MISSING if each is None else cell(each) for each in cells] for name, cells in found.items()
    }


def _passed(found: Mapping[str, Any]) -> str:
    return f"{found['passed']} of {found['passed'] + found['failed']}"


def _fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"`{value}`" if isinstance(value, str) else str(value)


def _neutral(releases: list[Release]) -> list[str]:
    trials = [list(release.results.get("numbers", {}).values()) for release in releases]
    return [f"{sum(each['verdict'] in _NEUTRAL for each in found)} of {len(found)}" for found in trials]


def _differing(releases: list[Release]) -> str:
    """Return the numbers of trials that are not the same in all releases, and how many are."""
    names = dict.fromkeys(name for release in releases for name in release.results.get("numbers", {}))
    rows: dict[str, list[str]] = {}
    same = 0
    for trial in names:
        found = [release.results.get("numbers", {}).get(trial, {}) for release in releases]
        for number in found[-1].keys() - {"verdict"}:
            values = [json.dumps(each.get(number), sort_keys=True) for each in found]
            same += len(set(values)) == 1
            if len(set(values)) > 1:
                rows[f"`{trial}`: {number}"] = [_short(value) for value in values]
    sentence = f"{same} of {same + len(rows)} numbers of {len(names)} trials are the same in all of them."
    if not rows:
        return sentence
    return f"{sentence} The others:\n\n{_table('number', releases, dict(sorted(rows.items())))}"


def _short(value: str) -> str:
    number = value.lstrip("-")
    return f"{int(value):,}" if number.isdigit() else f"`{value}`"


def _failures(releases: list[Release]) -> str:
    lines = [
        f"* {release.name}: `{test}`: {problem}"
        for release in releases
        for found in release.results.get("tests", {}).values()
        for test, problem in found["failures"].items()
    ]
    return "Tests that fail:\n\n" + "\n".join(lines) if lines else ""


def _table(title: str, releases: list[Release], rows: Mapping[str, Iterable[str]]) -> str:
    lines: list[list[str]] = [
        [title, *(release.name for release in releases)],
        ["---"] * (len(releases) + 1),
        *([name, *cells] for name, cells in rows.items()),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
