"""Backward in two parts, as zero-bubble schedules run it: torch's checkpoint and ours, in one process.

`stage_backward_input` and `stage_backward_weight` of `torch.distributed.pipelining` are called as a schedule
calls them, for one micro-batch of one stage of Llama blocks. Bytes are those of all storages that operators
make; what lies between the parts contains torch's own gradients at the places where the weight part begins.

    python -m bench.peers --part split_backward [--blocks 4] [--width 64] [--dropout 0.1]
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bench.output import parser, publish
from bench.table import table_of
from strategies.ac.budget import Budget
from strategies.ac.full import Full
from strategies.ac.nested import Nested
from strategies.ac.offload import Offload
from strategies.ac.selective_layer import SelectiveLayer
from strategies.ac.selective_op import SelectiveOp
from strategies.base import Strategy
from strategies.estimate.patched import without_collector
from strategies.step.ledger import Kind, Life, highest
from strategies.step.live_storages import RANDOM_STATE
from strategies.step.position import Position
from strategies.step.step_recorder import StepRecorder

Variant: TypeAlias = Callable[[nn.Module], nn.Module]
"""Puts activation checkpointing around the blocks of a stage."""

Gradients: TypeAlias = "list[Tensor | None]"
Measured: TypeAlias = "tuple[SplitStep, Gradients]"
"""One micro-batch, and gradients of input and parameters."""

_BATCH, _LENGTH, _HEADS = 2, 32, 4
_SAVED = (torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)  # noqa: SLF001 (its name)


class Norm(nn.Module):
    """Root mean square of the last dimension, as single operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, normed."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """A Llama block: nine parameters, each a group of its own in the weight part."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        linear = functools.partial(nn.Linear, bias=False)
        self.norm_1, self.norm_2 = Norm(width), Norm(width)
        self.q, self.k, self.v, self.o = (linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = (
            linear(width, 3 * width),
            linear(width, 3 * width),
            linear(3 * width, width),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return attention and MLP of `x`, (B, S, D)."""
        normed = self.norm_1(x)
        q, k, v = (
            each(normed).unflatten(-1, (_HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.o(mixed.transpose(1, 2).flatten(2)))
        normed = self.norm_2(x)
        result: Tensor = x + self.dropout(self.down(functional.silu(self.gate(normed)) * self.up(normed)))
        return result


class Stage(nn.Module):
    """The blocks of one stage, one after another, each inside of the module that is checkpointed."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(nn.Sequential, blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the last block makes of `x`."""
        for block in self.layers:
            x = block(x)
        return x

    def counter(self) -> Callable[[], float]:
        """Return what says how many forwards a block has had since."""
        calls = 0  # no attribute of a module, which `rewind` would put back

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        for layer in self.layers:
            layer[0].register_forward_pre_hook(count)  # type: ignore[index]
        return lambda: calls / len(self.layers)


def recorder_of(standing: Sequence[Tensor]) -> StepRecorder:
    """Return a recorder that knows what is there before."""
    recorder = StepRecorder(Position(), device="cpu")
    recorder.add_standing(standing)
    return recorder


def is_made(life: Life) -> bool:
    """Tell whether an operator has made a storage."""
    return life.kind is not Kind.STANDING and life.op != RANDOM_STATE


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitStep:
    """One micro-batch of one stage.

    Fields:
        way: name of the variant.
        is_split: backward ran in two parts.
        input_forwards, weight_forwards: recomputed forwards of a block, by the part that asked.
        flops: of the backward, with what it recomputes.
        saved_bytes: alive after forward.
        between_bytes: alive between the parts.
        peak_bytes: the most from the end of forward on.
        left_bytes: alive after the weight part, besides gradients; no collector of garbage has run.
        is_equal: gradients are bitwise those of the plain stage and one backward.
        flops_ratio: FLOPs / those of the plain stage's backward.
        reason: why it did not run.
    """

    way: str
    is_split: bool
    input_forwards: float = 0.0
    weight_forwards: float = 0.0
    flops: int = 0
    saved_bytes: int = 0
    between_bytes: int = 0
    peak_bytes: int = 0
    left_bytes: int = 0
    is_equal: bool = False
    flops_ratio: float = 0.0
    reason: str = ""


def variants() -> dict[str, Variant]:
    """Return the rows: torch's own functions, and our variants."""
    strategies: dict[str, Strategy] = {
        "full, torch": Full(layers_fqn="layers", split_backward="torch"),
        "full, hold": Full(layers_fqn="layers"),
        "full, again": Full(layers_fqn="layers", split_backward="again"),
        "selective_layer, hold": SelectiveLayer(layers_fqn="layers"),
        "selective_op, hold": SelectiveOp(layers_fqn="layers"),
        "selective_op, again": SelectiveOp(layers_fqn="layers", split_backward="again"),
        "nested, hold": Nested(layers_fqn="layers"),
        "nested, again": Nested(layers_fqn="layers", split_backward="again"),
        "budget of 80 %": Budget(layers_fqn="layers", fraction=0.8),
        "offload": Offload(layers_fqn="layers"),
    }
    return {
        "none": lambda stage: stage,
        "torch's selective checkpoint": _selective_of_torch,
        **{name: strategy.apply for name, strategy in strategies.items()},
    }


def step(way: str, variant: Variant, stage: Stage, x: Tensor, *, is_split: bool = True) -> Measured:
    """Return one micro-batch of a stage, and the gradients of its input and its parameters.

    Args:
        way: name of the variant.
        variant: applied to the stage.
        stage: plain blocks, whose gradients are empty.
        x: the stage's input.
        is_split: run backward in two parts.
    """
    run = variant(stage)
    if way.startswith("budget"):  # it plans in its first call
        run(x.detach().requires_grad_()).sum().backward()
        run.zero_grad()
    weights, forwards = list(stage.parameters()), stage.counter()
    x = x.detach().requires_grad_()
    gradient = torch.ones_like(x)
    torch.manual_seed(1)
    gc.collect()
    with without_collector(), recorder_of([*weights, *stage.buffers(), x, gradient]) as recorder:
        y = run(x)
        ledger, start, saved = recorder.ledger, recorder.ledger.moment, recorder.ledger.total(is_made)
        operators, calls = len(recorder.operators), forwards()
        if is_split:
            _, groups = stage_backward_input([y], [gradient], [x], iter(weights))
            between, input_calls = ledger.total(is_made), forwards()
            stage_backward_weight(iter(weights), groups)
            del groups
        else:
            torch.autograd.backward(y, gradient)
            between, input_calls = 0, forwards()
        del y
        left = ledger.total(is_made)
    gradients = [None if each.grad is None else each.grad.detach() for each in (x, *weights)]
    made = (each for each in ledger.changes[start:] if is_made(ledger.lives[each.life]))
    measured = SplitStep(
        way=way,
        is_split=is_split,
        input_forwards=input_calls - calls,
        weight_forwards=forwards() - input_calls,
        flops=sum(each.flops for each in recorder.operators[operators:]),
        saved_bytes=saved,
        between_bytes=between,
        peak_bytes=highest(saved, made)[0].nbytes,
        left_bytes=left - sum(each.untyped_storage().nbytes() for each in gradients if each is not None),
    )
    return measured, gradients


def rows(blocks: int, width: int, dropout: float) -> Iterator[SplitStep]:
    """Yield each variant with one backward and with a split one, compared with the plain stage.

    Args:
        blocks: of the stage.
        width: of a block.
        dropout: probability.
    """
    plain: Measured | None = None
    for is_split in (False, True):
        for way, variant in variants().items():
            torch.manual_seed(0)
            stage = Stage([Block(width, dropout) for _ in range(blocks)])
            x = torch.randn(_BATCH, _LENGTH, width)
            try:
                found = step(way, variant, stage, x, is_split=is_split)
            except RuntimeError as error:
                yield SplitStep(way=way, is_split=is_split, reason=str(_first_of(error)).partition(".")[0])
                continue
            plain = plain or found
            is_equal = are_equal(found[1], plain[1])
            yield replace(found[0], is_equal=is_equal, flops_ratio=found[0].flops / plain[0].flops)


def are_equal(left: Gradients, right: Gradients) -> bool:
    """Say whether gradients are bitwise equal, or absent in both."""
    return all(
        one is other if one is None or other is None else torch.equal(one, other)
        for one, other in zip(left, right, strict=True)
    )


def main(words: Sequence[str]) -> int:
    """Measure, print the table, write the JSON; return 1 where a gradient differs or something stays."""
    arguments = parser(__doc__, "split_backward", "peers")
    arguments.add_argument("--blocks", type=int, default=4, help="blocks of the stage")
    arguments.add_argument("--width", type=int, default=64, help="of a block")
    arguments.add_argument("--dropout", type=float, default=0.0, help="probability")
    chosen = arguments.parse_args(words)
    torch.set_num_threads(1)
    found = list(rows(chosen.blocks, chosen.width, chosen.dropout))
    protocol = {"blocks": chosen.blocks, "dropout": chosen.dropout, "shape": (_BATCH, _LENGTH, chosen.width)}
    publish(_table(found), chosen.out, protocol=protocol, results=found)
    return int(any(not row.is_equal or row.left_bytes for row in found if not row.reason))


def _table(found: Sequence[SplitStep]) -> Table:
    return table_of(
        found,
        {
            "way": "way",
            "backward": lambda row: "split" if row.is_split else "one",
            "forwards": lambda row: f"1 + {row.input_forwards:g} + {row.weight_forwards:g}",
            "FLOPs / plain": "flops_ratio:.2f",
            "after forward": "saved_bytes:,",
            "between": "between_bytes:,",
            "peak": "peak_bytes:,",
            "equal": "is_equal",
            "": "reason",
        },
        caption="forwards of a block: first + of the input part (the one backward) + of the weight part",
    )


def _selective_of_torch(stage: nn.Module) -> nn.Module:
    """Return `stage` with torch's own selective checkpoint around each block, as torchtitan puts it there."""
    contexts = functools.partial(create_selective_checkpoint_contexts, list(_SAVED))
    for counted in stage.layers:  # type: ignore[union-attr]
        counted.forward = functools.partial(
            checkpoint, counted.forward, use_reentrant=False, context_fn=contexts
        )
    return stage


def _first_of(error: BaseException) -> BaseException:
    """Return the error that caused the others."""
    return error if error.__cause__ is None else _first_of(error.__cause__)
