"""python: what is run, what its identity is, and what is refused."""

from __future__ import annotations

import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from strategies import StrategyError
from strategies.ac.full import Full
from strategies.ac.python import Python
from strategies.ac.selective_op import SelectiveOp
from tests.strategies.meters import measure
from tests.strategies.toys import Block, differences, toy, train_step

USERS = "tests.strategies.users_checkpointing"


@pytest.mark.parametrize("function", ["in_place", "by_torchs_wrapper"])
def test_a_function_costs_what_its_variant_costs(function: str) -> None:
    measured: list[Any] = []
    for strategy in (Full(layers_fqn="layers"), Python(factory=f"{USERS}:{function}")):
        model = strategy.apply(toy())
        assert differences(train_step(toy()), train_step(model)) == []  # type: ignore[arg-type]
        measured.append(measure(model, torch.arange(8).view(2, 4)))
    assert measured[0] == measured[1]


def test_a_policy_of_torch_stands_around_the_blocks() -> None:
    measured = [
        measure(strategy.apply(toy()), torch.arange(8).view(2, 4))
        for strategy in (
            SelectiveOp(layers_fqn="layers", save_ops=("aten.addmm.default",)),
            Python(factory=f"{USERS}:saves_products"),
        )
    ]
    assert measured[0] == measured[1]
    with pytest.raises(StrategyError) as error:
        Python(factory=f"{USERS}:saves_products").apply(torch.nn.Linear(1, 1))
    assert str(error.value) == (
        f"ac.factory: '{USERS}:saves_products' is a policy of torch for the blocks of a model, and no module "
        "of it repeats; give a function of the model"
    )


def test_wrappers_in_wrappers_leave_names_and_gradients() -> None:
    model = Python(factory=f"{USERS}:all_of_it").apply(toy())
    assert differences(train_step(toy()), train_step(model)) == []


def test_the_model_may_be_returned() -> None:
    model = toy()
    assert Python(factory=f"{USERS}:returned", kwargs={"times": 2}).apply(model) is model
    assert model.times == 2


def test_a_second_application_is_refused() -> None:
    model = Python(factory=f"{USERS}:nothing").apply(toy())
    for strategy in (Python(factory=f"{USERS}:nothing"), Full(layers_fqn="layers")):
        with pytest.raises(StrategyError) as error:
            strategy.apply(model)
        assert str(error.value) == "ac: 'Toy' is already checkpointed; apply one variant to a model"


_AS_THEY_ARE = "checkpointing leaves parameters and buffers, and their names, as they are"
_SHARED = "which the plain model would have too; change the modules of the model that it is given"
REFUSED: dict[str, tuple[str, dict[str, Any] | None, str]] = {
    "another model": (
        "another",
        None,
        "ac.factory: '{}' returned a model whose 'embedding.weight' is another tensor; " + _AS_THEY_ARE,
    ),
    "the model inside of another": (
        "around",
        None,
        "ac.factory: '{}' returned a model without 'embedding.weight'; " + _AS_THEY_ARE,
    ),
    "one parameter more": (
        "more",
        None,
        "ac.factory: '{}' returned a model with 'scale', which the given one has not; " + _AS_THEY_ARE,
    ),
    "a compiled block in place of a block": (
        "compiles",
        None,
        "ac.factory: '{}' returned a model without 'layers.0.scale'; " + _AS_THEY_ARE,
    ),
    "a class that the twin has too": (
        "patches_the_class",
        None,
        "ac.factory: '{}' changes functions of tests.strategies.toys.Block, " + _SHARED,
    ),
    "a function of torch": (
        "patches_torch",
        None,
        "ac.factory: '{}' changes functions of torch.nn.functional, " + _SHARED,
    ),
    "a setting of torch": (
        "sets_the_default",
        None,
        "ac.factory: '{}' changes torch.set_default_dtype, " + _SHARED,
    ),
    "no model": (
        "a_number",
        None,
        "ac.factory: '{}' returned int; return the model, or change it and return nothing",
    ),
    "a missing library": (
        "needs_a_library",
        None,
        "ac.factory: '{}' raised ModuleNotFoundError: No module named 'no_such_library'",
    ),
    "an error": ("raises", None, "ac.factory: '{}' raised KeyError: 'no such block'"),
    "an exit": ("exits", None, "ac.factory: '{}' exited with status 3"),
    "a misspelt argument": (
        "returned",
        {"time": 1},
        "ac.kwargs.time: '{}' has no such argument; did you mean 'times'? it takes: times",
    ),
    "an argument where none is taken": (
        "in_place",
        {"every": 1},
        "ac.kwargs.every: '{}' has no such argument; it takes none",
    ),
    "a missing argument": (
        "returned",
        None,
        (
            "ac.factory: '{}' raised TypeError: returned() missing 1 required keyword-only argument: "
            "'times'; give it ac.kwargs.times=…"
        ),
    ),
    "no argument for a model": (
        "takes_nothing",
        None,
        "ac.factory: '{}' raised TypeError: takes_nothing() takes 0 positional arguments but 1 was given",
    ),
    "no function": ("missing", None, f"ac.factory: module '{USERS}' has no function 'missing'"),
    "a value": (
        "VALUE",
        None,
        f"ac.factory: module '{USERS}' has no function 'VALUE'",
    ),
}


@pytest.mark.parametrize(("function", "arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_a_function_that_cannot_be_used_is_refused(
    function: str, arguments: dict[str, Any] | None, message: str
) -> None:
    name = f"{USERS}:{function}"
    with pytest.raises(StrategyError) as error:
        Python(factory=name, kwargs=arguments).apply(toy())
    assert str(error.value) == message.format(name)


@pytest.mark.parametrize("function", ["patches_the_class", "patches_torch", "sets_the_default"])
def test_what_the_twin_shares_is_put_back(function: str) -> None:
    def shared() -> tuple[object, ...]:
        return Block.forward, torch.nn.functional.linear, torch.get_default_dtype()

    before = shared()
    for _ in range(2):  # a guard of its own, set before, hides nothing
        with suppress(StrategyError):
            Python(factory=f"{USERS}:{function}").apply(toy())
        assert shared() == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "ac.factory: is empty; give package.module:function, a function of a model"),
        ({"factory": "mine"}, "ac.factory: must be 'package.module:function', got 'mine'"),
        ({"factory": 3}, "ac.factory: must be str, got 3"),
        ({"factory": "a:b", "kwargs": [1]}, "ac.kwargs: must be a mapping or null, got [1]"),
    ],
    ids=["nothing", "no function", "a number", "arguments without names"],
)
def test_what_names_no_function_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError) as error:
        Python(**fields)
    assert str(error.value) == message


def test_an_edit_of_what_it_imports_is_another_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine_ac").mkdir()
    Path("mine_ac/__init__.py").write_text("", encoding="utf-8")
    Path("mine_ac/outer.py").write_text("from .inner import apply\nimport torch\n", encoding="utf-8")
    inner = Path("mine_ac/inner.py")
    inner.write_text("def apply(model): ...\n", encoding="utf-8")
    before = Python(factory="mine_ac.outer:apply")
    assert Python(factory="mine_ac.outer:apply") == before == pickle.loads(pickle.dumps(before))
    inner.write_text("def apply(model): return model\n", encoding="utf-8")
    after = Python(factory="mine_ac.outer:apply")
    assert after != before
    with pytest.raises(StrategyError) as error:
        Python(factory="mine_ac.outer:apply", digest=before.digest)
    assert str(error.value) == (
        f"ac.digest: is {before.digest!r}, and 'mine_ac.outer:apply' has {after.digest!r}; "
        "its files have changed, or leave the digest out"
    )


def test_nothing_of_the_users_runs_before_it_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine_broken.py").write_text("def apply(", encoding="utf-8")
    strategy = Python(factory="mine_broken:apply")
    with pytest.raises(StrategyError) as error:
        strategy.apply(toy())
    assert str(error.value) == (
        "ac.factory: cannot import 'mine_broken': SyntaxError: '(' was never closed (mine_broken.py, line 1)"
    )
