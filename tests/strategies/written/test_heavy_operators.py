"""Heavy operators: their names, bytes and FLOPs, and what is kept within a number of bytes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from strategies.written.heavy_operators import HeavyOperator, recomputed_flops, rules_for
from tests.strategies.toys import Stack, toy
from tests.strategies.written.written_toys import operators_of

_LAYER = {
    # FLOPs and bytes of 16 tokens of width 16
    "qkv:linear": (24576, 3072),
    ":attention": (8192, 1024 + 128),
    "out:linear": (8192, 1024),
    "up:linear": (32768, 4096),
    "down:linear": (32768, 1024),
}


@pytest.mark.parametrize("model", ["biased", "bias_free"])
def test_names_flops_and_bytes_of_a_block(model: str) -> None:
    found = operators_of(toy(model).eval())
    assert list(found) == ["layers.0", "layers.1", "layers.2"]
    assert {each.rule: (each.flops, each.result_bytes) for each in found["layers.1"]} == _LAYER


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_rules_are_those_of_any_attention(backend: SDPBackend) -> None:
    with sdpa_kernel(backend):
        found = operators_of(toy("no_dropout"))
    assert [each.rule for each in found["layers.0"]] == list(_LAYER)


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.second(self.first(x).relu_()).sin())  # type: ignore[no-any-return]


def test_calls_are_numbered_and_what_is_written_or_runs_once_is_not_kept() -> None:
    found = operators_of(Stack(Written()), (torch.randn(4, 8),))
    assert [(each.rule, each.runs_again, each.is_written) for each in found["layers.0"]] == [
        ("first:linear", True, True),
        ("second:linear", True, False),
        ("second@1:linear", False, False),
    ]
    assert rules_for(found, math.inf)["layers.0"].keep == ("second:linear",)


_A, _B = (
    [
        HeavyOperator(
            fqn=fqn, rule=rule, number=0, flops=flops, result_bytes=size, runs_again=True, is_written=False
        )
        for rule, flops, size in (("x:linear", 100, 10), ("y:linear", 60, 20))
    ]
    for fqn in ("a", "b")
)


@pytest.mark.parametrize(
    ("extra_bytes", "a", "b", "flops"),
    [
        pytest.param(9, (), (), 320, id="nothing fits"),
        pytest.param(10, (), ("x:linear",), 220, id="of equals the one of the last block"),
        pytest.param(25, ("x:linear",), ("x:linear",), 120, id="the most FLOPs a byte first"),
        pytest.param(40, ("x:linear",), ("x:linear", "y:linear"), 60, id="the rest goes to what fits"),
        pytest.param(math.inf, ("x:linear", "y:linear"), ("x:linear", "y:linear"), 0, id="all"),
    ],
)
def test_rules_within_bytes(extra_bytes: float, a: tuple[str, ...], b: tuple[str, ...], flops: int) -> None:
    operators = {"a": _A, "b": _B}
    rules = rules_for(operators, extra_bytes)
    assert (rules["a"].keep, rules["b"].keep) == (a, b)
    assert recomputed_flops(operators, rules) == flops
