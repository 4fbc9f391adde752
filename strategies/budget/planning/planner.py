"""Making the plan of `ac=budget`: options of blocks, the choice among them, and the certificate."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch

from strategies.base import StrategyError
from strategies.budget.plan import BlockPlan, Plan
from strategies.budget.planning.autograd_bound import AutogradBound, Backward
from strategies.budget.planning.block_choice import (
    Chained,
    Choice,
    Group,
    Span,
    Stage,
    cheapest,
    smallest_budget,
)
from strategies.budget.planning.block_options import CallOptions, Option, thinned
from strategies.budget.planning.block_plans import block_plan, chained_plans, grouped_plan, of_call
from strategies.budget.planning.block_program import PlannedCall, planned_call
from strategies.budget.planning.chains import Chains
from strategies.budget.planning.cost import Cost, Objective
from strategies.budget.planning.group_options import GroupOption, Groups
from strategies.budget.planning.group_simulation import group_effect
from strategies.budget.planning.lower_bound import LowerBound
from strategies.budget.planning.prices import Price, Room, Waiting, Worth, price_of, prices
from strategies.budget.planning.recomputation import LeastFlops
from strategies.budget.planning.rerun import rerun_of
from strategies.budget.planning.schedules import Fates
from strategies.budget.planning.simulation import (
    PLAIN,
    RANDOM_STATE_BYTES,
    Decision,
    Effect,
    peak_bytes,
    totals_of,
)
from strategies.estimate.machine import PYTHON_S
from strategies.step.step_graph import StepGraph, StepOperator

_ATTEMPTS = 6
_CLOSE = 0.001
"""Budgets that the programme over blocks is given, and the share of a step's FLOPs above the bound that ends
the search for another one."""

_REFINEMENTS = 12
"""Times that decisions next to the chosen ones are tried, while plans get cheaper."""

_NEARBY = (0.97, 1.03)
"""Budgets, as shares of the one that is asked for, whose choices are refined, too: two changes, of which one
takes bytes and the other spares them, begin there."""

_FAR = 0.009
"""Share of a step's FLOPs above the bound from which on decisions are bred."""

_GENERATIONS, _FEWEST_GENERATIONS, _MOST_ALIKE = 48, 8, 8
"""Generations that equal blocks and chains share, the fewest of each, and how many of these have any."""

_IN_VAIN, _SPARED = 3, 1e-5
"""Rounds of generations that spare less than this share of a step's FLOPs, and end the search."""

_TILT = 1.5
"""Powers of two by which the prices of a generation are more or less than those of the choice."""

_BEYOND = 1.5, 3.5
"""Least and largest power of two in the price of bytes beyond the room of a block, as many as the budget, in
the cost of the choice."""

_MOST_CHAINS = 24
"""Chains that are not equal to another one and are searched for options."""

_MOST_NAMED = 4
"""Blocks of one kind that a message names."""


class BudgetBelowMinimum(StrategyError):  # noqa: N818 (it says what is wrong)
    """No plan keeps the budget.

    Args:
        budget_bytes: the budget.
        minimum_feasible_bytes: smallest peak that the planner reaches.
        proven_minimum_bytes: no schedule has a smaller one.
        limits: what no plan changes, such as blocks that run plain; nothing where there is no such thing.
    """

    def __init__(
        self, budget_bytes: int, minimum_feasible_bytes: int, proven_minimum_bytes: int, limits: str
    ) -> None:
        super().__init__(
            "ac",
            f"no plan keeps the step's peak within {budget_bytes} bytes; the smallest that is reached is "
            f"{minimum_feasible_bytes} bytes, and no schedule of these operators needs less than "
            f"{proven_minimum_bytes} bytes{limits}",
        )
        self.budget_bytes = budget_bytes
        self.minimum_feasible_bytes = minimum_feasible_bytes
        self.proven_minimum_bytes = proven_minimum_bytes
        self.limits = limits
        # what makes it again in the process that asked for the plan
        self.args = (budget_bytes, minimum_feasible_bytes, proven_minimum_bytes, limits)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The decisions about some blocks: one alone, those of a chain, or those of a group.

    Fields:
        start: number of the first block.
        effect: what changes.
        option: the option of a block alone or a chain; `None` of a group.
        span: number of the chain or the group; `None` of a block alone.
        keeps, shares: what each block of a group keeps from the second forward on, and what it adds.
    """

    start: int
    effect: Effect
    option: Option | None = None
    span: int | None = None
    keeps: tuple[frozenset[int], ...] = ()
    shares: tuple[Effect, ...] = ()


class Planner:
    """Plans for one step, whatever the budget.

    Args:
        graph: the step.
        objective: what is least (see `Cost`).
        host_bytes: most bytes of values that wait on the host; 0 offloads nothing.
        nests: whether blocks can be planned together: chains, and groups, whose forward runs again as one.
        is_taped: whether tapes follow the operators of blocks that are not plain.

    Attributes:
        stages: stages of a pipeline that the step is of; none of a whole model.
        plain_peak_bytes: peak of the step without a plan.
        step_flops, step_s: work of the step without recomputation.
        minimum_feasible_bytes: smallest peak that a plan reaches.
        bound: what no schedule can do better.
        autograd_bound: what none can that leaves backward to autograd.
    """

    _breeds = True

    def __init__(
        self,
        graph: StepGraph,
        *,
        objective: Objective = "flops",
        host_bytes: int = 0,
        nests: bool = True,
        is_taped: bool = True,
    ) -> None:
        self._graph = graph
        self.stages = graph.stages
        self._host_bytes = host_bytes
        self._objective = objective
        self._calls = [planned_call(graph, call) for call in graph.calls]
        self._random_state_bytes = RANDOM_STATE_BYTES.get(graph.device, 0)
        # the fewest FLOPs come first of `both`: bounds say where a search for them ends
        sought: Objective = "flops" if objective == "both" else objective
        self._cost, self._objective_cost = (
            Cost.of(each, graph.flops, graph.seconds) for each in (sought, objective)
        )
        caller_of = partial(
            CallOptions,
            graph,
            cost=self._cost,
            random_state_bytes=self._random_state_bytes,
            taped_operator_s=PYTHON_S["taped"] if is_taped else 0.0,
            may_drop=is_taped,
        )
        found = [
            partial(caller_of, call, rerun=rerun_of(graph, number, self._calls) if is_taped else None)
            for number, call in enumerate(self._calls)
        ]
        self._callers = [each(may_offload=host_bytes > 0) for each in found]
        self._without_host = [each() for each in found] if host_bytes else []
        self._known: dict[tuple[int, Decision], Chosen] = {}
        self._beside_others: dict[object, Effect] = {}
        self._unplanned = self._why_unplanned()
        self._stages = self._made_stages()
        self._groups: Groups | None = None
        self._chains: dict[int, CallOptions] = {}  # by number of the span
        self._spans: list[Span] = []
        if nests:
            options = [stage.options for stage in self._stages]
            self._groups = Groups(
                graph,
                self._callers,
                options,
                self._cost,
                random_state_bytes=self._random_state_bytes,
            )
            self._spans += self._chained(Chains(graph, self._callers, options, caller_of))
            groups = self._groups.all()
            self._spans += [
                Group(start=start, end=end + 1, options=options) for start, end, options in groups
            ]
        self.plain_peak_bytes = self._peak_bytes(self._untouched())
        self.step_flops, self.step_s = graph.flops, graph.seconds
        self.bound = LowerBound(graph, _seconds if objective == "time" else _flops)
        self.autograd_bound = AutogradBound(Backward.captured(graph, self._calls))
        self._least: dict[int, LeastFlops] = {}  # by budget
        self._jointly: dict[int, tuple[float, float]] = {}  # what was enough, and what was found
        self._smallest = self._choice_of_fewest_bytes()
        self.minimum_feasible_bytes = self._peak_bytes(self._smallest)

    def plan(self, budget_bytes: int) -> Plan:
        """Return the plan for a budget.

        Raises:
            BudgetBelowMinimum: no plan that was found keeps it.
        """
        least, stages, spans = self._refined(self._choice(budget_bytes), budget_bytes)
        chosen = self._weighed(least, budget_bytes, stages, spans)
        effects = [each.effect for each in chosen]
        return Plan(
            stages=self.stages,
            budget_bytes=budget_bytes,
            host_budget_bytes=self._host_bytes,
            offloaded_bytes=sum(effect.host_bytes for effect in effects),
            predicted_peak_bytes=self._peak_bytes(chosen),
            plain_peak_bytes=self.plain_peak_bytes,
            minimum_feasible_bytes=self.minimum_feasible_bytes,
            proven_minimum_bytes=self.bound.minimum_bytes(),
            step_flops=self.step_flops,
            extra_flops=sum(effect.flops for effect in effects),
            **self.least_flops(budget_bytes, sum(effect.flops for effect in effects)).in_plan(),
            extra_s=sum(effect.seconds for effect in effects),
            objective="flops" if self._objective == "both" and chosen is least else self._objective,
            model=self._model(),
            versions={"torch": torch.__version__},
            blocks=tuple(block for each in chosen for block in self._block_plans(each)),
        )

    def least_flops(self, budget_bytes: int, enough: float = np.inf) -> LeastFlops:
        """Return the bounds of FLOPs; 0, which always holds, where the plan makes seconds least.

        Args:
            budget_bytes: the budget.
            enough: what the bound of autograd need not exceed.
        """
        if self._objective == "time":
            return LeastFlops(0.0, 0.0)
        if budget_bytes not in self._least:
            of_any = self.bound.cost(budget_bytes, self._host_bytes)
            of_autograd = self.autograd_bound.cost(budget_bytes, self._host_bytes)
            self._least[budget_bytes] = LeastFlops(of_any, max(of_any, of_autograd))
        of_any, of_autograd = self._least[budget_bytes]
        sought, jointly = self._jointly.get(budget_bytes, (0.0, 0.0))
        of_autograd = max(of_autograd, jointly)
        if sought < enough and of_autograd < enough - _CLOSE * self.step_flops:
            near = enough - _FAR * self.step_flops
            jointly = self.autograd_bound.jointly(budget_bytes, self._host_bytes, enough=enough, near=near)
            of_autograd = max(of_autograd, jointly)
            self._jointly[budget_bytes] = enough, of_autograd
        return LeastFlops(of_any, of_autograd)

    def limits(self) -> str:
        """Return what no plan makes smaller, for the end of a sentence."""
        return _limits(self._unplanned) + self._beyond_backward()

    def _beyond_backward(self) -> str:
        """Say where the smallest peak lies, if it is where no value of a block lives any more."""
        effects = self._effects(self._smallest)
        moment = int(totals_of(self._graph, effects).argmax())
        ends = [operator.end for operator in self._graph.operators if operator.node]
        if moment <= max(ends, default=moment):
            return ""
        remedy = "shard the parameters, or take another optimizer"
        return f"; its peak lies in the optimizer's update, which no plan changes; {remedy}"

    def _block_plans(self, chosen: Chosen) -> Iterator[BlockPlan]:
        """Yield the plans of the blocks that were chosen for."""
        if chosen.option is None:
            yield from self._grouped_plans(chosen)
            return
        number = self._call_of(chosen.start)
        if chosen.span is not None:
            chain = self._chains[chosen.span].call
            found_plans = chained_plans(self._calls[number:], chain, chosen.option)
            yield from map(of_call, found_plans, self._graph.calls[number:])
            return
        call, planned = self._graph.calls[number], self._calls[number]
        found = block_plan(planned, replace(chosen.option, follow=lambda: chosen.effect))
        reason = self._unplanned.get(call.fqn)
        if not found.plain:
            planned_for = of_call(found, call)
            yield planned_for.parted()[1] if found.rerun else planned_for
        elif not call.modules:
            yield found if reason is None else replace(found, why=f"no plan is made for blocks that {reason}")

    def _grouped_plans(self, chosen: Chosen) -> Iterator[BlockPlan]:
        end = chosen.start + len(chosen.keeps)
        calls = self._calls[chosen.start : end]
        captured = self._graph.calls[chosen.start : end]
        for planned, keep, share, call in zip(calls, chosen.keeps, chosen.shares, captured, strict=True):
            found = grouped_plan(planned, keep, share, group=(calls[0].fqn, calls[-1].fqn))
            yield of_call(found, call)

    def _choice(self, budget_bytes: int) -> list[Chosen]:
        """Return the cheapest choice that keeps the budget."""
        found = self._all_within(budget_bytes, self._stages, self._spans, self._enough(budget_bytes))
        found += [
            each for each in (self._untouched(), self._smallest) if self._peak_bytes(each) <= budget_bytes
        ]
        if found:
            return min(found, key=self._cost_of_choice)
        raise BudgetBelowMinimum(
            budget_bytes, self.minimum_feasible_bytes, self.bound.minimum_bytes(), self.limits()
        )

    def _all_within(
        self, budget_bytes: int, stages: Sequence[Stage], spans: Sequence[Span], enough: float
    ) -> list[list[Chosen]]:
        """Return a choice that keeps the budget with values on the host, and one without, where there are.

        Where the host has little room, few of the states with bytes there are compared: so one that has none
        there may be cheaper.
        """
        found = [
            self._within(budget_bytes, stages, spans, host_bytes, enough)
            for host_bytes in sorted({0, self._host_bytes})
        ]
        return [each for each in found if each is not None]

    def _enough(self, budget_bytes: int) -> float:
        """Return the cost of a choice that is worth no search for a cheaper one."""
        if self._objective == "time":
            return 0.0
        self.least_flops(budget_bytes, enough=0.0)
        return self._least[budget_bytes].of_autograd + _CLOSE * self.step_flops

    def _refined(
        self, least: list[Chosen], budget_bytes: int
    ) -> tuple[list[Chosen], Sequence[Stage], Sequence[Span]]:
        """Return a cheaper choice of decisions next to the chosen ones, and stages and spans with these."""
        stages, spans, enough = list(self._stages), list(self._spans), self._enough(budget_bytes)
        tried = defaultdict[object, set[Fates]](set)
        for _ in range(_REFINEMENTS):
            if self._cost_of_choice(least) <= enough:
                break
            budgets = [int(share * budget_bytes) for share in _NEARBY]
            nearby = (self._cheapest(each, stages, spans, self._host_bytes) or () for each in budgets)
            self._extend(stages, spans, [*least, *(each for chosen in nearby for each in chosen)], tried)
            found = self._sought(least, stages, spans, budget_bytes, enough)
            if self._cost_of_choice(found) >= self._cost_of_choice(least):
                break
            least = found
        return self._found_by_breeding(least, stages, spans, budget_bytes)

    def _sought(
        self,
        least: list[Chosen],
        stages: Sequence[Stage],
        spans: Sequence[Span],
        budget_bytes: int,
        enough: float,
    ) -> list[Chosen]:
        """Return the cheapest of a choice, and of those that keep the budget.

        Also where what others hold, as this choice says, takes no bytes of who reads it.
        """
        found = [least, *self._all_within(budget_bytes, stages, spans, enough)]
        if shared := self._beside_chosen(least, stages, spans):
            found += self._all_within(budget_bytes, *shared, enough)
        return min(found, key=self._cost_of_choice)

    def _beside_chosen(
        self, chosen: Sequence[Chosen], stages: Sequence[Stage], spans: Sequence[Span]
    ) -> tuple[list[Stage], list[Span]] | None:
        """Return stages and spans with the bytes of options beside what earlier blocks hold, or may hold.

        The chosen decisions hold something, and the first block of several that read a storage may hold that.
        `None` where it changes nothing, or nothing is known of what is held, as in a pipeline's schedule.
        """
        if not self._breeds:
            return None
        own, around = list(stages), list(spans)
        holds = [(each.start, each.effect.holds.keys()) for each in chosen]
        known = dict[tuple[int, frozenset[int]], list[Option]]()

        def beside(stage: Stage, start: int, caller: CallOptions) -> Stage:
            held = {storage for at, storages in holds if at < start for storage in storages}
            held |= {each for each, reader in self._first_readers.items() if reader < start}
            held.intersection_update(caller.call.outer_storages)
            if not held or len(stage.options) == 1:  # nothing is decided about it
                return stage
            key = id(stage.options), caller.owned_beside(held)
            if key not in known:  # equal blocks share a list
                known[key] = caller.beside(stage.options, key[1])
            return replace(stage, options=known[key])

        for start, stage in enumerate(stages):
            own[start] = beside(stage, start, self._callers[self._call_of(start)])
        for number, caller in self._chains.items():
            chain = spans[number]
            assert isinstance(chain, Chained), "chains come first"
            around[number] = replace(chain, stage=beside(chain.stage, chain.start, caller))
        return None if own == list(stages) and around == list(spans) else (own, around)

    @cached_property
    def _first_readers(self) -> Mapping[int, int]:
        """The stage that first reads each storage in forward, so that it may hold it for all others."""
        first = dict[int, int]()
        for start in range(len(self._stages)):
            call = self._callers[self._call_of(start)].call
            for storage in {each for unit in call.program.units for each in unit.reads}:
                first.setdefault(call.number_of(storage), start)
        return first

    def _found_by_breeding(
        self, least: list[Chosen], stages: list[Stage], spans: list[Span], budget_bytes: int
    ) -> tuple[list[Chosen], Sequence[Stage], Sequence[Span]]:
        """Return a cheaper choice with decisions bred of others, while one is far from the bound."""
        if self._objective == "time" or not self._breeds:
            return least, stages, spans
        bound = self.least_flops(budget_bytes, self._cost_of_choice(least)).of_autograd
        enough = bound + _FAR * self.step_flops
        chance, in_vain = random.Random(0), 0  # noqa: S311 (the same plan on every rank)
        while self._cost_of_choice(least) > enough and in_vain < _IN_VAIN:
            near = self._bred(least, stages, spans, chance, budget_bytes)
            self._enter(stages, spans, near)
            before, least = least, self._sought(least, stages, spans, budget_bytes, 0.0)
            spared = self._cost_of_choice(before) - self._cost_of_choice(least)
            in_vain = 0 if spared > _SPARED * self.step_flops else in_vain + 1
        return least, stages, spans

    def _bred(
        self,
        chosen: Sequence[Chosen],
        stages: Sequence[Stage],
        spans: Sequence[Span],
        chance: random.Random,
        budget_bytes: int,
    ) -> dict[object, list[Option]]:
        """Return options for blocks and chains by their keys: for each choice, and for chains of several.

        Half of the generations make least what an option costs and its bytes at their prices, more or less.
        The others make least what it costs in the room that the choice about others leaves.
        """
        parts = [stages[each.start] if each.span is None else spans[each.span] for each in chosen]
        ends = [*(each.start for each in chosen[1:]), len(stages)]
        between = [stages[end - 1].between for end in ends]
        columns = [part.columns() for part in parts]
        taken = [self._place_of(each, part) for each, part in zip(chosen, parts, strict=True)]
        left, highest = (
            np.array([rows[kind][place] for rows, place in zip(columns, taken, strict=True)])
            for kind in (0, 1)
        )
        waiting = Waiting(left, highest, np.array(between), budget_bytes)
        priced = prices(columns, between, budget_bytes)
        scale = self._cost_of_choice(chosen) / budget_bytes

        def beyond() -> float:
            return scale * 2 ** chance.uniform(*_BEYOND)

        found = defaultdict[object, list[Option]](list)
        bred = defaultdict[object, list[tuple[int, int, CallOptions, Stage]]](list)
        for each in self._bred_for(chosen, ends, stages, spans):
            bred[each[2].key].append(each)
        few = (each for alike in bred.values() for each in alike[:: -(-len(alike) // _MOST_ALIKE)])
        for first, last, caller, stage in few:
            price, room = price_of(priced, first, last), waiting.room(first, last)
            worths = [
                Worth(_tilted(price, chance), Room(np.inf, room.highest), beyond(), stage)
                if number % 2 == 0
                else Worth(Price(0.0, 0.0), room, beyond(), stage)
                for number in range(max(_FEWEST_GENERATIONS, _GENERATIONS // len(bred[caller.key])))
            ]
            options = [*stage.options, *found[caller.key]]
            found[caller.key] += caller.bred(options, [each.of for each in worths], chance)
        return {key: thinned(options) for key, options in found.items() if options}

    def _bred_for(
        self, chosen: Sequence[Chosen], ends: Sequence[int], stages: Sequence[Stage], spans: Sequence[Span]
    ) -> Iterator[tuple[int, int, CallOptions, Stage]]:
        """Yield blocks and chains for which something runs again, with first and last choice about them."""
        first_at = {each.start: number for number, each in enumerate(chosen)}
        last_at = {end: number for number, end in enumerate(ends)}
        costs = [self._cost(each.effect.work) for each in chosen]
        for number, each in enumerate(chosen):
            if each.span is None and costs[number]:
                yield number, number, self._callers[self._call_of(each.start)], stages[each.start]
        for span, caller in self._chains.items():
            chain = spans[span]
            assert isinstance(chain, Chained), "chains come first"
            first, last = first_at.get(chain.start), last_at.get(chain.end)
            if first is not None and last is not None and any(costs[first : last + 1]):
                yield first, last, caller, chain.stage

    def _place_of(self, chosen: Chosen, part: Stage | Span) -> int:
        """Return the place of what was chosen among the options of a block or span."""
        if isinstance(part, Group):
            return [each.keeps for each in part.options].index(chosen.keeps)
        stage = part.stage if isinstance(part, Chained) else part
        assert chosen.option is not None, "groups have none"
        return [each.decision for each in stage.options].index(chosen.option.decision)

    def _caller_of(self, chosen: Chosen) -> CallOptions | None:
        """Return whose option was chosen; `None` of a group."""
        if chosen.option is None:
            return None
        alone = self._callers[self._call_of(chosen.start)]
        return alone if chosen.span is None else self._chains[chosen.span]

    def _cheapest(
        self, budget_bytes: int, stages: Sequence[Stage], spans: Sequence[Span], host_bytes: int
    ) -> list[Chosen] | None:
        """Return the cheapest choice by the model of bytes, if that has one."""
        choices = cheapest(stages, budget_bytes, host_bytes, spans)
        return None if choices is None else self._chosen(choices, stages, spans)

    def _extend(
        self,
        stages: list[Stage],
        spans: list[Span],
        chosen: Sequence[Chosen],
        tried: Mapping[object, set[Fates]],
    ) -> None:
        """Enter options next to the chosen ones, of all blocks and chains that are equal."""
        taken: dict[object, dict[Decision, Option]] = {}
        for each in chosen:
            caller = self._caller_of(each)
            if caller is not None and each.option is not None and not each.option.decision.is_rerun:
                taken.setdefault(caller.key, {})[each.option.decision] = each.option
        near: dict[object, list[Option]] = {}
        for caller in (*self._callers, *self._chains.values()):
            key = caller.key
            if key in taken and key not in near:
                options = caller.refined(list(taken[key].values()), tried[key])
                near[key] = [each for each in options if not each.decision.is_plain]  # no chain is
        self._enter(stages, spans, near)
        for number, span in enumerate(spans):
            if isinstance(span, Group):
                spans[number] = self._finer(span, chosen)

    def _enter(
        self, stages: list[Stage], spans: list[Span], found: Mapping[object, Sequence[Option]]
    ) -> None:
        """Enter options of blocks and chains, which were found by key."""
        # by list and key, with the old list, so that its id stays: equal blocks share one
        longer = dict[tuple[int, object], tuple[Sequence[Option], list[Option]]]()

        def entered(stage: Stage, key: object) -> Stage:
            options = stage.options
            if (id(options), key) not in longer:
                longer[id(options), key] = options, [*options, *found[key]]
            return replace(stage, options=longer[id(options), key][1])

        for start, stage in enumerate(stages):
            key = self._callers[self._call_of(start)].key if len(stage.options) > 1 else None
            if found.get(key):  # something is decided about it
                stages[start] = entered(stage, key)
        for number, caller in self._chains.items():
            chain = spans[number]
            assert isinstance(chain, Chained), "chains come first"
            if found.get(caller.key):
                spans[number] = replace(chain, stage=entered(chain.stage, caller.key))

    def _finer(self, group: Group, chosen: Sequence[Chosen]) -> Group:
        """Return a group with options between a chosen one of it and the next larger one, if there are."""
        keeps = [each.keeps for each in chosen if each.start == group.start]
        totals = [each.total for each in group.options if each.keeps in keeps]
        above = [each.total for each in group.options if totals and each.total > min(totals)]
        if not above:
            return group
        assert self._groups is not None, "it has found the group"
        finer = self._groups.options_of(group.start, group.end - 1, (min(totals), min(above)))
        return replace(group, options=[*group.options, *finer])

    def _within(
        self,
        budget_bytes: int,
        stages: Sequence[Stage],
        spans: Sequence[Span],
        host_bytes: int,
        enough: float = np.inf,
        *,
        cost: Cost | None = None,
    ) -> list[Chosen] | None:
        """Return the cheapest choice that keeps the budget, if the model of bytes has one.

        The model counts a few bytes more than there are, or fewer. So its budget is moved until the choice
        just fits by simulation, or costs no more than `enough`.
        """
        price = partial(self._cost_of_choice, cost=cost)
        best: list[Chosen] | None = None
        before: list[Chosen] | None = None
        low, high, target, strides = 0, 2 * budget_bytes, budget_bytes, 1
        for _ in range(_ATTEMPTS):
            chosen = self._cheapest(target, stages, spans, host_bytes)
            spare = 0 if chosen is None else budget_bytes - self._peak_bytes(chosen)
            # what was missed brought the same choice again: it is not all that is missed
            strides, before = 2 * strides if chosen == before else 1, chosen
            if chosen is not None and spare >= 0:
                best = chosen if best is None else min(best, chosen, key=price)
            if spare < 0:
                high = target
            else:
                low = target
            if best is not None and price(best) <= enough:
                break
            # the next one by what was missed, or the middle where that was tried
            further = target + strides * spare
            target = further if low < further < high else (low + high) // 2
        return best

    def _weighed(
        self, least: list[Chosen], budget_bytes: int, stages: Sequence[Stage], spans: Sequence[Span]
    ) -> list[Chosen]:
        """Return the choice that the objective makes least, of the options for the fewest FLOPs.

        Of groups, whose operators run twice and are followed twice, no other one is tried.
        """
        if self._cost == self._objective_cost or not self._cost_of_choice(least):
            return least
        chains = [span for span in spans if isinstance(span, Chained)]  # the first ones
        priced = _priced([*stages, *(chain.stage for chain in chains)], self._objective_cost)
        count = len(stages)
        dearer = [replace(chain, stage=each) for chain, each in zip(chains, priced[count:], strict=True)]
        ways: list[tuple[list[Stage], list[Span]]] = [(priced[:count], [*dearer])]
        if shared := self._beside_chosen(least, *ways[0]):
            ways.append(shared)
        found = [
            self._within(budget_bytes, *each, self._host_bytes, cost=self._objective_cost) for each in ways
        ]
        tried = [least, *(each for each in found if each is not None)]  # the first of equal ones
        return min(tried, key=partial(self._cost_of_choice, cost=self._objective_cost))

    def _choice_of_fewest_bytes(self) -> list[Chosen]:
        """Return the choice of the smallest peak: what fits the fewest bytes of the stages, or nothing."""
        found = [self._untouched()]
        for host_bytes in sorted({0, self._host_bytes}):
            chosen = self._of_fewest_bytes(self._stages, self._spans, host_bytes)
            shared = None if chosen is None else self._beside_chosen(chosen, self._stages, self._spans)
            beside = None if shared is None else self._of_fewest_bytes(*shared, host_bytes)
            found += [each for each in (chosen, beside) if each is not None]
        return min(found, key=self._peak_bytes)

    def _of_fewest_bytes(
        self, stages: Sequence[Stage], spans: Sequence[Span], host_bytes: int
    ) -> list[Chosen] | None:
        """Return the same of some options; `None` where it is among states that were left out of many."""
        return self._cheapest(smallest_budget(stages, host_bytes, spans), stages, spans, host_bytes)

    def _untouched(self) -> list[Chosen]:
        """Return the choice that leaves every block as it is."""
        return [self._decided(start, PLAIN) for start in range(len(self._stages))]

    def _chosen(
        self, choices: Sequence[Choice], stages: Sequence[Stage], spans: Sequence[Span]
    ) -> list[Chosen]:
        """Return the options of all calls, each with its effect in its own call."""
        return [self._chosen_one(each, stages, spans) for each in choices]

    def _chosen_one(self, choice: Choice, stages: Sequence[Stage], spans: Sequence[Span]) -> Chosen:
        start = choice.start
        if choice.span is None:
            return self._decided(start, stages[start].options[choice.option].decision)
        span = spans[choice.span]
        if isinstance(span, Group):
            return self._grouped(choice, span.options[choice.option])
        option = self._chains[choice.span].option(span.stage.options[choice.option].decision)
        return Chosen(start=start, option=option, effect=option.effect, span=choice.span)

    def _decided(self, start: int, decision: Decision) -> Chosen:
        """Return a decision about one stage of the programme, with what follows from it."""
        if (start, decision) not in self._known:
            option = self._callers[start].option(decision)
            self._known[start, decision] = Chosen(start=start, option=option, effect=option.effect)
        return self._known[start, decision]

    def _call_of(self, start: int) -> int:
        """Return the number of the call that stands for a stage of the programme."""
        return start

    def _grouped(self, choice: Choice, option: GroupOption) -> Chosen:
        assert self._groups is not None, "it has found the group"
        keeps = option.keeps
        members = self._groups.members(choice.start, choice.end - 1)
        effect, shares = group_effect(members, keeps, random_state_bytes=self._random_state_bytes)
        return Chosen(start=choice.start, effect=effect, span=choice.span, keeps=keeps, shares=tuple(shares))

    def _cost_of_choice(self, chosen: Sequence[Chosen], cost: Cost | None = None) -> float:
        """Return the cost of a choice, by default that of the search."""
        return sum(map(cost or self._cost, (each.effect.work for each in chosen)))

    def _peak_bytes(self, chosen: Sequence[Chosen]) -> int:
        return peak_bytes(self._graph, self._effects(chosen))

    def _effects(self, chosen: Sequence[Chosen]) -> list[Effect]:
        """Return the effects of a choice, in which the bytes of a storage are those of its last holder.

        Of what a block makes and the next one reads again, or of a mask that all blocks read, each effect
        alone counts the bytes.
        """
        last: dict[int, tuple[int, int]] = {}  # moment, and number among the chosen
        for number, each in enumerate(chosen):
            for storage, until in each.effect.holds.items():
                last[storage] = max(last.get(storage, (-1, -1)), (until, number))
        found = []
        for number, each in enumerate(chosen):
            others = {storage for storage in each.effect.holds if last[storage][1] != number}
            caller = self._caller_of(each) if others else None
            if caller is None or each.option is None:
                found.append(each.effect)
                continue
            key = each.start, each.span, each.option.decision, frozenset(others)
            if key not in self._beside_others:
                self._beside_others[key] = caller.effect_beside(each.option.decision, others)
            found.append(self._beside_others[key])
        return found

    def _made_stages(self) -> list[Stage]:
        """Return for each call of a block its options and the bytes that others hold around it."""
        held, callers = self._graph.held_bytes, self._callers
        known: dict[object, list[Option]] = {}
        shared: dict[object, list[Option]] = {}  # equal blocks have one list, by which groups know them
        stages = []
        for index, caller in enumerate(callers):
            is_plain = self._is_repeated(caller.call) or not caller.call.program.asked
            key = (caller.key, is_plain)
            if key not in known:
                known[key] = [caller.option(PLAIN)] if is_plain else caller.all()
                if self._without_host and not is_plain:
                    known[key] += self._without_host[index].all()
            whole = [] if is_plain else caller.whole()
            is_last = index + 1 == len(callers)
            next_start = caller.backward_start if is_last else callers[index + 1].call.start
            next_end = next_start if is_last else callers[index + 1].backward_end
            gaps = held[caller.call.end : next_start + 1], held[next_end : caller.backward_start + 1]
            stages.append(
                Stage(
                    options=shared.setdefault((key, *whole), [*known[key], *whole]),
                    forward_start=int(held[caller.call.start]),
                    backward_start=int(held[caller.backward_start]),
                    between=max(int(gap.max(initial=0)) for gap in gaps),
                )
            )
        return stages

    def _chained(self, chains: Chains) -> Iterator[Span]:
        """Yield the chains that have options which none of their blocks alone has."""
        known: dict[object, list[Option]] = {}
        for chain in chains.all():
            caller = chain.caller
            if caller.key not in known:
                if len(known) == _MOST_CHAINS:
                    continue
                known[caller.key] = [each for each in caller.all() if not each.decision.is_plain]
            if not known[caller.key]:
                continue
            self._chains[len(self._chains)] = caller
            yield Chained(
                start=chain.start,
                end=chain.end,
                stage=Stage(
                    options=known[caller.key],
                    forward_start=int(self._graph.held_bytes[caller.call.start]),
                    backward_start=int(self._graph.held_bytes[caller.backward_start]),
                ),
            )

    def _is_repeated(self, call: PlannedCall) -> bool:
        return sum(each.fqn == call.fqn for each in self._calls) > 1

    def _why_unplanned(self) -> dict[str, str]:
        """Return why a plan decides nothing, or not all, about a block, by FQN."""
        calls = Counter(call.fqn for call in self._graph.calls)
        called = {fqn: f"are called {count} times in a step" for fqn, count in calls.items() if count > 1}
        return called | staying(self._graph)

    def _model(self) -> dict[str, str]:
        graph = self._graph
        return {call.fqn: graph.fingerprint(call) for call in graph.calls}


def _tilted(price: Price, chance: random.Random) -> Price:
    return Price(*(each * 2 ** chance.uniform(-_TILT, _TILT) for each in price))


def _priced(stages: Sequence[Stage], cost: Cost) -> list[Stage]:
    """Return the stages, with options of another cost."""
    known: dict[int, list[Option]] = {}
    for stage in stages:
        if id(stage.options) not in known:
            known[id(stage.options)] = [replace(each, cost=cost(each.work)) for each in stage.options]
    return [replace(stage, options=known[id(stage.options)]) for stage in stages]


def staying(graph: StepGraph) -> dict[str, str]:
    """Return the blocks that have a call which no plan decides about, with its reason."""
    return {call.fqn: call.stays_because for call in graph.calls if call.stays_because}


def _limits(unplanned: Mapping[str, str]) -> str:
    """Return the blocks that no plan makes smaller, for the end of a sentence."""
    alike: dict[str, list[str]] = {}
    for fqn, why in unplanned.items():
        alike.setdefault(why, []).append(repr(fqn))
    parts = [f"{_named(fqns)}, which {why}" for why, fqns in alike.items()]
    return f"; plans leave as they are {'; and '.join(parts)}; ac=full may need less" if parts else ""


def _named(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _flops(operator: StepOperator) -> float:
    return operator.flops


def _seconds(operator: StepOperator) -> float:
    return operator.seconds
