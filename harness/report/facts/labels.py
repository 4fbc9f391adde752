"""Names of trials in reports: made of what differs within the sweep, and of nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from harness.records.later_options import CAME_LATER
from harness.records.record import RANK_SIZES
from harness.report.facts.number_words import escaped, printable

ExperimentFields = Mapping[str, Any]

_VARIANT = ("ac", "chunk", "shard")
_NAMED = ("model", "data", "protocol")
_GROUPS = (*_VARIANT, *_NAMED, "mesh")
_OF_THE_CHOICE = ("wrap_order",)
"""Scalar fields that say how a strategy is applied."""

_SPLIT = ("kwargs", "overrides")
"""Options that hold options."""

_FOUND = "module_classes"
"""Option that is found for each model, where nobody names it."""

_UNKNOWN = "?"
_MOST_CHARACTERS = 200  # of the value of an option


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """The name of a trial within its sweep.

    Fields:
        choice: strategies that it has, with the options that differ.
        other_fields: seed, dtype, data and so on that differ; empty where none was swept.
        mesh: mesh, with the options that differ among trials on that mesh.
    """

    choice: str
    other_fields: str
    mesh: str

    @property
    def variant(self) -> str:
        """Strategies, and what else was swept besides mesh and model."""
        return f"{self.choice} {self.other_fields}" if self.other_fields else self.choice


def group_name(experiment: ExperimentFields, group: str) -> str:
    """Return the chosen option of a group; `?` where an experiment, refused early, does not say.

    A function that a package registers has the name that it is registered by.
    """
    value = experiment.get(group)
    if isinstance(value, Mapping):
        return str(value.get("registered") or value.get("name", _UNKNOWN))
    return value if isinstance(value, str) else _UNKNOWN


def mesh_sizes(experiment: ExperimentFields) -> list[int]:
    """Return `RANK_SIZES` of the mesh, 1 for what is missing; nothing where there is no mesh."""
    mesh = experiment.get("mesh")
    sizes = [mesh.get(size) for size in RANK_SIZES] if isinstance(mesh, Mapping) else []
    return [size if isinstance(size, int) else 1 for size in sizes]


def variant_name(experiment: ExperimentFields) -> str:
    """Return the chosen strategies, without their options."""
    chosen = {group: group_name(experiment, group) for group in _VARIANT}
    others = [
        f"{group} {name}"
        for group, name in chosen.items()
        if group != "ac" and name not in ("none", _UNKNOWN)
    ]
    by_stage = experiment.get("stage_ac")
    ac = "/".join(map(str, by_stage)) if isinstance(by_stage, list) and by_stage else chosen["ac"]
    return " + ".join([ac, *others])


def point_label(experiment: ExperimentFields) -> str:
    """Return `variant on mesh, model`: what a trial is called, whatever else the sweep holds."""
    words = variant_name(experiment), group_name(experiment, "mesh"), group_name(experiment, "model")
    variant, mesh, model = map(escaped, words)
    return f"{variant} on {mesh}, {model}"


def point_labels(experiments: Sequence[ExperimentFields]) -> list[str]:
    """Return `variant on mesh, model` with the options that differ, one label a trial, for progress."""
    named = zip(labels(experiments), experiments, strict=True)
    return [
        escaped(f"{label.variant} on {label.mesh}, {group_name(experiment, 'model')}")
        for label, experiment in named
    ]


def labels(experiments: Sequence[ExperimentFields]) -> list[Label]:
    """Return one label a trial.

    An option of a group is shown where it differs between trials that chose the same option of that group.
    """
    experiments = _with_defaults(experiments)
    options, scalars = _swept_options(experiments), _swept_scalars(experiments)
    names = [group for group in ("data", "protocol") if len(_names(experiments, group)) > 1]
    found = []
    for experiment in experiments:
        choice = [
            variant_name(experiment),
            *(option for group in _VARIANT for option in _differing(experiment, options, group)),
            *_written(experiment, scalars.intersection(_OF_THE_CHOICE)),
        ]
        others = [
            *_written(experiment, scalars.difference(_OF_THE_CHOICE)),
            *(f"{group}={group_name(experiment, group)}" for group in names if _is_known(experiment, group)),
            *(f"{group}.{option}" for group in _NAMED for option in _differing(experiment, options, group)),
        ]
        mesh = [group_name(experiment, "mesh"), *_differing(experiment, options, "mesh")]
        found.append(Label(choice=" ".join(choice), other_fields=" ".join(others), mesh=" ".join(mesh)))
    return found


def fields_that_differ(experiments: Sequence[ExperimentFields]) -> dict[str, list[str]]:
    """Return the values of every field that differs, as words, by its name on the command line.

    An option of a group counts where it differs between trials that chose the same option of that group.
    """
    found: dict[str, list[str]] = {}
    experiments = _with_defaults(experiments)
    options = _swept_options(experiments)
    for group in _GROUPS:
        if len(names := _names(experiments, group)) > 1:
            found[group] = sorted(names)
        written = (each for experiment in experiments for each in _differing(experiment, options, group))
        for option, _, value in (each.partition("=") for each in dict.fromkeys(written)):
            found.setdefault(f"{group}.{option}", []).append(value)
    scalars = _swept_scalars(experiments)
    for name in sorted(scalars):
        values = (experiment[name] for experiment in experiments if name in experiment)
        found[name] = list(dict.fromkeys(map(_plain, values)))
    return found


def _with_defaults(experiments: Sequence[ExperimentFields]) -> list[ExperimentFields]:
    """Return experiments, each with the defaults of those later options that any of them states."""
    scalars = _used_defaults("", experiments)
    meshes = [mesh if isinstance(mesh := each.get("mesh"), Mapping) else {} for each in experiments]
    options = _used_defaults("mesh", meshes)
    return [
        {**scalars, **each, **({"mesh": {**options, **mesh}} if mesh else {})}
        for each, mesh in zip(experiments, meshes, strict=True)
    ]


def _used_defaults(group: str, all_options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the defaults of options that came later and that one of `all_options` states."""
    later = CAME_LATER[group].items()
    return {name: value for name, value in later if any(name in options for options in all_options)}


def _swept_options(experiments: Sequence[ExperimentFields]) -> set[tuple[str, str, str]]:
    """Return `(group, choice, option)` of what differs between experiments with the same choice."""
    peers: dict[tuple[str, str], list[tuple[str, Mapping[str, Any]]]] = {}
    for experiment in experiments:
        model = repr(experiment.get("model"))
        for group in _GROUPS:
            options = experiment.get(group)
            if isinstance(options, Mapping):
                peers.setdefault((group, group_name(experiment, group)), []).append((model, _flat(options)))
    found = {
        (group, name, option)
        for (group, name), same in peers.items()
        for option in {option for _, options in same for option in options}
        if _differs(option, same)
    }
    # files and functions of different names need no digests to be told apart
    return found - {(group, name, "digest") for group, name, option in found if option in {"path", "factory"}}


def _differs(option: str, same: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """Say whether an option differs between trials, each with its model; one that is found, for one model."""
    values: dict[str, list[object]] = {}
    for model, options in same:
        values.setdefault(model if option == _FOUND else "", []).append(options.get(option))
    return any(value != of_one[0] for of_one in values.values() for value in of_one)


def _swept_scalars(experiments: Sequence[ExperimentFields]) -> set[str]:
    """Return the scalar fields of experiments that differ; one that is left open does not."""
    values: dict[str, list[object]] = {}
    for name, value in chain.from_iterable(experiment.items() for experiment in experiments):
        if name not in _GROUPS and value is not None:
            values.setdefault(name, []).append(value)
    return {name for name, given in values.items() if any(value != given[0] for value in given)}


def _written(experiment: ExperimentFields, names: set[str]) -> Iterator[str]:
    yield from (f"{name}={_plain(value)}" for name, value in experiment.items() if name in names)


def _names(experiments: Sequence[ExperimentFields], group: str) -> set[str]:
    return {group_name(experiment, group) for experiment in experiments if _is_known(experiment, group)}


def _is_known(experiment: ExperimentFields, group: str) -> bool:
    return group_name(experiment, group) != _UNKNOWN


def _differing(experiment: ExperimentFields, swept: set[tuple[str, str, str]], group: str) -> Iterator[str]:
    """Yield the options of a group that differ; which one was chosen is said elsewhere."""
    name, options = group_name(experiment, group), experiment.get(group)
    for option, value in _flat(options).items() if isinstance(options, Mapping) else ():
        is_swept = option != "name" and (group, name, option) in swept
        if is_swept and not _is_the_models(experiment, option, value):
            yield f"{option}={_plain(value)}"


def _flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group with those of a mapping one by one, as in `kwargs.width`."""
    found: dict[str, Any] = {}
    for option, value in options.items():
        is_split = option in _SPLIT and isinstance(value, Mapping)
        found |= {f"{option}.{key}": item for key, item in value.items()} if is_split else {option: value}
    return found


def _is_the_models(experiment: ExperimentFields, option: str, value: Any) -> bool:
    """Return whether an option is only handed on from the model, as `layers_fqn` is."""
    model = experiment.get("model")
    return (
        option == "layers_fqn" and isinstance(model, Mapping) and option in model and model[option] == value
    )


def _plain(value: Any) -> str:
    """Return a value on one line; what is long, such as a tree of labels, by its start and an address."""
    text = f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)
    text = printable(" ".join(text.split()))
    if len(text) <= _MOST_CHARACTERS:
        return text
    address = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:6]
    return f"{text[: _MOST_CHARACTERS // 2]}…{address}"
