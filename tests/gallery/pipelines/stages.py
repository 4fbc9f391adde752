"""What entries share: blocks with nine parameters, and a schedule of torch with two stages on one rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.utils.checkpoint import checkpoint

from strategies import Strategy
from tests.gallery.parts import WIDTH, linear

MICROBATCHES, ROWS = 4, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCase:
    """A defect of a step of several micro-batches.

    Fields:
        by_torch: shows it with torch alone, and says in a sentence what happens.
        says: that sentence.
        here: what becomes of it in this package.
        verdict: `known bad`, `refused`, `differs` or `raises`, of the defect where this package meets it.
        why: likely cause, a sentence.
        fix: what mends it, a sentence.
        link: thread upstream that reports this or the like; empty where we know none.
    """

    by_torch: Callable[[], str]
    says: str
    here: str
    verdict: str
    why: str
    fix: str
    link: str = ""


class Block(nn.Module):
    """Nine linear layers, each a group of parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(9))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return `(B, WIDTH)`."""
        self.forwards += 1
        for each in self.linears:
            x = each(x).tanh()
        return x


class Stage(nn.Module):
    """A layer, then a block: a region whose input requires a gradient."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.stem = linear()
        self.blocks: Any = nn.ModuleList([block()])

    def forward(self, x: Tensor) -> Any:
        """Return `(B, WIDTH)`."""
        return self.blocks[0](self.stem(x))


def checkpointed(stage: nn.Module, **options: Any) -> nn.Module:
    """Put torch's checkpoint around the block, non-reentrant unless `options` say otherwise."""
    block: Any = stage.get_submodule("blocks.0")
    block.forward = partial(checkpoint, block.forward, **{"use_reentrant": False, **options})
    return stage


def trained(
    variant: Strategy | Callable[[nn.Module], nn.Module] | None = None,
    *,
    schedule: Callable[..., Any] = ScheduleInterleaved1F1B,
    block: Callable[[], nn.Module] = Block,
    is_inferred: bool = False,
    parts: int = 1,
) -> tuple[list[Any], list[Tensor]]:
    """Return the blocks of two stages and their gradients, after a step of four micro-batches.

    Args:
        variant: puts checkpoints into a stage.
        schedule: of `torch.distributed.pipelining`.
        block: makes the block of a stage.
        is_inferred: torch infers the shapes between stages.
        parts: number by which the loss of a micro-batch is divided.
    """
    apply: Callable[[nn.Module], Any] = (
        variant.apply if isinstance(variant, Strategy) else variant or nn.Module.train
    )
    torch.manual_seed(0)
    stages = [Stage(block) for _ in range(2)]
    batch = torch.randn(MICROBATCHES * ROWS, WIDTH)
    between = torch.zeros(ROWS, WIDTH, requires_grad=True)
    with _one_rank():
        run = schedule(
            [
                PipelineStage(
                    apply(stage),
                    index,
                    2,
                    torch.device("cpu"),
                    input_args=None if is_inferred else between if index else batch[:ROWS],
                    output_args=None if is_inferred else between,
                )
                for index, stage in enumerate(stages)
            ],
            n_microbatches=MICROBATCHES,
            loss_fn=lambda outputs, _: outputs.square().mean() / parts,
        )
        run.step(batch, target=batch, return_outputs=False)
    return [stage.blocks[0] for stage in stages], [
        each.grad for stage in stages for each in stage.parameters() if each.grad is not None
    ]


def apart(gradients: list[Tensor], others: list[Tensor]) -> float:
    """Return how far gradients are apart, as a share of their norm; 0 where all bits are equal."""
    if all(map(torch.equal, gradients, others)):
        return 0.0
    one, other = (torch.cat([each.flatten() for each in side]) for side in (gradients, others))
    return float((one - other).norm() / other.norm())


def raised(step: Callable[[], Any]) -> str:
    """Return the first sentence of what a step raises, of its cause where torch wraps it."""
    try:
        step()
    except RuntimeError as error:
        while error.__cause__ is not None:
            error = error.__cause__  # type: ignore[assignment]
        return f"raises {str(error).strip().partition('. ')[0].splitlines()[0]}"
    return "raises nothing"


@contextmanager
def _one_rank() -> Iterator[None]:
    """Give the scope a process group of one rank, and let a schedule that fails not print itself."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        logger.setLevel(level)
