"""The output of each module in a forward, and the first that differs from another model's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch.utils has no public name for it

from harness.measure.parity.snapshot import Captured, device_of_batch
from harness.measure.rng import seeded
from harness.measure.trainee import Trainee
from harness.models.base import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleOutput:
    """The output of one call of a module.

    Fields:
        tensors: copies on the host, DTensors as wholes.
    """

    fqn: str
    tensors: tuple[Tensor, ...]


def module_outputs(trainee: Trainee, batch: Batch, *, seed: int, dp_rank: int) -> list[ModuleOutput]:
    """Return what the modules give in the forward of the first step, in the order in which they end."""
    found: list[ModuleOutput] = []
    handles = [
        module.register_forward_hook(partial(_keep, found, name))
        for name, module in trainee.model.named_modules()
        if name
    ]
    try:
        with seeded(seed, step=0, dp_rank=dp_rank, device=device_of_batch(batch)):
            trainee.forward(batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def first_wrong(
    expected: Sequence[ModuleOutput],
    actual: Sequence[ModuleOutput],
    *,
    relative: float,
    part: int,
    parts: int,
) -> str:
    """Return the FQN of the first module that gives something else; empty where all give the same.

    What has another shape counts where it is a shard of one dimension, and is left out where it is not.

    Args:
        expected: what the modules of the whole model give.
        actual: what those give that may give shards.
        relative: largest accepted |actual - expected| / max|expected| of a tensor.
        part: index of this rank's shards.
    """
    known = dict(_numbered(expected))
    for key, given in _numbered(actual):
        pairs = zip(known[key].tensors, given.tensors, strict=False) if key in known else ()
        for whole, tensor in pairs:
            counterpart = _shard(whole, tensor.shape, part, parts)
            if counterpart is not None and not _is_close(counterpart, tensor, relative):
                return given.fqn
    return ""


def _keep(found: list[ModuleOutput], fqn: str, _module: nn.Module, _args: Any, output: Any) -> None:
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    copies = tuple(Captured.of(tensor, whole=True).to_host().value for tensor in tensors)
    found.append(ModuleOutput(fqn=fqn, tensors=copies))


def _numbered(outputs: Sequence[ModuleOutput]) -> Iterator[tuple[tuple[str, int], ModuleOutput]]:
    calls: Counter[str] = Counter()
    for output in outputs:
        yield (output.fqn, calls[output.fqn]), output
        calls[output.fqn] += 1


def _shard(whole: Tensor, shape: torch.Size, part: int, parts: int) -> Tensor | None:
    """Return what of `whole` a rank has if it has `shape`; `None` where that is no shard of one dimension."""
    if whole.shape == shape:
        return whole
    differing = [
        dim for dim, sizes in enumerate(zip(whole.shape, shape, strict=False)) if sizes[0] != sizes[1]
    ]
    if whole.dim() != len(shape) or len(differing) != 1:
        return None
    shards = whole.chunk(parts, differing[0])
    return shards[part] if part < len(shards) and shards[part].shape == shape else None


def _is_close(expected: Tensor, actual: Tensor, relative: float) -> bool:
    if not expected.is_floating_point() or expected.numel() == 0:
        return True
    distance = (actual.double() - expected.double()).abs().max()
    return bool(distance <= relative * expected.double().abs().max())
