"""Checkpointing and FSDP in every composition: around a unit, inside a unit, at the call of the whole model.

The twin of each case is FSDP alone. Three iterations with an optimizer step each; losses, outputs and
gradients are equal bit for bit.

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
from tests.covering import matrix
from tests.parity import cases
from tests.rank_pool import RankPool

_ITERATIONS = 3
"""The second gathers what the first has freed and put in order, the third what a usual step leaves."""
_ORDERS = ("inside_fsdp", "outside_fsdp", "call_site")
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
_ON_OFF = (False, True)

# reentrant regions inside units that are freed are refused, see below
_FSDP1 = [
    (order, strategy, reentrant, *rest)
    for order, strategy, reentrant, *rest in product(_ORDERS, _STRATEGIES, *[_ON_OFF] * 4)
    if not (reentrant and order == "inside_fsdp" and strategy != "NO_SHARD")
]


@pytest.mark.parametrize(
    ("order", "strategy", "reentrant", "use_orig_params", "cpu_offload", "offload"), matrix(_FSDP1)
)
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


@pytest.mark.parametrize(
    ("order", "reshard", "cpu_offload", "offload", "reentrant"),
    matrix(list(product(_ORDERS, *[_ON_OFF] * 4))),
)
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


@pytest.mark.parametrize(
    ("variant", "fsdp", "order"),
    matrix(list(product(["none", "full", "selective_op", "offload"], ["fsdp1", "fsdp2"], _ORDERS))),
)
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


_FSDP1_UNITS = list(product(_STRATEGIES, _ON_OFF, _ON_OFF))
_ON_HOST = [row for row in _FSDP1_UNITS if row[2]]
"""Here gradients of the step before were once summed in."""


@pytest.fixture(scope="module")
def ddp_losses(pool2: RankPool) -> list[object]:
    return _losses(pool2, Mesh(dp_replicate=2))


@pytest.mark.parametrize("cpu_offload", _ON_OFF, ids=["on device", "parameters on host"])
def test_fsdp2_trains_as_ddp_does(pool2: RankPool, ddp_losses: list[object], cpu_offload: bool) -> None:
    """A twin that is wrong itself would make a wrong variant look neutral: here the twins are compared."""
    assert _losses(pool2, Mesh(dp_shard=2, cpu_offload=cpu_offload)) == ddp_losses


@pytest.mark.parametrize(
    ("strategy", "use_orig_params", "cpu_offload"), matrix(_FSDP1_UNITS, always=_ON_HOST)
)
def test_fsdp1_trains_as_ddp_does(
    pool2: RankPool, ddp_losses: list[object], strategy: str, use_orig_params: bool, cpu_offload: bool
) -> None:
    mesh = Mesh(
        dp_shard=2,
        fsdp="fsdp1",
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        cpu_offload=cpu_offload,
    )
    assert _losses(pool2, mesh) == ddp_losses


def _losses(pool2: RankPool, mesh: Mesh) -> list[object]:
    """Return the losses of each rank without AC."""
    case = cases.experiment(variant="none", mesh=mesh, dropout=0.1, parity_steps=_ITERATIONS)
    return [found.losses for found in pool2.run(cases.parity, case)]


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
