"""Zero bubble and activation checkpointing on two ranks of this machine: torch's checkpoint, then the repair.

torch's checkpoint recomputes a region once for each backward that asks. Zero-bubble schedules take one
backward for a stage's inputs, and later one for each group of parameters: a Llama block, which has nine, runs
1 + 1 + 9 times for a micro-batch. Gradients are right bit for bit, and nothing warns
(https://github.com/pytorch/torchtitan/issues/773). Selective checkpointing raises "Trying to backward an
extra time". All but what stands below `# the repair` is torch alone.

    python examples/split_backward.py
"""

import functools
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

RANKS, STAGES, MICROBATCHES, WIDTH, HEADS = 2, 4, 4, 64, 4
Wrap = Callable[[nn.Module], nn.Module]
"""Puts checkpointing around the blocks of a stage."""


class Block(nn.Module):
    """A Llama block: nine parameters."""

    def __init__(self) -> None:
        super().__init__()
        linear = functools.partial(nn.Linear, bias=False)
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up, self.down = linear(WIDTH, 256), linear(WIDTH, 256), linear(256, WIDTH)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return attention and MLP of `x`, (B, S, WIDTH)."""
        self.forwards += 1
        normed = self.norm_1(x)
        q, k, v = (
            each(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.norm_2(x)
        result: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return result


class Stage(nn.Module):
    """Two blocks of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the last block's output."""
        for block in self.layers:
            x = block(x)
        return x


class Flops(TorchDispatchMode):
    """Counts the FLOPs of operators; the hooks of `FlopCounterMode` do not run under `autograd.grad`."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def plain(stage: nn.Module) -> nn.Module:
    """Return the stage as it is."""
    return stage


def by_torch(stage: nn.Module, **options: Any) -> nn.Module:
    """Put torch's checkpoint around each block."""
    for block in stage.layers:  # type: ignore[union-attr]
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    return stage


def selective_by_torch(stage: nn.Module) -> nn.Module:
    """Put torch's selective checkpoint around each block, which keeps the products of matrices."""
    kept = [torch.ops.aten.mm.default]
    return by_torch(stage, context_fn=functools.partial(create_selective_checkpoint_contexts, kept))


# the repair


def once(stage: nn.Module) -> nn.Module:
    """Put regions around the blocks that recompute once for both parts."""
    from strategies.ac.full import Full  # noqa: PLC0415 (the rest is torch alone)

    return Full(layers_fqn="layers").apply(stage)


def selective_once(stage: nn.Module) -> nn.Module:
    """Put such regions around the blocks that keep the products of matrices."""
    from strategies.ac.selective_op import SelectiveOp  # noqa: PLC0415

    return SelectiveOp(layers_fqn="layers", save_ops=("matmul",)).apply(stage)


def step(rank: int, wrap: Wrap) -> tuple[list[Counter[int]], int, list[Tensor]]:
    """Run a step of the schedule; return how often each stage's blocks ran, its FLOPs, and the gradients."""
    torch.manual_seed(0)
    stages = {index: Stage() for index in range(STAGES)}  # all, so that each has its weights on any rank
    mine = {index: stages[index] for index in range(rank, STAGES, RANKS)}
    cpu, between = torch.device("cpu"), torch.randn(2, 32, WIDTH, requires_grad=True)
    batch = torch.randn(MICROBATCHES * 2, 32, WIDTH)
    schedule = ScheduleInterleavedZeroBubble(
        [
            PipelineStage(
                wrap(stage),
                index,
                STAGES,
                cpu,
                input_args=between if index else batch[:2],
                output_args=between,
            )
            for index, stage in mine.items()
        ],
        n_microbatches=MICROBATCHES,
        loss_fn=lambda outputs, _: outputs.square().mean(),
    )
    with Flops() as counter:
        schedule.step(*([batch] if rank == 0 else []), target=batch, return_outputs=False)
    gradients = [each.grad for stage in mine.values() for each in stage.parameters() if each.grad is not None]
    blocks: list[Any] = [list(stage.layers) for stage in mine.values()]
    forwards = [Counter(int(block.forwards) for block in each) for each in blocks]
    return forwards, counter.total, gradients


def run(rank: int, folder: str, ways: tuple[str, ...]) -> None:
    """Compare ways on one rank with the plain stages, and print what the last rank finds."""
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # prints the whole schedule
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"file://{folder}/{ways[0]}")
    _, plain_flops, expected = step(rank, plain)
    for way in ways:
        forwards, flops, gradients = step(rank, globals()[way])
        if rank == RANKS - 1:
            counts = {count // MICROBATCHES for each in forwards for count in each}
            is_equal = all(map(torch.equal, gradients, expected))
            sys.stdout.write(
                f"{way}: {' or '.join(map(str, sorted(counts)))} forwards of a block for a micro-batch, "
                f"{flops / plain_flops:.2f} times the FLOPs of a step, gradients equal: {is_equal}\n"
            )
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    ways = ("plain", "by_torch", "once", "selective_once", "selective_by_torch")
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(run, args=(folder, ways), nprocs=RANKS, start_method="fork")  # imports once
        except ProcessRaisedException as error:  # of the last way
            (line, *_) = [line for line in str(error).splitlines() if "extra time" in line]
            sys.stdout.write(f"selective_by_torch: {line}\n")
