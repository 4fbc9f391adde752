"""The command that repeats a trial: its experiment as overrides of the configuration that ships with us."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_PACKAGE = Path(__file__).parents[2]
_CONF = next(folder for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if folder.is_dir())
_GROUPS = ("model", "mesh", "ac", "chunk", "shard", "data", "protocol")
_CHOICE_KEYS = ("name", "family")
_FACTORY = "factory"  # the option of a model that is made by the user
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PLAIN_WORD = re.compile(r"[A-Za-z_][\w.]*")
_REFERENCE = re.compile(r"\$\{(\w+)\.(\w+)\}")
_MEANT_OTHERWISE = ("null", "true", "false", "nan", "inf")


def command(experiment: Mapping[str, Any]) -> str | None:
    """Return the command line of one trial; only what differs from the defaults is written.

    `None` where the experiment is not resolved: it was refused before it could be.
    """
    if not all(isinstance(experiment.get(group), Mapping) for group in _GROUPS):
        return None
    return shlex.join(["acbench", *_overrides(experiment)])


def _overrides(experiment: Mapping[str, Any]) -> Iterator[str]:
    defaults = _yaml("config")
    entries = [entry for entry in defaults["defaults"] if isinstance(entry, Mapping)]
    chosen = {group: name for entry in entries for group, name in entry.items()}
    for group in _GROUPS:
        options = experiment[group]
        name = _choice(group, options)
        if name != chosen[group]:
            yield f"{group}={name}"
        yield from _options(group, name, options, experiment)
    for name, value in experiment.items():
        if name not in _GROUPS and not _is_usual(name, value, experiment, defaults):
            yield f"{name}={_written(value)}"


def _is_usual(name: str, value: Any, experiment: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    usual = ("own" if _FACTORY in experiment["model"] else "fp32") if name == "dtype" else defaults.get(name)
    return name in defaults and usual == value


def _choice(group: str, options: Mapping[str, Any]) -> str:
    """Return the file a group was chosen from.

    A mesh of free numbers is `single` with numbers, and a model with a name of the user's is its family.
    """
    name = str(options.get("name"))
    if name in _files(group):
        return name
    return {"mesh": "single", "model": str(options.get("family"))}.get(group, name)


def _options(
    group: str, choice: str, options: Mapping[str, Any], experiment: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the overrides of a group's options that differ from those of its choice."""
    defaults = _yaml(f"{group}/{choice}") if choice in _files(group) else {}
    if group == "model" and options.get("name") not in (choice, options.get(_FACTORY)):
        yield f"model.name={_written(options.get('name'))}"
    for option, value in options.items():
        if option in _CHOICE_KEYS:
            continue
        if option not in defaults:
            yield f"+{group}.{option}={_alone(value)}"
        elif _resolved(defaults[option], experiment) != value:
            yield f"{group}.{option}={_alone(value)}"


def _resolved(value: Any, experiment: Mapping[str, Any]) -> Any:
    """Return a default with a reference like `${model.layers_fqn}` followed."""
    reference = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if reference is None:
        return value
    group = experiment.get(reference[1])
    return group.get(reference[2]) if isinstance(group, Mapping) else value


def _written(value: Any) -> str:
    """Return `value` in Hydra's grammar of overrides."""
    if isinstance(value, str):
        is_plain = _PLAIN_WORD.fullmatch(value) and value.lower() not in _MEANT_OTHERWISE
        return value if is_plain else _quoted(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_written(str(key))}: {_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)


def _alone(value: Any) -> str:
    """Return `value` as the whole of an override, where `module:function` needs no quotes."""
    return value if isinstance(value, str) and _FUNCTION.fullmatch(value) else _written(value)


def _quoted(text: str) -> str:
    """Return `text` in single quotes; a backslash matters to Hydra only before a quote and at the end."""
    escaped = re.sub(r"(\\*)'", lambda found: found[1] * 2 + r"\'", text)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{escaped[len(escaped) - trailing :]}'"


@cache
def _files(group: str) -> frozenset[str]:
    """Return the names of the files of a group; a record may have any text as a name."""
    return frozenset(path.stem for path in (_CONF / group).glob("*.yaml"))


@cache
def _yaml(name: str) -> dict[str, Any]:
    content = yaml.safe_load((_CONF / f"{name}.yaml").read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
