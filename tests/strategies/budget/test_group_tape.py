"""What a group does where a forward is not the planned one, and where several forwards wait for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from strategies import StrategyError
from strategies.budget.carrying_out import enclose
from tests.strategies.budget.grouping_by_hand import grouped
from tests.strategies.budget.small_steps import WIDTH, Gated
from tests.strategies.budget.test_capture import captured

X = torch.randn(2, 8, WIDTH)


def model_in_group() -> Gated:
    planned = Gated(0.1)
    enclose(grouped(captured(Gated(0.1), X), [(0, 3)], 0.2), planned.blocks)
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
def test_results_and_gradients_are_those_of_the_plain_model(run: Callable[[Gated], Iterator[Tensor]]) -> None:
    expected, found = steps_of(Gated(0.1), run), steps_of(model_in_group(), run)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


def test_under_autocast_the_operators_of_forward_run_again() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        planned = Gated(0.1)
        enclose(grouped(captured(Gated(0.1), X), [(0, 3)], 0.2), planned.blocks)

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


def test_a_write_between_blocks_is_refused() -> None:
    problem = r"^ac: the input of 'layers\.1' was written to in place after the block before had made it"
    with pytest.raises(StrategyError, match=problem):
        Writing(model_in_group())(X)


def test_a_weight_that_changed_since_forward_is_refused() -> None:
    model = model_in_group()
    loss = model(X).sum()
    with torch.no_grad():
        model.get_parameter("layers.0.norms.0.weight").mul_(2)
    with pytest.raises(StrategyError, match=r"changed in place after forward"):
        loss.backward()
