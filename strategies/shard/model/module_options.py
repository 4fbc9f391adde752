"""Ways of a leaf module: how it may run on one mesh axis, from its operator's sharding candidates.

Around a leaf module a strategy can stand, so that what it reads and gives may change its state there. An
option is a way together with the states in which its input comes and its output goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.cost import Hardware
from strategies.shard.candidates.derivation import derive
from strategies.shard.candidates.enumeration import candidates
from strategies.shard.candidates.operation import Choice
from strategies.shard.candidates.redistribution import Collective, Step, collectives, plan, reversed_plan
from strategies.shard.model.state import SUMMED, WHOLE, Move, State, Value, move, sharded
from strategies.shard.operators.module_operations import module_operation

REPLICATED = "replicated"
"""Name of the way in which every rank computes everything, of modules that have no named candidates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A parameter of a leaf module as one rank holds it.

    Fields:
        placement: `Shard` for a part of its own, `Replicate` for all of it.
        reduction: steps that make its gradient whole.
    """

    placement: Placement
    reduction: tuple[Step, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How a leaf module runs on a rank.

    Fields:
        name: of the candidate.
        choice: what the axis shards: `k`, `n`, a batch dimension `b0`, or nothing.
        input: state in which it reads its input.
        output: state in which it leaves its output.
        finish: steps of the product of a linear, and of its gradient, before the bias is added.
        parameters: by name.
        flops: of one rank in one step.
    """

    name: str
    choice: Choice
    input: State = WHOLE
    output: State = WHOLE
    finish: Move = field(default_factory=Move)
    parameters: Mapping[str, Held] = field(default_factory=lambda: MappingProxyType({}))
    flops: int = 0

    @property
    def changes_parameters(self) -> bool:
        """Whether parameters, or their gradients, are others than those of the plain module."""
        return any(held.reduction or held.placement.is_shard() for held in self.parameters.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A way of a leaf module, or of a function, between states.

    Fields:
        inputs: states of the tensors that come in, in their order.
        output: state of what goes out.
        way: of a leaf module.
        entering: brings a leaf module's input to its way.
        leaving: brings its output away.
        collectives: of one step.
        seconds: of one rank in one step, computation and communication.
        memory_bytes: of parameters, their gradients, and what goes out, on one rank.
        fsdp_bytes: payload of FSDP's collectives of the parameters, which are larger the less the axis cuts.
    """

    inputs: tuple[State, ...]
    output: State
    way: Way | None = None
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
class Leaf:
    """A leaf module that is called once.

    Fields:
        fqn: its plain FQN.
        module: a meta tensor's module is enough.
        input, output: the tensors it reads and gives.
        split: what the model allows for its features: `column`, that the code behind it runs on a shard of
            its output features; `row`, that the code before it gives a shard of its input features.
        parameter_bytes: what a rank keeps of each parameter that this module alone reads, and of its
            gradient, where it is whole.
        fsdp_bytes: payload of FSDP's collectives of each such parameter, where the axis leaves it whole.
    """

    fqn: str
    module: nn.Module
    input: Value
    output: Value
    split: str | None
    parameter_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    fsdp_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


def ways(leaf: Leaf, ranks: int, hardware: Hardware) -> tuple[Way, ...]:
    """Return how a leaf module may run, full replication first."""
    module = leaf.module
    if isinstance(module, nn.Linear):
        return tuple(_linear(leaf, module, ranks, hardware))
    whole = Way(name=REPLICATED, choice=None, parameters=_held(module, Replicate(), ranks))
    return whole, *(
        Way(
            name=f"S{dim}",
            choice=f"b{dim}",
            input=sharded(dim),
            output=sharded(dim),
            parameters=_held(module, Partial(), ranks),
        )
        for dim in range(_batch_dims(leaf))
        if leaf.input.can_be_cut(dim, ranks)
    )


def options(leaf: Leaf, way: Way, ranks: int, hardware: Hardware) -> Iterator[Option]:
    """Yield a way between all states in which its input may come and its output may go."""
    for source in _edges(leaf.input, ranks, features=leaf.split == "row"):
        entering = move(source, way.input, leaf.input, ranks)
        for target in _edges(leaf.output, ranks, features=leaf.split == "column"):
            is_shard_of_features = target.dim is not None and target.dim == len(leaf.output.shape) - 1
            leaving = move(way.output, target, leaf.output, ranks)
            if entering is None or leaving is None or (is_shard_of_features and way.output != target):
                continue
            passage = _Passage(source=source, entering=entering, target=target, leaving=leaving)
            yield _option(leaf, way, passage, ranks, hardware)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Passage:
    source: State
    entering: Move
    target: State
    leaving: Move


def _option(leaf: Leaf, way: Way, passage: _Passage, ranks: int, hardware: Hardware) -> Option:
    entering, leaving = passage.entering, passage.leaving
    moved = (
        *entering.collectives("input"),
        *way.finish.collectives("output"),
        *leaving.collectives("output"),
        *(
            collective
            for name, held in way.parameters.items()
            for collective in collectives(held.reduction, phase="backward", operand=name)
        ),
    )
    entered = leaf.input.local_bytes(way.input, ranks) if entering.forward else 0
    fsdp_bytes = _on_rank(leaf.fsdp_bytes, way, ranks)
    return Option(
        inputs=(passage.source,),
        output=passage.target,
        way=way,
        entering=entering,
        leaving=leaving,
        collectives=moved,
        # units are gathered whole, so that no parameter has a latency of its own
        seconds=hardware.compute_s(way.flops)
        + hardware.communication_s(moved)
        + fsdp_bytes / hardware.bandwidth_bytes_per_s,
        memory_bytes=entered
        + leaf.output.local_bytes(passage.target, ranks)
        + _on_rank(leaf.parameter_bytes, way, ranks),
        fsdp_bytes=fsdp_bytes,
    )


def summed_parameter(name: str, parameter: Tensor, ranks: int, hardware: Hardware) -> Option:
    """Return the option of a parameter whose readers give summands of its gradient."""
    leaving = Move(backward=_reduction(parameter, Partial(), ranks))
    moved = leaving.collectives(name)
    return Option(
        inputs=(),
        output=SUMMED,
        leaving=leaving,
        collectives=moved,
        seconds=hardware.communication_s(moved),
    )


def _edges(value: Value, ranks: int, *, features: bool) -> Iterator[State]:
    """Yield the states of a tensor beside a leaf module; only the model says where features are sharded."""
    yield WHOLE
    if value.needs_gradient:
        yield SUMMED
    for dim in range(len(value.shape) - (not features)):
        if value.can_be_cut(dim, ranks):
            yield sharded(dim)


def _on_rank(whole_bytes: Mapping[str, int], way: Way, ranks: int) -> int:
    """Return the total of bytes of parameters, given for wholes, as a rank holds them."""
    cut = {name for name, held in way.parameters.items() if held.placement.is_shard()}
    return sum(count // (ranks if name in cut else 1) for name, count in whole_bytes.items())


def _linear(leaf: Leaf, module: nn.Linear, ranks: int, hardware: Hardware) -> Iterator[Way]:
    # whole or in even shards: what the operator's own enumeration has
    dtypes = {"input": leaf.input.dtype, "output": leaf.output.dtype}
    operation = module_operation(module, leaf.input.shape).typed(dtypes=dtypes)
    for candidate in candidates(operation, (ranks,), "complete", hardware=hardware):
        yield _way(candidate, leaf)
        if candidate.choices == ("k",):
            for dim in range(len(leaf.output.shape) - 1):
                if leaf.output.can_be_cut(dim, ranks):
                    yield _way(_scattered(candidate, dim, hardware), leaf)


def _scattered(candidate: Candidate, dim: int, hardware: Hardware) -> Candidate:
    """Return the candidate with its output reduced to shards of `dim`, rather than to wholes."""
    return derive(
        candidate.operation,
        candidate.choices,
        candidate.mesh_shape,
        name=candidate.name,
        hardware=hardware,
        output=(Shard(dim),),
    )


def _way(candidate: Candidate, leaf: Leaf) -> Way:
    entered, output = candidate.operand("input"), candidate.output
    (placement,) = output.placements
    # the products of a linear's backward, one for each of input and weight, are of one size
    gradients = leaf.input.needs_gradient + _needs_gradient(leaf.module, "weight")
    return Way(
        name=candidate.name,
        choice=candidate.choices[0],
        input=State(value=entered.placements[0], gradient=entered.computed[0]),
        output=WHOLE if placement.is_replicate() else State(value=placement, gradient=placement),
        finish=Move(forward=output.reduction, backward=reversed_plan(output.reduction)),
        parameters={
            operand.name: Held(
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


def _held(module: nn.Module, gradient: Placement, ranks: int) -> dict[str, Held]:
    """Return the parameters of a module, whole on every rank, with gradients that are wholes or summands."""
    return {
        name: Held(placement=Replicate(), reduction=_reduction(parameter, gradient, ranks))
        for name, parameter in module.named_parameters(recurse=False)
    }


def _reduction(parameter: Tensor, gradient: Placement, ranks: int) -> tuple[Step, ...]:
    """Return what makes the gradient of a parameter whole, if it gets one."""
    if not parameter.requires_grad:
        return ()
    sizes = {"shape": tuple(parameter.shape), "mesh_shape": (ranks,), "itemsize": parameter.element_size()}
    return plan((gradient,), (Replicate(),), **sizes)


def _batch_dims(leaf: Leaf) -> int:
    """Return how many leading dimensions a module works on one entry at a time."""
    module, dims = leaf.module, len(leaf.input.shape)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return dims - len(module.normalized_shape)
    if isinstance(module, nn.Embedding):
        # what renorms weights, or counts words, sees all of them
        return 0 if module.max_norm is not None or module.scale_grad_by_freq or module.sparse else dims
    return 0
