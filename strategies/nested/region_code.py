"""Regions become functions: each one a `GraphModule`, called through `torch.utils.checkpoint`.

A region's function holds the calls of the regions inside it, so that they nest when they run, not only
on paper: the recomputation of the outer one runs the inner `checkpoint` again.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from strategies.errors import StrategyError
from strategies.nested.nested_regions import NestedRegion, Path, every_region, filled, nest, path_name
from strategies.nested.scopes import Scope
from strategies.tracing.function_graph import Recording

_TAKEN = frozenset(dir(fx.GraphModule)) | {"meta"}

Wrap: TypeAlias = Callable[[fx.GraphModule], nn.Module]
"""Puts a module around the code of a region, for what else happens to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Treatment:
    """What happens to regions.

    Fields:
        options: keyword arguments of `torch.utils.checkpoint.checkpoint`, `use_reentrant` among them.
        wraps: what puts a module around a region, by its path.
        kept: regions that are not recomputed; each has a wrap.
    """

    options: Mapping[str, Any]
    wraps: Mapping[Path, Wrap]
    kept: frozenset[Path]


def lower(
    recording: Recording, scope: Scope, modules: Callable[[str], nn.Module], treatment: Treatment
) -> fx.GraphModule:
    """Return the code of one module's forward, with its regions as functions of their own.

    Args:
        recording: recording of the module's forward.
        scope: the regions in it.
        modules: function from an FQN below the module (`""` is the module itself) to the submodule to call.
        treatment: treatment of the regions.

    Raises:
        StrategyError: the regions do not nest, or one changes in place what was made outside of it.
    """
    nodes = [node for node in recording.graph.nodes if node.op not in {"placeholder", "output"}]
    paths = [path[scope.depth :] for path in _paths(nodes, scope)]
    names = [str(node.meta.get("fqn", node.name)) for node in nodes]
    outer = _outer(scope)
    regions = nest(paths, names, "ac.labels")
    storages = _StorageOrigins(recording.graph, nodes)
    for region in every_region(regions):
        if (*outer, *region.path) not in treatment.kept:
            storages.refuse_changes(region)
    return _Emitter(nodes, modules, treatment, outer).whole(recording.graph, regions)


def _outer(scope: Scope) -> Path:
    return next(iter(scope.paths.values()))[: scope.depth] if scope.paths else ()


def _paths(nodes: Sequence[fx.Node], scope: Scope) -> tuple[Path, ...]:
    """Return a path for every node; what is no submodule's call joins the regions around it."""
    of_calls = [_path(node, scope) if "fqn" in node.meta else None for node in nodes]
    of_glue = dict(zip(nodes, filled(of_calls), strict=True))
    # a parameter is read in the region that uses it, and only there: FSDP may have exchanged it by then
    return tuple(
        of_glue.get(next(iter(node.users)), ()) if node.op == "get_attr" else of_glue[node] for node in nodes
    )


def _path(node: fx.Node, scope: Scope) -> Path:
    """Return the path of a submodule's call; one called more often than it was at first has its latest."""
    fqn, call = node.meta["fqn"], node.meta["call"]
    known = [path for (name, _), path in scope.paths.items() if name == fqn]
    return scope.paths.get((fqn, call), known[-1] if call >= len(known) > 0 else ())


class _StorageOrigins:
    """Where the memory of each recorded tensor comes from, and who changes it in place."""

    def __init__(self, graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
        self._nodes = nodes
        self._at = {node: position for position, node in enumerate(nodes)}
        self._origins: dict[int, int] = {}
        for node in graph.nodes:
            at = -1 if node.op in {"placeholder", "get_attr"} else self._at.get(node, -1)
            for storage in _storages(node.meta.get("val")):
                self._origins.setdefault(storage, at)

    def refuse_changes(self, region: NestedRegion) -> None:
        """Refuse a region that a second run would not find as the first one did.

        Raises:
            StrategyError: it changes in place what was made outside of it, or what it takes is changed later.
        """
        inside = self._nodes[region.start : region.stop]
        for node in inside:
            if any(
                self._origins.get(each, -1) < region.start for each in _storages(node.meta.get("mutates"))
            ):
                problem = (
                    f"region {region.name} changes in place what was made outside of it, by {_shown(node)}"
                )
                raise StrategyError("ac", f"{problem}, so it cannot be recomputed; leave it outside")
        taken = {
            storage
            for node in inside
            for used in (node, *node.all_input_nodes)
            if used.op == "get_attr" or not region.start <= self._at.get(used, -1) < region.stop
            for storage in _storages(used.meta.get("val"))
        }
        for node in self._nodes[region.stop :]:
            if not taken.isdisjoint(_storages(node.meta.get("mutates"))):
                name, changing = region.name, _shown(node)
                problem = f"region {name} reads a tensor that {changing} later changes in place"
                remedy = f"so {name} cannot be recomputed; include {changing} in {name}"
                raise StrategyError("ac", f"{problem}, {remedy}")


def _storages(value: Any) -> list[int]:
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return [leaf.untyped_storage()._cdata for leaf in leaves]  # noqa: SLF001 (the identity that storages have)


def _shown(node: fx.Node) -> str:
    return repr(node.meta.get("fqn", node.name))


class _Emitter:
    """Writes graphs; positions are those of the recorded nodes."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        modules: Callable[[str], nn.Module],
        treatment: Treatment,
        outer: Path,
    ) -> None:
        self._nodes = nodes
        self._modules = modules
        self._treatment = treatment
        self._outer = outer
        self._at = {node: position for position, node in enumerate(nodes)}
        self._codes: list[fx.GraphModule] = []

    def whole(self, graph: fx.Graph, regions: Sequence[NestedRegion]) -> fx.GraphModule:
        """Return the code of all nodes."""
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        (result,) = next(node for node in graph.nodes if node.op == "output").args
        code = self._code(inputs, list(result), regions, 0, len(self._nodes), "forward", is_tuple=True)
        for each in self._codes:  # when all are made: each compiles those inside it once more
            cls: Any = type(each)  # a class of its own, which torch.fx has made for this graph
            cls.__call__ = cls.forward
        return code

    def _made(self, held: dict[str, nn.Module], graph: fx.Graph, name: str) -> fx.GraphModule:
        """Return code whose call will be its forward and nothing else.

        The call that torch.fx gives it reads the traceback of every exception, to print one; with early stop
        each recomputation ends with an exception, which would cost 0.6 ms a region.
        """
        self._codes.append(fx.GraphModule(held, graph, name))
        return self._codes[-1]

    def _interface(self, region: NestedRegion) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return what the region takes from outside, and what is used outside of what it makes."""
        inside = self._nodes[region.start : region.stop]
        taken = dict.fromkeys(each for node in inside for each in node.all_input_nodes)
        inputs = [node for node in taken if not self._holds(region, node)]
        outputs = [node for node in inside if not all(self._holds(region, user) for user in node.users)]
        return inputs, outputs

    def _holds(self, region: NestedRegion, node: fx.Node) -> bool:
        return region.start <= self._at.get(node, -1) < region.stop

    def _code(  # noqa: PLR0917 (what a function consists of)
        self,
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        regions: Sequence[NestedRegion],
        start: int,
        stop: int,
        name: str,
        *,
        is_tuple: bool = False,
    ) -> fx.GraphModule:
        graph = fx.Graph()
        held: dict[str, nn.Module] = {}
        known: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            known[node] = graph.placeholder(node.name)
        position = start
        waiting = list(regions)
        while position < stop:
            if waiting and waiting[0].start == position:
                region = waiting.pop(0)
                self._call(region, graph, held, known)
                position = region.stop
            else:
                self._copy(self._nodes[position], graph, held, known)
                position += 1
        results = tuple(known[node] for node in outputs)
        graph.output(results if is_tuple or len(results) != 1 else results[0])
        return self._made(held, graph, name)

    def _call(
        self, region: NestedRegion, graph: fx.Graph, held: dict[str, nn.Module], known: dict[fx.Node, fx.Node]
    ) -> None:
        inputs, outputs = self._interface(region)
        path = (*self._outer, *region.path)
        name = path_name(path)
        arguments = tuple(known[node] for node in inputs)
        code = self._code(inputs, outputs, region.regions, region.start, region.stop, f"checkpoint_{name}")
        wrap = self._treatment.wraps.get(path)
        if wrap is None:
            call = self._checkpoint(graph, code, arguments, held)
        else:
            body = code if path in self._treatment.kept else self._alone(code, inputs)
            call = graph.call_module(_hold(wrap(body), f"offload_{name}", held), arguments)
        if len(outputs) == 1:
            _call_it(call, outputs[0])
            known[outputs[0]] = call
            return
        for index, node in enumerate(outputs):
            known[node] = graph.call_function(operator.getitem, (call, index))
            _call_it(known[node], node)

    def _alone(self, code: fx.GraphModule, inputs: Sequence[fx.Node]) -> fx.GraphModule:
        """Return code that does nothing but call a region."""
        graph, held = fx.Graph(), dict[str, nn.Module]()
        arguments = tuple(graph.placeholder(node.name) for node in inputs)
        graph.output(self._checkpoint(graph, code, arguments, held))
        return self._made(held, graph, f"call_{code.__class__.__name__}")

    def _checkpoint(
        self,
        graph: fx.Graph,
        code: fx.GraphModule,
        arguments: tuple[fx.Node, ...],
        held: dict[str, nn.Module],
    ) -> fx.Node:
        function = graph.get_attr(_hold(code, code.__class__.__name__, held))
        return graph.call_function(checkpoint, (function, *arguments), dict(self._treatment.options))

    def _copy(
        self, node: fx.Node, graph: fx.Graph, held: dict[str, nn.Module], known: dict[fx.Node, fx.Node]
    ) -> None:
        if node.op == "get_attr":
            owner, _, attribute = str(node.target).rpartition(".")
            module = graph.get_attr(_hold(self._modules(owner), owner or "owner", held))
            known[node] = graph.call_function(builtins.getattr, (module, attribute))
            return
        known[node] = graph.node_copy(node, known.__getitem__)
        if node.op == "call_module":
            known[node].target = _hold(self._modules(str(node.target)), str(node.target), held)


def _call_it(node: fx.Node, recorded: fx.Node) -> None:
    """Give a region's result the name and the shape of what it is."""
    node._rename(recorded.name)  # noqa: SLF001 (torch.fx has no public way to name a node)
    node.meta["val"] = recorded.meta["val"]


def _hold(module: nn.Module, name: str, held: dict[str, nn.Module]) -> str:
    """Put `module` among those of a graph, and return its name there: one word, taken by no other."""
    word = name.replace(".", "_")
    word = word if word.isidentifier() else f"_{word}"
    while word in _TAKEN or held.setdefault(word, module) is not module:
        word += "_"
    return word
