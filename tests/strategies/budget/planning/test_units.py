"""What runs for a request, against a walk that follows one storage at a time."""

from __future__ import annotations

import random

import pytest

from strategies.budget.planning.units import Run, Runs, Unit, UnitStep

OUTSIDE = 2
STATE_BYTES = 7


def drawn(chance: random.Random, count: int) -> tuple[list[Unit], list[int]]:
    """Return units of one or two operators and results, and the bytes of their storages."""
    units: list[Unit] = []
    made = 0
    for _ in range(count):
        known = [*range(-OUTSIDE, 0), *range(made)]
        reads = tuple(sorted(chance.sample(known, min(len(known), chance.randint(1, 3)))))
        makes = tuple(range(made, made + chance.randint(1, 2)))
        made += len(makes)
        states, operators = chance.randint(0, 1), chance.randint(1, 2)
        first = len(units) * 2
        steps = [
            UnitStep(
                ordinal=first + number,
                made_bytes=0,
                private_bytes=chance.randint(0, 9),
                random_states=states if not number else 0,
                reads=reads if number == operators - 1 else (),
                made=makes if number == operators - 1 else (),
            )
            for number in range(operators)
        ]
        units.append(
            Unit(
                name="op",
                operators=tuple(each.ordinal for each in steps),
                steps=tuple(steps),
                reads=reads,
                makes=makes,
                flops=1,
                seconds=0.0,
                random_states=states,
                is_repeatable=True,
            )
        )
    sizes = [chance.randint(1, 20) for _ in range(made + OUTSIDE)]
    sized = []
    for unit in units:
        made_bytes = sum(sizes[each] for each in unit.makes)
        steps = [unit.steps[0]._replace(made_bytes=made_bytes), *unit.steps[1:]]
        sized.append(Unit(**{**vars(unit), "steps": tuple(steps)}))
    return sized, sizes


def needed(units: list[Unit], wanted: set[int], there: set[int]) -> list[int]:
    """Return the units that make what is wanted, by hand."""
    found: set[int] = set()
    lacking = {each for each in wanted if each >= 0} - there
    while lacking:
        storage = lacking.pop()
        unit = next(index for index, each in enumerate(units) if storage in each.makes)
        found.add(unit)
        made = {each for index in found for each in units[index].makes}
        lacking = (lacking | {each for each in units[unit].reads if each >= 0}) - there - made
    return sorted(found)


@pytest.mark.parametrize("seed", range(40))
def test_runs_are_those_of_a_walk_by_hand(seed: int) -> None:
    chance = random.Random(seed)
    units, sizes = drawn(chance, 9)
    own = len(sizes) - OUTSIDE
    runs = Runs(units, sizes, own)
    storages = range(own)
    everything = [*range(-OUTSIDE, 0), *storages]

    def some(share: float) -> set[int]:
        return {each for each in everything if chance.random() < share}

    for _ in range(20):
        there, wanted = some(0.3), chance.choice(storages)
        if wanted in there:
            continue
        run = Run(runs, runs.making(1 << wanted, runs.bits_of(there)))
        assert list(run.units) == needed(units, {wanted}, there)
        assert {*runs.storages_in(run.reads)} == {s for unit in run.units for s in units[unit].reads}
        assert {*runs.storages_in(run.makes)} == {s for unit in run.units for s in units[unit].makes}
