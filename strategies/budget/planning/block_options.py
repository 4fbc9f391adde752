"""The decisions that are worth considering for one block: none is worse than another in bytes and in cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import product
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from strategies.budget.kept import Answers
from strategies.budget.planning.block_program import BlockProgram, PlannedCall
from strategies.budget.planning.least_bytes import LeastBytes
from strategies.budget.planning.rerun import Rerun
from strategies.budget.planning.schedules import Fates, Schedules
from strategies.budget.planning.simulation import (
    PLAIN,
    RERUN,
    Decision,
    Effect,
    Highest,
    Simulation,
    Window,
    Work,
    decision_of,
    fates_of,
    highest,
    schedules_of,
)
from strategies.budget.planning.units import Run
from strategies.budget.planning.variation import Variation
from strategies.estimate.operator_cost import machine_for
from strategies.step.step_graph import StepGraph

_MOST_ENUMERATED = 6
"""Units with FLOPs up to which all sets of those that do not run again are tried."""

_SAMPLES = 32
_MOST_OPTIONS = 320
_REFINED = 24
_WAITING_BLOCKS = (1, 2, 4, 8)
"""Options whose neighbours are tried in each of the rounds: some of all costs, and those of the smallest
peaks where so many blocks wait for backward. With fewer of all costs plans of small models cost more; with
none of the smallest peaks these were higher."""

_ROUNDS = 4
_FEWEST_TRIED, _MOST_SIMULATED = 64, 20_000
"""Neighbours that a round tries at least, and operators that it simulates at most."""

_BRED, _FEWEST_BRED, _PARENTS, _CUTS = 128, 16, 24, 8
"""Decisions of a generation at most and at least, the best of those before that they come of, and minimum
cuts that crossovers begin with."""

_SMALLEST_MOVED = 0.02
"""Bytes of a storage that is worth a copy, as a share of the largest of the block."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A decision and what follows from it in one call, in bytes beyond those at the window's beginning.

    Fields:
        decision: the decision.
        forward_bytes: highest total of the block's forward.
        left_bytes: bytes that wait for backward.
        backward_bytes: highest total of the block's backward, what was left included.
        host_bytes: bytes that wait on the host.
        cost: FLOPs or seconds of what runs again, and of waiting for the host.
        work: what that is the cost of.
        units: number of units that run again, each as often as it does.
        follow: tells what changes, moment by moment, which a search asks of few options.
    """

    decision: Decision
    forward_bytes: int
    left_bytes: int
    backward_bytes: int
    host_bytes: int
    cost: float
    work: Work
    units: int
    follow: Callable[[], Effect] = field(repr=False, compare=False)

    @cached_property
    def effect(self) -> Effect:
        """The changes, moment by moment."""
        return self.follow()


class Found(NamedTuple):
    """A decision as bits, and what follows from it, as of `Option`: a search looks at few of them twice."""

    fates: Fates
    forward_bytes: int
    left_bytes: int
    backward_bytes: int
    host_bytes: int
    cost: float
    work: Work
    units: int


_Sets: TypeAlias = tuple[int, int, int, frozenset[tuple[int, int]]]
"""The fates of a decision."""

AnyOption: TypeAlias = "Option | Found"
_AnyOption = TypeVar("_AnyOption", bound=AnyOption)
_BYTES = attrgetter("left_bytes", "backward_bytes", "forward_bytes", "host_bytes")
_WORTH = attrgetter("cost", "left_bytes", "backward_bytes", "forward_bytes")
_MOST_TOGETHER, _COMPARED = 128, 128
"""Decisions that are simulated side by side, and options that are compared with others at once."""


class CallOptions:
    """The options of one call.

    Args:
        graph: the step.
        call: the call.
        cost: what running again costs.
        random_state_bytes: bytes on the device of the state of a random operator.
        may_offload: whether values may wait on the host.
        taped_operator_s: seconds that it takes to follow an operator of a block that has a tape.
        may_drop: whether storages may be dropped between requests that need them.
        known: decisions that the search begins with, beside cuts of the program.
        rerun: what happens where its forward runs again as a whole; `None` where it may not.
    """

    def __init__(
        self,
        graph: StepGraph,
        call: PlannedCall,
        cost: Callable[[Work], float],
        *,
        random_state_bytes: int,
        may_offload: bool = False,
        taped_operator_s: float = 0.0,
        may_drop: bool = False,
        known: Sequence[Decision] = (),
        rerun: Rerun | None = None,
    ) -> None:
        self.call = call
        self._known, self._rerun, self._may_drop = known, rerun, may_drop
        self._movable = _worth_moving(call.program) if may_offload else frozenset[int]()
        self._machine = machine_for(torch.device(graph.device))
        self._cost = cost
        beside_s = sum(unit.seconds for unit in call.program.units)
        self.taped_s = self._machine.not_hidden_s(taped_operator_s * call.program.operators, beside_s)
        self._random_state_bytes = random_state_bytes
        self.backward_start = min((each for each in call.asked if each >= call.end), default=call.end)
        self.backward_end = max((*call.until, *call.released, self.backward_start))
        if rerun is not None:
            self.backward_start = min(self.backward_start, rerun.asked)
            self.backward_end = max(self.backward_end, rerun.released)
        held = graph.held_bytes
        spans = (call.start, call.end), (self.backward_start, self.backward_end)
        self._beside = dict[frozenset[int], dict[Decision, tuple[int, ...]]]()
        self._windows = [Window(start, held[start : end + 1] - held[start]) for start, end in spans]

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for calls of equal options, but for what runs again as a whole."""
        call = self.call
        moments = [each - call.start for each in (*call.starts, call.end)]
        deaths = [min(death, call.end + 1) - call.start for death in call.deaths]
        later = [each - self.backward_start for each in (*call.asked, *call.until, *call.released)]
        late = [max(death - self.backward_start, -1) for death in call.deaths if death > call.end]
        outer = [
            min(max(death, call.end) - call.end, 1) + (death >= self.backward_end)
            for death in call.outer_deaths
        ]
        shape = [each.held.tobytes() for each in self._windows]
        gains = [
            (at - call.start, -1, gain) if at <= call.end else (0, at - self.backward_start, gain)
            for at, gain in call.gains
        ]
        dropped = [(storage, until - call.start) for storage, until in call.dropped.items()]
        ends = (tuple(each) for each in (moments, deaths, later, late, outer, dropped, gains))
        return call.program, *ends, *shape

    def option(self, decision: Decision) -> Option:
        """Return what follows from a decision, or from none where it runs and moves nothing."""
        if decision.is_rerun:
            effect = self.effect(decision)
            most, units = highest(effect, *self._windows), len(effect.runs)
            found = self._found([Fates(0, 0, 0)], most, [0], [effect.work], [units])[0]
            return self._option_of(found, decision)
        return self._option_of(self._simulated(schedules_of(self.call, decision))[0], decision)

    def effect(self, decision: Decision) -> Effect:
        """Return what a decision changes, moment by moment."""
        if decision.is_rerun:
            assert self._rerun is not None, "it is tried only where it is possible"
            return self._rerun.effect(self._random_state_bytes)
        return self._simulation(schedules_of(self.call, decision)).effect(0)

    def effect_beside(self, decision: Decision, held: AbstractSet[int]) -> Effect:
        """Return the same of a decision where other blocks hold some storages longer.

        Args:
            decision: the decision.
            held: numbers of these storages in the step.
        """
        owned = self.owned_beside(held)
        return self._simulation(schedules_of(self.call, decision), owned).effect(0)

    def beside(self, options: Sequence[Option], owned: frozenset[int]) -> list[Option]:
        """Return options with the bytes that they take where other blocks hold some storages longer.

        Args:
            options: some of this call.
            owned: its storages from outside that no other block holds, as of `owned_beside`.
        """
        known = self._beside.setdefault(owned, {})
        fresh = [each.decision for each in options if each.decision.has_tape and each.decision not in known]
        for start in range(0, len(fresh), _MOST_TOGETHER):
            part = fresh[start : start + _MOST_TOGETHER]
            fates = [_fates_of(self.call.program, each) for each in part]
            rows = self.highest(self._simulation(Schedules(self.call, fates), owned))
            known.update(zip(part, zip(*(row.tolist() for row in rows), strict=True), strict=True))
        found = list(options)
        for number, each in enumerate(options):
            if each.decision in known:
                forward, left, backward = known[each.decision]
                found[number] = replace(each, forward_bytes=forward, left_bytes=left, backward_bytes=backward)
        return found

    def owned_beside(self, held: AbstractSet[int]) -> frozenset[int]:
        """Return its storages from outside without those that others hold longer, by their numbers in it.

        Args:
            held: what others hold longer, by numbers in the step.
        """
        outer = enumerate(self.call.outer_storages)
        return frozenset(-1 - number for number, storage in outer if storage not in held)

    def _simulation(self, schedules: Schedules, owned: frozenset[int] | None = None) -> Simulation:
        return Simulation(
            schedules,
            self._random_state_bytes,
            owned=owned,
            machine=self._machine,
            taped_s=self.taped_s if schedules.has_tape else 0.0,
        )

    def _simulated(self, schedules: Schedules) -> list[AnyOption]:
        """Return what follows from decisions; where nothing runs or moves, the block runs untouched."""
        found = self._simulation(schedules)
        work = list(map(Work, found.flops.tolist(), found.seconds.tolist()))
        host_bytes, units = found.host_bytes.tolist(), found.units.tolist()
        rows = self._found(schedules.fates, self.highest(found), host_bytes, work, units)
        if not schedules.has_tape:
            return list(rows)
        return [row if row.units or row.fates.moved else self._plain for row in rows]

    def _found(
        self,
        fates: Sequence[Fates],
        found: Highest,
        host_bytes: Sequence[int],
        work: Sequence[Work],
        units: Sequence[int],
    ) -> list[Found]:
        sizes = (each.tolist() for each in found)
        return list(map(Found, fates, *sizes, host_bytes, map(self._cost, work), work, units))

    def highest(self, found: Simulation) -> Highest:
        """Return the highest totals of forward and backward, and what waits for backward.

        Bytes are beyond those at the beginning of the windows of forward and backward.
        """
        return found.highest(*self._windows)

    def _option_of(self, found: AnyOption, decision: Decision | None = None) -> Option:
        if isinstance(found, Option):
            return found
        decision = decision_of(self.call.program, found.fates) if decision is None else decision
        return Option(
            decision=decision,
            forward_bytes=found.forward_bytes,
            left_bytes=found.left_bytes,
            backward_bytes=found.backward_bytes,
            host_bytes=found.host_bytes,
            cost=found.cost,
            work=found.work,
            units=found.units,
            follow=partial(self.effect, decision),
        )

    @cached_property
    def _plain(self) -> Option:
        return self.option(PLAIN)

    def all(self) -> list[Option]:
        """Return the options of which none is worse than another, cheapest first."""
        return list(_all(self))

    def whole(self) -> list[Option]:
        """Return the option that runs again as a whole, where there is one."""
        return [] if self._rerun is None else [self.option(RERUN)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallOptions) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[object, ...]:
        """Equal for callers that find the same options, of this step or of another."""
        prices = self._cost, self._machine, self.taped_s, self._random_state_bytes
        return self.key, *prices, self._movable, tuple(self._known)

    def answers(self, *question: Any) -> Answers:
        """Return what is known of this call, about its options or what else is asked."""
        return Answers(self._identity, question)

    def found(self) -> list[Option]:
        """Return what `all` does, found anew."""
        program, tried = self.call.program, set[Fates]()

        def with_those_of(options: Sequence[Option], decisions: Iterable[Decision]) -> list[Option]:
            return self._extended(options, (_fates_of(program, each) for each in decisions), tried)

        options = with_those_of([self.option(PLAIN)], (*_cuts(program), *self._known))
        options = with_those_of(options, (held for each in options for held in self._on_host(each.decision)))
        # chains come last: earlier, they take the place of better neighbours
        stages = {program.fleeting: range(_ROUNDS)}
        stages.setdefault(program.fleeting_chains, range(_ROUNDS, _ROUNDS + 1))
        for anew, rounds in stages.items():
            corners = self._corners(options)
            options = with_those_of(options, (self._fleeting(each.decision, anew) for each in corners))
            for number in rounds:
                near = self._near(self._corners(options), anew, tried, number)
                options = self._extended(options, near, tried)
        return options

    def refined(self, chosen: Sequence[Option], tried: set[Fates]) -> list[Option]:
        """Return the options of decisions next to some chosen ones.

        Args:
            chosen: the options.
            tried: what was tried next to chosen ones before; it is added to.
        """
        program = self.call.program
        near = self._near(chosen, program.fleeting_chains, tried, 0)
        all_fates = [_fates_of(program, each.decision) for each in chosen]
        together = _some(_with_operands(program, all_fates), tried, _FEWEST_TRIED)
        return self._extended([], (*near, *together), tried)

    def bred(
        self,
        options: Sequence[Option],
        worths: Iterable[Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]],
        chance: random.Random,
    ) -> Sequence[Option]:
        """Return options of decisions that come of these, a generation for each worth.

        A third is joined of two of the best by the worth, others are one of them with a change or two.

        Args:
            options: where the decisions begin.
            worths: measures to make least, of rows as `Worth.of` takes.
            chance: draws parents and changes.
        """
        program = self.call.program
        among = [each for each in options if each.decision.has_tape]
        pool: dict[Fates, AnyOption] = {_fates_of(program, each.decision): each for each in among}
        found = list[Found]()
        rows = np.array(list(map(_WORTH, pool.values())), dtype=np.float64)
        for worth in worths if pool else ():
            newest_first = list(pool)[::-1]  # of those that are worth the same, the newest counts
            _, best = np.unique(worth(rows[::-1]), return_index=True)
            parents = [newest_first[each] for each in best[:_PARENTS]]
            count = min(_BRED, self._affordable([pool[each] for each in parents], _FEWEST_BRED))
            decided = self._decided(self._children(parents, chance, pool.keys(), count))
            fresh = {each.fates: each for each in self._simulated(decided) if isinstance(each, Found)}
            bred = [each for fates, each in fresh.items() if fates not in pool]
            if bred:
                rows = np.vstack([rows, list(map(_WORTH, bred))])
            pool |= fresh
            found += bred
        return [self._option_of(each) for each in thinned(found)]

    def _children(
        self, parents: Sequence[Fates], chance: random.Random, known: AbstractSet[Fates], count: int
    ) -> list[Fates]:
        """Return decisions that come of parents, and are not known."""
        mates, found = [*parents, *self._bases], dict[Fates, None]()
        for _ in range(2 * count):
            if chance.randrange(3):
                child = self._variation.changed(chance.choice(parents), chance)
            else:
                child = self._variation.joined(chance.choice(mates), chance.choice(mates), chance)
            if child not in known:
                found[child] = None
            if len(found) == count:
                break
        return list(found)

    @cached_property
    def _variation(self) -> Variation:
        return Variation(self.call.program, self._movable, may_drop=self._may_drop)

    @cached_property
    def _bases(self) -> Sequence[Fates]:
        """Decisions that keep the fewest bytes, with and without what can be made anew."""
        program = self.call.program
        cuts = _cuts(program)
        cuts = cuts[:: max(1, len(cuts) // _CUTS)]
        both = ((each, self._fleeting(each, program.fleeting_chains)) for each in cuts)
        return list(dict.fromkeys(_fates_of(program, each) for two in both for each in two))

    def _decided(self, all_fates: Sequence[Fates]) -> Schedules:
        """Return the schedules of decisions, without drops that no request follows.

        Operands would wait for these.
        Without them others may have fewer requests: what the same operators make is there again by the way.
        What dropped values are made of, and no operator may make again, is kept.
        """
        fates = [self._completed(each) if each.drops else each for each in all_fates]
        found = Schedules(self.call, fates)
        while useless := list(found.useless_drops()):
            for number, drop in useless:
                fates[number] = fates[number]._replace(drops=fates[number].drops - {drop})
            found = Schedules(self.call, fates)
        return found

    def _completed(self, fates: Fates) -> Fates:
        """Return a decision that keeps what dropped values are made of and no operator may make again.

        It keeps what must be there so that it is known who needs them, too.
        """
        program = self.call.program
        dropped = program.runs.bits_of({storage for storage, _ in fates.drops})
        kept = (fates.keep | program.made_beside(dropped) & ~fates.moved) & ~dropped
        operands = program.completed_bits(kept, fates.moved)
        completed = Fates(fates.keep | operands, fates.moved, fates.again & ~operands, fates.drops)
        return completed.without_idle_drops()

    def _near(
        self, options: Sequence[Option], anew: frozenset[int], tried: set[Fates], number: int
    ) -> Sequence[Fates]:
        """Return neighbours of options that were not tried, or every so many of them from one on."""
        program = self.call.program
        all_fates = [_fates_of(program, each.decision) for each in options]
        near = _neighbours(program, all_fates, self._movable, anew)
        return _some(near, tried, self._affordable(options, _FEWEST_TRIED), number)

    def _affordable(self, options: Sequence[AnyOption], fewest: int) -> int:
        """Return how many decisions next to some can be simulated at once, but so many at least."""
        runs = sum(each.units for each in options) // len(options)
        return max(fewest, _MOST_SIMULATED // max(len(self.call.program.units), runs, 1))

    def _extended(
        self, options: Sequence[Option], all_fates: Iterable[Fates], tried: set[Fates]
    ) -> list[Option]:
        """Return options with those of decisions that were not tried before."""
        fresh = [each for each in dict.fromkeys(all_fates) if each not in tried]
        tried.update(fresh)
        found: list[AnyOption] = list(options)
        for start in range(0, len(fresh), _MOST_TOGETHER):
            found += self._simulated(self._decided(fresh[start : start + _MOST_TOGETHER]))
        return [self._option_of(each) for each in thinned(found)]

    def _corners(self, options: Sequence[Option]) -> list[Option]:
        """Return a few options of all costs, and those of the fewest bytes."""
        rows = _rows(options)
        peaks = [blocks * rows[:, 0] + rows[:, 1] for blocks in _WAITING_BLOCKS]
        few = range(0, len(options), max(1, len(options) // _REFINED))
        return [options[each] for each in sorted({*few, *_smallest(np.column_stack([rows, *peaks]))})]

    def _fleeting(self, decision: Decision, among: frozenset[int]) -> Decision:
        """Return a decision that makes anew for each reader what costs no FLOPs, of some storages."""
        program = self.call.program
        keep = _kept(program, decision)
        cheap = frozenset(each for each in among if not program.units[program.runs.makers[each]].flops)
        return Decision(keep=keep, offload=decision.offload, again=cheap - keep - decision.offload)

    def _on_host(self, decision: Decision) -> Iterable[Decision]:
        """Yield decisions that hold the same, the inputs or all that is movable on the host."""
        if not self._movable:
            return
        keep = _kept(self.call.program, decision)
        inputs = frozenset(storage for storage in self._movable if storage < 0)
        yield Decision(keep=keep, offload=inputs)
        yield Decision(keep=keep - self._movable, offload=(keep & self._movable) | inputs)


@lru_cache(maxsize=8)
def _all(caller: CallOptions) -> Sequence[Option]:
    """Return all options of a caller; plans of one step for several budgets share them."""
    known = caller.answers()
    match known.read("options"):
        case list(held):
            return tuple(caller.option(Decision.from_list(each)) for each in held)
    found = tuple(caller.found())
    known.write("options", [each.decision.to_list() for each in found])
    return found


def thinned(options: Iterable[_AnyOption]) -> list[_AnyOption]:
    """Return the options that no other one beats, at most so many, cheapest first."""
    best = _undominated(list(options), slack=0.0)
    slack = 0.001
    while len(best) > _MOST_OPTIONS:
        best = _undominated(best, slack=slack)
        slack *= 2
    return best


def _undominated(options: list[_AnyOption], *, slack: float) -> list[_AnyOption]:
    """Return the options of which no other is better in cost and in all bytes; `slack` thins them out."""
    options.sort(key=lambda each: (each.cost, *_BYTES(each)))
    rows = _rows(options)
    span = slack * (rows.max(axis=0) - rows.min(axis=0)) if slack else 0.0
    chosen = np.empty(0, dtype=np.intp)
    for start in range(0, len(options), _COMPARED):
        part = rows[start : start + _COMPARED] + span
        beaten: npt.NDArray[np.bool_] = np.logical_or.reduce(_at_most(rows[chosen], part))
        beats = _at_most(rows[start : start + _COMPARED], part)
        for index in range(len(part)):
            if not beaten[index]:
                chosen = np.append(chosen, start + index)
                beaten |= beats[index]
    # thinning must not lose what fits the least
    return [options[index] for index in sorted({*chosen.tolist(), *_smallest(rows)})]


def _at_most(rows: npt.NDArray[np.float64], others: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Return which rows are at most as large as which others, in all columns."""
    found = np.ones((len(rows), len(others)), dtype=np.bool_)
    for own, other in zip(rows.T, others.T, strict=True):
        found &= own[:, None] <= other
    return found


def _rows(options: Sequence[AnyOption]) -> npt.NDArray[np.float64]:
    """Return the bytes of options, a row each."""
    return np.array(list(map(_BYTES, options)), dtype=np.float64)


def _smallest(rows: npt.NDArray[np.float64]) -> set[int]:
    """Return the numbers of the options of the fewest bytes of each kind."""
    return {int(column.argmin()) for column in rows.T}


def _worth_moving(program: BlockProgram) -> frozenset[int]:
    """Return the storages that can wait on the host, without those that are too small for a copy."""
    least = _SMALLEST_MOVED * max(map(program.nbytes_of, program.movable), default=0)
    return frozenset(storage for storage in program.movable if program.nbytes_of(storage) >= least)


@lru_cache(maxsize=8)
def _cuts(program: BlockProgram) -> Sequence[Decision]:
    """Return decisions that keep the fewest bytes for what runs again; first and last blocks share them."""
    if not program.saved:
        return ()
    cuts = LeastBytes(program)
    never = {index: np.inf for index, unit in enumerate(program.units) if not unit.is_repeatable}
    costly = [index for index in program.runs.making(program.saved_bits, 0) if program.units[index].flops]
    if len(costly) <= _MOST_ENUMERATED:
        prices: Iterable[dict[int, float]] = (
            dict.fromkeys((unit for unit, stays in zip(costly, chosen, strict=True) if stays), np.inf)
            for chosen in product((False, True), repeat=len(costly))
        )
    else:
        prices = _sampled(program, costly)
    keeps = (keep for each in prices for keep in cuts.keeps(each | never))
    return [Decision(keep=keep | program.pinned) for keep in dict.fromkeys(keeps)]


def _sampled(program: BlockProgram, costly: Sequence[int]) -> Iterable[dict[int, float]]:
    """Yield prices of units: their FLOPs times an exchange rate, more or less."""
    chance = random.Random(0)  # noqa: S311 (the same plan on every rank)
    rate = sum(program.nbytes) / sum(program.units[unit].flops for unit in costly)
    yield dict.fromkeys(costly, 0.0)
    yield dict.fromkeys(costly, np.inf)
    for sample in range(_SAMPLES):
        exchange = rate * 100 ** (2 * sample / _SAMPLES - 1)
        yield {
            unit: program.units[unit].flops * exchange * (2 ** chance.uniform(-1, 1) if sample % 2 else 1)
            for unit in costly
        }


def _fates_of(program: BlockProgram, decision: Decision) -> Fates:
    """Return a decision as bits; the plain one keeps all that autograd saves."""
    return fates_of(program, replace(decision, keep=_kept(program, decision)))


def _kept(program: BlockProgram, decision: Decision) -> frozenset[int]:
    """Return the storages that a decision keeps, with those that every decision but the plain one keeps."""
    return program.pinned | (program.saved if decision.is_plain else decision.keep)


def _neighbours(
    program: BlockProgram, all_fates: Sequence[Fates], movable: frozenset[int], fleeting: frozenset[int]
) -> Iterable[_Sets]:
    """Yield the decisions that keep one storage more or less, or move one more or less to the host.

    Also those that make one more or less anew for each reader.
    """
    bits_of = program.runs.bits_of
    alike = list(map(bits_of, program.alike))
    may_move, may_pass = bits_of(movable), bits_of(fleeting)
    for fates in all_fates:
        for kept, away in _near(program, alike, fates, may_move):
            held = program.completed_bits(kept, away)
            yield held, away, fates.again & ~(held | away), fates.drops
        keep, moved, _, drops = fates
        anew = may_pass & ~(keep | moved)
        for part in alike:
            if not part & ~anew:
                yield keep, moved, fates.again ^ part, drops


def _some(near: Iterable[_Sets], tried: set[Fates], most: int, number: int = 0) -> Sequence[Fates]:
    """Return decisions that were not tried: all, or every so many of them from one on."""
    fresh = [each for each in dict.fromkeys(near) if each not in tried]
    stride = len(fresh) // most + 1
    return [Fates(*each) for each in fresh[number % stride :: stride]]


def _with_operands(program: BlockProgram, all_fates: Sequence[Fates]) -> Iterable[_Sets]:
    """Yield the decisions that make storages more anew for each reader, with what only they are made of.

    Operands that autograd does not save wait from the first run to the last else, and nothing is spared. Also
    those that make others no longer anew in their place.
    """
    bits_of = program.runs.bits_of
    alike, fleeting = list(map(bits_of, program.alike)), bits_of(program.fleeting_chains)
    for keep, moved, own, drops in all_fates:
        may_pass = fleeting & ~(keep | moved | own)
        anew = [each for each in alike if not each & ~own]
        for part in alike:
            if not part & ~may_pass:
                again = own | part | program.unsaved_operands(part) & may_pass
                yield keep, moved, again, drops
                yield from ((keep, moved, again & ~each, drops) for each in anew)


def _near(
    program: BlockProgram, alike: Sequence[int], fates: Fates, movable: int
) -> Iterable[tuple[int, int]]:
    """Yield what is kept and what is on the host, one storage more or less."""
    runs, keep, moved = program.runs, fates.keep, fates.moved
    made = Run(runs, runs.making(program.saved_bits, keep | moved)).makes
    fresh, pinned = (made | program.saved_bits) & ~moved, runs.bits_of(program.pinned)
    fresh &= ~runs.bits_of(program.older)
    for part in alike:
        more, less = part & fresh & ~keep, part & keep & ~pinned
        if more:
            yield keep | more, moved
        if less:
            yield keep ^ less, moved
    for each in runs.each_of(movable & (keep | fresh | runs.outside) & ~moved):
        yield keep & ~each, moved | each
    for each in runs.each_of(moved):
        is_inner = not each & runs.outside
        yield keep | each if is_inner else keep, moved ^ each
        if is_inner and not each & pinned:
            yield keep, moved ^ each
