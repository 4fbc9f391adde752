"""Tables of steps in micro-batches, of the kept results of `tests.matrix.pipeline_rows`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.tools.keep import KEPT
from tests.matrix.steps_in_parts import SCHEDULES, Cell, cells, judgement, known_bad


def kept() -> tuple[Path, dict[Cell, Mapping[str, Any]]]:
    """Return the file, and what it says of each cell."""
    (path,) = KEPT.glob("pipelines-cpu-*.json")
    rows = {row["words"]: row for row in json.loads(path.read_text("utf-8"))["results"]}
    return path, {cell: rows[cell.words] for cell in cells()}


def schedule_table() -> str:
    """Return what each variant costs under each schedule."""
    path, rows = kept()
    lines = [
        "| schedule | `ac` | forwards of a block | FLOPs / plain | peaks of activations | verdict |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for schedule in SCHEDULES:
        for cell, row in rows.items():
            if cell.schedule == schedule and not row["ending"].startswith("refused"):
                lines.append(f"| `{schedule}` | {_variant(cell)} | {_costs(row)} | {_verdict(cell, row)} |")
    written = "Written by `python -m docs.tools.readme --only pipelines`"
    return "\n".join([*lines, "", f"{written} from {link(path)}."])


def places_table() -> str:
    """Return how each variant ends in each place, and the reasons of refusals."""
    path, rows = kept()
    places = list(dict.fromkeys(cell.place for cell in rows))
    variants = list(dict.fromkeys(cell.variant for cell in rows))
    reasons: dict[str, None] = {}
    lines = [
        "| `ac` | " + " | ".join(f"`{_short(place)}`" for place in places) + " |",
        "| --- " * (1 + len(places)) + "|",
    ]
    by_words = {(cell.variant, cell.place): (cell, row) for cell, row in rows.items()}
    for variant in variants:
        found = [by_words.get((variant, place)) for place in places]
        shown = ["-" if each is None else judged(*each, reasons) for each in found]
        lines.append(f"| `{variant.removeprefix('ac=')}` | " + " | ".join(shown) + " |")
    return "\n".join([*lines, "", *numbered(reasons), "", f"Measured: {link(path)}."])


def judged(cell: Cell, row: Mapping[str, Any], reasons: dict[str, None]) -> str:
    """Return a cell of the table; a refusal has the number of its reason, which is added."""
    word, rule = judgement(cell, row["ending"]), known_bad(cell)
    if word == "refused":
        reason = row["ending"].removeprefix("refused: ")
        reasons.setdefault(reason)
        return f"refused ({list(reasons).index(reason) + 1})"
    if rule is not None and word == "known bad":
        return _known_bad(rule.entry)
    return word


def _known_bad(entry: str) -> str:
    number = entry.partition("_")[0]
    return f"[known bad](gallery/pipelines.md#{number})"


def _verdict(cell: Cell, row: Mapping[str, Any]) -> str:
    rule = known_bad(cell)
    return row["ending"] if rule is None else f"{row['ending'].partition('.')[0]}: {_known_bad(rule.entry)}"


def _costs(row: Mapping[str, Any]) -> str:
    """Return the three cells of what a variant costs; those that raise have none."""
    if "forwards" not in row:
        return "- | - | -"
    forwards = " · ".join(_each_once(" + ".join(f"{n:g}" for n in rank) for rank in row["forwards"]))
    return f"{forwards} | {row['flops']:.2f} | {' · '.join(f'{n:,}' for n in row['peaks'])}"


def _each_once(words: Iterator[str]) -> Sequence[str]:
    return list(dict.fromkeys(words))


def _variant(cell: Cell) -> str:
    return f"`{cell.variant.removeprefix('ac=').replace(' ac.', '`, `')}`"


def _short(place: str) -> str:
    return place.removeprefix("mesh=").replace(" mesh.", " ").replace("pp_schedule=", "").replace("fsdp=", "")


def numbered(reasons: Iterable[str]) -> list[str]:
    """Return the list of the reasons that a table names by their numbers."""
    return [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]


def link(path: Path) -> str:
    """Return the link to a kept file from a page."""
    return f"[{path.name}](results/{path.name})"
