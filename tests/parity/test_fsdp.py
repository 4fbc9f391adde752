"""Checkpointing and FSDP in every composition: around a unit, inside a unit, at the call of the whole model.

The twin of each case is FSDP alone. Six iterations with an optimizer step each; losses, outputs and gradients
are equal bit for bit.

Source: the cases of PyTorch's test/distributed/fsdp/test_fsdp_checkpoint.py, completed.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from harness.errors import ConfigError
from harness.experiment.mesh import Mesh
from strategies.ac.full import Full
from tests.parity import cases
from tests.rank_pool import RankPool

_ITERATIONS = 6
_ORDERS = ("inside_fsdp", "outside_fsdp", "call_site")
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
_ON_OFF = (False, True)
_OFFLOADS = pytest.mark.parametrize("offload", _ON_OFF, ids=["kept", "offloaded"])
_REENTRANT = pytest.mark.parametrize("reentrant", _ON_OFF, ids=["non-reentrant", "reentrant"])
_HOST = pytest.mark.parametrize("cpu_offload", _ON_OFF, ids=["on device", "parameters on host"])
_PARAMETERS = pytest.mark.parametrize("use_orig_params", _ON_OFF, ids=["flat", "original"])

# reentrant regions inside units that are freed are refused, see below
_FSDP1 = [
    pytest.param(
        order, strategy, reentrant, id=f"{order}-{strategy}-{'reentrant' if reentrant else 'non-reentrant'}"
    )
    for order, strategy, reentrant in product(_ORDERS, _STRATEGIES, _ON_OFF)
    if not (reentrant and order == "inside_fsdp" and strategy != "NO_SHARD")
]


@pytest.mark.parametrize(("order", "strategy", "reentrant"), _FSDP1)
@_PARAMETERS
@_HOST
@_OFFLOADS
def test_fsdp1(
    pool2: RankPool,
    order: str,
    strategy: str,
    reentrant: bool,
    use_orig_params: bool,
    cpu_offload: bool,
    offload: bool,
) -> None:
    case = cases.experiment(
        mesh=Mesh(
            dp_shard=2,
            fsdp="fsdp1",
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
            cpu_offload=cpu_offload,
        ),
        options={"offload": offload, "use_reentrant": reentrant},
        dropout=0.1,
        parity_steps=_ITERATIONS,
        wrap_order=order,
    )
    assert pool2.run(cases.prove, case) == [[], []]


@pytest.mark.parametrize("order", _ORDERS)
@pytest.mark.parametrize("reshard", _ON_OFF, ids=["unsharded until backward", "resharded after forward"])
@_HOST
@_OFFLOADS
@_REENTRANT
def test_fsdp2(
    pool2: RankPool, order: str, reshard: bool, cpu_offload: bool, offload: bool, reentrant: bool
) -> None:
    case = cases.experiment(
        mesh=Mesh(dp_shard=2, reshard_after_forward=reshard, cpu_offload=cpu_offload),
        options={"offload": offload, "use_reentrant": reentrant},
        dropout=0.1,
        parity_steps=_ITERATIONS,
        wrap_order=order,
    )
    assert pool2.run(cases.prove, case) == [[], []]


@pytest.mark.parametrize("variant", ["none", "full", "selective_op", "offload"])
@pytest.mark.parametrize("fsdp", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("order", _ORDERS)
def test_every_variant_in_every_order(pool2: RankPool, variant: str, fsdp: str, order: str) -> None:
    case = cases.experiment(variant=variant, mesh=Mesh(dp_shard=2, fsdp=fsdp), dropout=0.1, wrap_order=order)
    assert pool2.run(cases.prove, case) == [[], []]


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("order", _ORDERS)
def test_hybrid_fsdp1(pool4: RankPool, strategy: str, order: str) -> None:
    mesh = Mesh(dp_replicate=2, dp_shard=2, fsdp="fsdp1", sharding_strategy=strategy)
    case = cases.experiment(mesh=mesh, dropout=0.1, wrap_order=order)
    assert pool4.run(cases.prove, case) == [[], [], [], []]


@pytest.mark.parametrize("variant", ["full", "selective_op", "offload"])
@pytest.mark.parametrize("parameters", ["flat", "original"])
def test_fsdp1_in_place_by_class_name(pool2: RankPool, variant: str, parameters: str) -> None:
    case = cases.experiment(
        variant=variant,
        mesh=Mesh(dp_shard=2, fsdp="fsdp1", use_orig_params=parameters == "original"),
        options={"module_classes": ("GPTBlock",)},
        dropout=0.1,
        wrap_order="outside_fsdp",
    )
    assert pool2.run(cases.prove, case) == [[], []]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_refuses_reentrant_regions_in_sharded_fsdp1_units(strategy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        cases.experiment(
            mesh=Mesh(dp_shard=2, fsdp="fsdp1", sharding_strategy=strategy), options={"use_reentrant": True}
        )
    assert str(refused.value) == (
        "ac.use_reentrant: true inside a sharded FSDP1 unit reads weights that the unit frees after its "
        "first backward; use ac.use_reentrant=false, wrap_order=outside_fsdp or "
        "mesh.sharding_strategy=NO_SHARD"
    )


_SAME_MATHEMATICS = {
    "FSDP2": Mesh(dp_shard=2),
    "FSDP2, parameters on host": Mesh(dp_shard=2, cpu_offload=True),
    **{
        f"FSDP1 {strategy}, {'original' if original else 'flat'}, {'host' if offload else 'device'}": Mesh(
            dp_shard=2,
            fsdp="fsdp1",
            sharding_strategy=strategy,
            use_orig_params=original,
            cpu_offload=offload,
        )
        for strategy, original, offload in product(_STRATEGIES, _ON_OFF, _ON_OFF)
    },
}


@pytest.mark.parametrize("mesh", _SAME_MATHEMATICS.values(), ids=_SAME_MATHEMATICS)
def test_two_ranks_train_alike_however_they_are_sharded(pool2: RankPool, mesh: Mesh) -> None:
    """A twin that is wrong itself would make a wrong variant look neutral: here the twins are compared."""
    ddp = cases.experiment(variant="none", mesh=Mesh(dp_replicate=2), dropout=0.1, parity_steps=_ITERATIONS)
    sharded = cases.experiment(variant="none", mesh=mesh, dropout=0.1, parity_steps=_ITERATIONS)
    expected, actual = ([found.losses for found in pool2.run(cases.parity, case)] for case in (ddp, sharded))
    assert actual == expected


class _Stack(nn.Module):
    """Ten linears that are recomputed together."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.Sequential(*(nn.Linear(16, 16) for _ in range(10)))

    def forward(self, x_BD: Tensor) -> Tensor:
        return torch.as_tensor(self.linears(x_BD))


class _Unit(nn.Module):
    """One FSDP unit with two stacks and plain layers around them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.first, self.second, self.after = (
            nn.Linear(16, 16),
            _Stack(),
            _Stack(),
            nn.Linear(16, 16),
        )

    def forward(self, x_BD: Tensor) -> Tensor:
        return torch.as_tensor(self.after(torch.relu(self.second(self.first(self.before(x_BD))))))


def train_submodules(rank: int, sharding: str, *, checkpointed: bool) -> list[Tensor]:
    """Return losses and gradients of this rank over six iterations of two units with two stacks each."""
    torch.manual_seed(0)
    model = nn.Sequential(_Unit(), _Unit())
    if sharding == "fsdp2":
        for unit in model:
            fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
    else:
        original, cpu = sharding == "fsdp1 original", torch.device("cpu")
        units = (FullyShardedDataParallel(unit, device_id=cpu, use_orig_params=original) for unit in model)
        model = nn.Sequential(*units)
    if checkpointed:
        Full(module_classes=("_Stack",)).apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Tensor] = []
    for step in range(_ITERATIONS):
        torch.manual_seed(100 * step + rank)
        loss = model(torch.randn(4, 16)).square().sum()
        loss.backward()
        # under original parameters a rank has no gradient of those that its shard does not hold
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found += [
            loss.detach(),
            *(getattr(gradient, "_local_tensor", gradient).clone() for gradient in gradients),
        ]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("sharding", ["fsdp1 flat", "fsdp1 original", "fsdp2"])
def test_two_checkpointed_stacks_in_two_units(pool2: RankPool, sharding: str) -> None:
    expected = pool2.run(train_submodules, sharding, checkpointed=False)
    actual = pool2.run(train_submodules, sharding, checkpointed=True)
    for plain, checkpointed in zip(expected, actual, strict=True):
        assert len(plain) >= _ITERATIONS * 2
        assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))
