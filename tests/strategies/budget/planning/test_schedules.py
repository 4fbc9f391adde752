"""Many decisions side by side have the effects that each has by hand, in drawn programs and all fields."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np
import pytest

from strategies.budget.plan import input_value
from strategies.budget.planning.block_program import BlockProgram, PlannedCall
from strategies.budget.planning.schedules import Fates, Schedules, columns_of
from strategies.budget.planning.simulation import (
    PLAIN,
    Decision,
    Effect,
    Simulation,
    Window,
    decision_of,
    effect_of,
    fates_of,
    highest,
)
from strategies.estimate.machine import MACHINES
from tests.strategies.budget.planning.simulating_by_hand import ByHand, uses
from tests.strategies.budget.planning.test_units import OUTSIDE, STATE_BYTES, drawn

UNITS, ASKED, DECISIONS, START = 9, 14, 30, 5
KINDS = ("a block", "a chain", "a forward that goes backward")


def drawn_call(chance: random.Random, kind: str) -> PlannedCall:
    """Return a call whose moments are drawn, as are its units and what backward asks for."""
    units, sizes = drawn(chance, UNITS)
    own, end = len(sizes) - OUTSIDE, START + 3 * UNITS
    first = START if kind == KINDS[2] else end
    asked = sorted(chance.sample(range(first, end + 40), ASKED))
    until = [moment + chance.randint(0, 6) for moment in asked]
    storages = [chance.choice([*range(-OUTSIDE, own)]) for _ in asked]
    starts = tuple(START + 3 * number for number in range(UNITS))
    return PlannedCall(
        fqn="block",
        program=BlockProgram(
            units=tuple(replace(each, flops=chance.randint(0, 9), seconds=chance.random()) for each in units),
            nbytes=tuple(sizes[:own]),
            outer_nbytes=tuple(reversed(sizes[own:])),
            asked=tuple(storages),
            values=(),
            inputs=((-1, input_value(0)),),
            operators=2 * UNITS,
            asks_in_forward=kind == KINDS[2],
        ),
        start=START,
        end=end,
        starts=starts,
        deaths=tuple(chance.randint(START, end + 10) for _ in range(own)),
        asked=tuple(asked),
        until=tuple(until),
        released=tuple(each + chance.randint(0, 9) for each in until),
        nodes=("",) * ASKED,
        outer_deaths=tuple(chance.randint(START, end + 50) for _ in range(OUTSIDE)),
        storages=tuple(range(100, 100 + own)),
        outer_storages=tuple(range(OUTSIDE)),
        dropped={each: end + chance.randint(-9, 20) for each in range(own) if chance.random() < 0.1},
        gains=((START + 2, 3), (end + 9, -3)),
        ends=(starts[UNITS // 2], end) if kind == KINDS[1] else (),
    )


def drawn_decision(chance: random.Random, call: PlannedCall) -> Decision:
    """Return a decision that gives each storage any fate."""
    shares, fates = (chance.random() for _ in range(4)), ("keep", "offload", "again", "drops")
    weights = dict(zip(fates, shares, strict=True))
    of: dict[str, set[int]] = {fate: set() for fate in fates}
    for storage in (-1, *range(len(call.program.nbytes))):
        for fate in ("offload",) if storage < 0 else fates:
            if chance.random() < weights[fate] / 2:
                of[fate].add(storage)
    keep, offload = of["keep"] - of["offload"], of["offload"]
    again = of["again"] - keep - offload
    drops = ((storage, chance.randint(1, 4)) for storage in sorted(of["drops"] - offload - again) * 2)
    return Decision(
        keep=frozenset(keep), offload=frozenset(offload), again=frozenset(again), drops=frozenset(drops)
    )


def assert_equal(found: Effect, expected: Effect) -> None:
    """Compare all fields but what the machine's copies to the host take."""
    names = {each.name for each in fields(Effect)} - {"host_bytes", "wait_s"}
    for name in sorted(names):
        assert (name, getattr(found, name)) == (name, getattr(expected, name))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(25))
def test_decisions_side_by_side_have_the_effects_that_each_has(seed: int, kind: str) -> None:
    chance = random.Random(f"{seed} {kind}")
    call = drawn_call(chance, kind)
    decisions = [drawn_decision(chance, call) for _ in range(DECISIONS)]
    owned = frozenset({-1}) if seed % 2 else None
    fates = [fates_of(call.program, each) for each in decisions]
    assert [decision_of(call.program, each) for each in fates] == decisions
    found = Simulation(Schedules(call, fates), STATE_BYTES, owned=owned)
    held = np.array([chance.randint(0, 50) for _ in range(call.end + 80)])
    windows = [Window(start, held[start:end]) for start, end in ((START, call.end + 1), (call.end + 3, 90))]
    most = found.highest(*windows)
    for number, decision in enumerate(decisions):
        effect, by_hand = found.effect(number), ByHand(call, decision, STATE_BYTES, owned=owned).effect()
        effect.seconds -= effect.wait_s
        by_hand.seconds = pytest.approx(by_hand.seconds)  # type: ignore[assignment]
        assert_equal(effect, by_hand)
        assert found.units[number] == len(by_hand.runs)
        own = [int(each[number]) for each in most]
        assert own == highest_by_hand(by_hand, windows, call.end)
        assert own == [int(each[0]) for each in highest(by_hand, *windows)]


def highest_by_hand(effect: Effect, windows: list[Window], end: int) -> list[int]:
    """Return the highest totals in forward and backward and what waits between, moment by moment."""

    def at(moment: int) -> int:
        return sum(gain for since, gain in effect.gains.items() if since <= moment)

    forward, backward = (
        max(
            0,
            *(
                at(moment) + int(window.held[moment - window.start]) + effect.peaks.get(moment, 0)
                for moment in range(window.start, window.end)
            ),
        )
        for window in windows
    )
    waits = range(min(end + 1, windows[1].start - 1), windows[1].start)
    return [forward, max(map(at, waits)), backward]


@pytest.mark.parametrize("kind", KINDS)
def test_untouched_and_offloaded_blocks(kind: str) -> None:
    for seed in range(40):
        chance = random.Random(f"{seed} {kind}")
        call = drawn_call(chance, kind)
        plain = effect_of(call, PLAIN, random_state_bytes=STATE_BYTES)
        assert_equal(plain, ByHand(call, PLAIN, STATE_BYTES).effect())
        decision = Decision(offload=frozenset(range(len(call.program.nbytes))))
        moved = effect_of(call, decision, random_state_bytes=STATE_BYTES)
        late = {
            storage
            for storage, moment in zip(call.program.asked, call.asked, strict=True)
            if storage >= 0 and moment >= call.end
        }
        late |= {storage for storage, until in call.dropped.items() if until >= call.end}
        assert moved.host_bytes == sum(call.program.nbytes[storage] for storage in late)
        window_s = sum(unit.seconds for unit in call.program.units)
        assert moved.wait_s == MACHINES["cpu"].offload_s(moved.host_bytes, window_s)
        assert moved.seconds == pytest.approx(moved.wait_s)


@pytest.mark.parametrize("seed", range(40))
def test_members_of_groups_side_by_side(seed: int) -> None:
    chance = random.Random(seed)
    call = drawn_call(chance, KINDS[0])
    own = range(len(call.program.nbytes))
    links, outs, moment = frozenset({-2}), frozenset({chance.choice(own)}), call.end + 1
    keeps = [frozenset(each for each in own if chance.random() < 0.4) for _ in range(DECISIONS)]
    fates = [fates_of(call.program, Decision(keep=keep)) for keep in keeps]
    schedules = Schedules(call, fates, links=links, outs=outs, second=moment)
    found = Simulation(schedules, STATE_BYTES)
    for number, keep in enumerate(keeps):
        expected = ByHand(
            call, Decision(keep=keep), STATE_BYTES, links=links, outs=outs, second=moment
        ).effect()
        expected.seconds = pytest.approx(expected.seconds)  # type: ignore[assignment]
        assert_equal(found.effect(number), expected)


@pytest.mark.parametrize("seed", range(10))
def test_drops_that_no_request_follows_are_told(seed: int) -> None:
    chance = random.Random(seed)
    call = drawn_call(chance, KINDS[0])
    decisions = [drawn_decision(chance, call) for _ in range(DECISIONS)]
    schedules = Schedules(call, [fates_of(call.program, each) for each in decisions])
    useless = {
        (number, drop)
        for number, each in enumerate(decisions)
        for drop in each.drops
        if uses(schedules, number)[drop[0]] <= drop[1]
    }
    assert set(schedules.useless_drops()) == useless


@pytest.mark.parametrize("count", [1, 8, 9, 300])
def test_columns_of_sets(count: int) -> None:
    rows = [0, 1, (1 << count) - 1, 1 << count - 1]
    expected = [[row >> place & 1 for place in range(count)] for row in rows]
    assert columns_of(rows, count).tolist() == expected


def test_no_decision_is_another_under_others() -> None:
    call = drawn_call(random.Random(0), KINDS[0])
    alone = Schedules(call, [Fates(0, 0, 0)])
    beside = Schedules(call, [Fates(-1 & (1 << len(call.program.nbytes)) - 1, 0, 0), Fates(0, 0, 0)])
    assert uses(beside, 1) == uses(alone, 0)
    assert uses(beside, 0) != uses(alone, 0)
