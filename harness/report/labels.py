"""How reports call a trial: by what differs within the sweep, and by nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Experiment = Mapping[str, Any]

_VARIANT = ("ac", "chunk", "shard")
_NAMED = ("model", "data", "protocol")
_GROUPS = (*_VARIANT, *_NAMED, "mesh")
_UNKNOWN = "?"


def group_name(experiment: Experiment, group: str) -> str:
    """Return the chosen option of a group; `?` where an experiment, refused early, does not say."""
    value = experiment.get(group)
    if isinstance(value, Mapping):
        return str(value.get("name", _UNKNOWN))
    return value if isinstance(value, str) else _UNKNOWN


def point_label(experiment: Experiment) -> str:
    """Return `variant on mesh, model`: what a trial is called, whatever else the sweep holds."""
    return (
        f"{_variant_name(experiment)} on {group_name(experiment, 'mesh')}, {group_name(experiment, 'model')}"
    )


def point_labels(experiments: Sequence[Experiment]) -> list[str]:
    """Return `variant on mesh, model` with the options that differ, one label a trial, for progress."""
    labels = zip(variant_labels(experiments), mesh_labels(experiments), experiments, strict=True)
    return [f"{variant} on {mesh}, {group_name(experiment, 'model')}" for variant, mesh, experiment in labels]


def variant_labels(experiments: Sequence[Experiment]) -> list[str]:
    """Return one label a trial: its variant and what was swept besides mesh and model.

    An option of a group is shown where it differs between trials that chose the same option of that group.
    """
    shown = [
        [
            *_differing(experiments, index, _VARIANT, qualified=False),
            *_recipe(experiments, index),
            *_names(experiments, index),
            *_differing(experiments, index, _NAMED, qualified=True),
        ]
        for index in range(len(experiments))
    ]
    return [
        " ".join([_variant_name(experiment), *options])
        for experiment, options in zip(experiments, shown, strict=True)
    ]


def mesh_labels(experiments: Sequence[Experiment]) -> list[str]:
    """Return one label a trial: its mesh, and the mesh options that differ among trials on that mesh."""
    return [
        " ".join(
            [group_name(experiment, "mesh"), *_differing(experiments, index, ("mesh",), qualified=False)]
        )
        for index, experiment in enumerate(experiments)
    ]


def _variant_name(experiment: Experiment) -> str:
    chosen = {group: group_name(experiment, group) for group in _VARIANT}
    others = [
        f"{group} {name}"
        for group, name in chosen.items()
        if group != "ac" and name not in ("none", _UNKNOWN)
    ]
    return " + ".join([chosen["ac"], *others])


def _differing(
    experiments: Sequence[Experiment], index: int, groups: Sequence[str], *, qualified: bool
) -> Iterator[str]:
    mine = experiments[index]
    for group in groups:
        name = group_name(mine, group)
        options = mine.get(group)
        if not isinstance(options, Mapping):
            continue
        peers = [
            other[group]
            for other in experiments
            if isinstance(other.get(group), Mapping) and group_name(other, group) == name
        ]
        for option, value in options.items():
            is_swept = any(peer.get(option) != value for peer in peers)
            if option != "name" and is_swept and not _is_the_models(mine, option, value):
                yield f"{group}.{option}={_plain(value)}" if qualified else f"{option}={_plain(value)}"


def _is_the_models(experiment: Experiment, option: str, value: Any) -> bool:
    """Whether an option is only handed on from the model, as `layers_fqn` is."""
    model = experiment.get("model")
    return (
        isinstance(model, Mapping) and option in model and model[option] == value and option == "layers_fqn"
    )


def _recipe(experiments: Sequence[Experiment], index: int) -> Iterator[str]:
    """Yield the scalar fields of the experiment itself that differ."""
    for option, value in experiments[index].items():
        is_swept = any(other.get(option, value) != value for other in experiments)
        if is_swept and option not in _GROUPS:
            yield f"{option}={_plain(value)}"


def _names(experiments: Sequence[Experiment], index: int) -> Iterator[str]:
    """Yield the choice of data and protocol where it differs; models have a column of their own."""
    for group in ("data", "protocol"):
        name = group_name(experiments[index], group)
        if name != _UNKNOWN and any(
            group_name(other, group) not in (name, _UNKNOWN) for other in experiments
        ):
            yield f"{group}={name}"


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value)
