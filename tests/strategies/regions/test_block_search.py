"""Which modules are found to be the blocks of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from strategies.regions.block_search import question, same_class_elsewhere, search_blocks
from strategies.regions.blocks import children_of


class Block(nn.Module):
    def __init__(self, width: int = 4, experts: int = 0) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)


class Other(Block):
    pass


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))


class Stage(nn.Module):
    def __init__(self, width: int, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.shrink = nn.Linear(width, 2 * width)


class Model(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def listed(*blocks: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(blocks)


FOUND = [
    pytest.param(
        Model(layers=listed(Block(), Block())), (["layers.0", "layers.1"], "layers", ()), id="a list"
    ),
    pytest.param(
        Model(inner=Model(layers=nn.Sequential(Block(), Block()))),
        (["inner.layers.0", "inner.layers.1"], "inner.layers", ()),
        id="deeper",
    ),
    pytest.param(Model(layers=listed(Block())), (["layers.0"], "layers", ()), id="one block"),
    pytest.param(
        Model(layers=listed(Block(experts=64), Block(experts=64))),
        (["layers.0", "layers.1"], "layers", ()),
        id="experts are no blocks",
    ),
    pytest.param(
        Model(layers=listed(Block(), Block(experts=8), Block(experts=8))),
        (["layers.0", "layers.1", "layers.2"], "layers", ()),
        id="a first block without experts",
    ),
    pytest.param(
        Model(stages=listed(Stage(2), Stage(8))),
        (
            ["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.1.blocks.1"],
            "stages.1.blocks",
            ("Block",),
        ),
        id="stages",
    ),
    pytest.param(
        Model(stages=listed(Stage(2, 1), Stage(8))),
        (["stages.0.blocks.0", "stages.1.blocks.0", "stages.1.blocks.1"], "stages.1.blocks", ("Block",)),
        id="a stage of one block",
    ),
    pytest.param(
        Model(stages=listed(Stage(2, 1), Stage(8, 1))),
        (["stages.0", "stages.1"], "stages", ()),
        id="stages of one block each",
    ),
    pytest.param(
        Model(down=listed(Block(), Block()), middle=Block(), up=listed(Block(), Block())),
        (["down.0", "down.1", "middle", "up.0", "up.1"], "down", ("Block",)),
        id="the same class elsewhere",
    ),
    pytest.param(
        Model(encoder=listed(Block(), Block()), decoder=listed(Other(), Other(), Other())),
        (["encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2"], "decoder", ("Block", "Other")),
        id="two containers",
    ),
    pytest.param(
        Model(stem=nn.Sequential(Other(1)), layers=listed(Block(16), Block(16))),
        (["layers.0", "layers.1"], "layers", ()),
        id="a small container beside",
    ),
    pytest.param(
        nn.Sequential(Block(), Block()), (["0", "1"], "", ("Block",)), id="the model is the container"
    ),
    pytest.param(
        Model(first=Block(), second=Block()), (["first", "second"], "", ("Block",)), id="attributes"
    ),
    pytest.param(
        Model(layers=nn.Sequential(nn.Sequential(Leaf()), nn.Sequential(Leaf()))),
        (["layers.0", "layers.1"], "layers", ()),
        id="blocks that are containers",
    ),
    pytest.param(
        Model(
            down=listed(listed(Block(2), Other(2), Leaf()), listed(Block(4), Other(4), Leaf())),
            up=listed(listed(Block(8), Block(8), nn.Sequential(Leaf())), listed(Block(2))),
        ),
        (
            ["down.0.0", "down.0.1", "down.1.0", "down.1.1", "up.0.0", "up.0.1", "up.1.0"],
            "up.0",
            ("Block", "Other"),
        ),
        id="lists in lists",
    ),
    pytest.param(
        Model(layers=nn.ModuleDict({"a": listed(Block(), listed(Block())), "b": listed(Block())})),
        (["layers.a.0", "layers.a.1.0", "layers.b.0"], "layers.a", ("Block",)),
        id="lists in a dictionary",
    ),
    pytest.param(
        Model(layers=listed(listed(Leaf(), Leaf()), listed(Leaf()))),
        (["layers.0.0", "layers.0.1", "layers.1.0"], "layers.0", ("Leaf",)),
        id="leaves in lists in a list",
    ),
    pytest.param(
        Model(encoder=listed(shared := Block(), Block()), decoder=listed(shared, shared)),
        (["encoder.0", "encoder.1"], "encoder", ()),
        id="a container of another one's blocks",
    ),
    pytest.param(Model(layers=listed(Leaf(), Leaf())), (["layers.0", "layers.1"], "layers", ()), id="leaves"),
    pytest.param(nn.Linear(2, 2), None, id="nothing"),
    pytest.param(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), None, id="no block"),
]


@pytest.mark.parametrize(("model", "expected"), FOUND)
def test_blocks_are_found(model: nn.Module, expected: Any) -> None:
    found = search_blocks(model)
    assert (found and (list(found.classes), found.layers_fqn, found.module_classes)) == expected


def test_blocks_are_counted_by_class() -> None:
    model = Model(encoder=listed(Block(), Block()), decoder=listed(Other(), Other(), Other()))
    found = search_blocks(model)
    assert found is not None
    assert found.words == "2 Block and 3 Other"


@pytest.mark.parametrize(
    ("model", "elsewhere"),
    [
        pytest.param(Model(down=listed(Block(), Block()), middle=Block()), ["middle"], id="one"),
        pytest.param(Model(down=listed(Block(experts=2)), middle=Expert(4)), [], id="of another class"),
        pytest.param(
            Model(down=nn.Sequential(nn.Sequential(Leaf())), up=nn.Sequential(Leaf())), [], id="containers"
        ),
    ],
)
def test_the_same_class_elsewhere(model: nn.Module, elsewhere: Sequence[str]) -> None:
    assert list(same_class_elsewhere(model, children_of(model, "down"))) == elsewhere


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        pytest.param(
            Model(down=listed(Block(), Block()), middle=Block(), up=listed(Block(), Block())),
            "2 of 5 Block; try ac.module_classes=[Block]",
            id="some of a class",
        ),
        pytest.param(Model(down=listed(Block(), Block()), up=listed(Other())), None, id="all of a class"),
        pytest.param(
            Model(down=listed(Block(64), Block(64)), middle=Block(1)), None, id="all but a small one"
        ),
    ],
)
def test_a_container_is_questioned_that_has_some_of_a_class(model: nn.Module, asked: str | None) -> None:
    assert question(model, children_of(model, "down")) == asked
