"""`assert_neutral` under DDP and FSDP: all ranks ask alike, and all say what is wrong on one of them."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness.check import NotNeutral, assert_neutral
from tests.harness.check.small_models import Growing, Stack, batch, checkpointed, stack_of
from tests.rank_pool import RankPool

MAKES = {"a stack": Stack, "shared state": stack_of(Growing)}
VARIANTS = {
    "right": checkpointed(),
    "dropout drawn anew": checkpointed(preserve_rng_state=False),
    "reentrant": checkpointed(use_reentrant=True),
}


def _made(make: str, parallel: str) -> nn.Module:
    model: Any = MAKES[make]()
    if parallel == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    sharded: nn.Module = fully_shard(model, mesh=mesh)
    return sharded


def _variant(name: str, model: Any) -> None:
    VARIANTS[name](getattr(model, "module", model))


def said(rank: int, make: str, parallel: str, variants: tuple[str, str]) -> tuple[str, Any, Any, str, int]:
    """Return verdict, probe, part and likely cause of a check, and the number of its notes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = assert_neutral(
                partial(_made, make, parallel), batch(), partial(_variant, variants[rank]), steps=2
            )
        except NotNeutral as failure:
            found = failure.found
    first = found.first or {}
    return found.verdict, first.get("probe"), first.get("part"), str(found), len(found.notes)


RIGHT = ("right", "right")
CASES: dict[str, tuple[str, str, tuple[str, str], str, str | None, str | None, str]] = {
    "DDP": ("a stack", "ddp", RIGHT, "neutral", None, None, ""),
    "FSDP": ("a stack", "fsdp", RIGHT, "neutral", None, None, ""),
    "DDP, dropout drawn anew on rank 1": (
        *("a stack", "ddp", ("right", "dropout drawn anew"), "differs", "parity", "gradients"),
        "recomputation on rank 1: aten.bernoulli_.float",
    ),
    "FSDP, dropout drawn anew on rank 1": (
        *("a stack", "fsdp", ("right", "dropout drawn anew"), "differs", "parity", "gradients"),
        "recomputation on rank 1: aten.bernoulli_.float",
    ),
    "FSDP, micro-batches share state": (
        *("shared state", "fsdp", RIGHT, "differs", "between", "gradients", "gallery 8"),
    ),
    "DDP, nothing in the regions is trained": (
        *("a stack", "ddp", ("reentrant", "reentrant"), "differs", "parity", "gradients"),
        "gradient without the variant only: module.layers.0.up.weight",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_say_the_same(case: str, pool2: RankPool) -> None:
    make, parallel, variants, verdict, probe, part, words = CASES[case]
    answers = pool2.run(said, make, parallel, variants)
    assert [answer[:3] for answer in answers] == [(verdict, probe, part)] * 2
    assert [words in answer[3] for answer in answers] == [True, True], answers
    assert [answer[4] for answer in answers] == [0, 0]
