"""Variants of AC that installed packages register by the entry point group `acbench.ac`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any

from hydra.core.config_store import ConfigStore

from harness.errors import ConfigError
from strategies import Strategy, ac_variants
from strategies.last_words import last_words

GROUP = "acbench.ac"
_CHOICE = re.compile(r"\+*ac=(.*)")


def offer_registered(words: Sequence[str]) -> None:
    """Make options of the group `ac` of those registered variants that a command names; no other is imported.

    A function becomes `ac=python` with its name; a `Strategy` class is a variant as ours are.

    Raises:
        ConfigError: a name is ours or registered twice; what is registered cannot be imported, or is neither.
    """
    named = {
        name for word in words if (match := _CHOICE.match(word)) for name in re.findall(r"\w+", match[1])
    }
    entries = entry_points(group=GROUP) if named else EntryPoints()
    for name in sorted(named & entries.names):
        found = [*entries.select(name=name)]
        if len(found) > 1 or (name in ac_variants and ac_variants[name].__module__.startswith("strategies.")):
            others = "acbench has" if len(found) == 1 else "another package registers"
            problem = f"{found[0].value!r} is registered as {name!r}, a name that {others}"
            raise ConfigError("ac", f"{problem}; uninstall its package, or let it take another name")
        ConfigStore.instance().store(group="ac", name=name, node=_node(name, found[0]), provider=GROUP)


def _node(name: str, entry: EntryPoint) -> dict[str, Any]:
    """Return the options of a registered variant, as its file would have them."""
    try:
        loaded = entry.load()
    except (Exception, SystemExit) as error:
        words = last_words(error)
        problem = (
            f"{entry.value!r}, registered as {name!r}, cannot be imported: {words.kind}: {words.message}"
        )
        raise ConfigError("ac", problem) from error
    if isinstance(loaded, type) and issubclass(loaded, Strategy):
        module = loaded.__module__.rpartition(".")[2]
        if module != name:
            problem = f"{entry.value!r} is registered as {name!r}; a Strategy has the name of its module"
            raise ConfigError("ac", f"{problem}, {module!r}")
        ac_variants[name] = loaded
        fields = {field.name: _default(field) for field in dataclasses.fields(loaded)}
        return {"name": name, **fields}
    if not callable(loaded):
        problem = f"{entry.value!r}, registered as {name!r}, is {type(loaded).__name__}"
        raise ConfigError("ac", f"{problem}; register a function of a model, or a Strategy class")
    function = {"factory": entry.value, "kwargs": None, "digest": None}
    return {"name": "python", **function, "registered": name}


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field, as a plain value; blocks are those of the model."""
    if field.name == "layers_fqn":
        return "${model.layers_fqn}"
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if field.default is dataclasses.MISSING:
        return "???"
    return list(field.default) if isinstance(field.default, tuple) else field.default
