"""What runs for a request, and its bytes meanwhile, against a walk that follows one storage at a time."""

from __future__ import annotations

import random
from collections import Counter

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
        run = runs.run(wanted, runs.bits_of(there))
        assert list(run.units) == needed(units, {wanted}, there)
        assert runs.run(wanted, runs.bits_of(there)) is run
        assert {*runs.storages_in(run.reads)} == {s for unit in run.units for s in units[unit].reads}
        superfluous, freed, fetched = some(0.2), some(0.4), some(0.2)
        stashed = {unit for unit in run.units if chance.random() < 0.5}
        assert run.bytes_meanwhile(
            runs.bits_of(superfluous),
            runs.bits_of(freed),
            runs.bits_of(fetched),
            sum(1 << unit for unit in stashed),
            STATE_BYTES,
        ) == by_hand(units, sizes, run.units, superfluous, freed, fetched, stashed)


def by_hand(
    units: list[Unit],
    sizes: list[int],
    running: tuple[int, ...],
    superfluous: set[int],
    freed: set[int],
    fetched: set[int],
    stashed: set[int],
) -> tuple[int, int]:
    """Return the most bytes and those at the end, counting readers down."""
    left = Counter(each for unit in running for each in units[unit].reads)
    live = peak = 0
    waiting = set(fetched)
    for index in running:
        for number, step in enumerate(units[index].steps):
            if not number:
                here = waiting & {*units[index].reads}
                waiting -= here
                live += sum(sizes[each] for each in here)
            live += step.made_bytes
            peak = max(peak, live + step.private_bytes + STATE_BYTES * (step.random_states > 0))
            live -= STATE_BYTES * step.random_states * (index not in stashed)
            live -= sum(sizes[each] for each in step.made if each in superfluous)
            for each in step.reads:
                left[each] -= 1
                live -= sizes[each] if not left[each] and each in freed else 0
    live += sum(sizes[each] for each in waiting)
    return max(peak, live), live


def test_memory_of_results_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    units, sizes = drawn(random.Random(0), 9)
    runs = Runs(units, sizes, len(sizes) - OUTSIDE)
    monkeypatch.setattr("strategies.budget.planning.units._MOST_KNOWN", 3)
    last = len(sizes) - OUTSIDE - 1
    for there in range(1 << 6):
        run = runs.run(last, there)
        assert run.units == Run(runs, runs.making(1 << last, there)).units
        assert runs.count <= 4
