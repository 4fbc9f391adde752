"""What ranks of the realisation tests run: models that run as planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from strategies import StrategyError
from strategies.shard.base import Sharding
from strategies.shard.model.plan_file import load, save
from strategies.shard.model.realisation import realise
from strategies.shard.model.shard_plan import ShardPlan
from tests.counted_collectives import Collectives, Counts, promised
from tests.strategies.shard.models import AXIS, Chain
from tests.strategies.shard.shard_ranks import mesh_of

_RELATIVE = 1e-12


def _dense() -> Chain:
    torch.manual_seed(0)
    return Chain().double()


def _tokens() -> torch.Tensor:
    return torch.randint(0, 10, (4, 6), generator=torch.Generator().manual_seed(1))


def _step(model: nn.Module) -> torch.Tensor:
    output: torch.Tensor = model(_tokens())
    functional.cross_entropy(output.flatten(0, 1), _tokens().flatten()).backward()  # type: ignore[no-untyped-call]
    return output.detach()


def _planned(strategy: Sharding, model: nn.Module, ranks: int = 2) -> ShardPlan:
    plan = strategy.plan(model, (_tokens(),), replace(AXIS, ranks=ranks))
    assert plan is not None
    return plan


def examine(_rank: int, strategy: Sharding) -> tuple[list[str], Counts, Counts]:
    """Return what differs from the dense model, by name, what the plan promises, and what a step did."""
    return _examined(strategy, _planned(strategy, _dense()))


def examine_file(rank: int, strategy: Sharding, path: Path) -> tuple[list[str], Counts, Counts]:
    """Return what `examine` does, of a plan that a file holds; each rank has its own."""
    own = path.with_name(f"{rank}-{path.name}")
    save(_planned(strategy, _dense()), own)
    return _examined(strategy, load(own))


def _examined(strategy: Sharding, plan: ShardPlan) -> tuple[list[str], Counts, Counts]:
    dense, model = _dense(), _dense()
    strategy.realise(model, plan, mesh_of((2,)))
    with Collectives() as counter:
        output = _step(model)
    return _differences(dense, model, output), promised(plan.collectives), counter.counts


def _differences(dense: nn.Module, model: nn.Module, output: torch.Tensor) -> list[str]:
    found = [] if _are_close(_step(dense), output) else ["output"]
    pairs = zip(dense.named_parameters(), model.named_parameters(), strict=True)
    for (name, expected), (other, actual) in pairs:
        assert expected.grad is not None
        assert actual.grad is not None
        is_equal = _are_close(expected.grad, _whole(actual.grad)) and torch.equal(expected, _whole(actual))
        if name != other or not is_equal:
            found.append(name)
    return found


def planted(_rank: int, strategy: Sharding, fqn: str, what: str) -> list[str]:
    """Return what differs where one module forgets a reduction."""
    dense, model = _dense(), _dense()
    plan = _planned(strategy, model)
    realise(model, _forgetting(plan, fqn, what), mesh_of((2,)))
    return _differences(dense, model, _step(model))


def proof_of(_rank: int, strategy: Sharding, fqn: str, what: str) -> str:
    """Return what the proof says of a plan in which one module forgets a reduction; nothing if none does."""
    model = _dense()
    plan = _planned(strategy, model)
    plan = _forgetting(plan, fqn, what) if fqn else plan
    state, before = torch.get_rng_state(), [each.grad for each in model.parameters()]
    try:
        strategy.realise(model, plan, mesh_of((2,)), sample=(_tokens(),))
    except StrategyError as error:
        return str(error)
    assert torch.equal(torch.get_rng_state(), state)
    assert [each.grad for each in model.parameters()] == before
    assert _differences(_dense(), model, _step(model)) == []
    return ""


def _forgetting(plan: ShardPlan, fqn: str, what: str) -> ShardPlan:
    def forget(option: Any) -> Any:
        if what == "parameters":
            held = {name: replace(each, reduction=()) for name, each in option.candidate.parameters.items()}
            return replace(option, candidate=replace(option.candidate, parameters=held))
        return replace(option, entering=replace(option.entering, backward=()))

    modules = tuple(
        replace(placed, option=forget(placed.option)) if placed.fqn == fqn else placed
        for placed in plan.modules
    )
    return replace(plan, modules=modules)


def placements(_rank: int, strategy: Sharding) -> dict[str, str]:
    """Return the placement of each parameter that is a DTensor, and check that names and classes stay."""
    model = _dense()
    names = list(model.state_dict())
    strategy.realise(model, _planned(strategy, model), mesh_of((2,)))
    assert list(model.state_dict()) == names
    assert isinstance(model.head, nn.Linear)
    return {
        name: str(parameter.placements[0])
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
    }


def refusal(_rank: int, strategy: Sharding, ranks: int, times: int) -> str:
    """Return the message with which realising the plan of `ranks` ranks `times` times is refused."""
    return _refused(_planned(strategy, _dense(), ranks), times)


def refusal_of_plan(_rank: int, plan: ShardPlan) -> str:
    """Return the message with which the model refuses a plan."""
    return _refused(plan, times=1)


def _refused(plan: ShardPlan, times: int) -> str:
    model, mesh = _dense(), mesh_of((2,))
    try:
        for _ in range(times):
            realise(model, plan, mesh)
    except StrategyError as error:
        return str(error)
    return "accepted"


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _are_close(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    return bool((expected - actual).abs().max() <= _RELATIVE * expected.abs().max())
