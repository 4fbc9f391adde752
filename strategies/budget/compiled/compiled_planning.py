"""Plans for a step whose blocks are compiled, and the partitions that carry them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import nn
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened

from strategies.base import Partition, RunnableStep, StrategyError
from strategies.budget.compiled.compiled_capture import capture_compiled
from strategies.budget.compiled.joint_graph import JointGraph
from strategies.budget.compiled.joint_split import PlannedPartition
from strategies.budget.plan import BlockPlan, Plan
from strategies.regions.blocks import ModelModules
from strategies.step.call_sizes import difference, sizes_of
from strategies.step.sizes import TensorSize
from strategies.step.step_graph import StepGraph

_COMPILER = "compiler"


def captured(step: RunnableStep, modules: ModelModules) -> tuple[StepGraph, Callable[[Plan], Plan]]:
    """Return the graph of a step whose blocks are compiled, and what makes its plans those of the compiler.

    Args:
        step: a step of the plain model, with the compiler of the trial.
        modules: what a plan will decide about; the blocks alone are compiled.

    Raises:
        StrategyError: a block is not one graph, or the step cannot be captured.
    """
    if step.compiler == "none":
        problem = "compiled needs a compiler; use compile=aot_eager or inductor, or ac.executor=eager"
        raise StrategyError("ac.executor", problem)
    graph, joints = capture_compiled(step, modules)

    def of_compiler(plan: Plan) -> Plan:
        return replace(
            plan,
            executor="compiled",
            versions={**plan.versions, _COMPILER: step.compiler},
            blocks=tuple(
                each
                for block in plan.blocks
                for before, own in [_parted(block)]
                for each in (
                    *before,
                    _of_graph(own, joints[own.fqn], modules.blocks[own.fqn]) if own.fqn in joints else own,
                )
            ),
        )

    return graph, of_compiler


def _parted(block: BlockPlan) -> tuple[Sequence[BlockPlan], BlockPlan]:
    """Return the plan of what runs before a compiled block, where it is not kept, and that of the block."""
    if block.caller is None:
        return (), block
    before, own = block.parted()
    before = replace(before, extra_flops=0, saved_bytes=0, kept_bytes=0)
    return ((before,) if before.recompute or before.again else ()), own


def _of_graph(block: BlockPlan, joint: JointGraph, module: nn.Module) -> BlockPlan:
    """Return the plan of a block with what its graph must be; refuse values that the graph has not."""
    for value in block.keep:
        joint.node_of(value)
    return replace(block, graph=joint.digest, sizes=(*joint.sizes, *_parameter_sizes(module)))


def _parameter_sizes(module: nn.Module) -> tuple[TensorSize, ...]:
    """Return the sizes of parameters; none where FSDP1 has made them parts of a flat one."""
    is_flat = any(map(_is_fsdp_flattened, module.parameters()))
    return () if is_flat else sizes_of(module, (), {})


def partitions(plan: Plan, blocks: Mapping[str, nn.Module], compiler: str) -> Mapping[str, Partition]:
    """Return the partition functions of blocks, by FQN; none where the budget needs nothing.

    Args:
        compiler: the backend of `torch.compile`.

    Raises:
        StrategyError: the plan is for another compiler, or for other parameters.
    """
    made_for = plan.versions.get(_COMPILER)
    if made_for != compiler:
        problem = f"was made for compile={made_for}, whose graphs are others than those of {compiler}"
        raise StrategyError("ac.plan_file", f"{problem}; make it again")
    if plan.is_plain:
        return MappingProxyType({})
    planned_blocks = [block for block in plan.blocks if block.graph]  # the others did not run
    for block in planned_blocks:
        planned = [size for size in block.sizes if not size.name.startswith("input ")]
        found = _parameter_sizes(blocks[block.fqn])
        unlike = difference(planned, found) if planned and found else None
        if unlike is not None:
            problem = f"the plan of {block.fqn!r} was {unlike}"
            raise StrategyError("ac", f"{problem}; make it again for these sizes")
    return {block.fqn: PlannedPartition.of(block) for block in planned_blocks}
