from __future__ import annotations

import pytest
import torch

from strategies.shard.model.placement_state import SUMMED, WHOLE, Move, State, TensorValue, move, sharded

_VALUE = TensorValue(shape=(4, 6), dtype=torch.float32, needs_gradient=True)

MOVES = [
    # from | to | collectives forward | collectives backward
    pytest.param(WHOLE, WHOLE, (), (), id="stays whole"),
    pytest.param(WHOLE, SUMMED, (), ("all_reduce",), id="gradient is summed on the way back"),
    pytest.param(WHOLE, sharded(0), (), ("all_gather",), id="cut"),
    pytest.param(SUMMED, SUMMED, (), (), id="stays a summand"),
    pytest.param(sharded(0), WHOLE, ("all_gather",), (), id="gathered"),
    pytest.param(sharded(0), SUMMED, ("all_gather",), ("reduce_scatter",), id="gathered for summands"),
    pytest.param(sharded(0), sharded(1), ("all_to_all",), ("all_to_all",), id="cut otherwise"),
    pytest.param(sharded(1), sharded(1), (), (), id="stays cut"),
]


def _kinds(found: Move, phase: str) -> tuple[str, ...]:
    return tuple(each.kind for each in found.collectives("x") if each.phase == phase)


@pytest.mark.parametrize(("source", "target", "forward", "backward"), MOVES)
def test_a_move_takes_these_collectives(
    source: State, target: State, forward: tuple[str, ...], backward: tuple[str, ...]
) -> None:
    found = move(source, target, _VALUE, 2)
    assert found is not None
    assert (_kinds(found, "forward"), _kinds(found, "backward")) == (forward, backward)
    assert {each.payload_bytes for each in found.collectives("x")} <= {96, 48}


@pytest.mark.parametrize("target", [WHOLE, sharded(0)], ids=str)
def test_what_comes_back_whole_cannot_become_a_summand(target: State) -> None:
    assert move(SUMMED, target, _VALUE, 2) is None


def test_without_a_gradient_nothing_comes_back() -> None:
    tokens = TensorValue(shape=(4, 6), dtype=torch.int64, needs_gradient=False)
    found = move(WHOLE, sharded(0), tokens, 2)
    assert found is not None
    assert found.collectives("x") == ()


def test_states_have_names() -> None:
    assert [str(state) for state in (WHOLE, SUMMED, sharded(0), sharded(2))] == ["R", "R*", "S0", "S2"]


def test_a_rank_holds_its_part() -> None:
    assert [_VALUE.local_bytes(state, 2) for state in (WHOLE, SUMMED, sharded(1))] == [96, 96, 48]


@pytest.mark.parametrize(("dim", "ranks", "can"), [(0, 2, True), (0, 3, False), (1, 3, True), (0, 8, False)])
def test_cuts_are_even(dim: int, ranks: int, can: bool) -> None:
    assert _VALUE.can_be_cut(dim, ranks) is can
