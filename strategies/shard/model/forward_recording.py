"""Recording of a forward for sharding: on whole tensors, or as a rank runs it, on its parts of them.

Code may do something else with a shard than with the whole: `len(h)`, a view to a number of rows, or a branch
over a shape. So a forward is recorded both ways, and `soundness` compares the two.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map_only

from strategies.base import StrategyError
from strategies.estimate.operator_cost import tensors_of
from strategies.estimate.patched import without_collector
from strategies.shard.candidates.layout import Shape
from strategies.tracing.function_graph import FunctionRecorder
from strategies.tracing.module_state import CONSTANTS
from strategies.tracing.shadow import Shadow, device_of, shadowed
from strategies.tracing.without_data import following

Parts: TypeAlias = Mapping[str, tuple[Shape, Tensor]]
"""Results of modules by FQN: the shape on a rank, and the whole tensor."""

_NAME = "forward of the model"
_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_OWN = ("torch", "strategies", "contextlib", "functools")
"""Packages and modules whose frames are not the model's code."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """A tensor among recorded arguments: the number of the step that gave it."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """A call, an input or a parameter, as it was recorded.

    Fields:
        arguments: positional and named arguments; a tensor stands as its `StepResult`.
        shapes: shapes of the tensors that it gives.
        line: line of the model's code that calls it, `model.py:12`; empty if none does.
        within: FQNs of the modules in whose forward that is, outermost first.
    """

    node: fx.Node
    arguments: Any
    shapes: tuple[Shape, ...]
    line: str
    within: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """A question about a tensor, such as its size.

    Fields:
        step: number of the step that gave the tensor.
        before: number of the step that came next.
    """

    step: int
    before: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Followed:
    """The recording of a forward.

    Fields:
        steps: all steps, whether somebody uses their results or not.
        reads: questions about tensors, in order.
        outputs: leaves of what it returned; a tensor stands as its `StepResult`.
        stop: reason why it ended early, if it did.
        stopped_in_call: whether a function that it called did so.
        kept: numbers of the steps whose results are still held by somebody when the forward is over.
        bypassed: FQNs of modules that are not looked into, whose forward is taken without calling them.
        attributes: FQN and attribute of what it and its calls read of modules.
    """

    steps: tuple[RecordedStep, ...]
    reads: tuple[Read, ...]
    outputs: tuple[Any, ...] = ()
    structure: TreeSpec | None = None
    stop: str | None = None
    stopped_in_call: bool = False
    kept: tuple[int, ...] = ()
    bypassed: frozenset[str] = frozenset()
    attributes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """A forward that can be recorded.

    Fields:
        shadow: shadow of the model, on the meta device.
        sample: positional inputs.
        through: FQNs of the submodules that are looked into.
        hooked: FQNs among them around which hooks run.
    """

    shadow: Shadow
    sample: tuple[Any, ...]
    through: frozenset[str]
    hooked: frozenset[str]

    def on_wholes(self) -> tuple[fx.Graph, Followed]:
        """Return what the forward does on whole tensors; the graph has what is used of it.

        Raises:
            StrategyError: it does what a graph cannot hold, or depends on data.
        """
        recorder, inputs = self._recorder({})
        with following(lambda: _NAME), _without_log():
            graph = recorder.record(inputs)
        return graph, recorder.followed()

    def on_parts(self, parts: Parts) -> Followed:
        """Return what the forward does where some modules give parts."""
        with without_collector():  # what is made stays in the youngest generation, which is collected alone
            followed, tensors = self._on_parts(parts)
            for step in followed.steps:
                step.node.meta.clear()  # the last that holds its result
            gc.collect(0)
        return replace(followed, kept=tuple(number for number, tensor in tensors if tensor() is not None))

    def _on_parts(self, parts: Parts) -> tuple[Followed, list[tuple[int, weakref.ref[Tensor]]]]:
        """Return what forward does on these parts, and its results by step; it may stop with an error."""
        recorder, inputs = self._recorder(parts)
        stop = None
        try:
            with _without_log():
                recorder.record(inputs)
        except Exception as error:  # noqa: BLE001 (the user's code may say in any way that it does not run)
            stop = _one_line(error)
        followed = recorder.followed(stop)
        tensors = [
            (number, weakref.ref(tensor))
            for number, step in enumerate(followed.steps)
            if step.node.op not in ("placeholder", "get_attr")
            for tensor in tensors_of(step.node)
        ]
        return followed, tensors

    def _recorder(self, parts: Parts) -> tuple[_PlaceRecorder, Any]:
        device = device_of(tree_leaves(self.sample))
        shadow = self.shadow.on(device)
        recorder = _PlaceRecorder(shadow, self.through, hooked=self.hooked, parts=parts)
        return recorder, shadowed(shadow, self.sample, device)


def seen_by_hooks(tensor: Tensor) -> Tensor:
    """Stand in a graph for hooks between a caller and a module that is looked into."""
    return tensor


def is_sizes(node: fx.Node) -> bool:
    """Return whether a node is a `torch.Size`, which a graph has to make of numbers."""
    return node.target is torch.Size


class _PlaceRecorder(FunctionRecorder):
    """Records also where calls stand in the model's code, and what that asks of tensors."""

    def __init__(
        self, shadow: Shadow, through: frozenset[str], *, hooked: frozenset[str], parts: Parts
    ) -> None:
        super().__init__(shadow, through, _NAME)
        self._hooked = hooked
        self._parts = parts
        self._within = [""]
        self._asked: list[tuple[fx.Node, int]] = []
        self._bypassed: set[str] = set()
        self._followed: Followed | None = None
        self._is_inside = False

    def followed(self, stop: str | None = None) -> Followed:
        """Return what was recorded, up to where it stopped."""
        if self._followed is not None and stop is None:
            return self._followed
        is_in_call = self._failure is not None and not isinstance(self._failure, StrategyError)
        return replace(self._so_far(), stop=stop, stopped_in_call=is_in_call)

    def read(self, module: nn.Module, name: str) -> None:
        """As `FunctionRecorder.read`; a call reads `forward` too, but of what is not looked into in quiet."""
        fqn = self._shadow.fqns[id(module)]
        if name == "forward" and not self._is_quiet and fqn not in self._through:
            self._bypassed.add(fqn)
        if self._is_inside:  # what a call returns decides what follows
            self._frame.note_read(fqn, name)
        super().read(module, name)

    def called(self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """As `FunctionRecorder.called`; some modules give parts, and hooks see what comes and goes."""
        fqn = self._shadow.fqns[id(module)]
        if self._is_quiet or fqn not in self._through:
            part = None if self._is_quiet else self._parts.get(fqn)
            inside = partial(self._inside, body if part is None else partial(_made, *part))
            return super().called(module, body if self._is_quiet else inside, args, kwargs)
        self._within.append(fqn)
        if fqn in self._hooked:
            args, kwargs = self._handed((args, kwargs), fqn)
        result = super().called(module, body, args, kwargs)
        self._within.pop()
        return self._handed(result, fqn) if fqn in self._hooked else result

    def _inside(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_inside = True
        try:
            return body(*args, **kwargs)
        finally:
            self._is_inside = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record a call, and note the questions about a tensor that leave no node."""
        before = len(self._graph.nodes)
        result = super().__torch_function__(func, types, args, kwargs)
        asked = self._frame.nodes.get(id(args[0])) if args and not self._is_quiet else None
        if asked is not None and before == len(self._graph.nodes):
            self._asked.append((asked, len(self._graph.nodes)))
        return result

    def _handed(self, value: Any, fqn: str) -> Any:
        """Mark tensors that hooks may see, and refuse to hand them anything else."""
        others = [leaf for leaf in tree_leaves(value) if not isinstance(leaf, (Tensor, *CONSTANTS))]
        if others:
            problem = f"hands a {type(others[0]).__name__} to hooks of {fqn!r}"
            raise self._error(f"{problem}, which may see shards in it")

        def hand(tensor: Tensor) -> Tensor:
            node = self._graph.call_function(seen_by_hooks, (self._node(tensor, "hooks"),))
            node.meta["mutates"] = ()
            self._results(tensor, node, "hooks give")
            return tensor

        return tree_map_only(Tensor, hand, value)

    def _results(self, result: Any, node: fx.Node, where: str) -> None:
        self._mark(node)
        super()._results(result, node, where)

    def _node(self, tensor: Tensor, where: str) -> fx.Node:
        node = super()._node(tensor, where)
        self._mark(node)
        return node

    def _mark(self, node: fx.Node) -> None:
        if "line" not in node.meta:
            node.meta |= {"line": _line(), "within": tuple(self._within)}

    def _finished(self, leaves: list[Any], structure: TreeSpec) -> fx.Graph:
        """Take what forward returns, as steps that gave it."""
        outputs = [self._node(leaf, "output") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        followed = self._so_far()
        places = {step.node: StepResult(number) for number, step in enumerate(followed.steps)}
        returned = tuple(places[each] if isinstance(each, fx.Node) else each for each in outputs)
        self._followed = replace(followed, outputs=returned, structure=structure)
        return super()._finished(leaves, structure)

    def _so_far(self) -> Followed:
        """Return the steps that were recorded until now, with the reads between them."""
        numbers: dict[fx.Node, int] = {}
        before = []  # each node, how many are steps
        for node in self._graph.nodes:
            before.append(len(numbers))
            if not is_sizes(node):
                numbers[node] = len(numbers)
        before.append(len(numbers))
        reads = tuple(Read(step=numbers[node], before=before[count]) for node, count in self._asked)
        return Followed(
            steps=tuple(_steps(numbers)),
            reads=reads,
            bypassed=frozenset(self._bypassed),
            attributes=tuple(self._frame.reads),
        )


@contextmanager
def _without_log() -> Iterator[None]:
    """Keep tracebacks of what fails on fake tensors out of the log: it says what does not run on parts."""
    was_disabled, _LOG.disabled = _LOG.disabled, True
    try:
        yield
    finally:
        _LOG.disabled = was_disabled


def _steps(numbers: Mapping[fx.Node, int]) -> Iterator[RecordedStep]:
    def placed(node: fx.Node) -> Any:
        return node.args[0] if is_sizes(node) else StepResult(numbers[node])

    for node in numbers:
        yield RecordedStep(
            node=node,
            arguments=fx.node.map_arg((node.args, node.kwargs), placed),
            shapes=tuple(tuple(tensor.shape) for tensor in tensors_of(node)),
            line=node.meta.get("line", ""),
            within=node.meta.get("within", ()),
        )


def _made(shape: Shape, whole: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    """Return a part of `whole`, which code may change in place."""
    order = sorted(range(whole.dim()), key=whole.stride().__getitem__, reverse=True)
    part = torch.empty_permuted(shape, order, dtype=whole.dtype, device=whole.device)
    return part.requires_grad_(whole.requires_grad).clone()


def _line() -> str:
    """Return file and line of the user's code that runs now; empty in torch's and ours."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (where the call stands is the question)
    while frame is not None and frame.f_code is not FunctionRecorder.record.__code__:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _OWN:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _one_line(error: Exception) -> str:
    text = error.problem if isinstance(error, StrategyError) else f"{type(error).__name__}: {error}"
    return text.strip().partition("\n")[0]
