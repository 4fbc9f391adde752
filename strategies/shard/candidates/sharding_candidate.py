"""A sharding candidate: one way to place the operands of an operator on a device mesh."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from strategies.shard.candidates.candidate_cost import CandidateCost
from strategies.shard.candidates.layout import Placements, Shape, local_shape, sharding_sequence
from strategies.shard.candidates.operation import Choices, OperandType, Operation
from strategies.shard.candidates.redistribution import Collective, Steps, steps_between


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedOperand:
    """An operand with its placements.

    Fields:
        name: role of the operand, `input`, `weight`, `bias`, `output`.
        type: `arg`, `param`, `buffer` or `output`.
        shape: physical shape of the whole operand.
        logical_shape: shape in the operator's mathematics: batch dimensions as one, a linear's weight
            transposed.
        placements: placements of the operand and its gradient, one a mesh axis.
        computed: placements in which the output, or the gradient of an input, is computed, before it is
            communicated: `Partial` on axes where every rank has a summand. Equal to `placements`
            for what gets no gradient.
        mesh_shape: sizes of the mesh axes.
    """

    name: str
    type: OperandType
    shape: Shape
    logical_shape: Shape
    placements: Placements
    computed: Placements
    mesh_shape: Shape
    itemsize: int

    @property
    def sharding_sequence(self) -> tuple[str, ...]:
        """The mesh axes that shard each physical dimension: `("R", "S0", "R", "S1")`."""
        return sharding_sequence(self.placements, len(self.shape))

    @property
    def spec(self) -> str:
        """The sharding sequence in one word: `RS0RS1`; `R` where there is no dimension."""
        return "".join(self.sharding_sequence) or "R"

    @property
    def local_shape(self) -> Shape:
        """Shape of one rank's part."""
        return local_shape(self.shape, self.placements, self.mesh_shape)

    @property
    def local_bytes(self) -> int:
        """Bytes of one rank's part."""
        return prod(self.local_shape) * self.itemsize

    @property
    def reduction(self) -> Steps:
        """The steps from where the output, or the gradient of an input, is computed to where it lies."""
        return steps_between(
            self.computed,
            self.placements,
            shape=self.shape,
            mesh_shape=self.mesh_shape,
            itemsize=self.itemsize,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingCandidate:
    """One way to place the operands of an operator.

    Fields:
        name: `S0S1 = S0R x RS1_0`: the logical placements of output and inputs, and the physical batch
            dimension that is sharded.
        choices: label that each mesh axis shards; `None` replicates.
        mesh_shape: sizes of the mesh axes.
        operands: inputs in the order of the operator, then what it makes.
        statistics: sums that are synchronised on the way, and their gradients.
        communication: the collectives of one step, those of the forward first.
        cost: cost of one rank in a training step in which every differentiable operand gets its gradient.
    """

    name: str
    operation: Operation
    choices: Choices
    mesh_shape: Shape
    operands: tuple[PlacedOperand, ...]
    communication: tuple[Collective, ...]
    cost: CandidateCost
    statistics: tuple[PlacedOperand, ...] = ()

    @property
    def inputs(self) -> tuple[PlacedOperand, ...]:
        """The operands that the operator reads."""
        return self.operands[: len(self.operation.inputs)]

    @property
    def outputs(self) -> tuple[PlacedOperand, ...]:
        """The operands that the operator makes."""
        return self.operands[len(self.operation.inputs) :]

    @property
    def output(self) -> PlacedOperand:
        """The operand that the operator makes, the first where there are several."""
        return self.outputs[0]

    def operand(self, name: str) -> PlacedOperand:
        """Return the operand of that role. Raises KeyError: the operator has no such operand."""
        return {operand.name: operand for operand in self.operands}[name]
