from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.measure.parity.module_outputs import ModuleOutput, first_wrong, module_outputs
from tests.toy_trainee import toy_batches, toy_trainee

_WHOLE = torch.arange(24.0).reshape(2, 12) + 1


def _given(*tensors: Tensor) -> list[ModuleOutput]:
    return [ModuleOutput(fqn=f"layers.{index}", tensors=(each,)) for index, each in enumerate(tensors)]


@pytest.mark.parametrize(
    ("actual", "wrong"),
    [
        pytest.param(_WHOLE, "", id="the whole"),
        pytest.param(_WHOLE * (1 + 1e-5), "", id="within rounding"),
        pytest.param(_WHOLE[:, 6:], "", id="this rank's shard of features"),
        pytest.param(_WHOLE[1:], "", id="this rank's shard of rows"),
        pytest.param(_WHOLE[:, :6], "layers.1", id="another rank's shard"),
        pytest.param(_WHOLE / 2, "layers.1", id="a summand"),
        pytest.param(_WHOLE.reshape(-1), "", id="what is no shard is left out"),
        pytest.param(torch.full((2, 12), torch.nan), "layers.1", id="NaN"),
    ],
)
def test_the_first_module_that_gives_something_else(actual: Tensor, wrong: str) -> None:
    right = torch.ones(3)
    found = first_wrong(
        _given(right, _WHOLE, right), _given(right, actual, right), relative=1e-4, part=1, parts=2
    )
    assert found == wrong


def test_calls_are_compared_in_turn_and_what_is_called_by_one_alone_is_left_out() -> None:
    first, second = _given(torch.ones(3), torch.zeros(3))
    again = ModuleOutput(fqn="layers.0", tensors=(torch.zeros(3),))
    assert first_wrong([first, again], [second, first, again], relative=0, part=0, parts=2) == ""
    assert first_wrong([first, again], [first, first], relative=0, part=0, parts=2) == "layers.0"


def test_outputs_stand_in_the_order_in_which_modules_end_and_nothing_stays_behind() -> None:
    trainee = toy_trainee(lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8))))
    (batch,) = toy_batches(1, 4, 8)
    found = module_outputs(trainee, batch, seed=0, dp_rank=0)
    assert [each.fqn for each in found] == ["0", "1.0", "1.1", "1"]
    assert all(each.tensors[0].shape == (4, 8) for each in found)
    assert not any(module._forward_hooks for module in trainee.model.modules())
