"""Variants that packages register: how they are composed, and what is refused."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from types import ModuleType
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from harness.command_line import registered
from harness.errors import ConfigError
from strategies import Strategy, ac_variants
from strategies.ac.full import Full

ENTRIES = {
    "half": ["examples.theirs:every_second"],
    "registered_strategy": ["registered_strategy:Mine"],
    "another_name": ["registered_strategy:Mine"],
    "full": ["examples.theirs:every_second"],
    "twice": ["examples.theirs:every_second", "examples.theirs:another"],
    "value": ["examples.theirs:__name__"],
    "gone": ["no_such_package:apply"],
}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("registered_strategy")
    module.Mine = type("Mine", (Full,), {"__module__": "registered_strategy"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "registered_strategy", module)
    entries = EntryPoints(
        EntryPoint(name=name, value=value, group="acbench.ac")
        for name, values in ENTRIES.items()
        for value in values
    )
    monkeypatch.setattr(registered, "entry_points", entries.select)
    monkeypatch.setattr(registered, "ac_variants", dict(ac_variants))


def _stored(name: str) -> Any:
    repository = ConfigStore.instance().repo["ac"]
    return OmegaConf.to_container(repository.pop(f"{name}.yaml").node, resolve=False)


def test_a_function_is_ac_python() -> None:
    registered.offer_registered(["-m", "ac=none,half"])
    function = {"factory": "examples.theirs:every_second", "kwargs": None, "digest": None}
    assert _stored("half") == {"name": "python", **function, "registered": "half"}


def test_a_class_is_a_variant_with_its_fields() -> None:
    registered.offer_registered(["ac=registered_strategy"])
    found: type[Strategy] = vars(registered)["ac_variants"]["registered_strategy"]
    assert found.__name__ == "Mine"
    node = _stored("registered_strategy")
    assert (node["name"], node["layers_fqn"], node["module_classes"], node["early_stop"]) == (
        "registered_strategy",
        "${model.layers_fqn}",
        [],
        True,
    )


def test_what_no_command_names_is_not_imported() -> None:
    registered.offer_registered(["ac=none", "model=mlp", "ac.kwargs.x=gone"])


_OTHER_NAME = "; uninstall its package, or let it take another name"
REFUSED = {
    "another_name": (
        "'registered_strategy:Mine' is registered as 'another_name'; "
        "a Strategy has the name of its module, 'registered_strategy'"
    ),
    "full": f"'examples.theirs:every_second' is registered as 'full', a name that acbench has{_OTHER_NAME}",
    "twice": (
        "'examples.theirs:every_second' is registered as 'twice', "
        f"a name that another package registers{_OTHER_NAME}"
    ),
    "value": (
        "'examples.theirs:__name__', registered as 'value', is str; "
        "register a function of a model, or a Strategy class"
    ),
    "gone": (
        "'no_such_package:apply', registered as 'gone', cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_package'"
    ),
}


@pytest.mark.parametrize(("name", "message"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_a_variant_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        registered.offer_registered([f"ac={name}"])
    assert str(error.value) == f"ac: {message}"
