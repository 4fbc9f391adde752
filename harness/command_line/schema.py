"""The one door from Hydra's `DictConfig` to a frozen, validated `Experiment`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from harness.command_line.unknown_option import suggestion, unknown_option
from harness.errors import ConfigError, require_at_least, require_at_most
from harness.experiment.data import data_specs
from harness.experiment.experiment import Experiment, Recipe, shown_model
from harness.experiment.mesh import SIZES, Mesh
from harness.experiment.protocol import Protocol
from harness.launchers.base import Launcher
from harness.launchers.local import Local
from harness.launchers.slurm import Slurm
from harness.launchers.slurm_packed import SlurmPacked
from harness.models import ModelSpec, families
from harness.predict.hardware import Hardware
from harness.predict.solve import SOLVABLE
from harness.predict.this_cpu import THIS_CPU, numbers_of_this_cpu
from harness.records.later_options import without_later, without_models_blocks
from harness.records.store import check_name
from harness.report.wandb.publisher import Tracker
from harness.sweep.launch import Run
from harness.trial.preflight import blocks_of
from strategies import StrategyError, ac_variants, chunk_variants, shard_variants
from strategies.ac import selective_op

if TYPE_CHECKING:
    from strategies.regions.block_search import FoundBlocks  # which needs torch

LAUNCHERS: Mapping[str, type[Any]] = {"local": Local, "slurm": Slurm, "slurm_packed": SlurmPacked}
"""Launchers by the option of `hydra/launcher` that chooses them."""

_VARIANTS: Mapping[str, Mapping[str, type[Any]]] = {
    "ac": ac_variants,
    "chunk": chunk_variants,
    "shard": shard_variants,
}
"""Variants by the group that chooses them."""

_LARGEST = 2**63 - 1  # of the numbers that torch takes for sizes
Search: TypeAlias = "Callable[[float, ModelSpec], FoundBlocks | None]"
"""Looks for the blocks of a model, within a time in seconds."""

_MISSING = "???"
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "tuple": "a list",
    "dict": "a mapping",
    "None": "null",
    "Any": "a word or a list",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The options of the command itself.

    Fields:
        show: what to print of the strategies instead of running anything; `None` runs.
        solve: field whose value `acbench-plan` looks for; `None` takes every point as it is.
        search: how many points of a sweep `acbench-plan` chooses and predicts; `None` predicts all.
    """

    run: Run
    tracker: Tracker
    show: str | None = None
    solve: str | None = None
    search: int | None = None


def searched_here(deadline_s: float, model: ModelSpec) -> FoundBlocks | None:
    """Return the blocks of a model, which this process builds.

    Raises:
        ConfigError: the model cannot be made.
    """
    found = blocks_of(deadline_s, model)
    if isinstance(found, ConfigError | StrategyError):
        raise found
    return found


def experiment_fields(config: DictConfig) -> dict[str, Any]:
    """Return the resolved fields of `config` that describe the experiment, as plain values.

    Raises:
        ConfigError: an option that nothing reads or that was removed, an interpolation that leads nowhere.
    """
    names = [field.name for field in dataclasses.fields(Experiment)]
    options = [*names, *_setting_names(), "sweep", "hardware"]
    for name in config:
        if name not in options and name != "hydra":
            raise unknown_option(str(name), options)
    return _plain(config, names)


def within_usable(fields: Mapping[str, Any], hardware: Hardware | None) -> Mapping[str, Any]:
    """Return `fields`, in which `ac=budget` without a number asks for what is usable of `hardware`."""
    ac = fields["ac"]
    is_asked = isinstance(ac, Mapping) and ac.get("name") == "budget"
    if hardware is None or not is_asked or any(ac.get(number) is not None for number in _BUDGETS):
        return fields
    return {**fields, "ac": {**ac, "budget_gib": hardware.usable_gib}}


_BUDGETS = ("budget_gib", "fraction", "plan_file")


def materialise(fields: Mapping[str, Any], search: Search = searched_here) -> Experiment:
    """Return the experiment that `fields` describe.

    Args:
        fields: what `experiment_fields` returned.
        search: looks for the blocks of a model, here or elsewhere.

    Raises:
        ConfigError: an unknown option, a wrong type, a value out of range, an impossible combination.
        StrategyError: the same, found by a strategy.

    Where `model.layers_fqn` is null, the blocks are looked for, and all options that refer to it follow.
    Where `ac.save_ops` is null, the mesh decides what is kept.
    """
    fields = _with_saved_dispatch(with_blocks(fields, search))
    model: ModelSpec = _choose("model", "family", families(), fields["model"])
    scalars = {field.name: fields[field.name] for field in dataclasses.fields(Recipe) if field.name in fields}
    if scalars.get("dtype", "") is None:
        scalars["dtype"] = model.usual_dtype()
    return Experiment(
        model=model,
        mesh=_construct("mesh", Mesh, fields["mesh"]),
        **{group: _choose(group, "name", known, fields[group]) for group, known in _VARIANTS.items()},
        data=_choose("data", "name", data_specs(), fields["data"]),
        protocol=_construct("protocol", Protocol, fields["protocol"]),
        **_typed("", Recipe, scalars),
    )


def _with_saved_dispatch(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `fields` in which selective AC keeps where tokens go, if it is not told what to keep."""
    ac, mesh = fields["ac"], fields["mesh"]
    is_open = isinstance(ac, Mapping) and ac.get("save_ops", ()) is None
    if not is_open or not isinstance(mesh, Mapping) or mesh.get("ep") in {None, 1}:
        return fields
    return {**fields, "ac": {**ac, "save_ops": list(selective_op.DISPATCHING)}}


def words_of_found(fields: Mapping[str, Any], search: Search = searched_here) -> str | None:
    """Return which blocks `materialise` finds, as options; `None` where the fields name them."""
    if not _seeks_blocks(fields):
        return None
    found = _found_blocks(
        _Written(text=repr(fields["model"]), value=fields["model"]), _deadline_s(fields), search
    )
    if found is None:
        return "model.layers_fqn='' (no blocks found: ac.module_classes=[…] names the class of a shared one)"
    named = f" ac.module_classes=[{','.join(found.module_classes)}]" if found.module_classes else ""
    return f"model.layers_fqn={found.layers_fqn or repr('')}{named} (found: {found.words})"


def _seeks_blocks(fields: Mapping[str, Any]) -> bool:
    model = fields["model"]
    return isinstance(model, Mapping) and "layers_fqn" in model and model["layers_fqn"] is None


def with_blocks(fields: Mapping[str, Any], search: Search) -> Mapping[str, Any]:
    """Return `fields` with the blocks that are found where they name none.

    Raises:
        ConfigError: as of `materialise`, about the model.
    """
    if not _seeks_blocks(fields):
        return fields
    found = _found_blocks(
        _Written(text=repr(fields["model"]), value=fields["model"]), _deadline_s(fields), search
    )
    layers_fqn = "" if found is None else found.layers_fqn
    filled = {
        name: {**group, "layers_fqn": layers_fqn}
        if isinstance(group, Mapping) and group.get("layers_fqn", "") is None
        else group
        for name, group in fields.items()
    }
    ac = fields["ac"]
    takes_classes = ac != filled["ac"] and not ac.get("module_classes", ("no such option",))
    if found is not None and takes_classes and fields["wrap_order"] != "call_site":
        filled["ac"]["module_classes"] = list(found.module_classes)
    return filled


@functools.lru_cache(maxsize=64)
def _found_blocks(model: _Written, deadline_s: float, search: Search) -> FoundBlocks | None:
    """Return the blocks of a model: points of a sweep share it, and a factory takes time."""
    spec: ModelSpec = _choose("model", "family", families(), {**model.value, "layers_fqn": ""})
    return search(deadline_s, spec)


def _deadline_s(fields: Mapping[str, Any]) -> float:
    """Return the time of a trial, which is that of its factory; the default where it will be refused."""
    asked = fields["protocol"].get("deadline_s")
    is_time = isinstance(asked, int | float) and not isinstance(asked, bool) and 0 < asked < math.inf
    return float(asked) if is_time else Protocol().deadline_s


def swept_variants(points: Iterable[Mapping[str, Any]]) -> dict[str, set[str]]:
    """Return the variants that the points of a sweep choose, by group."""
    swept: dict[str, set[str]] = {group: set() for group in _VARIANTS}
    for point in points:
        for group, names in swept.items():
            node = point.get(group)
            if isinstance(node, Mapping) and isinstance(node.get("name"), str):
                names.add(node["name"])
    return swept


def without_idle_options(fields: Mapping[str, Any], swept: Mapping[str, set[str]]) -> dict[str, Any]:
    """Return `fields` of a point of a sweep without the options that are for other variants of the sweep.

    A sweep over a group and the options of one variant has one point of each other variant. An option that
    no variant of the sweep has stays, so that it is refused; `none` ignores those of all variants.
    """
    return {
        name: _without_idle(value, _VARIANTS[name], swept[name]) if name in _VARIANTS else value
        for name, value in fields.items()
    }


def _without_idle(node: Any, registry: Mapping[str, type[Any]], swept: set[str]) -> Any:
    chosen = node.get("name") if isinstance(node, Mapping) else None
    if not isinstance(chosen, str) or chosen not in registry:
        return node
    others = registry if chosen == "none" else swept & registry.keys()
    own = _options_of(registry[chosen])
    idle = {option for name in others for option in _options_of(registry[name])} - own
    return {option: value for option, value in node.items() if option not in idle}


def _options_of(variant: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(variant)}


def settings(config: DictConfig) -> Settings:
    """Return the part of `config` that is not the experiment.

    Raises:
        ConfigError: a wrong type, an option that was removed, or a name that is no folder name.
    """
    values = _plain(config, _setting_names())
    tracker = _construct("tracker", Tracker, values.pop("tracker"))
    show, solve, search = (values.pop(name) for name in ("show", "solve", "search"))
    if not isinstance(show, str | None):
        raise ConfigError("show", f"must be the name of a view or null, got {show!r}")
    if solve is not None and solve not in SOLVABLE:
        problem = f"{solve!r} cannot be solved for; {suggestion(str(solve), list(SOLVABLE))}"
        raise ConfigError("solve", problem)
    if search is not None and (type(search) is not int or search < 1):
        raise ConfigError("search", f"must be a number of predictions, at least 1, or null, got {search!r}")
    run = _construct("", Run, values)
    check_name(run.name)
    return Settings(run=run, tracker=tracker, show=show, solve=solve, search=search)


def hardware_of(config: DictConfig) -> Hardware | None:
    """Return the hardware that `config` names; `None` where it names none.

    Raises:
        ConfigError: numbers without a name, an unknown option, a wrong type, a value out of range.
    """
    if config.get("hardware") is None:
        return None
    (values,) = _plain(config, ["hardware"]).values()
    if not isinstance(values, Mapping) or "name" not in values:
        problem = f"must be named before its numbers are changed, got {values!r}"
        raise ConfigError("hardware", f"{problem}; use hardware=h100 hardware.usable_gib=40, for example")
    if values["name"] == THIS_CPU:
        values = _instead(numbers_of_this_cpu(), values)
    hardware: Hardware = _construct("hardware", Hardware, values, chosen=str(values["name"]))
    return hardware


def _instead(measured: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was measured, with what was given instead; null leaves a number as it was measured."""
    found = dict(measured)
    for name, value in given.items():
        if isinstance(value, Mapping):
            found[name] = _instead(measured.get(name, {}), value)
        elif value is not None:
            found[name] = value
    return found


def launcher_of(node: Mapping[str, Any]) -> Launcher:
    """Return the launcher that `hydra/launcher` chose.

    Args:
        node: its options, with its `name`.

    Raises:
        ConfigError: an unknown option, a wrong type, a value out of range.
    """
    values = {key: value for key, value in node.items() if key != "_target_"}
    name = values.pop("name", None)
    if name not in LAUNCHERS:
        problem = f"unknown launcher {name!r}"
        raise ConfigError("hydra/launcher", f"{problem}; {suggestion(str(name), list(LAUNCHERS))}")
    launcher: Launcher = _construct("hydra.launcher", LAUNCHERS[name], values, chosen=name)
    return launcher


def to_yaml(resolved: Mapping[str, Any]) -> str:
    """Return `resolved` as YAML, keys in their order."""
    return "".join(_yaml(key, _Written(text=repr(value), value=value)) for key, value in resolved.items())


def as_refused(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` of a refused point as an experiment shows them, as far as they are sound."""
    layers_fqn = fields["model"].get("layers_fqn") if isinstance(fields.get("model"), Mapping) else None
    with suppress(ConfigError):  # as it was written
        fields = {**fields, "model": shown_model(_choose("model", "family", families(), fields["model"]))}
    shown = without_later("", fields)
    for group in ("protocol", "ac", "chunk", "shard"):
        if isinstance(fields.get(group), Mapping):
            shown[group] = without_later(group, fields[group])
    if isinstance(fields.get("ac"), Mapping):
        shown["ac"] = without_models_blocks(shown["ac"], layers_fqn)
    try:
        mesh = _construct("mesh", Mesh, fields["mesh"])
    except ConfigError:
        return {**shown, "mesh": _named_by_its_sizes(fields["mesh"])}
    return {**shown, "mesh": {"name": mesh.label, **mesh.asked()}}


def _named_by_its_sizes(mesh: Any) -> Any:
    if not isinstance(mesh, Mapping):
        return mesh
    sizes = {name: mesh[name] for name in SIZES if name in mesh}
    try:
        return {"name": _construct("mesh", Mesh, sizes).label, **mesh}
    except ConfigError:
        return mesh


def _setting_names() -> list[str]:
    return [*(field.name for field in dataclasses.fields(Run)), "tracker", "show", "solve", "search"]


def _plain(config: DictConfig, names: Iterable[str]) -> dict[str, Any]:
    """Return the resolved values of `names`; what has no value yet stays `???`, for `_typed` to name."""
    present = config.keys()
    removed = [name for name in names if name not in present]
    if removed:
        problem = "cannot be deleted: every experiment needs it"
        raise ConfigError(removed[0], f"{problem}; remove '~{removed[0]}' from the command")
    try:
        return {name: _resolved(config, name) for name in names}
    except OmegaConfBaseException as error:
        raise ConfigError(error.full_key or "config", str(error.msg).splitlines()[0]) from error


def _resolved(config: DictConfig, name: str) -> Any:
    try:
        value = config[name]
    except MissingMandatoryValue:
        return _MISSING
    if not OmegaConf.is_config(value):
        return value
    plain = OmegaConf.to_container(value)
    return OmegaConf.to_container(value, resolve=True) if "${" in repr(plain) else plain  # which takes longer


def _choose(group: str, key: str, registry: Mapping[str, type[Any]], node: Any) -> Any:
    """Construct the class that `node[key]` names."""
    if not isinstance(node, Mapping):
        problem = f"must be a group of options, got {node!r}"
        raise ConfigError(group, f"{problem}; choose one with {group}=<option>")
    values = dict(node)
    name = str(values.pop(key, None))
    if name not in registry:
        raise ConfigError(f"{group}.{key}", f"unknown {name!r}; {suggestion(name, list(registry))}")
    return _construct(group, registry[name], values, chosen=str(node.get("name", name)))


def _construct(where: str, cls: type[Any], values: Any, chosen: str | None = None) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(where, f"must be a group of options, got {values!r}")
    return cls(**_typed(where, cls, values, chosen))


def _typed(where: str, cls: Any, values: Mapping[str, Any], chosen: str | None = None) -> dict[str, Any]:
    """Return `values` with the types `cls` declares; lists become tuples, because experiments are frozen."""
    typed = _typed_once(where, cls, _Written(text=repr(values), value=values), chosen)
    return {
        name: copy.deepcopy(value) if isinstance(value, dict | tuple) else value
        for name, value in typed.items()
    }


@functools.lru_cache(maxsize=4096)
def _typed_once(where: str, cls: Any, written: _Written, chosen: str | None) -> dict[str, Any]:
    """Return what `_typed` returns, not to be written to: points of a sweep share most of their groups."""
    values = written.value
    types = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    prefix = f"{where}." if where else ""
    for name in values:
        if name not in types:
            raise unknown_option(f"{prefix}{name}", list(types), chosen)
    found = dict(_defaults(cls))
    for name, value in values.items():
        try:
            found[name] = _converted(cls, name, _Written(text=repr(value), value=value))
        except OmegaConfBaseException as error:
            problem = f"must be {_in_words(types[name])}, got {value!r}"
            raise ConfigError(f"{prefix}{name}", problem) from error
    for option, value in found.items():
        if value == _MISSING:
            raise ConfigError(f"{prefix}{option}", "has no default; give it a value")
        _require_finite(f"{prefix}{option}", value)
    return {option: _frozen(value) for option, value in found.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """A value, equal to those that are written alike; so 1, 1.0 and true differ. `text`: its `repr`."""

    text: str
    value: Any = dataclasses.field(compare=False)


@functools.cache
def _schema(cls: Any) -> Any:
    return OmegaConf.structured(cls)


@functools.cache
def _defaults(cls: Any) -> dict[str, Any]:
    return _container(_schema(cls))


@functools.lru_cache(maxsize=4096)
def _converted(cls: Any, name: str, written: _Written) -> Any:
    """Return a value with the type that `cls` declares for its field `name`.

    Points of a sweep share most of their values, and OmegaConf takes its time.
    """
    return _container(OmegaConf.merge(_schema(cls), {name: written.value}))[name]


@functools.lru_cache(maxsize=4096)
def _yaml(key: str, written: _Written) -> str:
    """Return the lines of one key; the YAML of a mapping is that of its keys."""
    return OmegaConf.to_yaml(OmegaConf.create({key: written.value}))


def _container(node: Any) -> dict[str, Any]:
    """Return the plain values of a mapping, interpolations resolved."""
    values = OmegaConf.to_container(node, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _in_words(kind: str) -> str:
    """Return a type annotation as people say it: `int | None` is "an integer or null"."""
    parts = [part.partition("[")[0].strip() for part in kind.split("|")]
    return " or ".join(_WORDS.get(part, part) for part in parts)


def _require_finite(where: str, value: Any) -> None:
    """Refuse NaN and infinities, which no option means and JSON does not know, and what no size can be."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _require_finite(f"{where}.{key}", item)
    elif isinstance(value, list):
        for item in value:
            _require_finite(where, item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(where, f"must be a finite number, got {value}")
    elif isinstance(value, int):
        require_at_most(where, value, _LARGEST)
        require_at_least(where, value, -_LARGEST)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
