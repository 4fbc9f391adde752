"""Variants on meshes of parts: none ends otherwise than neutral or refused, and the kept page says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.tools.meshes import kept
from harness.ranks.agent import Agent
from tests.matrix.mesh_cells import PLACES, MeshCell, cells, counts_of
from tests.matrix.pipeline_rows import rows_of
from tests.matrix.steps_in_parts import judgement


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("place", PLACES)
def test_the_page_says_what_is_repeated(agent: Agent, tmp_path: Path, place: str) -> None:
    _, rows = kept()
    here = [cell for cell in cells() if cell.place == place]
    assert rows_of(agent, here, tmp_path) == [rows[cell] for cell in here]


def test_every_kept_cell_is_neutral_against_twin_and_dense_model_or_refused() -> None:
    _, rows = kept()
    judged = {cell.words: judgement(cell, row["ending"]) for cell, row in rows.items()}
    assert [words for words, each in judged.items() if each not in {"neutral", "refused"}] == []
    assert [
        row["words"]
        for row in rows.values()
        if judged[row["words"]] == "neutral" and (row["twin"], row["dense"]) != ("bitwise", "tolerance")
    ] == []


def test_refused_cells_are_those_of_budgets_and_name_the_option() -> None:
    _, rows = kept()
    endings = {cell.words: row["ending"] for cell, row in rows.items()}
    refused = {words: ending for words, ending in endings.items() if ending.startswith("refused")}
    assert refused
    assert [words for words in refused if not words.startswith("ac=budget")] == []
    assert [ending for ending in refused.values() if "mesh." not in ending] == []


def test_cells_are_counted_by_how_they_ended() -> None:
    variants = ["ac=full", "ac=selective_op ac.save_ops=[comm]", "ac=selective_op", "ac=budget"]
    given = [MeshCell(variant=each, place="mesh=cp2") for each in variants]
    endings = ["neutral", "neutral", "differs: gradients", "refused: ac=budget has no …"]
    assert counts_of(given, endings) == (
        "4 cells: 2 neutral (50.0% of all, 66.7% of those that run), 1 refused, 1 other; of one row a "
        "variant 3 cells: 2 neutral (66.7% of all, 100.0% of those that run), 1 refused, 0 other"
    )
    assert counts_of(given[:1], endings[:1]) == (
        "1 cells: 1 neutral (100.0% of all, 100.0% of those that run), 0 refused, 0 other"
    )
