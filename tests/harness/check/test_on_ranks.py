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
from harness.errors import ConfigError
from strategies import StrategyError
from strategies.ac.budget import Budget
from tests.harness.check.small_models import Growing, Stack, batch, checkpointed, stack_of
from tests.rank_pool import RankPool

MAKES = {"a stack": Stack, "shared state": stack_of(Growing)}


class Refusing:
    """A region that forward leaves alone, and of which no backward comes to an end."""

    def __init__(self, block: nn.Module) -> None:
        self._forward = block.forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._forward(x)
        outputs.register_hook(self._refuse)
        return outputs

    def _refuse(self, _gradient: torch.Tensor) -> None:
        raise ValueError("no recomputation here")


def _refusing(model: Stack) -> None:
    for layer in model.layers:
        layer.forward = Refusing(layer)


def _absent(_model: Stack) -> None:
    raise TypeError("no such variant")


VARIANTS = {
    "right": checkpointed(),
    "raising in backward": _refusing,
    "raising when applied": _absent,
    "dropout drawn anew": checkpointed(preserve_rng_state=False),
    "reentrant": checkpointed(use_reentrant=True),
}


def _made(make: str, parallel: str) -> nn.Module:
    if parallel == "none":
        return MAKES[make]()
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
    "rank 1 raises in backward": (
        *("a stack", "none", ("right", "raising in backward"), "differs", "parity", "recomputation"),
        "the variant's backward raises ValueError: no recomputation here",
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


def refused(rank: int) -> str:
    """Return what a check raises of which the variant cannot be applied on rank 1."""
    variant = partial(_variant, ("right", "raising when applied")[rank])
    try:
        assert_neutral(partial(_made, "a stack", "none"), batch(), variant, steps=1)
    except (ConfigError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_no_rank_waits_for_one_that_cannot_apply_the_variant(pool2: RankPool) -> None:
    assert pool2.run(refused, timeout_s=30.0) == [
        "ConfigError: rank 1: raises TypeError: no such variant",
        "TypeError: no such variant",
    ]


def planned(rank: int, parallel: str, variant: Budget) -> str:  # noqa: ARG001 (the pool gives it)
    """Return what a check of a byte budget says, or raises."""
    try:
        return assert_neutral(partial(_made, "a stack", parallel), batch(256), variant, steps=1).verdict
    except (ConfigError, StrategyError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_all_ranks_have_the_plan_of_rank_0(parallel: str, pool2: RankPool) -> None:
    variant = Budget(layers_fqn="layers", fraction=0.95)
    assert pool2.run(planned, parallel, variant) == ["neutral", "neutral"]


@pytest.mark.parametrize(
    ("variant", "first", "second"),
    [
        (
            Budget(layers_fqn="layers", fraction=0.01),
            "StrategyError: ac.fraction: no plan keeps",
            "ConfigError: rank 0: raises StrategyError: ac.fraction: no plan keeps",
        ),
        (
            Budget(layers_fqn="module.layers", fraction=0.9),
            *["StrategyError: ac.layers_fqn: 'module.layers' is"] * 2,
        ),
    ],
    ids=["no plan", "no blocks"],
)
def test_no_rank_waits_for_a_plan_that_there_is_not(
    variant: Budget, first: str, second: str, pool2: RankPool
) -> None:
    said_by_0, said_by_1 = pool2.run(planned, "ddp", variant, timeout_s=30.0)
    assert (said_by_0[: len(first)], said_by_1[: len(second)]) == (first, second)
