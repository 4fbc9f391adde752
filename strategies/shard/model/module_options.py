"""Options for one module: the sharding candidates of its operator, with the states of its input and output.

Resharding can stand around a module that is called once, because its class is exchanged for one that does it.
So an option has, besides the candidate, the state in which the input arrives, the state in which the output
leaves, and the collectives at both ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.estimate.machine import Machine
from strategies.shard.candidates.candidate_cost import communication_s
from strategies.shard.candidates.derivation import derive
from strategies.shard.candidates.enumeration import candidates
from strategies.shard.candidates.operation import Label
from strategies.shard.candidates.redistribution import (
    Collective,
    Steps,
    collectives,
    reversed_steps,
    steps_between,
)
from strategies.shard.candidates.sharding_candidate import ShardingCandidate
from strategies.shard.model.placement_state import SUMMED, WHOLE, Move, State, TensorValue, move, sharded
from strategies.shard.operators.module_operations import module_operation

REPLICATED = "replicated"
"""Name of the candidate in which every rank computes everything, of modules without named candidates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldParameter:
    """A parameter of a leaf module as one rank holds it.

    Fields:
        placement: `Shard` for a part of its own, `Replicate` for all of it.
        reduction: steps that make its gradient whole.
    """

    placement: Placement
    reduction: Steps = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleCandidate:
    """A sharding candidate of a leaf module on one mesh axis.

    Fields:
        choice: label that the axis shards: `k`, `n`, a batch dimension `b0`, or nothing.
        input: state in which the module reads its input.
        finish: steps of a linear's product, and of its gradient, before the bias is added.
        flops: FLOPs of one rank in one step.
    """

    name: str
    choice: Label
    input: State = WHOLE
    output: State = WHOLE
    finish: Move = field(default_factory=Move)
    parameters: Mapping[str, HeldParameter] = field(default_factory=lambda: MappingProxyType({}))
    flops: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOption:
    """One option of a node of the model's graph: a module by a candidate, or a function, between states.

    Fields:
        inputs: states of the tensors that it reads, in their order.
        candidate: candidate by which a leaf module runs; `None` for all other nodes.
        entering: redistribution of a leaf module's input, from its state to the candidate's.
        leaving: redistribution of its output, from the candidate's state.
        seconds: time of one rank in one step, computation and communication.
        memory_bytes: bytes of parameters, their gradients and the output on one rank.
        fsdp_bytes: payload of FSDP's collectives of the parameters; the less the axis cuts, the larger.
    """

    inputs: tuple[State, ...]
    output: State
    candidate: ModuleCandidate | None = None
    entering: Move = field(default_factory=Move)
    leaving: Move = field(default_factory=Move)
    collectives: tuple[Collective, ...] = ()
    seconds: float = 0.0
    memory_bytes: int = 0
    fsdp_bytes: int = 0

    @property
    def communicated_bytes(self) -> int:
        """Payload of all collectives, FSDP's of the parameters among them."""
        return self.fsdp_bytes + sum(collective.payload_bytes for collective in self.collectives)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafModule:
    """A module of torch's that is called once, so that it can run by any of its candidates.

    Fields:
        fqn: plain FQN of the module.
        split: rule of the model for its features: `column` if the code behind it runs on a shard of its
            output features, `row` if the code before it gives a shard of its input features.
        parameter_bytes: bytes that a rank keeps of each parameter that this module alone reads, with its
            gradient, if the axis leaves it whole.
        fsdp_bytes: payload of FSDP's collectives of each such parameter, if the axis leaves it whole.
    """

    fqn: str
    module: nn.Module
    input: TensorValue
    output: TensorValue
    split: str | None
    parameter_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    fsdp_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


def module_candidates(leaf: LeafModule, ranks: int, machine: Machine) -> tuple[ModuleCandidate, ...]:
    """Return the candidates of a leaf module on an axis of `ranks`, full replication first."""
    module = leaf.module
    if isinstance(module, nn.Linear):
        return tuple(_linear(leaf, module, ranks, machine))
    whole = ModuleCandidate(name=REPLICATED, choice=None, parameters=_held(module, Replicate(), ranks))
    return whole, *(
        ModuleCandidate(
            name=f"S{dim}",
            choice=f"b{dim}",
            input=sharded(dim),
            output=sharded(dim),
            parameters=_held(module, Partial(), ranks),
        )
        for dim in range(_batch_dims(leaf))
        if leaf.input.can_be_cut(dim, ranks)
    )


def options(
    leaf: LeafModule, candidate: ModuleCandidate, ranks: int, machine: Machine
) -> Iterator[NodeOption]:
    """Yield a candidate between all states in which its input may arrive and its output may leave."""
    for source in _edges(leaf.input, ranks, features=leaf.split == "row"):
        entering = move(source, candidate.input, leaf.input, ranks)
        for target in _edges(leaf.output, ranks, features=leaf.split == "column"):
            is_shard_of_features = target.dim is not None and target.dim == len(leaf.output.shape) - 1
            leaving = move(candidate.output, target, leaf.output, ranks)
            if entering is None or leaving is None or (is_shard_of_features and candidate.output != target):
                continue
            option = NodeOption(
                inputs=(source,), output=target, candidate=candidate, entering=entering, leaving=leaving
            )
            yield _costed(option, leaf, candidate, ranks, machine)


def _costed(
    option: NodeOption, leaf: LeafModule, candidate: ModuleCandidate, ranks: int, machine: Machine
) -> NodeOption:
    moved = (
        *option.entering.collectives("input"),
        *candidate.finish.collectives("output"),
        *option.leaving.collectives("output"),
        *(
            collective
            for name, held in candidate.parameters.items()
            for collective in collectives(held.reduction, phase="backward", operand=name)
        ),
    )
    entered_bytes = leaf.input.local_bytes(candidate.input, ranks) if option.entering.forward else 0
    left_bytes = leaf.output.local_bytes(option.output, ranks)
    fsdp_bytes = _on_rank(leaf.fsdp_bytes, candidate, ranks)
    # units are gathered whole, so that no parameter has a latency of its own
    fsdp_s = fsdp_bytes / machine.link_bytes_per_s
    return replace(
        option,
        collectives=moved,
        seconds=machine.compute_s(candidate.flops) + communication_s(machine, moved) + fsdp_s,
        memory_bytes=entered_bytes + left_bytes + _on_rank(leaf.parameter_bytes, candidate, ranks),
        fsdp_bytes=fsdp_bytes,
    )


def summed_parameter(name: str, parameter: Tensor, ranks: int, machine: Machine) -> NodeOption:
    """Return the option of a parameter whose readers give summands of its gradient."""
    leaving = Move(backward=_reduction(parameter, Partial(), ranks))
    moved = leaving.collectives(name)
    return NodeOption(
        inputs=(), output=SUMMED, leaving=leaving, collectives=moved, seconds=communication_s(machine, moved)
    )


def _edges(value: TensorValue, ranks: int, *, features: bool) -> Iterator[State]:
    """Yield the states of a tensor next to a leaf module; only the model says where features are sharded."""
    yield WHOLE
    if value.needs_gradient:
        yield SUMMED
    for dim in range(len(value.shape) - (not features)):
        if value.can_be_cut(dim, ranks):
            yield sharded(dim)


def _on_rank(whole_bytes: Mapping[str, int], candidate: ModuleCandidate, ranks: int) -> int:
    cut = {name for name, held in candidate.parameters.items() if held.placement.is_shard()}
    return sum(count // (ranks if name in cut else 1) for name, count in whole_bytes.items())


def _linear(leaf: LeafModule, module: nn.Linear, ranks: int, machine: Machine) -> Iterator[ModuleCandidate]:
    """Yield the candidates of a linear, and with sums of products also those that scatter the output."""
    dtypes = {"input": leaf.input.dtype, "output": leaf.output.dtype}
    operation = module_operation(module, leaf.input.shape).typed(dtypes=dtypes)
    for candidate in candidates(operation, (ranks,), "complete", machine=machine):
        yield _module_candidate(candidate, leaf)
        if candidate.choices == ("k",):
            for dim in range(len(leaf.output.shape) - 1):
                if leaf.output.can_be_cut(dim, ranks):
                    # the output reduced to shards of `dim`, rather than to wholes
                    scattered = derive(
                        operation,
                        ("k",),
                        (ranks,),
                        name=candidate.name,
                        machine=machine,
                        output=(Shard(dim),),
                    )
                    yield _module_candidate(scattered, leaf)


def _module_candidate(candidate: ShardingCandidate, leaf: LeafModule) -> ModuleCandidate:
    entered, output = candidate.operand("input"), candidate.output
    (placement,) = output.placements
    # the products of a linear's backward, one for each of input and weight, are of one size
    gradients = leaf.input.needs_gradient + _needs_gradient(leaf.module, "weight")
    return ModuleCandidate(
        name=candidate.name,
        choice=candidate.choices[0],
        input=State(value=entered.placements[0], gradient=entered.computed[0]),
        output=WHOLE if placement.is_replicate() else State(value=placement, gradient=placement),
        finish=Move(forward=output.reduction, backward=reversed_steps(output.reduction)),
        parameters={
            operand.name: HeldParameter(
                placement=operand.placements[0],
                reduction=operand.reduction if _needs_gradient(leaf.module, operand.name) else (),
            )
            for operand in candidate.inputs[1:]
        },
        flops=candidate.cost.forward_flops + candidate.cost.backward_flops * gradients // 2,
    )


def _needs_gradient(module: nn.Module, name: str) -> bool:
    parameter: Tensor = getattr(module, name)
    return parameter.requires_grad


def _held(module: nn.Module, gradient: Placement, ranks: int) -> dict[str, HeldParameter]:
    return {
        name: HeldParameter(placement=Replicate(), reduction=_reduction(parameter, gradient, ranks))
        for name, parameter in module.named_parameters(recurse=False)
    }


def _reduction(parameter: Tensor, gradient: Placement, ranks: int) -> Steps:
    """Return what makes the gradient of a parameter whole, if it gets one."""
    if not parameter.requires_grad:
        return ()
    sizes = {"shape": tuple(parameter.shape), "mesh_shape": (ranks,), "itemsize": parameter.element_size()}
    return steps_between((gradient,), (Replicate(),), **sizes)


def _batch_dims(leaf: LeafModule) -> int:
    """Return how many leading dimensions a module works on one entry at a time."""
    module, dims = leaf.module, len(leaf.input.shape)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return dims - len(module.normalized_shape)
    if isinstance(module, nn.Embedding):
        # what renorms weights, or counts words, sees all of them
        return 0 if module.max_norm is not None or module.scale_grad_by_freq or module.sparse else dims
    return 0
