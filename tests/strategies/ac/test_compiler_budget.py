# ruff: noqa: E501 (one line a message)
"""compiler_budget: what it tells the partitioner; what that makes of it is examined where models are compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._functorch import config

from harness.trial.compilation import Backends
from strategies import StrategyError
from strategies.ac.compiler_budget import CompilerBudget
from tests.harness.composing import experiment_of, refusal_of, rows
from tests.strategies.toys import toy


def test_its_options_are_options_of_the_partitioner() -> None:
    known = config.get_config_copy()
    assert set(CompilerBudget().partitioner) <= set(known)


def test_the_model_stays_as_it_is() -> None:
    model = toy()
    assert CompilerBudget().apply(model) is model
    assert type(model) is type(toy())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"budget": 1.5}, "ac.budget: must be in [0, 1], got 1.5", id="above all activations"),
        pytest.param({"budget": True}, "ac.budget: must be in [0, 1], got True", id="no number"),
        pytest.param({"solver": "milp"}, "ac.solver: must be one of dp, greedy, ilp, dp_knapsack_sliding_hirschberg, got 'milp'", id="an unknown solver"),
        pytest.param({"estimator": "testing"}, "ac.estimator: must be one of flops, profile, got 'testing'", id="an unknown estimator"),
    ],
)  # fmt: skip
def test_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError) as caught:
        CompilerBudget(**fields)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("line", "message"),
    rows(
        {
            "ac=compiler_budget": "compile: none leaves nobody to carry out ac=compiler_budget; use compile=aot_eager or inductor",
            "ac=compiler_budget compile=aot_eager wrap_order=call_site": "wrap_order: call_site does not suit CompilerBudget; use inside_fsdp",
        }
    ),
)
def test_needs_a_compiler_and_its_model(line: str, message: str) -> None:
    assert refusal_of(line) == message


def test_the_configuration_of_torch_is_as_before_once_something_is_compiled() -> None:
    asked: list[float] = []

    class Watched(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x).sin()

    backend = Backends().of(experiment_of("ac=compiler_budget ac.budget=0.25 compile=aot_eager"))

    def watching(graph: Any, inputs: Any) -> Any:
        compiled = backend(graph, inputs)
        asked.append(config.activation_memory_budget)
        return compiled

    before = config.save_config_portable()
    torch.compile(Watched().forward, backend=watching)(torch.ones(4, 4, requires_grad=True)).sum().backward()
    torch.compiler.reset()
    assert asked == [1.0]
    assert config.save_config_portable() == before
