"""What groups and chains do where a forward is not the planned one, and where several wait for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from strategies import StrategyError
from strategies.budget.eager.carrying_out import enclose
from strategies.budget.plan import Plan
from strategies.regions.blocks import ModelModules
from strategies.step.plan_capture import capture
from strategies.step.step_graph import StepGraph
from tests.rank_pool import RankPool
from tests.strategies.budget.planning.chaining_by_hand import in_chains
from tests.strategies.budget.planning.grouping_by_hand import grouped, groups_of
from tests.strategies.budget.small_steps import WIDTH, Gated, measured_peak_bytes, step_of
from tests.strategies.step.test_plan_capture import captured

X = torch.randn(2, 8, WIDTH)


TOGETHER: dict[str, Callable[[StepGraph], Plan]] = {
    "group": lambda graph: grouped(graph, [(0, 3)], 0.2),
    "chain": lambda graph: in_chains(graph, [(0, 4)], 0.2, seed=1),
}


def model_in(how: str) -> Gated:
    planned = Gated(0.1)
    enclose(TOGETHER[how](captured(Gated(0.1), X)), ModelModules(blocks=planned.blocks))
    return planned


def steps_of(model: Gated, run: Callable[[Gated], Iterator[Tensor]]) -> list[Tensor]:
    """Return results of what runs, gradients, and the state of the generator."""
    torch.manual_seed(1)
    model.zero_grad()
    results = list(run(model))
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert gradients
    return [*results, *gradients, torch.get_rng_state()]


def two_forwards_before_backward(model: Gated) -> Iterator[Tensor]:
    first, second = model(X).sum(), model(2 * X).sum()
    second.backward()
    first.backward()
    yield first


def smaller_inputs(model: Gated) -> Iterator[Tensor]:
    model(X[:1]).sum().backward()
    yield from ()


def evaluated_between(model: Gated) -> Iterator[Tensor]:
    loss = model(X).sum()
    model.eval()
    yield model(X)
    model.train()
    loss.backward()


def one_block_left_out(model: Gated) -> Iterator[Tensor]:
    x = model.layers[3](model.layers[1](model.layers[0](X)))
    x.sum().backward()
    yield x


def interrupted_before(model: Gated) -> Iterator[Tensor]:
    model.layers[1](model.layers[0](X))
    model(X).sum().backward()
    yield from ()


def gradient_of_the_input(model: Gated) -> Iterator[Tensor]:
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    yield x.grad


@pytest.mark.parametrize(
    "run",
    [
        two_forwards_before_backward,
        smaller_inputs,
        evaluated_between,
        one_block_left_out,
        interrupted_before,
        gradient_of_the_input,
    ],
)
@pytest.mark.parametrize("how", TOGETHER)
def test_results_and_gradients_are_those_of_the_plain_model(
    how: str, run: Callable[[Gated], Iterator[Tensor]]
) -> None:
    expected, found = steps_of(Gated(0.1), run), steps_of(model_in(how), run)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("how", TOGETHER)
def test_under_autocast_the_operators_of_forward_run_again(how: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        planned = model_in(how)

    def run(model: Gated) -> Iterator[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(X).float().sum()
        loss.backward()
        yield loss

    assert all(map(torch.equal, steps_of(Gated(0.1), run), steps_of(planned, run)))


class Writing(nn.Module):
    """Runs two blocks, and writes to what the first has made."""

    def __init__(self, model: Gated) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        y = self.model.layers[0](x)
        outputs: Tensor = self.model.layers[1](y.mul_(2))
        return outputs


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        (
            "group",
            r"^ac: the input of 'layers\.1' was written to in place after the block before had made it",
        ),
        (
            "chain",
            r"^ac: an input of 'layers\.0 to layers\.3' was written to in place after its plan had seen",
        ),
    ],
)
def test_a_write_between_blocks_is_refused(how: str, problem: str) -> None:
    with pytest.raises(StrategyError, match=problem):
        Writing(model_in(how))(X)


@pytest.mark.parametrize("how", TOGETHER)
def test_a_weight_that_changed_since_forward_is_refused(how: str) -> None:
    model = model_in(how)
    loss = model(X).sum()
    with torch.no_grad():
        model.get_parameter("layers.1.norms.0.weight").mul_(2)
    with pytest.raises(StrategyError, match=r"changed in place after forward"):
        loss.backward()


def wrapped(model: Gated, kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp1":
        for index, layer in enumerate(model.layers):
            model.layers[index] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def step_on_ranks(model: Gated, whole: nn.Module, x: Tensor) -> StepGraph:
    step_of(whole, x)()
    standing = [*whole.parameters(), x]
    return capture(
        step_of(whole, x), ModelModules(blocks=model.blocks), device=torch.device("cpu"), standing=standing
    )


def neutral_on_ranks(rank: int, kind: str, how: str) -> bool:
    """Return whether steps with a plan are the plain ones; one for DDP needs the predicted bytes."""
    torch.manual_seed(rank)
    x = torch.randn(2, 8, WIDTH)
    plain, planned = Gated(0.1), Gated(0.1)
    blocks = planned.blocks
    models = [wrapped(model, kind) for model in (plain, planned)]
    graph = step_on_ranks(plain, models[0], x) if kind == "ddp" else captured(Gated(0.1), x)
    plan = TOGETHER[how](graph)
    enclose(plan, ModelModules(blocks=blocks))
    found = []
    for model in models:
        torch.manual_seed(rank)
        for _ in range(2):
            step_of(model, x)()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        found.append([getattr(each, "_local_tensor", each).clone() for each in gradients])
    assert len(found[0]) == len(found[1]) > 0
    if kind == "ddp":
        peak = measured_peak_bytes(models[1], [x], step_of(models[1], x))
        assert peak == plan.predicted_peak_bytes
    return all(map(torch.equal, *found))


def groups_when_sharded(_rank: int, kind: str) -> list[tuple[int, int]]:
    """Return the groups that a plan which is made on ranks can have."""
    model = Gated()
    graph = step_on_ranks(model, wrapped(model, kind), torch.randn(2, 8, WIDTH))
    return [(start, end) for start, end, _ in groups_of(graph).all()]


@pytest.mark.parametrize("how", TOGETHER)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_steps_are_neutral_on_two_ranks(pool2: RankPool, kind: str, how: str) -> None:
    assert pool2.run(neutral_on_ranks, kind, how) == [True, True]


def test_parameters_that_nothing_gathers_are_refused(pool2: RankPool) -> None:
    problem = r"^ac: the plan of 'layers\.0' was made for parameter norms\.0\.weight of \(16,\) float32"
    with pytest.raises(StrategyError, match=problem):
        pool2.run(neutral_on_ranks, "fsdp1", "group")


def test_a_plan_has_no_groups_where_parameters_are_taken_away(pool2: RankPool) -> None:
    assert pool2.run(groups_when_sharded, "ddp")[0][:2] == [(0, 1), (0, 2)]
    assert pool2.run(groups_when_sharded, "fsdp2") == [[], []]
