"""Regions around FSDP units: their parameters are elsewhere, or of another dtype, when it is recorded."""

from __future__ import annotations

from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)

from strategies.ac.nested import Nested
from strategies.base import StrategyError
from tests.rank_pool import RankPool

WIDTH = 4
Generation = Literal["fsdp1", "fsdp1 around all", "fsdp1 around all, flat", "fsdp2"]


class Averaging(nn.Linear):
    """Reads and writes a buffer of its own, which is no parameter that a unit takes away."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__(into, out)
        self.register_buffer("average", torch.ones(into))
        self.average: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.average.lerp_(x.detach().mean(0).to(self.average.dtype), 0.5)
        return super().forward(x * self.average.to(x.dtype))


class Scaled(nn.Module):
    """Makes a tensor of the dtype that the hidden states happen to have."""

    def __init__(self, layer: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleList(layer(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.factor = 0.3

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        scale = torch.full((WIDTH,), self.factor, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x) * scale
        return self.head(x)  # type: ignore[no-any-return]


def sharded(model: Scaled, generation: Generation, dtype: torch.dtype | None) -> nn.Module:
    if generation == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        return model
    options: dict[str, Any] = {
        "mixed_precision": MixedPrecision(param_dtype=dtype),
        "device_id": torch.device("cpu"),
        "use_orig_params": not generation.endswith("flat"),
    }
    for index, layer in enumerate(model.layers if generation == "fsdp1" else ()):
        model.layers[index] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


def losses(
    rank: int,
    generation: Generation,
    dtype: torch.dtype | None,
    levels: list[int] | None,
    layer: type[nn.Linear] = nn.Linear,
) -> list[float]:
    torch.manual_seed(0)
    plain = Scaled(layer)
    if levels is not None:
        Nested(layers_fqn="layers", levels=levels).apply(plain)
    model = sharded(plain, generation, dtype)
    tokens = torch.arange(4) % (rank + 2)
    found = []
    for factor in (0.3, 0.3, 0.7):
        plain.factor = factor
        loss = model(tokens).float().square().sum()
        loss.backward()
        found.append(loss.item())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    local = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
    return [*found, *(gradient.double().sum().item() for gradient in local)]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["one dtype", "mixed precision"])
@pytest.mark.parametrize("generation", get_args(Generation))
def test_what_forward_reads_follows_the_units(
    pool2: RankPool, generation: Generation, dtype: torch.dtype | None
) -> None:
    expected = pool2.run(losses, generation, dtype, None)
    assert pool2.run(losses, generation, dtype, [1, 2]) == expected
    assert len(expected[0]) > 3


@pytest.mark.parametrize("generation", ["fsdp2", "fsdp1"])
def test_the_state_of_a_unit_is_rewound(pool2: RankPool, generation: Generation) -> None:
    expected = pool2.run(losses, generation, None, None, Averaging)
    assert pool2.run(losses, generation, None, [1, 2], Averaging) == expected


def losses_behind_fsdp1(rank: int, levels: list[int] | None) -> list[float]:
    torch.manual_seed(0)
    model = sharded(Scaled(), "fsdp1", None)
    if levels is not None:
        Nested(layers_fqn="layers", levels=levels, early_stop=False).apply(model)
    loss = model(torch.arange(4) % (rank + 2)).square().sum()
    loss.backward()
    return [loss.item(), *(each.grad.sum().item() for each in model.parameters() if each.grad is not None)]


def test_fsdp1_may_come_before(pool2: RankPool) -> None:
    assert pool2.run(losses_behind_fsdp1, [1, 2]) == pool2.run(losses_behind_fsdp1, None)


def refusal_of_other_parameters(_rank: int) -> str:
    torch.manual_seed(0)
    model = Scaled()
    Nested(layers_fqn="layers", levels=[1, 2]).apply(model)
    fully_shard(model.head)
    other = {name: 2 * each for name, each in model.named_parameters() if name.startswith("layers")}
    with pytest.raises(StrategyError) as error:
        torch.func.functional_call(model, other, (torch.arange(4),)).square().sum().backward()
    return str(error.value)


def test_a_functional_call_beside_units_is_refused(pool2: RankPool) -> None:
    message = (
        "ac: 'layers.0' ran with other parameters in forward than it has now; "
        "call it in a module that gives it these (torch.func.functional_call)"
    )
    assert pool2.run(refusal_of_other_parameters) == [message, message]
