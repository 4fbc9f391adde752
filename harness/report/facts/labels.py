"""How reports call a trial: by what differs within the sweep, and by nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.report.facts.number_words import printable

ExperimentFields = Mapping[str, Any]

_VARIANT = ("ac", "chunk", "shard")
_NAMED = ("model", "data", "protocol")
_GROUPS = (*_VARIANT, *_NAMED, "mesh")
_MESH_SIZES = ("dp_replicate", "dp_shard", "tp")
_OF_THE_CHOICE = ("wrap_order",)
"""Scalar fields that say how a strategy is applied."""

_UNKNOWN = "?"
_MOST_CHARACTERS = 200  # of the value of an option


def group_name(experiment: ExperimentFields, group: str) -> str:
    """Return the chosen option of a group; `?` where an experiment, refused early, does not say."""
    value = experiment.get(group)
    if isinstance(value, Mapping):
        return str(value.get("name", _UNKNOWN))
    return value if isinstance(value, str) else _UNKNOWN


def mesh_sizes(experiment: ExperimentFields) -> list[int]:
    """Return the sizes of the mesh dimensions, 1 for what is missing; nothing where there is no mesh."""
    mesh = experiment.get("mesh")
    sizes = [mesh.get(size) for size in _MESH_SIZES] if isinstance(mesh, Mapping) else []
    return [size if isinstance(size, int) else 1 for size in sizes]


def variant_name(experiment: ExperimentFields) -> str:
    """Return the chosen strategies, without their options."""
    chosen = {group: group_name(experiment, group) for group in _VARIANT}
    others = [
        f"{group} {name}"
        for group, name in chosen.items()
        if group != "ac" and name not in ("none", _UNKNOWN)
    ]
    return " + ".join([chosen["ac"], *others])


def point_label(experiment: ExperimentFields) -> str:
    """Return `variant on mesh, model`: what a trial is called, whatever else the sweep holds."""
    return (
        f"{variant_name(experiment)} on {group_name(experiment, 'mesh')}, {group_name(experiment, 'model')}"
    )


def point_labels(experiments: Sequence[ExperimentFields]) -> list[str]:
    """Return `variant on mesh, model` with the options that differ, one label a trial, for progress."""
    labels = zip(variant_labels(experiments), mesh_labels(experiments), experiments, strict=True)
    return [f"{variant} on {mesh}, {group_name(experiment, 'model')}" for variant, mesh, experiment in labels]


def variant_labels(experiments: Sequence[ExperimentFields]) -> list[str]:
    """Return one label a trial: its variant and what was swept besides mesh and model.

    An option of a group is shown where it differs between trials that chose the same option of that group.
    """
    labels = zip(choice_labels(experiments), other_field_labels(experiments), strict=True)
    return [f"{choice} {others}" if others else choice for choice, others in labels]


def choice_labels(experiments: Sequence[ExperimentFields]) -> list[str]:
    """Return the part of `variant_labels` that says which strategies a trial has."""
    options = _swept_options(experiments, _VARIANT)
    scalars = _swept_scalars(experiments).intersection(_OF_THE_CHOICE)
    return [
        " ".join(
            [
                variant_name(experiment),
                *_differing(experiment, options, _VARIANT, qualified=False),
                *_written(experiment, scalars),
            ]
        )
        for experiment in experiments
    ]


def other_field_labels(experiments: Sequence[ExperimentFields]) -> list[str]:
    """Return the rest of `variant_labels`: seed, dtype, data and so on; empty where none was swept."""
    options = _swept_options(experiments, _NAMED)
    scalars = _swept_scalars(experiments).difference(_OF_THE_CHOICE)
    names = [group for group in ("data", "protocol") if len(_names(experiments, group)) > 1]
    return [
        " ".join(
            [
                *_written(experiment, scalars),
                *(
                    f"{group}={group_name(experiment, group)}"
                    for group in names
                    if _is_known(experiment, group)
                ),
                *_differing(experiment, options, _NAMED, qualified=True),
            ]
        )
        for experiment in experiments
    ]


def mesh_labels(experiments: Sequence[ExperimentFields]) -> list[str]:
    """Return one label a trial: its mesh, and the mesh options that differ among trials on that mesh."""
    options = _swept_options(experiments, ("mesh",))
    return [
        " ".join(
            [group_name(experiment, "mesh"), *_differing(experiment, options, ("mesh",), qualified=False)]
        )
        for experiment in experiments
    ]


def _swept_options(
    experiments: Sequence[ExperimentFields], groups: Sequence[str]
) -> set[tuple[str, str, str]]:
    """Return `(group, choice, option)` of what differs between experiments with the same choice."""
    peers: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for experiment in experiments:
        for group in groups:
            options = experiment.get(group)
            if isinstance(options, Mapping):
                peers.setdefault((group, group_name(experiment, group)), []).append(options)
    return {
        (group, name, option)
        for (group, name), same in peers.items()
        for option in {option for options in same for option in options}
        if any(options.get(option) != same[0].get(option) for options in same)
    }


def _swept_scalars(experiments: Sequence[ExperimentFields]) -> set[str]:
    """Return the scalar fields of experiments that differ."""
    first = {name: value for experiment in reversed(experiments) for name, value in experiment.items()}
    return {
        name
        for experiment in experiments
        for name, value in experiment.items()
        if name not in _GROUPS and value != first[name]
    }


def _written(experiment: ExperimentFields, names: set[str]) -> Iterator[str]:
    yield from (f"{name}={_plain(value)}" for name, value in experiment.items() if name in names)


def _names(experiments: Sequence[ExperimentFields], group: str) -> set[str]:
    return {group_name(experiment, group) for experiment in experiments if _is_known(experiment, group)}


def _is_known(experiment: ExperimentFields, group: str) -> bool:
    return group_name(experiment, group) != _UNKNOWN


def _differing(
    experiment: ExperimentFields, swept: set[tuple[str, str, str]], groups: Sequence[str], *, qualified: bool
) -> Iterator[str]:
    """Yield the options of `groups` that differ; which one was chosen is said elsewhere."""
    for group in groups:
        name, options = group_name(experiment, group), experiment.get(group)
        if not isinstance(options, Mapping):
            continue
        for option, value in options.items():
            is_swept = option != "name" and (group, name, option) in swept
            if is_swept and not _is_the_models(experiment, option, value):
                yield f"{group}.{option}={_plain(value)}" if qualified else f"{option}={_plain(value)}"


def _is_the_models(experiment: ExperimentFields, option: str, value: Any) -> bool:
    """Whether an option is only handed on from the model, as `layers_fqn` is."""
    model = experiment.get("model")
    return (
        isinstance(model, Mapping) and option in model and model[option] == value and option == "layers_fqn"
    )


def _plain(value: Any) -> str:
    """Return a value on one line; what is long, such as a tree of labels, by its start and an address."""
    text = f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)
    text = printable(" ".join(text.split()))
    if len(text) <= _MOST_CHARACTERS:
        return text
    address = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:6]
    return f"{text[: _MOST_CHARACTERS // 2]}…{address}"
