"""The graphs that a compiler made of a model: how often each ran, and what they compute a second time.

A compiled function runs its backward as one autograd node, which records nothing. So no meter can tell the
operators of forward that the compiler has put there. Its graph can: a node that tracing met in backward says
so, and all others have been computed in forward already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch._dynamo.utils import counters
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only

from harness.records.measured import MeasuredWork
from strategies.estimate.flops import called, flops_of

_BACKWARD = "is_backward"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputedWork:
    """Forward operators that one run of a graph of backward computes once more."""

    flops: int = 0
    operators: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledWork:
    """The work of compiled functions in one step that no meter can tell.

    Fields:
        recomputed: what they computed once more.
        graphs: number of graphs of the model.
        breaks: number of graph breaks by their reason.
    """

    recomputed: RecomputedWork
    graphs: int
    breaks: dict[str, int]

    def beside(self, work: MeasuredWork) -> MeasuredWork:
        """Return what meters counted of a step, with this."""
        again = Counter(work.recomputed_ops) + self.recomputed.operators
        return replace(
            work,
            recomputed_flops=work.recomputed_flops + self.recomputed.flops,
            recomputed_ops=dict(sorted(again.items())),
            compiled_graphs=self.graphs,
            graph_breaks=dict(self.breaks),
        )


class CompiledGraphs:
    """The graphs of one experiment; all its models in a process share them, as the compiler does.

    Attributes:
        entered: makes the context in which a compiled function is called. A meter that has replaced functions
            puts them back there, because a function that it finds replaced the compiler compiles anew.
        breaks: number of graph breaks by their reason.
    """

    def __init__(self) -> None:
        self.entered: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.breaks: Counter[str] = Counter()
        self._recomputed: list[RecomputedWork] = []
        self._runs: list[int] = []
        self._broken_before: Counter[str] = Counter(counters["graph_break"])

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def runs(self) -> tuple[int, ...]:
        """The number of runs of each graph, in the order in which they were compiled."""
        return tuple(self._runs)

    def add(self, graph: GraphModule, *, is_backward: bool) -> Callable[[], None]:
        """Take note of a graph; return what is to be called whenever it runs."""
        number = len(self._runs)
        self._runs.append(0)
        self._recomputed.append(_recomputed(graph) if is_backward else RecomputedWork())

        def ran() -> None:
            self._runs[number] += 1

        return ran

    def recomputed_since(self, runs: tuple[int, ...]) -> RecomputedWork:
        """Return what has been recomputed since `self.runs` were `runs`."""
        earlier = (*runs, *[0] * (len(self) - len(runs)))
        total: Counter[str] = Counter()
        flops = 0
        for once, now, then in zip(self._recomputed, self._runs, earlier, strict=True):
            flops += once.flops * (now - then)
            total.update({name: count * (now - then) for name, count in once.operators.items()})
        return RecomputedWork(flops=flops, operators=+total)

    def work_since(self, runs: tuple[int, ...]) -> CompiledWork:
        """Return what a step did that began when `self.runs` were `runs`."""
        recomputed = self.recomputed_since(runs)
        return CompiledWork(recomputed=recomputed, graphs=len(self), breaks=dict(self.breaks))

    def note_breaks(self) -> None:
        """Take note of the graph breaks since this was called last."""
        now = Counter(counters["graph_break"])
        for reason, count in (now - self._broken_before).items():
            self.breaks[_in_one_line(reason)] += count
        self._broken_before = now


def _recomputed(graph: GraphModule) -> RecomputedWork:
    nodes = [node for node in graph.graph.nodes if _is_recomputed(node)]
    return RecomputedWork(
        flops=sum(map(_flops, nodes)), operators=Counter(str(_operator(node)) for node in nodes)
    )


def _is_recomputed(node: Node) -> bool:
    if node.op != "call_function" or node.meta.get("partitioner_tag") == _BACKWARD:
        return False
    return isinstance(_operator(node), OpOverload)


def _operator(node: Node) -> Any:
    return called(node.target, node.args)[0]


def _flops(node: Node) -> int:
    args, kwargs = tree_map_only(Node, lambda each: each.meta.get("val"), (node.args, node.kwargs))
    operator, operands = called(node.target, tuple(args))
    return flops_of(operator, operands, dict(kwargs), node.meta.get("val"))


def _in_one_line(reason: Any) -> str:
    return str(reason).strip().splitlines()[0] if str(reason).strip() else "no reason given"
