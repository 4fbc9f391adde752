"""What `show=regions` prints: the tree of regions and the code that they become."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.ac.nested import Nested
from strategies.nested.tape_listing import literal
from tests.strategies.nested.chain import LABELS, Chain

GOLDEN = Path(__file__).parents[2] / "golden" / "nested_seed.txt"


def test_the_seed_is_shown_as_it_always_was() -> None:
    with torch.device("meta"):
        model, x = Chain(), torch.empty(4, 4)
    assert f"{Nested(labels=LABELS).view('regions', model, (x,))}\n" == GOLDEN.read_text(encoding="utf-8")


def test_blocks_of_a_sequence_and_a_region_in_a_region() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, device="meta") for _ in range(4)))
    shown = Nested(labels={"1": 0, "2": [0, 1]}).view("regions", model, (torch.empty(2, 8, device="meta"),))
    assert shown == (
        "0\n"
        "region 0\n"
        "    1\n"
        "    region 0_1\n"
        "        2\n"
        "3\n"
        "\n"
        "# forward of the model\n"
        "def forward(self, input):\n"
        "    def checkpoint_0(self, _0):\n"
        "        def checkpoint_0_1(self, _1):\n"
        "            _2 = self[2](_1)  # float32 (2, 8)\n"
        "            return _2\n"
        "\n"
        "        _1 = self[1](_0)  # float32 (2, 8)\n"
        "        _2 = torch.utils.checkpoint.checkpoint(self.checkpoint_0_1, _1, use_reentrant=False)"
        "  # float32 (2, 8)\n"
        "        return _2\n"
        "\n"
        "    _0 = self[0](input)  # float32 (2, 8)\n"
        "    _2 = torch.utils.checkpoint.checkpoint(self.checkpoint_0, _0, use_reentrant=False)"
        "  # float32 (2, 8)\n"
        "    _3 = self[3](_2)  # float32 (2, 8)\n"
        "    return (_3,)"
    )


class Between(nn.Module):
    """Something between two layers."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function = nn.Linear(8, 8), function
        self.layers = nn.ModuleDict({"for": nn.Linear(8, 8), "a-b": nn.Linear(8, 8)})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8))])
        self.register_buffer("mask", torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        mask: Any = self.mask
        x = self.layers["for"](self.function(self.first(x), mask))
        return self.layers["a-b"](x) * self.scales[0]  # type: ignore[no-any-return]


def _written(x: Tensor, mask: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0:2] = 0.5 * y[:, 2:4]
    y[..., -1] = math.inf
    return y + mask[0]


CODE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "a slice": (lambda x, mask: x + mask[None, 0, :8], "tensor[None, 0, :8]"),
    "slices of all kinds": (
        lambda x, _: x[:, ::2].repeat(1, 2) + x[..., None, 1:][..., 0, :1],
        "[..., None, 1:]",
    ),
    "writes": (_written, "[:, 0:2] = "),
    "a dtype": (lambda x, _: x.to(torch.float64).to(dtype=torch.float32), ".to(torch.float64)"),
    "a device": (lambda x, _: x + torch.zeros(8, device=x.device), "device=torch.device(type="),
    "infinity": (lambda x, mask: x.masked_fill(mask[0] == 0, -math.inf), 'float("-inf")'),
    "lists": (lambda x, _: torch.cat([x[:, :4], x[:, 4:]], dim=1), "[:, 4:]  #"),
    "an index of a list": (lambda x, _: x[[1, 0]], "[[1, 0]]"),
    "an index of a tuple of one": (lambda x, _: x[(0,)].expand(2, 8), "[0,]"),
}


@pytest.mark.parametrize(("function", "words"), CODE.values(), ids=CODE)
def test_the_code_of_a_forward_is_python(function: Callable[[Tensor, Tensor], Tensor], words: str) -> None:
    model = Between(function)
    labels = {"first": 0, "layers.for": 0, "layers.a-b": 1}
    shown = Nested(labels=labels).view("regions", model, (torch.randn(2, 8),))
    code = shown.partition("# forward of the model\n")[2]
    compile(code, "forward", "exec")
    assert words in code


@pytest.mark.parametrize(
    ("value", "code"),
    [
        pytest.param(
            {"a": (1,), "b": [slice(None, 128, None)]},
            "{'a': (1,), 'b': [slice(None, 128, None)]}",
            id="containers",
        ),
        pytest.param(torch.Size([1, 2]), "(1, 2)", id="a size"),
        pytest.param(math.nan, 'float("nan")', id="no number"),
        pytest.param(nn.Linear, "torch.nn.modules.linear.Linear", id="a class"),
        pytest.param(lambda x: x, None, id="a function without a name"),
        pytest.param(object(), None, id="an object"),
    ],
)
def test_values_as_code(value: Any, code: str | None) -> None:
    written = literal(value)
    compile(written, "value", "eval")
    assert written == (repr(repr(value)) if code is None else code)
