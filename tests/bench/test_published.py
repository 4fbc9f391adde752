"""Numbers of others next to ours: every byte of ours has a name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.peers import published


@pytest.mark.parametrize("row", ["C1", "C2", "C11", "C15"])
def test_every_byte_has_a_name(row: str) -> None:
    found = list(published.ROWS[row]())
    assert found
    for each in found:
        assert each.row == row
        assert each.is_explained, (each.quantity, each.ours, each.parts)
        assert not replace(each, ours=each.ours + 1).is_explained


def test_a_layer_saves_what_is_published_and_the_statistics_of_norms() -> None:
    plain, selective = published.layer_bytes()
    statistics = 4 * 64 * 2 * 2  # means and deviations of two norms, of 64 x 2 tokens, in bf16
    for each, formula in ((plain, 720_896), (selective, 557_056)):
        assert each.theirs_number == formula
        assert each.ours - formula == statistics


def test_tiles_cost_bytes_where_there_are_few_tokens() -> None:
    long, long_in_tiles, short, short_in_tiles = (each.ours for each in published.tiled_mlp())
    assert long_in_tiles < long
    assert short_in_tiles > short
