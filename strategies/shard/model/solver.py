"""The integer program over a whole model: one option for each node, states that fit on every edge.

    minimise    the seconds of all chosen options; among equals, their communicated bytes
    such that   a node has one option,
                what a node reads is in the state in which its source gives it,
                memory and communicated bytes stay within their limits

Options of leaf modules include what brings tensors from state to state, so resharding needs no variables
of its own. Solved to optimality by HiGHS (Huangfu, Hall 2018, doi:10.1007/s12532-017-0130-5) through SciPy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from strategies.base import StrategyError
from strategies.estimate.scipy_modules import scipy
from strategies.shard.model.graph import Choice, ModelGraph, Node
from strategies.shard.model.module_options import NodeOption
from strategies.shard.model.placement_state import WHOLE, State

Size: TypeAlias = Callable[[NodeOption], float]

_seconds: Size = attrgetter("seconds")
_memory: Size = attrgetter("memory_bytes")
_communicated: Size = attrgetter("communicated_bytes")

_EQUAL = 1e-9
"""Relative difference below which two times are one: rounding of sums of floats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The resources that a plan may use on one rank; `None` for any amount.

    Fields:
        memory_bytes: bytes of parameters, their gradients, and the outputs of all calls.
        communicated_bytes: payload of all collectives of a step, FSDP's of placed parameters among them.
    """

    memory_bytes: int | None = None
    communicated_bytes: int | None = None


def cheapest(graph: ModelGraph, limits: Limits) -> Choice | None:
    """Return the options that together take the least time; `None` where none fit together.

    Of choices that take the same time it is one with the fewest communicated bytes. Where the model's code
    does something else on a rank's parts than on the whole, the tensor to blame takes another state.

    Raises:
        StrategyError: without that state none fit together any more.
    """
    problem = None
    while (choice := _cheapest(graph, limits)) is not None:
        conflict = graph.conflict_of(choice)
        if conflict is None:
            return choice
        problem = conflict.problem
        narrower = graph.without(conflict, choice)
        if narrower is None:
            break
        graph = narrower
    if problem is None:
        return None
    problem = f"needs code that does on a shard what it does on the whole; {problem}"
    raise StrategyError("shard", f"{problem}; use shard=none and mesh.tp=1")


def first_stop(graph: ModelGraph) -> Node | None:
    """Return the first node that no options of itself and those before it fit; `None` where all fit."""

    def fails(count: int) -> bool:
        return _solve(replace(graph, nodes=graph.nodes[:count], outputs=()), _seconds, {}) is None

    count = bisect_left(range(len(graph.nodes) + 1), x=True, key=fails)
    return graph.nodes[count - 1] if count <= len(graph.nodes) else None


def _cheapest(graph: ModelGraph, limits: Limits) -> Choice | None:
    """Return the fastest choice within the limits, and of equally fast ones that which communicates least."""
    bounds: dict[Size, float] = {
        size: limit
        for size, limit in ((_memory, limits.memory_bytes), (_communicated, limits.communicated_bytes))
        if limit is not None
    }
    if _memory in bounds:
        bounds[_memory] -= graph.resident_bytes
    fastest = _solve(graph, _seconds, bounds)
    if fastest is None:
        return None
    time_limit = sum(map(_seconds, fastest)) * (1 + _EQUAL)
    return _solve(graph, _communicated, {**bounds, _seconds: time_limit}) or fastest


def smallest_memory_bytes(graph: ModelGraph) -> int | None:
    """Return the least memory that a rank needs, however it runs; `None` where no options fit together."""
    choice = _solve(graph, _memory, {})
    if choice is None:
        return None
    return graph.resident_bytes + sum(option.memory_bytes for option in choice)


def _solve(graph: ModelGraph, objective: Size, bounds: Mapping[Size, float]) -> Choice | None:
    """Return the choice with the least total `objective` whose other sizes are within `bounds`."""
    variables = _Variables(graph)
    rows = [*variables.one_option_each(), *variables.fitting_states(), *variables.whole_outputs()]
    for size, limit in bounds.items():
        rows.append(variables.at_most(size, limit))
    chosen = variables.minimise(objective, rows)
    if chosen is None or _is_within(chosen, bounds):
        return chosen
    # solvers accept a millionth too much, callers nothing
    rows += [variables.at_most(size, limit * (1 - 1e-5)) for size, limit in bounds.items()]
    chosen = variables.minimise(objective, rows)
    return chosen if chosen is not None and _is_within(chosen, bounds) else None


def _is_within(choice: Choice, bounds: Mapping[Size, float]) -> bool:
    return all(sum(map(size, choice)) <= limit for size, limit in bounds.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A constraint: `low <= sum of coefficient x variable <= high`."""

    coefficients: dict[int, float]
    low: float
    high: float


class _Variables:
    """The options of all nodes, one after another; a variable is 1 where its option is chosen."""

    def __init__(self, graph: ModelGraph) -> None:
        self._graph = graph
        self._options: list[NodeOption] = []
        self._of: list[range] = []
        for node in graph.nodes:
            start = len(self._options)
            self._options += _undominated(node.options)
            self._of.append(range(start, len(self._options)))

    def one_option_each(self) -> Iterable[_Row]:
        for variables in self._of:
            yield _Row(coefficients=dict.fromkeys(variables, 1.0), low=1.0, high=1.0)

    def fitting_states(self) -> Iterable[_Row]:
        """Yield for each edge and state: sources that give it are as many as nodes that read it."""
        for index, node in enumerate(self._graph.nodes):
            for position, source in enumerate(node.sources):
                given = self._by_state(source, lambda option: option.output)
                read = self._by_state(index, lambda option, at=position: option.inputs[at])  # type: ignore[misc]
                for state in {**given, **read}:
                    signed = dict.fromkeys(given.get(state, ()), 1.0)
                    signed |= dict.fromkeys(read.get(state, ()), -1.0)
                    yield _Row(coefficients=signed, low=0.0, high=0.0)

    def whole_outputs(self) -> Iterable[_Row]:
        for index in self._graph.outputs:
            others = [at for at in self._of[index] if self._options[at].output != WHOLE]
            yield _Row(coefficients=dict.fromkeys(others, 1.0), low=0.0, high=0.0)

    def at_most(self, size: Size, limit: float) -> _Row:
        """Return the row in the unit in which its numbers are smallest: solvers err by a millionth of one."""
        sizes = [[size(self._options[at]) for at in variables] for variables in self._of]
        least = [min(each, default=0.0) for each in sizes]
        more = [value - low for each, low in zip(sizes, least, strict=True) for value in each]
        room = limit - sum(least)
        is_whole = all(value == int(value) for value in more)
        unit = (gcd(*map(int, more)) if is_whole else max(more)) or 1.0
        return _Row(
            coefficients={at: value / unit for at, value in enumerate(more)}, low=-np.inf, high=room / unit
        )

    def minimise(self, objective: Size, rows: list[_Row]) -> Choice | None:
        """Return the options with the least sum of `objective`; `None` where none keep the constraints."""
        costs = np.array([objective(option) for option in self._options])
        optimize = scipy("optimize")
        solution = optimize.milp(
            costs / (costs.max() or 1.0),
            integrality=np.ones(len(costs)),
            bounds=optimize.Bounds(0, 1),
            constraints=_constraints(rows, len(costs)),
            options={"mip_rel_gap": 0.0},
        )
        if solution.x is None:
            return None
        return tuple(self._options[max(variables, key=lambda at: solution.x[at])] for variables in self._of)

    def _by_state(self, index: int, state_of: Callable[[NodeOption], State]) -> dict[State, list[int]]:
        found: dict[State, list[int]] = {}
        for at in self._of[index]:
            found.setdefault(state_of(self._options[at]), []).append(at)
        return found


def _constraints(rows: list[_Row], variables: int) -> Any:
    row_of = [row for row, each in enumerate(rows) for _ in each.coefficients]
    column_of = [at for each in rows for at in each.coefficients]
    values = [value for each in rows for value in each.coefficients.values()]
    matrix = scipy("sparse").csr_array((values, (row_of, column_of)), shape=(len(rows), variables))
    bounds = [row.low for row in rows], [row.high for row in rows]
    return scipy("optimize").LinearConstraint(matrix, *bounds)


def _undominated(options: tuple[NodeOption, ...]) -> list[NodeOption]:
    """Return the options that no other of the same states beats in seconds, bytes and memory."""
    kept: dict[tuple[tuple[State, ...], State], list[NodeOption]] = {}
    for option in sorted(options, key=_sizes):
        peers = kept.setdefault((option.inputs, option.output), [])
        if not any(all(a <= b for a, b in zip(_sizes(peer), _sizes(option), strict=True)) for peer in peers):
            peers.append(option)
    return [option for peers in kept.values() for option in peers]


def _sizes(option: NodeOption) -> tuple[float, ...]:
    return option.seconds, option.communicated_bytes, option.memory_bytes
