"""Steps in micro-batches: each cell ends as it is known to, and the kept page says what runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.tools.pipelines import kept, places_table
from harness.ranks.agent import Agent
from tests.gallery.entries import STEPS
from tests.matrix.pipeline_rows import rows_of
from tests.matrix.steps_in_parts import KNOWN_BAD, PLACES, Cell, cells, judgement

_TORCH = Cell(variant="ac=full ac.split_backward=torch", place="mesh=pp2 mesh.pp_schedule=zbv")
_PLAIN = Cell(variant="ac=full", place="mesh=pp2 mesh.pp_schedule=zbv")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("place", PLACES)
def test_the_page_says_what_runs(agent: Agent, tmp_path: Path, place: str) -> None:
    _, rows = kept()
    here = [cell for cell in cells() if cell.place == place]
    assert rows_of(agent, here, tmp_path) == [rows[cell] for cell in here]


def test_no_kept_cell_ends_otherwise_than_is_known() -> None:
    _, rows = kept()
    assert [cell.words for cell, row in rows.items() if judgement(cell, row["ending"]) == "unexpected"] == []
    assert {cell.words for cell in rows} == {cell.words for cell in cells()}
    assert "unexpected" not in places_table()


@pytest.mark.parametrize(
    ("cell", "ending", "expected"),
    [
        (_PLAIN, "neutral", "neutral"),
        (_PLAIN, "refused: ac: no", "refused"),
        (_PLAIN, "neutral, a block is recomputed 10 times", "unexpected"),
        (_PLAIN, "differs: gradients", "unexpected"),
        (_TORCH, "neutral, a block is recomputed 10 times", "known bad"),
        (_TORCH, "neutral", "unexpected"),
    ],
    ids=["right", "refused", "repeated", "wrong", "repeated as known", "mended, and known to be bad"],
)
def test_an_end_is_judged_by_what_is_known(cell: Cell, ending: str, expected: str) -> None:
    assert judgement(cell, ending) == expected


def test_every_rule_has_its_entry_of_the_gallery() -> None:
    assert {rule.entry for rule in KNOWN_BAD} <= set(STEPS)


def test_options_of_a_split_backward_stand_where_there_is_one() -> None:
    found = list(cells())
    split = {cell.schedule for cell in found if "split_backward" in cell.variant}
    assert split == {"zero_bubble", "zbv"}
    assert len(found) == len({cell.words for cell in found})
