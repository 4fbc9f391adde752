"""Labels of a model's submodules: which calls are followed, and the path of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from strategies.base import StrategyError
from strategies.nested.nested_regions import Path, path_name
from strategies.regions.blocks import unwrapped

_SHOWN = 8  # names in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Labels:
    """Paths of submodule calls.

    Fields:
        paths: paths by FQN; every name of a module used under several counts, the n-th for its n-th call.
        where: configuration path they come from, for messages.
        is_partial: calls without a label join the regions around them, rather than end them.
    """

    paths: Mapping[str, Path]
    where: str
    is_partial: bool

    def regions(self) -> list[Path]:
        """Return the paths of all regions, each before those inside it."""
        found = (path[:end] for path in self.paths.values() for end in range(1, len(path) + 1))
        return list(dict.fromkeys(found))

    def check(self, model: nn.Module) -> None:
        """Refuse labels that cannot fit `model`, whatever it does.

        Raises:
            StrategyError: naming the first such label.
        """
        known = dict(plain_modules(model))
        for fqn, path in self.paths.items():
            if not fqn or fqn not in known:
                problem = f"{fqn!r} names no submodule; submodules are: {_some(known)}"
                raise StrategyError(self.where, problem)
            if _has_no_forward(known[fqn]):
                problem = f"{fqn!r} is a list of modules, which nobody calls; label what it holds"
                raise StrategyError(self.where, problem)
            holder = next((name for name in _holders(fqn) if name in self.paths), None)
            if holder is not None and path[: len(self.paths[holder])] != self.paths[holder]:
                outer = list(self.paths[holder])
                problem = f"{fqn!r} has the path {list(path)}, and {holder!r}, which holds it, {outer}"
                raise StrategyError(self.where, f"{problem}; the inner path must begin with the outer one")

    def check_regions(self, where: str, paths: Collection[Path]) -> None:
        """Refuse paths of regions that there are not. Raises StrategyError: naming the first."""
        known = self.regions()
        for path in paths:
            if path not in known:
                names = ", ".join(map(path_name, known)) or "none"
                raise StrategyError(where, f"there is no region {path_name(path)}; regions are: {names}")

    def crosses(self, unit: str) -> bool:
        """Say whether a region begins inside the module `unit` and ends outside of it, or the other way."""
        own = next((self.paths[name] for name in (unit, *_holders(unit)) if name in self.paths), ())
        inside = {fqn for fqn in self.paths if fqn.startswith(f"{unit}.")}
        of_inside, of_others = (
            {self.paths[fqn][:end] for fqn in fqns for end in range(len(own) + 1, len(self.paths[fqn]) + 1)}
            for fqns in (inside, self.paths.keys() - inside - {unit})
        )
        return not of_inside.isdisjoint(of_others)

    def targets(self, model: nn.Module) -> dict[int, Target]:
        """Return the modules of `model` whose calls are followed, by `id`."""
        holders = {holder for fqn in self.paths for holder in _holders(fqn)}
        found: dict[int, Target] = {}
        for fqn, module in _called_in(model, holders, ""):
            target = found.setdefault(id(module), Target(fqn, module, is_scope=fqn in holders, paths=[]))
            if fqn in self.paths:
                target.paths.append(self.paths[fqn])
        return found


@dataclass(frozen=True, slots=True)
class Target:
    """A module whose calls are followed.

    Fields:
        fqn: the first of its plain FQNs.
        is_scope: labels lie inside, so that its forward is followed too.
        paths: paths of its labels; several for a module used under several names.
    """

    fqn: str
    module: nn.Module
    is_scope: bool
    paths: list[Path]

    def path(self, number: int) -> Path | None:
        """Return the path of its call `number`, `None` without a label."""
        if not self.paths:
            return None
        return self.paths[min(number, len(self.paths) - 1) if len(set(self.paths)) > 1 else 0]


def plain_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield plain FQN and plain module of every submodule, one of several names under each of them."""
    plain = unwrapped(model)
    yield prefix, plain
    for name, child in plain._modules.items():  # noqa: SLF001 (children that repeat count too)
        if child is not None:
            yield from plain_modules(child, f"{prefix}.{name}" if prefix else name)


def _called_in(module: nn.Module, holders: Collection[str], prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that forwards around labels can call."""
    for name, child in unwrapped(module)._modules.items():  # noqa: SLF001
        if child is None:
            continue
        fqn = f"{prefix}{name}"
        is_container = _has_no_forward(unwrapped(child))
        if not is_container:
            yield fqn, child
        if is_container or fqn in holders:
            yield from _called_in(child, holders, f"{fqn}.")


def _has_no_forward(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _holders(fqn: str) -> Iterator[str]:
    """Yield the FQNs of the modules around `fqn`, from the innermost, without the root."""
    while "." in fqn:
        fqn = fqn.rpartition(".")[0]
        yield fqn


def _some(names: Mapping[str, Any]) -> str:
    shown = [name for name in names if name]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more
