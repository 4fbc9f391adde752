"""Blocks: found by container or by class; what cannot be found is refused with what could be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from strategies import Observation, StrategyError
from strategies.regions.blocks import ModelModules, children_of, find_blocks, plain_class, unwrapped
from strategies.regions.region import Region, enclose, regions
from tests.strategies.toys import MODELS, Toy, toy

FOUND = {
    "children of a ModuleList": ("biased", "layers", (), ["layers.0", "layers.1", "layers.2"]),
    "children of a ModuleDict": ("module_dict", "layers", (), ["layers.b0", "layers.b1", "layers.b2"]),
    "children of a Sequential": ("sequential", "layers", (), ["layers.0", "layers.1", "layers.2"]),
    "a block used twice is one block": ("shared_block", "layers", (), ["layers.0", "layers.1"]),
    "by class": ("biased", "", ("Block",), ["layers.0", "layers.1", "layers.2"]),
    "by two classes": (
        "shared_block",
        "",
        ("LayerNorm", "Embedding"),
        ["embedding", "layers.0.norm", "layers.1.norm"],
    ),
    "classes win over the container": ("biased", "layers", ("Embedding",), ["embedding"]),
}


@pytest.mark.parametrize(("model", "layers_fqn", "classes", "expected"), FOUND.values(), ids=FOUND)
def test_found(model: str, layers_fqn: str, classes: tuple[str, ...], expected: list[str]) -> None:
    assert list(find_blocks(toy(model), layers_fqn=layers_fqn, module_classes=classes)) == expected


def test_what_a_plan_may_decide_about() -> None:
    inner = nn.ModuleDict({"words": nn.Embedding(2, 4), "layers": toy().layers, "act": nn.GELU()})
    other = nn.Sequential(nn.Linear(4, 4))
    whole = nn.ModuleDict({"inner": inner, "head": nn.Linear(4, 4), "other": other, "drop": nn.Dropout()})
    for layers_fqn, classes in (("inner.layers", ()), ("", ("LayerNorm",))):
        blocks = find_blocks(whole, layers_fqn=layers_fqn, module_classes=classes)
        found = ModelModules.of(whole, blocks)
        assert list(found.blocks) == list(blocks)
        assert list(found.beside) == ["inner.words", "head"]
        assert found.caller == ("", whole)  # what is called; a ModuleDict never is
    vars(whole["head"])["forward"] = None
    assert list(ModelModules.of(whole, blocks).beside) == ["inner.words"]
    vars(whole)["forward"] = None
    assert ModelModules.of(whole, blocks).caller is None


CALLERS = {
    "the model": (("layers.0", "layers.1"), ""),
    "a module inside": (("model.layers.0", "model.layers.1"), "model"),
    "around a container that is called": (("model.stages.0.0", "model.stages.0.1"), "model"),
    "around blocks in several places": (("model.layers.0", "model.stages.0.1"), "model"),
}


@pytest.mark.parametrize(("fqns", "caller"), CALLERS.values(), ids=CALLERS)
def test_the_caller_of_blocks(fqns: tuple[str, ...], caller: str) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
            self.stages = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))

    class Outer(Inner):
        def __init__(self) -> None:
            super().__init__()
            self.model = Inner()

    model = Outer()
    found = ModelModules.of(model, {fqn: model.get_submodule(fqn) for fqn in fqns}).caller
    assert found == (caller, model.get_submodule(caller))


def test_of_matches_that_nest_the_outermost_is_the_block() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_norm, self.out = nn.LayerNorm(2), nn.Linear(2, 2)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention, self.mlp = nn.LayerNorm(2), Attention(), nn.Sequential(nn.Linear(2, 2))

    model = nn.Module()
    model.layers = nn.ModuleList(Layer() for _ in range(2))
    found = find_blocks(model, layers_fqn="", module_classes=("LayerNorm", "Attention", "Sequential"))
    assert list(found) == [f"layers.{n}.{part}" for n in range(2) for part in ("norm", "attention", "mlp")]


REFUSED = {
    "nothing named": (
        "",
        (),
        "ac.layers_fqn: is empty; name the module that holds the blocks, containers are: layers",
    ),
    "missing": ("layrs", (), "ac.layers_fqn: 'layrs' is not a module of Toy; containers are: layers"),
    "missing below": (
        "layers.0.heads",
        (),
        "ac.layers_fqn: 'layers.0.heads' is not a module of Toy; containers are: layers",
    ),
    "no container": (
        "layers.0",
        (),
        (
            "ac.layers_fqn: 'layers.0' is a Block, "
            "not a ModuleList, ModuleDict or Sequential; containers are: layers"
        ),
    ),
    "misspelt class": (
        "",
        ("Blok",),
        (
            "ac.module_classes: 'Blok' is no class of a module in Toy; did you mean 'Block'? "
            "classes are: Block, Dropout, Embedding, LayerNorm, Linear, ModuleList"
        ),
    ),
    "nested classes": (
        "",
        ("Block", "LayerNorm"),
        "ac.module_classes: 'layers.0.norm' (LayerNorm) lies inside 'layers.0' (Block); name one of them",
    ),
}


class Shared(nn.Module):
    """A block that forward calls several times, and that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.block = nn.Linear(2, 2), Inside()


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2, 2), nn.GELU())


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.flat = Shared(), nn.ModuleList([nn.Linear(2, 2)])


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.boxed = nn.Module(), nn.ModuleList([Shared()])
        self.body.layers = nn.ModuleList([Shared()])


BY_CLASS: dict[str, tuple[Callable[[], nn.Module], str, str, str]] = {
    "a shared block, nothing named": (
        Shared,
        "",
        "is empty; name the module that holds the blocks, containers are: block.mlp",
        "ac.module_classes=[Inside] (in a program module_classes=['Inside'])",
    ),
    "a shared block, named as if it were a container": (
        Shared,
        "block",
        "'block' is a Inside, not a ModuleList, ModuleDict or Sequential; containers are: block.mlp",
        "ac.module_classes=[Inside] (in a program module_classes=['Inside'])",
    ),
    "inside of another module": (
        Around,
        "blocks",
        "'blocks' is not a module of Around; containers are: body.block.mlp, flat",
        "ac.module_classes=[Shared] or ac.module_classes=[Inside] (in a program module_classes=['Shared'])",
    ),
    "stages of a Sequential": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))),
        "",
        "is empty; name the module that holds the blocks, containers are: 0, 1",
        "ac.module_classes=[Sequential] (in a program module_classes=['Sequential'])",
    ),
    "nothing that has parts": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        "",
        "is empty; name the module that holds the blocks, containers are: none",
        "",
    ),
    "beside containers of blocks": (
        Holding,
        "blocks",
        (
            "'blocks' is not a module of Holding; containers are: body.layers, "
            "body.layers.0.block.mlp, boxed, boxed.0.block.mlp"
        ),
        "",
    ),
}


@pytest.mark.parametrize(("kind", "layers_fqn", "message", "classes"), BY_CLASS.values(), ids=BY_CLASS)
def test_a_class_that_may_name_the_blocks_is_said(
    kind: Callable[[], nn.Module], layers_fqn: str, message: str, classes: str
) -> None:
    with pytest.raises(StrategyError) as error:
        find_blocks(kind(), layers_fqn=layers_fqn, module_classes=())
    way_out = f"; or name blocks by their class, {classes}" if classes else ""
    assert str(error.value) == f"ac.layers_fqn: {message}{way_out}"


@pytest.mark.parametrize(("layers_fqn", "classes", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(layers_fqn: str, classes: tuple[str, ...], message: str) -> None:
    with pytest.raises(StrategyError) as error:
        find_blocks(toy(), layers_fqn=layers_fqn, module_classes=classes)
    assert str(error.value) == message


def test_an_empty_container_is_refused() -> None:
    model = Toy(**MODELS["biased"])
    model.layers = nn.ModuleList()
    with pytest.raises(StrategyError, match=r"'layers' holds no blocks; containers are: layers"):
        children_of(model, "layers")


def test_wrappers_are_seen_through() -> None:
    model = toy()
    compiled: Any = torch.compile(model, backend="eager")
    assert unwrapped(compiled) is model
    assert list(children_of(compiled, "layers")) == ["layers.0", "layers.1", "layers.2"]
    assert list(find_blocks(compiled, layers_fqn="", module_classes=("Block",))) == list(
        children_of(model, "layers")
    )


def test_the_class_of_an_enclosed_module_is_the_users() -> None:
    class Untouched:
        def __call__(self, _module: Any, body: Any, args: Any, kwargs: Any) -> Any:
            return body(*args, **kwargs)

        def observe(self) -> Observation:
            return Observation()

    model = toy()
    region: Region = Untouched()
    enclose(model.layers[1], region)
    assert type(model.layers[1]) is not type(model.layers[0])
    assert plain_class(model.layers[1]) is type(model.layers[0])
    assert isinstance(model.layers[1], type(model.layers[0]))
    assert list(find_blocks(model, layers_fqn="", module_classes=("Block",))) == [
        "layers.0",
        "layers.1",
        "layers.2",
    ]
    assert regions(model) == {"layers.1": region}
