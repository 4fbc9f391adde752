"""The one door from Hydra's `DictConfig` to a frozen, validated `Experiment`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException, ValidationError

from harness.data import data_specs
from harness.errors import ConfigError
from harness.experiment import Experiment, Recipe
from harness.launch import Run
from harness.mesh import Mesh
from harness.models import families
from harness.protocol import Protocol
from harness.report.publisher import Tracker
from harness.store import check_name
from strategies import ac_variants, chunk_variants, shard_variants


CHOICE_KEYS = ("name", "family")
"""Keys by which a group says what was chosen; they are no options of the choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A `Run` with its tracker."""

    run: Run
    tracker: Tracker


def experiment_fields(config: DictConfig) -> dict[str, Any]:
    """Return the resolved fields of `config` that describe the experiment, as plain values.

    Raises:
        ConfigError: an interpolation leads nowhere, or a mandatory value is missing.
    """
    groups = {field.name for field in dataclasses.fields(Experiment)}
    kept = OmegaConf.masked_copy(config, [key for key in config if key in groups])
    try:
        values = OmegaConf.to_container(kept, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        missing = isinstance(error, MissingMandatoryValue)
        problem = "has no default; give it a value" if missing else str(error.msg).splitlines()[0]
        raise ConfigError(error.full_key or "config", problem) from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def materialise(fields: Mapping[str, Any]) -> Experiment:
    """Return the experiment that `fields` describe.

    Args:
        fields: what `experiment_fields` returned.

    Raises:
        ConfigError: an unknown option, a wrong type, a value out of range, an impossible combination.
        StrategyError: the same, found by a strategy.
    """
    scalars = {field.name for field in dataclasses.fields(Recipe)}
    return Experiment(
        model=_choose("model", "family", families(), fields["model"]),
        mesh=_construct("mesh", Mesh, fields["mesh"]),
        ac=_choose("ac", "name", ac_variants, fields["ac"]),
        chunk=_choose("chunk", "name", chunk_variants, fields["chunk"]),
        shard=_choose("shard", "name", shard_variants, fields["shard"]),
        data=_choose("data", "name", data_specs(), fields["data"]),
        protocol=_construct("protocol", Protocol, fields["protocol"]),
        **_typed("", Recipe, {key: value for key, value in fields.items() if key in scalars}),
    )


def settings(config: DictConfig) -> Settings:
    """Return the part of `config` that is not the experiment.

    Raises:
        ConfigError: a wrong type, or a name that is no folder name.
    """
    names = [field.name for field in dataclasses.fields(Run)]
    values = OmegaConf.to_container(OmegaConf.masked_copy(config, [*names, "tracker"]), resolve=True)
    assert isinstance(values, dict)
    run = _construct("", Run, {name: values[name] for name in names})
    check_name(run.name)
    return Settings(run=run, tracker=_construct("tracker", Tracker, values["tracker"]))


def to_yaml(resolved: Mapping[str, Any]) -> str:
    """Return `resolved` as YAML, keys in their order."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(resolved)))


def with_mesh_name(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` of a refused point with its mesh named, where the mesh itself is sound."""
    try:
        label = _construct("mesh", Mesh, fields["mesh"]).label
    except ConfigError:
        return dict(fields)
    return {**fields, "mesh": {"name": label, **fields["mesh"]}}


def suggestion(wrong: str, options: list[str]) -> str:
    """Return `did you mean 'x'? ` and the options, for the end of a message."""
    if not options:
        return "there are no options"
    close = difflib.get_close_matches(wrong, options, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}options: {', '.join(sorted(options))}"


def _choose(group: str, key: str, registry: Mapping[str, type[Any]], node: Any) -> Any:
    """Construct the class that `node[key]` names."""
    if not isinstance(node, Mapping):
        raise ConfigError(group, f"must be a group of options, got {node!r}; choose one with {group}=<option>")
    values = dict(node)
    name = str(values.pop(key, None))
    if name not in registry:
        raise ConfigError(f"{group}.{key}", f"unknown {name!r}; {suggestion(name, list(registry))}")
    return _construct(group, registry[name], values)


def _construct(where: str, cls: type[Any], values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(where, f"must be a group of options, got {values!r}")
    return cls(**_typed(where, cls, values))


def _typed(where: str, cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with the types `cls` declares; lists become tuples, because experiments are frozen."""
    names = [field.name for field in dataclasses.fields(cls)]
    prefix = f"{where}." if where else ""
    for name in values:
        if name not in names:
            raise ConfigError(f"{prefix}{name}", f"unknown option; {suggestion(str(name), names)}")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(cls), dict(values))
        plain = OmegaConf.to_container(merged, resolve=True)
    except (ValidationError, ConfigKeyError) as error:
        name = (error.full_key or "").partition(".")[0]
        wanted = next((field.type for field in dataclasses.fields(cls) if field.name == name), "another type")
        raise ConfigError(f"{prefix}{error.full_key}", f"must be {wanted}, got {values.get(name)!r}") from error
    assert isinstance(plain, dict)
    return {str(key): _frozen(value) for key, value in plain.items() if value != "???"}


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
