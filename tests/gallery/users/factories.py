"""Factories of the users' models, by the names of their cases."""

from __future__ import annotations

from typing import Any

from tests.gallery.users.cases import CASES

_FACTORIES = {name.partition(" ")[0]: case.make for name, case in CASES.items()}


def __getattr__(name: str) -> Any:
    try:
        return _FACTORIES[name]
    except KeyError:
        raise AttributeError(name) from None
