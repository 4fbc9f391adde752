"""`compile=aot_eager|inductor`: blocks, or the whole model, as compiled functions.

The backends are torch's. What stands around them here takes notes: which graphs there are, and how often each
runs. A module is compiled in place, behind a dynamic class, so that names stay those of the plain model.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from harness.experiment.experiment import Experiment
from harness.experiment.protocol import Protocol
from harness.measure.work.compiled_graphs import CompiledGraphs
from strategies import Partition, StrategyError
from strategies.regions.blocks import Disguised
from strategies.regions.disguise import disguise

_ATTRIBUTE = "_acbench_compiled"
_RECOMPILATIONS = 256
"""Of one function: models with and without AC share the code of their blocks, each of which may have a plan
of its own. torch's own limit is 8."""


class Backend:
    """A backend of `torch.compile` that takes notes; models that share one share what it compiled.

    Args:
        name: `aot_eager` or `inductor`.
        inductor: options of `torch._inductor.config` that are set while something is compiled.
        partitioner: what to set of `torch._functorch.config` while something is compiled.
        partition: splits joint graphs; `None`: torch's own function.
        graphs: where notes go; `None`: notes of its own.
    """

    def __init__(
        self,
        name: str,
        *,
        inductor: Sequence[str] = (),
        partitioner: Mapping[str, Any] | None = None,
        partition: Partition | None = None,
        graphs: CompiledGraphs | None = None,
    ) -> None:
        self.graphs = CompiledGraphs() if graphs is None else graphs
        self.name = name
        self._partition = partition
        self._of_partitions: dict[Partition, Backend] = {}
        self._options = {"enable_autograd_cache": False, **(partitioner or {})}
        self._inductor = tuple(inductor)

    def splitting(self, partition: Partition | None) -> Backend:
        """Return this backend with another function that splits joint graphs; equal ones share a backend.

        Args:
            partition: the function; `None`: torch's own.
        """
        if partition is None:
            return self
        made = Backend(
            self.name,
            inductor=self._inductor,
            partitioner=self._options,
            partition=partition,
            graphs=self.graphs,
        )
        return self._of_partitions.setdefault(partition, made)

    def __call__(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Return a callable for what Dynamo has traced, from torch's compiler of forward and backward."""
        # a cached pair of graphs would be used without a word to anyone here
        with functorch_config.patch(self._options):
            return (self._operator_by_operator if self.name == "aot_eager" else self._kernels)(graph, inputs)

    def _operator_by_operator(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiler: Callable[..., Callable[..., Any]] = aot_autograd(
            fw_compiler=partial(self._boxed, is_backward=False),
            bw_compiler=partial(self._boxed, is_backward=True),
            partition_fn=self._partition or min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
        return compiler(graph, inputs)

    def _boxed(self, graph: GraphModule, inputs: list[Any], *, is_backward: bool) -> Callable[..., Any]:
        ran = self.graphs.add(graph, is_backward=is_backward)
        run = _counted(boxed_nop(graph, inputs), ran)
        run._boxed_call = True  # type: ignore[attr-defined]  # noqa: SLF001 (how AOTAutograd knows one list of inputs)
        return run

    def _kernels(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        patches: dict[str, Any] = dict.fromkeys(self._inductor, True)
        if self._partition is not None:
            inductor_partition: Any = importlib.import_module("strategies.budget.compiled.inductor_partition")
            as_pass = inductor_partition.AsCustomPass(self._partition, repr(self._partition))
            patches["custom_partitioner_fn"] = as_pass
        compiled: Callable[..., Any] = _inductor().compile_fx(
            graph, inputs, inner_compile=self._generated, config_patches=patches or None
        )
        return compiled

    def _generated(self, graph: GraphModule, inputs: Any, **options: Any) -> Any:
        ran = self.graphs.add(graph, is_backward=bool(options.get("is_backward")))
        compiled: Any = _inductor().compile_fx_inner(graph, inputs, **options)
        compiled.current_callable = _counted(compiled.current_callable, ran)
        return compiled


def alike(experiment: Experiment) -> str:
    """Return a key that is equal for experiments whose models are: with any optimizer and protocol."""
    return json.dumps(replace(experiment, optimizer="adamw", protocol=Protocol()).to_dict(), sort_keys=True)


class Backends:
    """The backends of one trial, one an experiment: a fresh model of it is not compiled anew."""

    def __init__(self) -> None:
        self._made: dict[str, Backend] = {}

    def of(self, experiment: Experiment, *, inductor: Sequence[str] = ()) -> Backend:
        """Return the backend of `experiment`, which sets these options of Inductor."""
        key = " ".join([alike(experiment), *inductor])
        made = Backend(experiment.compile, inductor=inductor, partitioner=experiment.ac.partitioner)
        return self._made.setdefault(key, made)


@contextmanager
def compiling(experiment: Experiment) -> Iterator[None]:
    """Let models of `experiment` be compiled inside the scope; none of it stays afterwards.

    What exceeds the limit of recompilations raises: it would run uncompiled, and nothing would say so.
    Planned graphs stay whole: DDP would have them cut where a bucket of gradients ends.
    """
    if not experiment.is_compiled:
        yield
        return
    limits: dict[str, Any] = {"recompile_limit": _RECOMPILATIONS, "fail_on_recompile_limit_hit": True}
    if experiment.plans_graphs:
        limits["optimize_ddp"] = False
    torch.compiler.reset()
    try:
        with dynamo_config.patch(limits):
            yield
    finally:
        torch.compiler.reset()


def compile_model(
    model: nn.Module, units: Mapping[str, nn.Module], experiment: Experiment, backend: Backend
) -> None:
    """Compile `model` in place.

    Args:
        units: its blocks; where AC plans graphs, those that it plans.
    """
    modules = {"": model} if experiment.compile_scope == "model" else units
    partitions = experiment.ac.partitions(model, backend.name) if experiment.plans_graphs else {}
    for fqn, module in modules.items():
        _compile(module, backend.splitting(partitions.get(fqn)))
    if experiment.plans_graphs:
        experiment.ac.enclose_beside(model)


def _compile(module: nn.Module, backend: Backend) -> None:
    call = torch.compile(module.forward, backend=backend, dynamic=False)
    module.__dict__[_ATTRIBUTE] = Entrance(graphs=backend.graphs, call=call)
    disguise(module, _CompiledForward)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrance:
    """A compiled function, as meters let it be called."""

    graphs: CompiledGraphs
    call: Callable[..., Any] = field(repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it. Raises StrategyError: a partition does not suit a graph."""
        try:
            with self.graphs.entered():
                return self.call(*args, **kwargs)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, StrategyError):  # of a partition
                raise error.inner_exception from error
            raise


class _CompiledForward(Disguised):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        entrance: Entrance = vars(self)[_ATTRIBUTE]
        return entrance(*args, **kwargs)


def _inductor() -> ModuleType:
    return importlib.import_module("torch._inductor.compile_fx")


def _counted(run: Callable[..., Any], ran: Callable[[], None]) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        ran()
        return run(*args)

    return counted
