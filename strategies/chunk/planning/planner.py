"""Planning of all scopes of a model together: forward alone, and forward with backward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace

from strategies.chunk.loops.backward import SavedFate
from strategies.chunk.loops.decisions import decisions_of, structure_of
from strategies.chunk.loops.loop import Loop, Schedule
from strategies.chunk.planning.forward_search import ForwardSearch, unchunked_schedule
from strategies.chunk.planning.rehearsal import Rehearsal
from strategies.chunk.planning.scope_scheduler import ScopeScheduler, inputs_at, signature_of
from strategies.chunk.planning.training_schedules import ScopeKind, TrainingSchedules
from strategies.estimate.liveness import Storages
from strategies.estimate.operator_cost import Machine
from strategies.tracing.operator_graph import ScopeGraph

_DOUBT = 1.05  # estimated peaks are no more than this above those of rehearsals
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRegion:
    """Operators that run as one loop.

    Fields:
        scope: FQN of the module in whose forward they stand; `""` is the model.
        operators: names in the listing of the scope, in order.
        dimension: of the value that the region grew from, along which it is cut; `None` for a sum.
        value: name of the value that the region grew from.
        size: of the chunk axis.
        chunk_size: positions in a chunk; the last one may have less.
        chunks: how often the operators run.
    """

    scope: str
    operators: tuple[str, ...]
    dimension: int | None
    value: str
    size: int
    chunk_size: int
    chunks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSchedule:
    """The schedules of all scopes.

    Fields:
        graphs: inner ones first, the model's last.
        schedules: of these.
        goals: the peaks that were asked of them.
        recomputes: whether their forward runs again in backward.
        peak_bytes: of the whole pass.
        slowdown: time of the pass / time without loops.
        peak_share: estimated peak / that without loops, for passes with a backward.
    """

    graphs: list[ScopeGraph]
    schedules: list[Schedule]
    goals: list[int]
    recomputes: list[bool]
    peak_bytes: int
    slowdown: float
    peak_share: float = 1.0

    def recomputed(self) -> tuple[str, ...]:
        """Return the FQNs of the scopes whose forward runs again in backward."""
        # of a scope that is called twice the last call decides, as in `schedulers`
        latest = dict(zip((graph.fqn for graph in self.graphs), self.recomputes, strict=True))
        return tuple(fqn for fqn, recomputes in latest.items() if recomputes)

    def regions(self) -> list[PlannedRegion]:
        """Return the loops, in the order of scopes and operators."""
        return [
            _region(graph.fqn, item)
            for graph, schedule in zip(self.graphs, self.schedules, strict=True)
            for item in schedule.items
            if isinstance(item, Loop)
        ]

    def schedulers(self, machine: Machine, *, training: bool) -> dict[str, ScopeScheduler]:
        """Return who decides for each scope from now on."""
        found: dict[str, ScopeScheduler] = {}
        parts = zip(self.graphs, self.schedules, self.goals, self.recomputes, strict=True)
        for graph, schedule, goal, recomputes in parts:
            # identical blocks share one schedule, whose nodes are those of the first one's graph
            decided = decisions_of(next(iter(schedule.storages.keys)).graph, schedule)
            earlier = found.get(graph.fqn)
            found[graph.fqn] = ScopeScheduler(
                decisions={structure_of(graph.graph): decided, **(earlier.decisions if earlier else {})},
                goal_bytes=goal,
                sort=(signature_of(graph.graph), decided, goal, recomputes, earlier and earlier.sort),
                share=self.peak_share if training else None,
                recomputes=recomputes,
                machine=machine,
            )
        return found


class ForwardSchedules:
    """Plans the scopes of one model; identical scopes once, and nothing twice.

    Args:
        graphs: of the scopes, inner ones first, the model's last.
        machine: whose time is saved.
        around: what AC does with what autograd saves of scopes, by FQN.

    `smallest` is the forward plan of the smallest peak once it is certain, and `rehearsed` has the training
    plans whose peak is certain, by position on the path.
    """

    def __init__(
        self, graphs: list[ScopeGraph], machine: Machine, around: Mapping[str, SavedFate] | None = None
    ) -> None:
        self.machine = machine
        self.graphs = graphs
        self._root = graphs[-1].graph
        self._calls = [node for node in self._root.nodes if node.op == "call_module"]
        self._plain: dict[ScopeKind, Schedule] = {}
        self._fitted: dict[Hashable, Schedule] = {}
        left = [(around or {}).get(graph.fqn, SavedFate.KEPT) for graph in graphs]
        self._signatures: list[ScopeKind] = [
            (signature_of(graph.graph), each) for graph, each in zip(graphs, left, strict=True)
        ]
        self._planned: dict[int, ModelSchedule] = {}
        self._training: TrainingSchedules | None = None
        self.smallest: ModelSchedule | None = None
        self.rehearsed: dict[int, ModelSchedule] = {}
        for graph, signature in zip(graphs, self._signatures, strict=True):
            if signature not in self._plain:
                self._plain[signature] = unchunked_schedule(graph.graph, Storages.of_graph(graph.graph), {})
        self._seconds = sum(self._plain[each].seconds(machine) for each in self._signatures)

    def plan(self, goal: int) -> ModelSchedule:
        """Return the schedules whose peak is at most `goal`, or near the smallest."""
        if goal not in self._planned:
            self._planned[goal] = self._plan(goal)
        return self._planned[goal]

    def _plan(self, goal: int) -> ModelSchedule:
        root = self._plain[self._signatures[-1]]
        donated = root.donations()
        for _ in range(2):  # loops of the root may let other inputs of calls live longer
            schedules, goals, calls = [], [], {}
            before = dict(zip(root.items, root.profile().before_bytes, strict=True))
            for call, signature in zip(self._calls, self._signatures[:-1], strict=True):
                goals.append(max(goal - before[call], 0))
                schedules.append(self._fit(signature, donated[call], goals[-1]))
                calls[call] = schedules[-1].profile().peak_bytes - sum(root.storages.made[call].values())
            plain = replace(self._plain[self._signatures[-1]], calls=calls)
            root = ForwardSearch(plain, self.machine).fit(goal)
            if root.donations() == donated:
                break
            donated = root.donations()
        schedules.append(root)
        return ModelSchedule(
            graphs=self.graphs,
            schedules=schedules,
            goals=[*goals, goal],
            recomputes=[False] * len(schedules),
            peak_bytes=root.profile().peak_bytes,
            slowdown=sum(schedule.seconds(self.machine) for schedule in schedules) / self._seconds,
        )

    def training(self) -> TrainingSchedules:
        """Return the planner of forward and backward."""
        if self._training is None:
            self._training = TrainingSchedules(self.graphs, self._plain, self._signatures, self.machine)
        return self._training

    def _fit(self, signature: ScopeKind, donated: frozenset[int], goal: int) -> Schedule:
        key = signature, donated, goal
        if key not in self._fitted:
            plain = self._plain[signature]
            graph = next(iter(plain.storages.keys)).graph
            self._fitted[key] = ForwardSearch(plain, self.machine, inputs_at(graph, donated)).fit(goal)
        return self._fitted[key]


def forward_plan(
    planner: ForwardSchedules, rehearsal: Rehearsal, budget: int | None
) -> tuple[ModelSchedule, int]:
    """Return the fastest plan that a rehearsal finds within the budget, or the smallest, and its peak."""

    def certain(planned: ModelSchedule) -> ModelSchedule:
        schedulers = planned.schedulers(planner.machine, training=False)
        return replace(planned, peak_bytes=rehearsal.peak_bytes(schedulers))

    if planner.smallest is None:
        planner.smallest = certain(planner.plan(0))
    smallest = planner.smallest
    if budget is None:
        return smallest, smallest.peak_bytes
    fitting = certain(planner.plan(budget))
    chosen = min((smallest, fitting), key=lambda each: (each.peak_bytes > budget, each.slowdown))
    return chosen, min(smallest.peak_bytes, fitting.peak_bytes)


def training_plan(
    planner: ForwardSchedules, rehearsal: Rehearsal, budget: int | None
) -> tuple[ModelSchedule, int]:
    """Return the fastest plan that rehearsals find within the budget, or the smallest, and its peak."""
    training = planner.training()
    path = training.path
    known = planner.rehearsed

    def rehearsed(index: int) -> ModelSchedule:
        if index not in known:
            options = training.chosen_options(path[index])
            planned = ModelSchedule(
                graphs=planner.graphs,
                schedules=[option.planned.schedule for option in options],
                goals=[path[index].peak_bytes] * len(options),
                recomputes=[option.recomputes for option in options],
                peak_bytes=0,
                slowdown=path[index].seconds / path[0].seconds,
                peak_share=path[index].peak_bytes / path[0].peak_bytes,
            )
            peak = rehearsal.peak_bytes(planned.schedulers(planner.machine, training=True))
            known[index] = replace(planned, peak_bytes=peak)
            _LOG.info("chunks: %s bytes by the rehearsal of plan %d of %d", f"{peak:,}", index, len(path))
        return known[index]

    last = len(path) - 1
    smallest = rehearsed(last)
    if budget is None or smallest.peak_bytes > budget:
        found = [rehearsed(index) for index in range(max(last - 2, 0), last + 1)]
        smallest = min(found, key=lambda each: each.peak_bytes)
        if budget is None or smallest.peak_bytes > budget:
            return smallest, smallest.peak_bytes
    guess = next((index for index, each in enumerate(path) if each.peak_bytes <= budget), last)
    first = next((index for index, each in enumerate(path) if each.peak_bytes <= budget * _DOUBT), last)
    _search(lambda index: index >= first and rehearsed(index).peak_bytes <= budget, guess, last)
    fitting = [each for each in known.values() if each.peak_bytes <= budget]
    smallest = min(known.values(), key=lambda each: each.peak_bytes)
    return min(fitting, key=lambda each: each.slowdown), smallest.peak_bytes


def _search(fits: Callable[[int], bool], guess: int, last: int) -> None:
    """Ask `fits` for positions around `guess` until the first that fits is found; peaks fall, nearly."""
    low, high, step = -1, last, 1  # the last position fits or is of no use
    while high - low > 1:
        at = min(max(guess, low + 1), high - 1)
        if fits(at):
            high, guess = at, at - step
        else:
            low, guess = at, at + step
        step *= 2


def _region(scope: str, loop: Loop) -> PlannedRegion:
    seed = loop.region.seed
    return PlannedRegion(
        scope=scope,
        operators=tuple(node.name for node in loop.region.members),
        dimension=None if seed.axis is None else seed.axis.dim,
        value=seed.node.name,
        size=loop.size,
        chunk_size=loop.length,
        chunks=loop.chunks,
    )
