"""Naming: what the candidates of an operator are called, and which of them ColossalAI has too.

Labels `b0`, `b1`, … are batch dimensions, numbered as in the output. Operators in rows, `(…, k) x (k, n)`,
are named by logical dimensions, `S0S1 = S0R x RS1_2`; batched ones, `(b, i, k) x (b, k, j)`, by labels,
`Sb0Si1 = Sb0Si1 x Sb0`; all others by physical dimensions, `RS0 = S0R`.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from strategies.shard.candidates.layout import grouped_sequence, sharding_sequence
from strategies.shard.candidates.operation import Choices, Label, LabelledOperand, Operation

_MATRIX = 2


def name_in_rows(operation: Operation, choices: Choices) -> str:
    """Return `output = input x weight` in logical dimensions, and which batch dimensions are sharded."""
    specs = [
        "".join(grouped_sequence(operand.placements(choices), operand.logical)[:_MATRIX]) or "R"
        for operand in _factors(operation)
    ]
    return "_".join([f"{specs[0]} = {' x '.join(specs[1:])}", *_batch_dims(choices)])


def is_classic_in_rows(used: Choices) -> bool:
    """Return whether ColossalAI has it: one batch dimension at most, and not with replicated axes only."""
    batch = {choice for choice in used if _is_batch(choice)}
    leaves_axes = None in used and set(used) <= {None, *batch}
    return len(batch) <= 1 and not (batch and leaves_axes)


def name_batched(operation: Operation, choices: Choices) -> str:
    """Return `output = input x other` in labels, and which batch dimensions if there are several."""
    output, left, right = _factors(operation)
    inner = {choice for choice in choices if choice is not None and not _is_batch(choice)}
    first, second = (_lettered(operand, choices, inner) for operand in (output, left))
    text = f"{first} = {second} x {_lettered(right, choices)}"
    has_several = sum(map(_is_batch, output.labels)) > 1
    return "_".join([text, *_batch_dims(choices)]) if has_several else text


def is_classic_batched(used: Choices) -> bool:
    """Return whether ColossalAI has it: every axis shards, and one batch dimension is sharded."""
    return None not in used and len({choice for choice in used if _is_batch(choice)}) == 1


def is_classic_embedding(used: Choices) -> bool:
    """Return whether ColossalAI has it: no sharded vocabulary `v`, and one batch dimension at most."""
    return "v" not in used and len(set(used) - {None, "d"}) <= 1


def name_by_dimensions(operation: Operation, choices: Choices) -> str:
    """Return `RS0 = S0R x R`: the placements of the output, or of the first of several, and of all inputs."""
    operands = (operation.outputs[0], *operation.inputs)
    specs = ["".join(_sequence(operand, choices)) or "R" for operand in operands]
    return f"{specs[0]} = {' x '.join(specs[1:])}"


def name_layer_norm(operation: Operation, choices: Choices) -> str:
    """Return `[S0, R] = [S0, R] x [R]`; ColossalAI calls full replication `RR = RR x R` in any dimension."""
    if not any(choices):
        return "RR = RR x R"
    operands = (operation.outputs[0], *operation.inputs[:2])
    specs = [f"[{', '.join(_sequence(operand, choices))}]" for operand in operands]
    return f"{specs[0]} = {' x '.join(specs[1:])}"


def name_batch_norm(operation: Operation, choices: Choices) -> str:
    """Return the name in rows, and whether the batch's statistics are synchronised."""
    name = name_in_rows(operation, choices)
    return f"{name} WITH SYNC_BN" if "batch" in choices else name


def _factors(operation: Operation) -> tuple[LabelledOperand, ...]:
    """Return the output, and the first two operands of the first term."""
    inputs = {operand.name: operand for operand in operation.inputs}
    return (operation.outputs[0], *(inputs[name] for name in operation.terms[0][:2]))


def _sequence(operand: LabelledOperand, choices: Choices) -> tuple[str, ...]:
    return sharding_sequence(operand.placements(choices), len(operand.shape))


def _is_batch(choice: Label) -> bool:
    return choice is not None and choice.startswith("b") and choice[1:].isdigit()


def _batch_dims(choices: Choices) -> list[str]:
    """Return the number of the sharded batch dimension; where they differ, of every axis that has one."""
    dims = [choice[1:] for choice in choices if choice is not None and _is_batch(choice)]
    return dims[:1] if len(set(dims)) == 1 else dims


def _lettered(operand: LabelledOperand, choices: Choices, inner: AbstractSet[Label] = frozenset()) -> str:
    """Return `Sb0Si1`: by the first letter of labels, which mesh axes shard it.

    An operand that is sharded, but lacks one of the `inner` labels that are, ends in `R`.
    """
    axes: dict[str, str] = {}
    for label in operand.labels:
        for axis, choice in enumerate(choices):
            if label is not None and choice == label:
                axes[label[0]] = axes.get(label[0], "") + str(axis)
    text = "".join(f"S{letter}{''.join(sorted(found))}" for letter, found in axes.items())
    return text + "R" if not text or not inner <= set(operand.labels) else text
