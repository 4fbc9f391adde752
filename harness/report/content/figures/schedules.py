"""Memory of each rank of a pipeline through its schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from harness.records.merge_ranks import RankPipeline
from harness.report.content.figures.encodings import MIB, tip, variant_colour
from harness.report.facts import quantities
from harness.report.facts.document import Figure
from harness.report.facts.sweep_records import Entry, SweepRecords

_MOST_LINES = 10  # of a panel
_MOST_PANELS = 12
_MOST_WORDS, _MOST_NUMBERS = 28, 56  # of the tiles of a panel, which is some 500 pixels wide
_HEIGHT, _GAP, _TILE = 200, 6, 15  # pixels: of a panel, below it, of a tile

_DASHES = ([1, 0], [5, 2], [2, 2], [8, 2, 2, 2])
_KINDS: Mapping[str, tuple[str, str]] = {
    "F": ("forward", "#d5dcae"),
    "B": ("backward", "#7ba3c9"),
    "I": ("input part", "#a9cbe3"),
    "W": ("weight part", "#e3b9a9"),
}
"""What a rank does, with the colour of its tile."""


def schedule_figure(sweep: SweepRecords) -> Figure | None:
    """Return the memory of each rank in each action: a panel a schedule and rank, a line a trial."""
    rows = [
        row
        for entries in sweep.by_setting.values()
        for rank, known in _ranks(entries)
        for row in _panel(f"{sweep.where(entries[0])}, rank {rank}", rank, known)
    ]
    panels = list(islice(dict.fromkeys(row["panel"] for row in rows), _MOST_PANELS))
    rows = [row for row in rows if row["panel"] in panels]
    if not rows:
        return None
    x = {"field": "at", "type": "quantitative", "title": None, "scale": {"nice": False}, "axis": None}
    shared = {
        "x": x,
        "y": {"field": "mib", "type": "quantitative", "title": "MiB"},
        "color": variant_colour(sweep, rows),
        "detail": {"field": "name"},
        **_dashes(rows),
        "tooltip": [
            tip("name", "trial"),
            tip("does", "in"),
            tip("microbatch", "micro-batch"),
            tip("stage", "stage"),
            tip("bytes", "bytes", ",d"),
        ],
    }
    layers = [
        {"mark": {"type": "line", "interpolate": "step", "strokeWidth": 1.5}, "encoding": shared},
        {"mark": {"type": "point", "opacity": 0, "size": 60}, "encoding": shared},
        {
            "transform": [{"filter": "datum.is_peak"}],
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": shared,
        },
        *(layer for place in range(1 + max(row["tile"] for row in rows)) for layer in _tiles(place, rows, x)),
    ]
    return Figure(
        key="schedule",
        title="Memory by rank through the schedule",
        about=(
            "The highest total of live storages in each action of a rank, from the end of the one before; a "
            "panel a schedule and rank. Tiles are the actions in their order, with their micro-batch: "
            f"{', '.join(f'{kind} {name}' for kind, (name, _) in _KINDS.items())}; a row a stage of the "
            "rank. Actions are drawn equally long. Dots are the peaks."
        ),
        spec={
            "transform": [{"calculate": f"datum.bytes / {MIB}", "as": "mib"}],
            "facet": {"field": "panel", "type": "nominal", "title": None, "sort": panels},
            "resolve": {"scale": {"x": "independent"}},
            "spec": {"height": _HEIGHT, "layer": layers},
        },
        rows=tuple(rows),
        paths={"bytes": quantities.action_bytes("{rank}", "{number}").path},
    )


def _dashes(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the channel that tells variants of one colour apart; nothing where there are none."""
    families: dict[str, list[str]] = {}
    for row in rows:
        choices = families.setdefault(row["variant"], [])
        choices += [] if row["choice"] in choices else [row["choice"]]
    several = [choice for choices in families.values() if len(choices) > 1 for choice in choices]
    if not several:
        return {}
    dashes = {
        choice: _DASHES[index % len(_DASHES)]
        for each in families.values()
        for index, choice in enumerate(each)
    }
    return {
        "strokeDash": {
            "field": "choice",
            "type": "nominal",
            "title": "options",
            "scale": {"domain": list(dashes), "range": list(dashes.values())},
            "legend": {"values": several},
        }
    }


def _ranks(entries: Sequence[Entry]) -> Iterator[tuple[int, list[tuple[Entry, RankPipeline]]]]:
    """Yield each rank, with what the trials of a setting say of it that say what they did."""
    said = [
        (entry, entry.record.memory.pipeline)
        for entry in entries
        if entry.record.memory is not None and entry.record.memory.pipeline is not None
    ]
    for rank in range(max((len(ranks) for _, ranks in said), default=0)):
        known = [(entry, ranks[rank]) for entry, ranks in said if rank < len(ranks) and ranks[rank].actions]
        yield rank, known[:_MOST_LINES]


def _panel(panel: str, rank: int, known: Sequence[tuple[Entry, RankPipeline]]) -> Iterator[dict[str, Any]]:
    """Yield the row of each action of each trial; tiles are those of the first one, as all have the same."""
    for index, (entry, stages) in enumerate(known):
        peak = max(action.bytes for action in stages.actions)
        for number, action in enumerate(stages.actions):
            kind = next(letter for letter in action.action if not letter.isdigit())
            stage, microbatch = map(int, action.action.split(kind))
            yield {
                "trial_id": entry.trial_id,
                "name": entry.name,
                "variant": entry.family,
                "choice": entry.choice,
                "panel": panel,
                "rank": rank,
                "number": number,
                "at": number + 0.5,
                "end": number + 1,
                "bytes": action.bytes,
                "does": _KINDS[kind][0],
                "microbatch": microbatch,
                "stage": stage,
                "tile": stages.stages.index(stage),
                "is_tile": index == 0,
                "is_peak": action.bytes == peak,
            } | _word(f"{kind}{microbatch}", len(stages.actions))


def _word(word: str, actions: int) -> dict[str, str]:
    """Return what stands on a tile: kind and micro-batch, or the micro-batch, as far as there is room."""
    if actions > _MOST_NUMBERS:
        return {}
    return {"word": word if actions <= _MOST_WORDS else word[1:]}


def _tiles(place: int, rows: Sequence[Mapping[str, Any]], x: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the layers of a row of tiles below the axis."""
    top = _HEIGHT + _GAP + place * (_TILE + 1)
    here = [{"filter": f"datum.is_tile && datum.tile == {place}"}]
    kinds = {name: colour for name, colour in _KINDS.values() if name in {row["does"] for row in rows}}
    yield {
        "transform": here,
        "mark": {"type": "rect", "stroke": "white", "strokeWidth": 0.5},
        "encoding": {
            "x": {**x, "field": "number"},
            "x2": {"field": "end"},
            "y": {"value": top},
            "y2": {"value": top + _TILE},
            "fill": {
                "field": "does",
                "type": "nominal",
                "title": "does",
                "scale": {"domain": list(kinds), "range": list(kinds.values())},
            },
            "tooltip": [tip("does", "does"), tip("microbatch", "micro-batch"), tip("stage", "stage")],
        },
    }
    if any("word" in row for row in rows):
        yield {
            "transform": here,
            "mark": {"type": "text", "fontSize": 9, "color": "#333333", "baseline": "middle"},
            "encoding": {"x": x, "y": {"value": top + _TILE / 2}, "text": {"field": "word"}},
        }
