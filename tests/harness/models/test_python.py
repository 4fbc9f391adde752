from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.errors import ConfigError
from harness.measure.environment import describe, environment_id
from harness.models import Batch, ModelSpec

MakeSpec = Callable[..., ModelSpec]

FACTORIES = """
import torch
from torch import nn

class Stack(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.Linear(8, 256))

    def forward(self, tokens):
        return self.blocks(self.embedding(tokens))

def tokens():
    return Stack()

def dropping(dropout):
    return Stack(dropout)

def usually(dropout=0.1):
    return Stack(dropout)

def anything(**options):
    return Stack(options.get("dropout", 0.2))

class Frozen(Stack):
    def train(self, mode=True):
        super().train(mode)
        self.blocks[1].eval()
        return self

def frozen():
    return Frozen()

def image():
    target = torch.randn(2, 4)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    return model, (torch.randn(2, 3),), lambda out: (out - target).square().mean()

def nothing():
    return None

class Silent(Exception):
    def __str__(self):
        raise ValueError("no words")

def raises_silently():
    raise Silent

def draws_silently():
    def draw(count):
        raise Silent
    return Stack(), draw, lambda out, target: out.sum()

def pair():
    return Stack(), (torch.zeros(1),)

value = 3
"""


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Return the name of a module in the current folder, another one for every test."""
    name = "user_" + "".join(character if character.isalnum() else "_" for character in request.node.name)
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_a_factory_below_the_current_folder(make_spec: MakeSpec, user_code: str, batch: Batch) -> None:
    spec = make_spec("python", factory=f"{user_code}:tokens", layers_fqn="blocks")
    model = spec.build()
    assert spec.loss(model(*batch.inputs), batch).shape == ()
    assert spec.fixed_batch() is None


def test_dropout_is_given_to_a_factory_that_takes_it(make_spec: MakeSpec, user_code: str) -> None:
    spec = make_spec("python", factory=f"{user_code}:dropping", layers_fqn="blocks", dropout=0.3)
    assert spec.build().get_submodule("blocks.1").p == 0.3


@pytest.mark.parametrize(
    ("factory", "dropout", "trained", "replaced"),
    [
        pytest.param("usually", None, 0.1, (), id="the factory's own"),
        pytest.param("usually", 0.0, 0.0, ("dropout: 0.1 -> 0.0",), id="what is asked for"),
        pytest.param("usually", 0.1, 0.1, (), id="what is asked for is the factory's own"),
        pytest.param("anything", None, 0.2, (), id="the factory's own of any name"),
        pytest.param("anything", 0.3, 0.3, (), id="what is asked for of any name"),
        pytest.param("dropping", 0.3, 0.3, (), id="required"),
    ],
)
def test_dropout_is_the_factorys_own_unless_it_is_given(
    make_spec: MakeSpec,
    user_code: str,
    factory: str,
    dropout: float | None,
    trained: float,
    replaced: tuple[str, ...],
) -> None:
    spec = make_spec("python", factory=f"{user_code}:{factory}", layers_fqn="blocks", dropout=dropout)
    assert spec.build().get_submodule("blocks.1").p == trained
    assert spec.replaced(ep=1) == replaced
    assert spec.may_drop_out()


def test_errors_without_words_are_the_users(make_spec: MakeSpec, user_code: str) -> None:
    spec = make_spec("python", factory=f"{user_code}:raises_silently")
    with pytest.raises(ConfigError) as refusal:
        spec.build()
    said = "raised Silent: (its text cannot be had: ValueError)"
    assert str(refusal.value) == f"model.factory: '{user_code}:raises_silently' {said}"
    spec = make_spec("python", factory=f"{user_code}:draws_silently")
    for draw in (spec.sample_batch, spec.empty_batch):
        with pytest.raises(ConfigError) as refusal:
            draw(2, np.random.default_rng(0))
        assert str(refusal.value) == f"model.factory: its batch of 2 {said}"


def test_a_module_that_trains_in_evaluation_is_said(make_spec: MakeSpec, user_code: str) -> None:
    spec = make_spec("python", factory=f"{user_code}:frozen", layers_fqn="blocks")
    assert [module.training for module in spec.build().modules()] == [True, True, True, True, False, True]
    assert spec.replaced(ep=1) == ("mode of blocks.1: training -> evaluation, by its own train()",)


def test_example_inputs_make_the_batch(make_spec: MakeSpec, user_code: str) -> None:
    spec = make_spec("python", factory=f"{user_code}:image", layers_fqn="")
    before = torch.get_rng_state()
    first, second = spec.fixed_batch(), spec.fixed_batch()
    assert first is not None
    assert second is not None
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.inputs[0], second.inputs[0])
    assert first.targets is None
    loss = spec.loss(spec.build()(*first.inputs), first)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.isfinite()


def test_example_inputs_are_real_below_a_meta_device(make_spec: MakeSpec, user_code: str) -> None:
    spec = make_spec("python", factory=f"{user_code}:image", layers_fqn="")
    with torch.device("meta"):
        fixed = spec.fixed_batch()
    assert fixed is not None
    assert fixed.inputs[0].device.type == "cpu"
    assert spec.loss(torch.zeros(2, 4, requires_grad=True), fixed).device.type == "cpu"


def test_tensor_parallel_plan_is_the_users(make_spec: MakeSpec) -> None:
    spec = make_spec("python", factory="package:make", tp_column=["blocks.*.up"], tp_row=["blocks.*.down"])
    assert spec.tensor_parallel_plan() == {"blocks.*.up": "column", "blocks.*.down": "row"}


@pytest.mark.parametrize(
    "factory", ["make", "package:", ":make", "package:make()", "package.:make", "a b:make", "a:b:c"]
)
def test_a_factory_that_is_no_path(make_spec: MakeSpec, factory: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_spec("python", factory=factory)
    assert str(refusal.value) == f"model.factory: must be 'package.module:function', got {factory!r}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"factory": "{module}:missing"},
            "model.factory: module '{module}' has no function 'missing'",
            id="no such function",
        ),
        pytest.param(
            {"factory": "{module}:value"},
            "model.factory: module '{module}' has no function 'value'",
            id="not callable",
        ),
        pytest.param(
            {"factory": "{module}_absent:tokens"},
            "model.factory: cannot import '{module}_absent': No module named '{module}_absent'",
            id="no such module",
        ),
        pytest.param(
            {"factory": "{module}:nothing"},
            "model.factory: must return a module, or (module, example_inputs, loss_fn), got NoneType "
            "from '{module}:nothing'",
            id="returns nothing",
        ),
        pytest.param(
            {"factory": "{module}:pair"},
            "model.factory: must return a module, or (module, example_inputs, loss_fn), got tuple "
            "from '{module}:pair'",
            id="inputs without a loss",
        ),
        pytest.param(
            {"factory": "{module}:tokens", "dropout": 0.1},
            "model.dropout: must be null, the factory takes no `dropout`, got 0.1",
            id="takes no dropout",
        ),
        pytest.param(
            {"factory": "{module}:tokens", "dropout": 0.0},
            "model.dropout: must be null, the factory takes no `dropout`, got 0.0",
            id="takes no dropout, not even none",
        ),
        pytest.param(
            {"factory": "{module}:dropping"},
            "model.factory: '{module}:dropping' raised TypeError: dropping() missing 1 required positional "
            "argument: 'dropout'; give it model.dropout=…",
            id="requires a dropout",
        ),
        pytest.param(
            {"factory": "{module}:tokens", "layers_fqn": "layers"},
            "model.layers_fqn: must name a ModuleList, ModuleDict or Sequential of Stack, got 'layers'; "
            "containers here: blocks",
            id="blocks elsewhere",
        ),
        pytest.param(
            {"factory": "{module}:tokens", "layers_fqn": "embedding"},
            "model.layers_fqn: must name a ModuleList, ModuleDict or Sequential of Stack, got 'embedding'; "
            "containers here: blocks",
            id="not a container",
        ),
    ],
)
def test_building_refuses(make_spec: MakeSpec, user_code: str, changes: dict[str, Any], message: str) -> None:
    changes = changes | {"factory": changes["factory"].format(module=user_code)}
    with pytest.raises(ConfigError) as refusal:
        make_spec("python", **({"layers_fqn": "blocks"} | changes)).build()
    assert str(refusal.value) == message.format(module=user_code)


PACKAGE = {
    "__init__.py": "",
    "model.py": "import functools\nimport torch\nfrom . import widths\nfrom .parts.block import Block\n"
    "def make():\n    from .late import BLOCKS\n"
    "    return torch.nn.ModuleDict({'blocks': torch.nn.Sequential(*[Block() for _ in range(BLOCKS)])})\n"
    "def make_other():\n    from . import other\n    return make()\n"
    "partial = functools.partial(make)\n"
    "class Maker:\n    def __call__(self):\n        return make()\n"
    "maker = Maker()\n",
    "widths.py": "WIDTH = 4\n",
    "late.py": "BLOCKS = 2\n",
    "other.py": "",
    "unused.py": "",
    "parts/__init__.py": "",
    "parts/block.py": "import json\nfrom torch import nn\nfrom ..widths import WIDTH\n"
    "class Block(nn.Linear):\n    def __init__(self):\n        super().__init__(WIDTH, WIDTH)\n",
}
LOADED = ["__init__.py", "late.py", "model.py", "parts/__init__.py", "parts/block.py", "widths.py"]


@pytest.fixture
def user_package(user_code: str, tmp_path: Path) -> Path:
    """Return the folder of a package in the current folder, another one for every test."""
    folder = tmp_path / f"{user_code}_package"
    for name, content in PACKAGE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize("function", ["make", "partial", "maker"])
def test_files_are_all_that_the_factory_imports_and_nothing_installed(
    make_spec: MakeSpec, user_package: Path, function: str
) -> None:
    spec = make_spec("python", factory=f"{user_package.name}.model:{function}", layers_fqn="blocks")
    before = torch.get_rng_state()
    assert [path.relative_to(user_package).as_posix() for path in spec.files()] == LOADED
    assert torch.equal(torch.get_rng_state(), before)


def test_a_factory_of_a_library_has_no_files(make_spec: MakeSpec) -> None:
    assert make_spec("python", factory="torch.nn:Identity", layers_fqn="").files() == ()


def test_an_edit_of_an_imported_module_is_another_environment(
    make_spec: MakeSpec, user_package: Path
) -> None:
    spec = make_spec("python", factory=f"{user_package.name}.model:make", layers_fqn="blocks")
    before = environment_id(describe("cpu", spec.files()))
    (user_package / "unused.py").write_text("1")
    (user_package / "widths.py").touch()
    assert environment_id(describe("cpu", spec.files())) == before
    (user_package / "widths.py").write_text("WIDTH = 8\n")
    assert environment_id(describe("cpu", spec.files())) != before


def test_a_folder_with_the_name_of_a_package_of_ours_is_named(
    make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "strategies").mkdir()
    (tmp_path / "strategies" / "mine.py").write_text("def make(): ...")
    with pytest.raises(ConfigError) as refusal:
        make_spec("python", factory="strategies.mine:make", layers_fqn="").build()
    assert str(refusal.value) == (
        "model.factory: cannot import 'strategies.mine': No module named 'strategies.mine'; 'strategies' is "
        "a package of acbench, so a folder of yours cannot have this name: rename it"
    )


def test_a_model_is_called_by_its_factory_or_as_the_user_says(make_spec: MakeSpec) -> None:
    assert make_spec("python", factory="mine:make").name == "mine:make"
    assert make_spec("python", factory="mine:make", name="wide").name == "wide"
