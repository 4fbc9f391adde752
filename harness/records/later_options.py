"""Options that came later: what does not ask for them leaves them out, and keeps its address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CAME_LATER: Mapping[str, Mapping[str, Any]] = {
    "": {"microbatches": 1, "stage_ac": []},
    "mesh": {
        "sp": False,
        "loss_parallel": False,
        "sync": "each",
        "cp": 1,
        "cp_method": "gather",
        "ep": 1,
        "ep_capacity": None,
    },
    "protocol": {"probes": False},
    "ac": {
        "split_backward": "hold",
        "keep": [],
        "keep_last": 0,
        "least_bytes": 0,
        "share": 1.0,
        "fetch_ahead": 2,
        "registered": None,
    },
}
"""Such options with their defaults, by group; those of no group are under the empty name."""


def without_later(group: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group without those that came later and have their default."""
    later = CAME_LATER.get(group, {})
    return {
        name: value
        for name, value in options.items()
        if name not in later or (list(value) if isinstance(value, tuple) else value) != later[name]
    }


def without_models_blocks(ac: Mapping[str, Any], layers_fqn: str | None) -> dict[str, Any]:
    """Return the options of AC without blocks that are the model's, of which `ac=file` once said nothing.

    Args:
        ac: the options, with the name of the variant.
        layers_fqn: container of the model's blocks.
    """
    usual: dict[str, Any] = (
        {"layers_fqn": layers_fqn, "module_classes": []} if ac.get("name") == "file" else {}
    )
    return {
        option: value
        for option, value in ac.items()
        if option not in usual or (list(value) if isinstance(value, tuple) else value) != usual[option]
    }
