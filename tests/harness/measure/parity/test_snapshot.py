"""Snapshots: what a trained step leaves, part by part, and that taking them changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.measure.parity.compare import Snapshot, compare, compare_steps, steps, summarise
from harness.measure.rng import rng_states
from harness.models.base import Batch
from harness.records.parity_result import PARTS
from tests.gpu.devices import CUDA
from tests.toy_trainee import ToyTrainee, toy_batches, toy_steps, toy_trainee


class Net(nn.Module):
    """Dropout of every generator, a persistent and a transient buffer, and a parameter without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.get_buffer("calls").add_(1)
        scale = random.uniform(0.5, 1.5) * np.random.uniform(0.5, 1.5)  # noqa: NPY002 (the global one)
        return {"y": nn.functional.dropout(self.linear(x), 0.5) * scale}


def net() -> ToyTrainee:
    return toy_trainee(Net)


STATE_OF_NET = ["training", "linear.training", "linear.in_features", "linear.out_features"]


class TestSteps:
    def test_gradients_of_inputs_are_of_this_step(self) -> None:
        batch = Batch(inputs=({"x": torch.ones(4, 8, requires_grad=True)}, torch.ones(1)), targets=None)
        trainee = toy_trainee(lambda: nn.Linear(1, 1), call=lambda _model: lambda inputs, _: inputs["x"])
        for step in steps(trainee, [batch, batch], seed=0):
            assert list(step.input_gradients) == ["inputs[0]['x']"]
            assert step.input_gradients["inputs[0]['x']"].value.unique().tolist() == [2 / 32]
        assert batch.inputs[0]["x"].grad is None

    def test_the_order_of_gradients_is_that_of_backward(self) -> None:
        (step,) = toy_steps(net())
        assert step.backward_order == ("linear.bias", "linear.weight", "unused")

    def test_the_trained_parameters_of_blocks_are_known(self) -> None:
        trainee = net()
        (step,) = toy_steps(replace(trainee, blocks={"linear": trainee.model.get_submodule("linear")}))
        assert step.blocks == {"linear": frozenset({"linear.weight", "linear.bias"})}

    def test_two_equal_models_are_equal_over_several_steps(self) -> None:
        summary = compare_steps(toy_steps(net(), count=3), toy_steps(net(), count=3), count=3)
        assert summary.is_equal
        assert (summary.level, summary.steps, len(set(summary.losses))) == ("bitwise", 3, 3)

    def test_a_step_has_all_parts(self) -> None:
        (step,) = toy_steps(net())
        assert {part: list(getattr(step, part)) for part in PARTS} == {
            "outputs": ["outputs", "outputs['y']"],
            "loss": ["loss"],
            "gradients": ["unused", "linear.weight", "linear.bias"],
            "input_gradients": [],
            "buffers": ["calls", "cache"],
            "state": STATE_OF_NET,
            "rng_state": ["cpu", "python", "numpy"],
            "parameters": ["unused", "linear.weight", "linear.bias"],
        }
        assert step.gradients["unused"] is None

    def test_gradients_are_of_this_step_and_parameters_follow_the_update(self) -> None:
        trainee = net()
        before = trainee.model.get_parameter("linear.weight").detach().clone()
        first, second = toy_steps(trainee, count=2)
        after = first.parameters["linear.weight"].value
        assert torch.equal(after, before.sub(first.gradients["linear.weight"].value, alpha=0.1))
        assert torch.equal(
            second.parameters["linear.weight"].value,
            after.sub(second.gradients["linear.weight"].value, alpha=0.1),
        )
        assert int(first.buffers["calls"].value) == 1
        assert int(second.buffers["calls"].value) == 2

    def test_side_by_side_is_one_after_the_other(self) -> None:
        alternating = list(zip(toy_steps(net(), count=3), toy_steps(net(), count=3), strict=True))
        consecutive = [step.to_host() for step in toy_steps(net(), count=3)]
        for (one, other), alone in zip(alternating, consecutive, strict=True):
            assert summarise(
                [compare(one, alone, rank=0, step=0), compare(other, alone, rank=0, step=0)]
            ).is_equal

    def test_the_generators_are_left_as_they_were(self) -> None:
        torch.manual_seed(3)
        random.seed(3)
        expected = torch.get_rng_state(), random.getstate()
        trainee = toy_steps(net(), count=2)
        next(trainee)
        assert torch.equal(torch.get_rng_state(), expected[0])
        assert random.getstate() == expected[1]

    def test_the_generators_are_left_as_they_were_when_a_step_fails(self) -> None:
        state = torch.get_rng_state()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            next(toy_steps(net(), width=3))
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("part", ["outputs", "rng_state"])
    def test_every_data_parallel_rank_draws_its_own_numbers(self, part: str) -> None:
        (one,), (other,) = (toy_steps(net(), dp_rank=dp_rank) for dp_rank in range(2))
        assert not compare(one, other, rank=0, step=0).parts[part].equal

    def test_every_step_draws_its_own_numbers(self) -> None:
        batch = toy_batches(1, 4, 8)[0]
        one, other = steps(net(), [batch, batch], seed=0)
        assert not compare(one, other, rank=0, step=0).parts["rng_state"].equal

    def test_sparse_gradients_are_compared(self) -> None:
        def embed(model: nn.Module) -> Callable[[Tensor], Tensor]:
            return lambda x: model(x.abs().long())

        def trainee() -> ToyTrainee:
            return toy_trainee(lambda: nn.Embedding(8, 4, sparse=True), call=embed)

        (step,) = toy_steps(trainee())
        assert step.gradients["weight"].kind == "Tensor (torch.sparse_coo)"
        assert compare_steps(toy_steps(trainee()), toy_steps(trainee()), count=1).is_equal


@pytest.mark.parametrize("device", [CUDA])
def test_steps_on_a_gpu_seed_and_compare_its_generator(device: str) -> None:
    def generator() -> Tensor:
        return rng_states(torch.device(device))[device]

    def snapshots() -> Iterator[Snapshot]:
        trainee = toy_trainee(lambda: Net().to(device))
        return steps(trainee, toy_batches(2, 4, 8, device=device), seed=0)

    state = generator()
    assert device in next(snapshots()).rng_state
    assert compare_steps(snapshots(), (step.to_host() for step in snapshots()), count=2).is_equal
    assert torch.equal(generator(), state)
