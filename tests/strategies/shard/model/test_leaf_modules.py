from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from strategies.shard.model.leaf_modules import is_seen_through, why_not_placed


class _Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the parent's name)
        return super().forward(input) * 2


class _Initialised(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class _Called(nn.Linear):
    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 (the parent's name)
        called: Tensor = super().__call__(input)
        return called * 2


class _Computed(nn.Embedding):
    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return torch.zeros(2, 2)


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


def _changed(change: Callable[[nn.Linear], object]) -> nn.Linear:
    module = nn.Linear(2, 2)
    change(module)
    return module


OTHER_FORWARD = "has another forward than nn.Linear"
OTHER_PARAMETERS = "has other parameters than nn.Linear, or computes them"
MODULES = [
    pytest.param(nn.Linear(2, 2, bias=False), None, id="linear"),
    pytest.param(nn.Embedding(2, 2), None, id="embedding"),
    pytest.param(nn.LayerNorm(2), None, id="layer norm"),
    pytest.param(nn.RMSNorm(2), None, id="RMS norm"),
    pytest.param(_Initialised(2, 2), None, id="a subclass with the same forward"),
    pytest.param(_Doubled(2, 2), OTHER_FORWARD, id="another forward"),
    pytest.param(_Called(2, 2), OTHER_FORWARD, id="another call"),
    pytest.param(
        _changed(lambda module: setattr(module, "forward", torch.relu)),
        OTHER_FORWARD,
        id="a forward of its own",
    ),
    pytest.param(
        _changed(lambda module: module.register_parameter("scale", nn.Parameter(torch.ones(2)))),
        OTHER_PARAMETERS,
        id="a further parameter",
    ),
    pytest.param(
        _changed(lambda module: module.register_buffer("seen", torch.zeros(2))),
        OTHER_PARAMETERS,
        id="a buffer",
    ),
    pytest.param(
        _changed(lambda module: module.add_module("act", nn.ReLU())), OTHER_PARAMETERS, id="a submodule"
    ),
    pytest.param(_changed(parametrizations.weight_norm), OTHER_PARAMETERS, id="a parametrisation"),
    pytest.param(
        _changed(lambda module: module.register_forward_hook(lambda *_: None)),
        "has hooks, which would see shards",
        id="a hook",
    ),
    pytest.param(
        _changed(lambda module: module.register_full_backward_pre_hook(lambda *_: None)),
        "has hooks, which would see shards",
        id="a hook of the backward",
    ),
    pytest.param(nn.Conv1d(1, 1, 1), "is not a torch linear, embedding or norm", id="a convolution"),
]


@pytest.mark.parametrize(("module", "reason"), MODULES)
def test_a_leaf_is_exactly_what_is_known(module: nn.Module, reason: str | None) -> None:
    assert why_not_placed(module) == reason


def test_a_computed_parameter_is_not_known() -> None:
    module = nn.Embedding(2, 2)
    module.__class__ = _Computed
    assert why_not_placed(module) == "has other parameters than nn.Embedding, or computes them"


@pytest.mark.parametrize(
    ("module", "down_to_modules", "down_to_functions"),
    [
        pytest.param(nn.Sequential(nn.Linear(2, 2)), True, True, id="a container"),
        pytest.param(nn.ReLU(), True, True, id="a function"),
        pytest.param(nn.Linear(2, 2), False, False, id="a leaf"),
        pytest.param(_Doubled(2, 2), False, True, id="the user's own linear"),
        pytest.param(_Scale(), False, True, id="the user's own parameter"),
        pytest.param(nn.Conv1d(1, 1, 1), False, False, id="torch's own module"),
        pytest.param(nn.BatchNorm1d(2, affine=False), False, False, id="buffers"),
    ],
)
def test_modules_that_stand_for_what_they_call(
    module: nn.Module, down_to_modules: bool, down_to_functions: bool
) -> None:
    found = [is_seen_through(module, to_functions=to_functions) for to_functions in (False, True)]
    assert found == [down_to_modules, down_to_functions]


def test_what_has_hooks_is_called_as_a_whole() -> None:
    module = nn.ReLU()
    module.register_forward_hook(lambda *_: None)
    assert not is_seen_through(module, to_functions=True)
