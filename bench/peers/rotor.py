"""rotor's optimal persistent schedule of a chain of blocks: its dynamic programme, on torch's checkpoint.

No release of rotor is on PyPI (the package of that name is another program), and Rockmate, which contains
one, needs a licence of Gurobi. So the programme is written from the paper; the schedule runs as nested
checkpoints.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2020, "Optimal checkpointing for heterogeneous
chains", INRIA RR-9302, theorem 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from bench.peers.blockwise import Schedule, Scheduled, run_by
from bench.peers.workload import Peer, Workload, blocks_of
from strategies.estimate.tensors import plain_tensors, tensors_in

_SLOTS = 256
"""Parts that all bytes of a chain are counted in."""

SHARES = (0.2, 0.3, 0.4, 0.6)
"""Budgets, of the bytes that all blocks save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes:
    """What a block holds for backward.

    Fields:
        input_bytes: of its first input.
        saved_bytes: of what it saves beside its input and parameters.
    """

    input_bytes: int
    saved_bytes: int


def peers(sizes: Sequence[BlockSizes]) -> Iterator[Peer]:
    """Yield a peer for each distinct schedule among the budgets."""
    known: dict[Schedule, float] = {}
    for share in SHARES:
        schedule = best_schedule(sizes, int(share * sum(each.saved_bytes for each in sizes)))
        if schedule is not None:
            known.setdefault(schedule, share)
    for schedule, share in known.items():
        run = partial(run_by, make=partial(Scheduled, schedule=schedule))
        yield Peer(name="rotor (from the paper)", setting=f"{share:.0%}", change=run)


def sizes_of_blocks(workload: Workload) -> list[BlockSizes]:
    """Return the sizes of the blocks of the plain model, in the order of forward."""
    trainee = workload.trainee()
    standing = {_storage(each) for each in trainee.model.parameters()}
    standing |= {_storage(each) for each in trainee.model.buffers()}
    found: list[BlockSizes] = []
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def before(_module: object, _args: tuple[object, ...]) -> None:
        saved.clear()

    def after(_module: object, args: tuple[object, ...], _output: object) -> None:
        inputs = list(plain_tensors(tensors_in(args)))
        outer = standing | {_storage(each) for each in inputs}
        kept = sum(nbytes for storage, nbytes in saved.items() if storage not in outer)
        found.append(BlockSizes(input_bytes=inputs[0].untyped_storage().nbytes(), saved_bytes=kept))

    for block in blocks_of(trainee).values():
        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = trainee.forward(workload.batch(0))[1]
    del loss
    return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def best_schedule(sizes: Sequence[BlockSizes], budget_bytes: int) -> Schedule | None:
    """Return the schedule of the least recomputation within a budget; `None` where none fits.

    Blocks cost the same. The input of the first block stands in the bytes of nobody.

    Args:
        sizes: of the blocks.
        budget_bytes: most bytes that blocks hold at once.
    """
    slot = max(1, math.ceil(sum(each.saved_bytes + each.input_bytes for each in sizes) / _SLOTS))
    saved = [math.ceil(each.saved_bytes / slot) for each in sizes]
    inputs = [math.ceil(each.input_bytes / slot) for each in sizes]

    @cache
    def best(first: int, last: int, room: int) -> tuple[int, Schedule] | None:
        """Return fewest repeated blocks, and the schedule, of the blocks from `first` to `last`."""
        if room < saved[first]:
            return None
        if first == last:
            return 0, (first,)
        rest = best(first + 1, last, room - saved[first] - inputs[first + 1])
        found = [] if rest is None else [(rest[0], (first, *rest[1]))]
        for middle in range(first + 1, last + 1):
            later = best(middle, last, room - inputs[middle])
            earlier = best(first, middle - 1, room)
            if later is not None and earlier is not None:
                cost = middle - first + later[0] + earlier[0]
                found.append((cost, (earlier[1], *later[1])))
        return min(found, key=lambda each: each[0], default=None)

    chosen = best(0, len(sizes) - 1, budget_bytes // slot)
    return None if chosen is None else chosen[1]
