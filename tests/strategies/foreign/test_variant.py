"""Variants of libraries: a missing one is named, and what one prints is no output of the command."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from strategies import StrategyError, ac_variants
from strategies.foreign import variant
from strategies.regions.blocks import AbsentBlock
from tests.strategies.toys import WIDTH, toy


@pytest.mark.parametrize(
    ("library", "extra"),
    [
        ("transformers", "hf"),
        *((name, name) for name in ("accelerate", "trl", "torchtitan", "fairscale", "deepspeed")),
    ],
)
def test_a_missing_library_is_named(library: str, extra: str) -> None:
    with (
        mock.patch.object(variant, "find_spec", return_value=None),
        pytest.raises(StrategyError) as error,
    ):
        ac_variants[library]()
    assert str(error.value) == f"ac: {library} is not installed: pip install 'acbench[{extra}]'"


def test_what_a_library_prints_when_it_is_imported_is_no_output(capsys: pytest.CaptureFixture[str]) -> None:
    def imported(_name: str) -> SimpleNamespace:
        print("looking for an accelerator")  # noqa: T201 (as DeepSpeed does)
        return SimpleNamespace(switch_on=lambda _model, **_options: None)

    with (
        mock.patch.object(variant, "find_spec", return_value=object()),
        mock.patch.object(variant, "import_module", imported),
    ):
        ac_variants["deepspeed"](layers_fqn="layers").apply(toy())  # type: ignore[call-arg]
    assert capsys.readouterr() == ("", "looking for an accelerator\n")


class _Passing(AbsentBlock):
    """A block of another stage, which passes on what the stage before has given."""

    given: Any

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        return self.given


class _OfTitan:
    """A policy that wraps blocks as torchtitan's do."""

    Config = staticmethod(lambda **_options: None)

    def __init__(self, _config: None) -> None: ...

    def apply(self, model: Any) -> None:
        for name, block in model.layers.named_children():
            model.layers.register_module(name, checkpoint_wrapper(block))


def _wrap(block: nn.Module, **_options: Any) -> None:
    forward = block.forward

    def checkpointed(x: Any, shift: Any) -> Any:
        return checkpoint(partial(forward, shift=shift), x, use_reentrant=True)

    block.forward = checkpointed


_OF_TORCH: dict[str, dict[str, Any]] = {
    "deepspeed.runtime.activation_checkpointing": {
        "checkpointing": SimpleNamespace(checkpoint=partial(checkpoint, use_reentrant=True))
    },
    "fairscale.nn.checkpoint": {"checkpoint_wrapper": _wrap},
    "torchtitan.distributed": {"activation_checkpoint": SimpleNamespace(FullAC=_OfTitan)},
}
"""Functions of torch for those of libraries, by module."""


@pytest.mark.parametrize("module", _OF_TORCH)
def test_blocks_of_other_stages_stay_as_they_are(module: str) -> None:
    library, parts = module.partition(".")[0], module.split(".")
    stands_in = {".".join(parts[: depth + 1]): ModuleType(module) for depth in range(len(parts))}
    vars(stands_in[module]).update(_OF_TORCH[module])
    options = {"torchtitan": {"policy": "full"}}.get(library, {})
    model: Any = toy()
    model.layers[0] = _Passing()
    calls = f"strategies.foreign.{library}_calls"
    with (
        mock.patch.object(variant, "find_spec", return_value=object()),
        mock.patch.dict(sys.modules, stands_in),
    ):
        sys.modules.pop(calls, None)  # another test may have imported it with the library
        import_module(calls)
        ac_variants[library](**options, layers_fqn="layers").apply(model)  # type: ignore[call-arg]
        del sys.modules[calls]
    given = torch.ones(2, 4, WIDTH, requires_grad=True)
    model.layers[0].given = given
    assert type(model.layers[0]) is _Passing
    model(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
    assert given.grad is not None
