"""torch_remat: which submodules keep their activations, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch_remat", reason="torch-remat is not installed: pip install 'acbench[remat]'")

from strategies import StrategyError
from strategies.ac import torch_remat
from strategies.ac.torch_remat import TorchRemat
from tests.strategies.toys import differences, toy, train_step


def applied(**fields: Any) -> Any:
    return TorchRemat(layers_fqn="layers", **fields).apply(toy())


def test_without_random_numbers_dropout_is_drawn_anew() -> None:
    plain, model = toy(), applied(preserve_rng_state=False)
    found = differences(train_step(plain), train_step(model))
    assert "rng_state" in found
    assert any("gradient" in each for each in found), found


def test_a_module_that_no_forward_calls_is_reported() -> None:
    strategy = TorchRemat(layers_fqn="layers", save_regions=("up", "dropout.unused"))
    model = toy()
    for block in model.layers:
        block.dropout.add_module("unused", type(block.up)(1, 1))
    strategy.apply(model)
    assert strategy.observe(model).never_fired == ()  # nothing has run yet
    train_step(model)
    seen = strategy.observe(model)
    assert (seen.named, seen.never_fired) == (("up", "dropout.unused"), ("dropout.unused",))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        pytest.param(
            lambda: TorchRemat(save_regions="up"),  # type: ignore[arg-type]
            "ac.save_regions: must be a list of module names in a block, got 'up'",
            id="a name for a list",
        ),
        pytest.param(
            lambda: applied(save_regions=("upp",)),
            "ac.save_regions: 'layers.0' has no submodule 'upp'; the nearest: 'up', 'out'",
            id="no such module",
        ),
        pytest.param(
            lambda: TorchRemat(save_regions=("up",)).call_site(toy()),
            "wrap_order: call_site makes the model one region, and ac.save_regions names parts of blocks; "
            "use inside_fsdp",
            id="no blocks",
        ),
        pytest.param(
            lambda: TorchRemat(save_regions=("up",)).check_compilation("compile_first", "blocks"),
            "compile_order: compile_first hides what ac.save_regions names from torch-remat; "
            "use compile_order=ac_first",
            id="names inside compiled code",
        ),
    ],
)
def test_refusals(act: Any, message: str) -> None:
    with pytest.raises(StrategyError) as error:
        act()
    assert str(error.value) == message


def test_a_missing_package_is_named() -> None:
    with (
        mock.patch.object(torch_remat, "find_spec", return_value=None),
        pytest.raises(StrategyError) as error,
    ):
        TorchRemat()
    assert str(error.value) == (
        "ac: torch_remat needs the package torch-remat, which is not installed: pip install 'acbench[remat]'"
    )
