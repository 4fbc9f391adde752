"""Capturing a step whose blocks are compiled: on the joint graphs that the compiler really has.

Each block is compiled here once, with all that backward reads saved. Its two graphs then run operator by
operator: forward gives what it saves to whoever watches, and backward asks for each value just before the
node that reads it. So plans are made of the operators that the compiler will run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch._functorch import config as functorch_config
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import _disable_current_modes

from strategies.base import RunnableStep, StrategyError
from strategies.budget.compiled.joint_graph import JointGraph
from strategies.budget.compiled.joint_split import split
from strategies.regions.blocks import ModelModules
from strategies.regions.region import Unobserved
from strategies.regions.saved_tensors import hooks_around, packed_by
from strategies.step.plan_capture import capture, enclosed
from strategies.step.step_graph import StepGraph

_Unpack = Callable[[], Tensor]


def capture_compiled(step: RunnableStep, modules: ModelModules) -> tuple[StepGraph, Mapping[str, JointGraph]]:
    """Return the graph of a step whose blocks are compiled, and the joint graphs of these.

    Args:
        step: a step of the plain model, with the compiler of the trial.
        modules: what a plan will decide about; the blocks alone are compiled.

    Raises:
        StrategyError: a block is not one graph, or the step cannot be captured.
    """
    with _compiled(step, modules.blocks) as (bodies, recorders):
        graph = capture(step.run, modules, device=step.device, standing=step.standing, bodies=bodies)
    joints = {fqn: recorder.joint for fqn, recorder in recorders.items() if recorder.joint is not None}
    for call in (each for each in graph.calls if each.fqn in joints):
        operators = [graph.operators[number] for number in call.operators]
        own = [operator.name for operator in operators[len(call.before) :]]
        _require_same(joints[call.fqn], own, call.fqn)
    return graph, joints


def attend_capture(step: RunnableStep, blocks: Mapping[str, nn.Module]) -> None:
    """Take the steps of `capture_compiled`, with the collectives of compiled blocks, and look at none.

    Args:
        step, blocks: as of `capture_compiled`.

    Raises:
        StrategyError: a block is not one graph.
    """
    with _compiled(step, blocks) as (bodies, _), enclosed(blocks, lambda fqn: _Runs(bodies[fqn])):
        step.run()


@contextmanager
def _compiled(
    step: RunnableStep, blocks: Mapping[str, nn.Module]
) -> Iterator[tuple[Mapping[str, Callable[..., Any]], Mapping[str, BlockRecorder]]]:
    """Compile blocks in one step; give what runs in their place, and what their graphs are."""
    recorders = {fqn: BlockRecorder(fqn, step.compiler) for fqn in blocks}
    bodies = {
        fqn: Lifted(
            torch.compile(block.forward, backend=recorders[fqn], dynamic=False, fullgraph=True), step, fqn
        )
        for fqn, block in blocks.items()
    }
    # blocks of one class share their code; DDP would cut a graph where its buckets end
    options = {"recompile_limit": dynamo_config.recompile_limit + len(blocks), "optimize_ddp": False}
    try:
        with dynamo_config.patch(options), step.around():
            with enclosed(blocks, lambda fqn: _Runs(bodies[fqn])):
                step.run()
            yield bodies, recorders
    finally:
        torch.compiler.reset()  # what was compiled here would count among recompilations of the same code


def _require_same(joint: JointGraph, ran: Sequence[str], fqn: str) -> None:
    names = [str(node.target) for node in joint.operators]
    if list(ran[: len(names)]) != names:
        pairs = zip([*names, "none"], [*ran, "none"], strict=False)
        expected, found = next(pair for pair in pairs if pair[0] != pair[1])
        problem = f"the graph of {fqn!r} has {expected} where {found} ran"
        raise StrategyError("ac.executor", f"{problem}; use ac.executor=eager compile=none")


class _Runs(Unobserved):
    """A region that runs something in place of a block's forward."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self._body = body

    def __call__(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run it."""
        del module, body
        return self._body(*args, **kwargs)


class Lifted:
    """A compiled function, called with the functions of torch as they are without a watch."""

    def __init__(self, call: Callable[..., Any], step: RunnableStep, fqn: str) -> None:
        self._call, self._step, self._fqn = call, step, fqn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it. Raises StrategyError: the block is not one graph, or not one that a plan is made for."""
        try:
            with self._step.unwrapped():
                return self._call(*args, **kwargs)
        except Unsupported as error:
            reason = str(error).strip().splitlines()[0]
            problem = f"{self._fqn!r} is not one graph: {reason}"
            raise StrategyError("ac.executor", f"{problem}; use ac.executor=eager compile=none") from error
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, StrategyError):
                raise error.inner_exception from error
            raise


class BlockRecorder:
    """A backend of `torch.compile` for one block, whose graphs run for who watches.

    Args:
        fqn: plain FQN of the block, for errors.
        compiler: `aot_eager` or `inductor`: whose joint graph it is.

    Attributes:
        joint: the joint graph, once the block has run; `None` where nothing in it needs a gradient.
    """

    def __init__(self, fqn: str, compiler: str) -> None:
        self.joint: JointGraph | None = None
        self._fqn = fqn
        self._compiler = compiler
        self._outputs = 0
        self._numbers = count()
        self._given: dict[int, dict[str, _Unpack]] = {}
        self._saved: frozenset[str] = frozenset()

    def __call__(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Return a callable for what Dynamo has traced."""
        # a cached pair of graphs would be used without a word to anyone here
        with functorch_config.patch(enable_autograd_cache=False):
            return (self._by_inductor if self._compiler == "inductor" else self._by_operators)(graph, inputs)

    def _by_operators(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiler: Callable[..., Callable[..., Any]] = aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=self._backward,
            inference_compiler=_plain,
            partition_fn=self._partition,
            keep_inference_input_mutations=True,
        )
        return compiler(graph, inputs)

    def _by_inductor(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        made: Any = importlib.import_module("strategies.budget.compiled.inductor_partition")
        compile_fx: Any = importlib.import_module("torch._inductor.compile_fx").compile_fx
        patches = {"custom_partitioner_fn": made.AsCustomPass(self._partition, self._fqn)}
        compiled: Callable[..., Any] = compile_fx(
            graph, inputs, inner_compile=self._inner, config_patches=patches
        )
        return compiled

    def _inner(self, graph: GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        if options.get("is_inference"):
            return _plain(graph, inputs)
        return (self._backward if options.get("is_backward") else self._forward)(graph, inputs)

    def _partition(
        self,
        joint_module: GraphModule,
        joint_inputs: Any,  # noqa: ARG002 (partition functions get them)
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **options: Any,  # noqa: ARG002 (Inductor gives its name)
    ) -> tuple[GraphModule, GraphModule]:
        """Return graphs of forward and backward; forward saves all that backward reads."""
        self.joint = JointGraph(joint_module, num_fwd_outputs, self._fqn)
        self._outputs = num_fwd_outputs
        return split(self.joint, self.joint.asked, static_lifetime_input_indices)

    def _forward(self, graph: GraphModule, inputs: Any) -> Callable[..., Any]:  # noqa: ARG002 (backends get them)
        saved = _without_saved(graph, self._outputs)
        self._saved = frozenset(saved.values())

        def run(args: list[Any]) -> Any:
            number = next(self._numbers)
            runner = _GivingForward(graph, self._saved)
            results = list(runner.boxed_run(args))
            self._given[number] = runner.given
            with _disable_current_modes():  # no watch knows of what stands for saved values
                for place in saved:
                    results[place] = torch.tensor(number)
            return results

        return _boxed(run)

    def _backward(self, graph: GraphModule, inputs: Any) -> Callable[..., Any]:  # noqa: ARG002 (backends get them)
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        first = next((place for place, name in enumerate(names) if name in self._saved), None)

        def run(args: list[Any]) -> Any:
            with _disable_current_modes():
                waiting = {} if first is None else self._given.pop(int(args[first]))
            return _AskingBackward(graph, waiting).boxed_run(args)

        return _boxed(run)


def _without_saved(graph: GraphModule, outputs: int) -> Mapping[int, str]:
    """Take from the results of a graph what it has computed for backward; return its places and names."""
    (output,) = graph.graph.find_nodes(op="output")
    results = list(output.args[0])
    saved = {
        place: node.name
        for place, node in enumerate(results)
        if place >= outputs and isinstance(node, Node) and node.op != "placeholder"
    }
    for place in saved:
        results[place] = None
    output.args = (tuple(results),)
    return saved


class _GivingForward(Interpreter):
    """Runs a graph of forward; what it saves is given away as soon as it is there."""

    def __init__(self, graph: GraphModule, saved: Iterable[str]) -> None:
        super().__init__(graph)
        self.given: dict[str, _Unpack] = {}
        self._saved = frozenset(saved)

    def run_node(self, n: Node) -> Any:
        """Run a node, and give its value away where it is saved."""
        value = super().run_node(n)
        if n.name in self._saved:
            self.given[n.name] = _packed(value)
        is_forgotten = n.op == "call_function" and not n.users
        return None if is_forgotten else value


class _AskingBackward(Interpreter):
    """Runs a graph of backward; it asks for what forward has given away when a node reads it."""

    def __init__(self, graph: GraphModule, waiting: dict[str, _Unpack]) -> None:
        super().__init__(graph)
        self._waiting = waiting

    def fetch_args_kwargs_from_env(self, n: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a node, in whose order it asks; none is held for a later node."""
        asked = [each for each in n.all_input_nodes if each.name in self._waiting]
        for each in asked:
            self.env[each] = self._waiting[each.name]()
        found = super().fetch_args_kwargs_from_env(n)
        for each in asked:
            if each in self.user_to_last_uses.get(n, ()):
                del self._waiting[each.name]
            else:
                del self.env[each]
        return found


def _packed(value: Tensor) -> _Unpack:
    """Return what gives a saved value back, by the hooks that stand around the block."""
    hooks = hooks_around()
    return (lambda: value) if hooks is None else packed_by(hooks, value)


def _plain(graph: GraphModule, inputs: Any) -> Callable[..., Any]:  # noqa: ARG001 (backends get them)
    """Return a graph that needs no backward, operator by operator."""
    return _boxed(lambda args: Interpreter(graph).boxed_run(args))


def _boxed(run: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    run._boxed_call = True  # type: ignore[attr-defined]  # noqa: SLF001 (how AOTAutograd knows one list of inputs)
    return run
