"""The files that `show=file` prints: each computes and holds what its variant does, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import Strategy, StrategyError, ac_variants
from tests.strategies.meters import measure
from tests.strategies.toys import differences, toy, train_step
from tests.strategies.written.written_toys import TOKENS, loaded

SHOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "by class": ("full", {"module_classes": ("Block",)}),
    "every second": ("selective_layer", {}),
    "the first": ("selective_layer", {"first": 1}),
    "offload": ("offload", {}),
}


SCORES = 2 * 16 * 8 * 16
"""FLOPs of a block's queries by keys: with dropout the CPU has no kernel, and files keep its result alone."""


def made(variant: str, options: dict[str, Any]) -> Strategy:
    given: dict[str, Any] = {"layers_fqn": "layers", **options}
    return ac_variants[variant](**given)


def shown(variant: str, options: dict[str, Any], name: str = "biased") -> str:
    strategy = made(variant, options)
    return strategy.view("file", toy(name), (TOKENS,))


@pytest.mark.parametrize(("variant", "options"), SHOWN.values(), ids=SHOWN)
def test_a_file_computes_the_same_and_costs_as_much(variant: str, options: dict[str, Any]) -> None:
    measured = []
    models = (
        made(variant, options).apply(toy()),
        loaded(shown(variant, options))["apply"](toy()),
    )
    for model in models:
        assert differences(train_step(toy()), train_step(model)) == []
        measured.append(measure(model, TOKENS))
    if variant != "offload":  # on the CPU a file moves nothing
        assert measured[0] == measured[1]


@pytest.mark.parametrize(("name", "again"), [("biased", 3 * SCORES), ("no_dropout", 0)])
def test_selective_op_keeps_what_backward_needs(name: str, again: int) -> None:
    measured = []
    models = (
        made("selective_op", {}).apply(toy(name)),
        loaded(shown("selective_op", {}, name))["apply"](toy(name)),
    )
    for model in models:
        assert differences(train_step(toy(name)), train_step(model)) == []
        measured.append(measure(model, TOKENS))
    of_variant, of_file = measured
    assert of_file.backward_flops == of_variant.backward_flops + again
    assert of_file.saved_bytes <= of_variant.saved_bytes


def test_titles_say_what_the_file_is_of() -> None:
    assert shown("selective_layer", {"last": 2}).splitlines()[:3] == [
        '"""ac=selective_layer of acbench for 2 of 3 blocks of Toy.',
        "",
        "    from apply_selective_layer import apply",
    ]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "rewinding": (
        "full",
        {"rewind": True},
        "ac.rewind: is true, which a written file has no words for; use ac.rewind=false",
    ),
    "no random numbers": (
        "full",
        {"preserve_rng_state": False},
        "ac.preserve_rng_state: is false, which a written file has no words for; use ac.preserve_rng_",
    ),
    "an overload": (
        "selective_op",
        {"save_ops": ["aten.mm.default"]},
        "ac.save_ops: a written file has no words for 'aten.mm.default'; it knows matmul, conv, attention",
    ),
    "a preset": (
        "selective_op",
        {"save_ops": "torchtitan"},
        "ac.save_ops: a written file has no words for 'torchtitan'; it knows matmul, conv, attention",
    ),
    "every second product": (
        "selective_op",
        {"matmul_recompute_every": 2},
        "ac.matmul_recompute_every: is 2, which a written file has no words for; use 0",
    ),
    "another container": ("full", {"layers_fqn": "head"}, "ac.layers_fqn: 'head' is a Linear, not a "),
}


@pytest.mark.parametrize(("variant", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_file_cannot_say_is_refused(variant: str, options: dict[str, Any], message: str) -> None:
    strategy = made(variant, options)
    with torch.device("meta"), pytest.raises(StrategyError) as error:
        strategy.view("file", toy(), (TOKENS,))
    assert str(error.value).startswith(message)


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, *, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_inputs_by_name() -> None:
    strategy = made("selective_op", {})
    text = strategy.view("file", ByName(), (), {"x": torch.randn(2, 4)})
    assert loaded(text)["RULES"] == [(["layers.0", "layers.1"], [], [":linear"])]


def test_views_by_position_refuse_inputs_by_name() -> None:
    strategy = ac_variants["nested"](levels=[1], layers_fqn="layers")  # type: ignore[call-arg]
    with pytest.raises(StrategyError) as error:
        strategy.view("regions", ByName(), (), {"x": torch.randn(2, 4)})
    assert str(error.value) == (
        "show: show=regions follows inputs by position, and the model takes x by name alone; "
        "give them positions"
    )


class ReadsValues(ByName):
    def forward(self, *, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else super().forward(x=x)


def test_a_model_that_reads_values_is_refused() -> None:
    strategy = made("selective_op", {})
    with pytest.raises(StrategyError) as error:
        strategy.view("file", ReadsValues(), (), {"x": torch.randn(2, 4)})
    said = str(error.value)
    assert said.startswith(
        "ac: a step on tensors without memory says which operators there are, and the model raises "
    )
    assert said.endswith("; it must not read values of tensors")
