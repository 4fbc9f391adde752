"""Time of plans at the peaks of peers: the rows of one width."""

from __future__ import annotations

from itertools import product

from bench.peers.widths import OBJECTIVES, PEERS, rows_of


def test_a_plan_keeps_the_peak_of_each_peer_as_it_was_predicted() -> None:
    rows = list(rows_of(32, turns=1))
    assert [(row.peer, row.objective) for row in rows] == list(product(PEERS, OBJECTIVES))
    assert [row.misses_bytes for row in rows] == [0] * len(rows)
    assert all(row.ours_share is not None and row.ours_share <= row.share for row in rows)
    assert all(row.ours_over_peer is not None and row.ours_over_peer.median > 0 for row in rows)
