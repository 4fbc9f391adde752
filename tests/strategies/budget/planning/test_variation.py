"""Decisions that come of others: each storage has one fate, and some are found by no single change."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from strategies.budget.planning.planner import Planner
from strategies.budget.planning.schedules import Fates
from strategies.budget.planning.variation import Variation
from tests.strategies.budget.planning.test_enumeration import Blocks, Residual
from tests.strategies.budget.planning.test_schedules import KINDS, drawn_call
from tests.strategies.step.test_plan_capture import captured


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_each_storage_has_one_fate(kind: str, seed: int) -> None:
    chance = random.Random(seed)
    program = drawn_call(chance, kind).program
    runs, pinned = program.runs, program.runs.bits_of(program.pinned)
    movable = frozenset(each for each in program.movable if chance.random() < 0.5)
    variation = Variation(program, movable, may_drop=bool(seed % 2))
    pool = [Fates(program.completed_bits(pinned, 0), 0, 0)]
    for _ in range(200):
        found = variation.changed(chance.choice(pool), chance)
        if chance.random() < 0.5:
            found = variation.joined(chance.choice(pool), found, chance)
        pool.append(found)
        keep, moved, again, drops = found
        assert not (keep & moved | keep & again | moved & again)
        assert pinned & ~(keep | moved) == 0
        assert program.completed_bits(keep, moved) == keep
        assert program.fleeting_chains.issuperset(runs.storages_in(again))
        assert movable.issuperset(runs.storages_in(moved))
        assert {each for each, _ in drops} <= (program.droppable if seed % 2 else set())
        assert all(number > 0 for _, number in drops)
    assert len(set(pool)) > 50


def test_what_a_place_hands_on_is_kept_by_some() -> None:
    program = captured(
        Blocks([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))]), torch.randn(8, 4)
    )
    (call,) = (each.call.program for each in Planner(program)._callers)
    size = len(call.nbytes)
    everything, chance = (1 << size) - 1, random.Random(0)
    found = {
        Variation(call, frozenset(), may_drop=False)
        .joined(Fates(0, 0, 0), Fates(everything, 0, 0), chance)
        .keep
        for _ in range(100)
    }
    whole = {everything >> place << place for place in range(1, size)}
    assert whole < found  # nothing before a place, and all from there on
    handed = [each & ~max(one for one in whole if one & each == one) for each in found - whole]
    assert all(each and each & (each - 1) == 0 for each in handed)  # each operator reads the one before it


def test_a_chain_keeps_the_same_of_each_block_and_makes_all_links_anew() -> None:
    torch.manual_seed(0)

    def block() -> nn.Module:
        gated = Residual(
            nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.SiLU(), nn.Conv1d(16, 8, 3, padding=1))
        )
        return Residual(nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.ReLU(), gated, nn.GELU()))

    found = Planner(captured(Blocks([block() for _ in range(5)]), torch.randn(16, 8, 32)))
    plan = found.plan(int(0.8 * found.minimum_feasible_bytes + 0.2 * found.plain_peak_bytes))
    assert plan.extra_flops <= plan.lower_bound_autograd_flops + 1
