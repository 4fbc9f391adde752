"""The page of the legality matrix says what the kept result says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from docs.tools.legality import PAGE, page, page_of
from tests.matrix.legality import Cell

GOOD = Cell(
    variant="full",
    mesh="single",
    wrap_order="inside_fsdp",
    compile="none",
    compile_order=None,
    dtype="fp32",
    dropout=0.1,
    early_stop=True,
    preserve_rng_state=True,
)
REDRAWN = replace(GOOD, preserve_rng_state=False)
TILED = replace(GOOD, chunk="tiles")
COMPILED = replace(GOOD, mesh="tp2", compile="inductor", compile_order="compile_first")
EVERYTHING = [GOOD, REDRAWN, COMPILED, TILED]


def _content(**ran: str) -> dict[str, Any]:
    names = {"good": GOOD, "redrawn": REDRAWN, "compiled": COMPILED, "tiled": TILED}
    return {
        "environment": {
            "torch": "2.13.0+cpu",
            "python": "3.11.7",
            "device": "a machine",
            "commit": "1a2b3c4d5e",
        },
        "protocol": {"uncompiled": "every cell", "compiled": "some"},
        "results": {
            "environment_id": "0" * 12,
            "refused": {"mesh: too small": 3, "ac: no": 4},
            "ran": _tree({names[name].words: ending for name, ending in ran.items()}),
            "seconds": {"none": 3.0, "inductor": 20.0},
            "legal": 5,
            "planned": 4,
        },
    }


def _tree(ran: Mapping[str, str]) -> dict[str, Any]:
    """Return cells by their first word, as a kept file has them by all of their words."""
    tree: dict[str, Any] = {}
    for words, ending in ran.items():
        first, _, others = words.partition(" ")
        tree.setdefault(first, {})[others] = ending
    return tree


def _page(folder: Path, *contents: dict[str, Any]) -> str:
    paths = [folder / f"{number}.json" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(json.dumps(content), "utf-8")
    return page_of(paths, EVERYTHING)


def test_the_page_is_current() -> None:
    assert page() == PAGE.read_text("utf-8"), "run python -m docs.tools.legality"


def test_every_judgement_is_counted_where_it_stands(tmp_path: Path) -> None:
    told = _page(tmp_path, _content(good="neutral", redrawn="differs: gradients", compiled="neutral"))
    for line in (
        "| all | 12 |",
        "| refused before anything runs | 7 |",
        "| ran | 3 |",
        "| of these known bad | 1 |",
        "| variant | compile | `single` | `tp2` |",
        "| `ac=full` | `none` | 1 neutral, 1 known bad | - |",
        "| `ac=full` | `inductor`, `compile_first` | - | 1 neutral |",
        "| ac: no | 4 |",
        "Nothing.",
    ):
        assert line in told.splitlines(), told
    assert "1.5 s with `compile=none`, 20.0 s with `compile=inductor`" in told


def test_what_is_unexpected_is_listed(tmp_path: Path) -> None:
    told = _page(tmp_path, _content(redrawn="neutral", compiled="neutral"))
    assert "The test has cells of `ac=full chunk=tiles` too: what is kept is older." in told.splitlines()
    assert f"* `{REDRAWN.words}`: neutral; gallery 11 says that it differs" in told


def test_the_last_ending_of_a_cell_counts(tmp_path: Path) -> None:
    first = _content(good="neutral", redrawn="neutral", compiled="differs: gradients")
    told = _page(tmp_path, first, _content(redrawn="differs: gradients", compiled="neutral"))
    assert "2 cells ran once more at 1a2b3c4d, after a mend; that ending counts." in told
    assert "| ran | 3 |" in told.splitlines()
    assert "| of these unexpected | 0 |" in told.splitlines()


def test_cells_that_are_added_count_with_the_numbers_of_their_file(tmp_path: Path) -> None:
    first, added = _content(good="neutral", compiled="neutral"), _content(tiled="neutral")
    added["results"] |= {"refused": {"ac: no": 7}, "legal": 9, "planned": 6}
    told = _page(tmp_path, first, added)
    assert "1 cells were added at 1a2b3c4d." in told
    for line in (
        "| `ac=full chunk=tiles` | `none` | 1 neutral | - |",
        *("| all | 16 |", "| legal | 9 |"),
        "| of these not run yet | 3 |",
        "| ac: no | 7 |",
    ):
        assert line in told.splitlines(), told
    assert "3.0 s with `compile=none`" in told
