# ruff: noqa: E501 (arguments and what is said about them stand on one line)
"""What to switch on, asked by a program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import acbench
from tests.acbench.test_comparing import BATCH, Stack

MAKE: Any = Stack


@pytest.mark.slow
def test_the_answer_of_a_program() -> None:
    answer = acbench.fit(Stack, (torch.ones(512, 16),), on="epyc_9004", gib=0.001)
    assert answer.use is not None
    assert answer.use.verdict == "neutral"
    assert not answer.plain.fits
    assert answer.blocks.to_dict()["count"] == 3
    assert "def apply(model" in answer.code()
    assert isinstance(answer.apply(Stack()), nn.Module)
    assert repr(answer).startswith("USE ")
    assert "<table>" in answer._repr_html_()
    assert answer.command is None
    measured = acbench.measure(Stack, (torch.ones(512, 16),))[0]
    assert (answer.plain.peak_bytes, answer.plain.saved_bytes) == (measured.peak_bytes, measured.saved_bytes)


class Mute(Exception):  # noqa: N818 (its text cannot be had)
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Raising(Stack):
    def forward(self, _x: torch.Tensor) -> torch.Tensor:
        raise Mute


def _raise(_outputs: object) -> None:
    raise ValueError("two\nlines")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = x + self.down(self.up(x).relu())
        return outputs


class Shared(nn.Module):
    """One block that is a plain attribute, called four times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = Layer(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.layer(x)
        outputs: torch.Tensor = self.head(x)
        return outputs


WAY_OUT = (
    "make: no blocks found in Shared: no module of it repeats; its classes save Layer 320.0 KiB; "
    'name blocks by their class, module_classes=["Layer"]; or put what repeats, or stages of it, into a '
    "ModuleList or Sequential of modules"
)


def test_a_shared_block_is_named_by_its_class() -> None:
    found = acbench.fit(
        Shared, (torch.ones(512, 16),), on="epyc_9004", gib=1.0, proof=False, module_classes=["Layer"]
    )
    assert found.blocks.to_dict()["classes"] == {"Layer": 1}
    assert not found.blocks.found
    full = next(each for each in found.options if each.variant == "full")
    assert full.saved_bytes < found.plain.saved_bytes
    assert full.overrides == ("ac=full", "ac.module_classes=[Layer]")


BLOCKS_NAMED: dict[str, tuple[dict[str, Any], str]] = {
    "no list": (
        {"module_classes": "Layer"},
        "ac.module_classes: must be a list of class names, got 'Layer'",
    ),
    "no class": (
        {"module_classes": ["Lair"]},
        "ac.module_classes: 'Lair' is no class of a module in Shared; did you mean 'Layer'? ",
    ),
    "no container": ({"layers_fqn": "layer"}, "ac.layers_fqn: 'layer' is a Layer, not a ModuleList, "),
}


@pytest.mark.parametrize(("named", "message"), BLOCKS_NAMED.values(), ids=BLOCKS_NAMED)
def test_blocks_that_are_not_there_are_refused(named: dict[str, Any], message: str) -> None:
    with pytest.raises(acbench.StrategyError) as refused:
        acbench.fit(Shared, BATCH, on="epyc_9004", gib=1.0, **named)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"on": "rtx"}, "--on: unknown 'rtx'; ", id="hardware"),
        pytest.param({"gib": 0}, "--gib: must be above 0, got 0", id="memory"),
        pytest.param({"dtype": "fp8"}, "dtype: must be one of own, fp32, bf16, bf16_mixed, got 'fp8'", id="dtype"),
        pytest.param({"margin": 1}, "margin: must be in [0, 1), got 1", id="margin"),
        pytest.param({"make": Stack()}, "make: must be a function that returns a fresh model, got an instance of Stack", id="a model"),
        pytest.param({"batch": [BATCH, BATCH]}, "batch: must be one batch, got 2 micro-batches; ", id="micro-batches"),
        pytest.param({"make": lambda: nn.Linear(16, 16)}, "make: no blocks found in Linear: ", id="no blocks"),
        pytest.param({"make": Shared}, WAY_OUT, id="a shared block"),
        pytest.param({"make": Raising}, "make: the plain step raised Mute: (its text cannot be had: RuntimeError) (test_fitting.py, line ", id="a model that raises"),
        pytest.param({"loss_fn": _raise}, "make: the plain step raised ValueError: two lines (test_fitting.py, line ", id="a loss that raises"),
    ],
)  # fmt: skip
def test_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    given = {"make": MAKE, "batch": BATCH, "gib": 1.0, "on": "epyc_9004"} | arguments
    with pytest.raises(acbench.ConfigError) as refused:
        acbench.fit(given.pop("make"), given.pop("batch"), **given)
    assert str(refused.value).startswith(message)
