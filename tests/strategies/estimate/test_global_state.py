"""Global state that somebody changes is put back and named."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from strategies.estimate.global_state import GlobalState, ledger


class Mine(nn.Linear):
    """A class that somebody may patch."""

    def own(self) -> int:
        """Return a number."""
        return helper()


def helper() -> int:
    """Return a number."""
    return 1


def _hooks() -> None:
    torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor).__enter__()


CHANGES: dict[str, tuple[Callable[[], object], Callable[[], Any]]] = {
    "torch.set_default_dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "torch.set_default_device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "torch.set_grad_enabled": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "torch.autocast('cpu')": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "torch.get_autocast_dtype('cpu')": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
    ),
    "torch.set_autocast_cache_enabled": (
        lambda: torch.set_autocast_cache_enabled(False),
        torch.is_autocast_cache_enabled,
    ),
    "torch.use_deterministic_algorithms": (
        lambda: torch.use_deterministic_algorithms(True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "torch.set_num_threads": (
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
        torch.get_num_threads,
    ),
    "torch.set_float32_matmul_precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "torch.nn.utils.parametrize._cache_enabled": (
        lambda: setattr(parametrize, "_cache_enabled", 1),
        lambda: parametrize._cache_enabled,
    ),
    "torch.nn.utils.parametrize._cache": (
        lambda: parametrize._cache.update({(1, "w"): None}),
        lambda: dict(parametrize._cache),
    ),
    "torch.nn.modules.module._global_forward_hooks": (
        lambda: nn.modules.module.register_module_forward_hook(lambda *_: None),
        lambda: dict(nn.modules.module._global_forward_hooks),
    ),
    "hooks of saved tensors": (
        _hooks,
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(False),  # type: ignore[attr-defined]
    ),
    "gc.enable": (gc.disable, gc.isenabled),
    f"functions of {__name__}.Mine": (
        lambda: setattr(Mine, "forward", lambda _self, x: x),
        lambda: Mine.forward,
    ),
    "functions of torch.nn.modules.linear.Linear": (
        lambda: setattr(nn.Linear, "forward", lambda _self, x: x),
        lambda: nn.Linear.forward,
    ),
    f"functions of {__name__}": (lambda: globals().update(helper=lambda: 2), lambda: helper),
}


@pytest.mark.parametrize("name", CHANGES)
def test_puts_back_and_names(name: str) -> None:
    change, read = CHANGES[name]
    before = read()
    state = GlobalState(Mine(2, 2))
    change()
    assert state.put_back() == (name,)
    assert read() == before
    assert state.put_back() == ()


def test_two_who_take_turns_have_their_own() -> None:
    state = GlobalState()
    mine, other = state.forked(), state.forked()
    with mine.entered():
        torch.set_default_dtype(torch.float64)
    assert torch.get_default_dtype() is torch.float32
    with other.entered():
        assert torch.get_default_dtype() is torch.float32
    with mine.entered():
        assert torch.get_default_dtype() is torch.float64


def _change_much_and_raise() -> None:
    torch.rand(1)
    random.random()
    np.random.rand(700)  # noqa: NPY002 (as models draw)
    torch.set_default_dtype(torch.float64)
    raise RuntimeError("mine")


def test_a_scope_that_raises_leaves_nothing_behind() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]  # noqa: NPY002
    with pytest.raises(RuntimeError, match=r"^mine$"), ledger() as changed:
        _change_much_and_raise()
    assert changed == ["torch.set_default_dtype", "generator cpu", "generator python", "generator numpy"]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state(legacy=False)["state"]["pos"] == before[2]  # noqa: NPY002


def test_the_mark_of_a_patch_goes_with_the_patch() -> None:
    def patch() -> None:
        if not hasattr(Mine, "is_patched"):
            Mine.is_patched = True  # type: ignore[attr-defined]
            Mine.own = lambda _: 2  # type: ignore[assignment]

    state = GlobalState(Mine(1, 1))
    variant = state.forked()
    for _ in range(2):
        with variant.entered():
            patch()
            assert Mine(1, 1).own() == 2
        assert Mine(1, 1).own() == 1
        assert not hasattr(Mine, "is_patched")
