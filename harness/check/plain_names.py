"""The plain model's names for what a variant has wrapped or renamed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from harness.measure.parity.module_state import hooks_of
from harness.measure.parity.snapshot import Snapshot

_PREFIXES = ("length of ", "order of ", "members of ")
_INPUT = re.compile(r"inputs\[(\d+)\]\[[01]\](.*)", re.DOTALL)
_NAMED = ("gradients", "buffers", "state", "parameters")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainNames:
    """The names that a model had before the variant was applied.

    Fields:
        modules: modules of the plain model by FQN.
        attributes: names of their own attributes and hooks, by FQN.
    """

    modules: Mapping[str, nn.Module]
    attributes: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, model: nn.Module) -> PlainNames:
        """Take the names of `model`, which no variant has touched yet."""
        modules = dict(model.named_modules())
        held = {fqn: _held(module) for fqn, module in modules.items()}
        return cls(modules=modules, attributes=held)

    def renaming(self, model: nn.Module) -> Renaming:
        """Return how names of `model`, with the variant on it, become those of the plain one."""
        known = {id(module): fqn for fqn, module in self.modules.items()}
        found = dict(model.named_modules(remove_duplicate=False))
        fqns = {name: known.get(id(module)) for name, module in found.items()}
        added = {
            f"{name}.{attribute}".removeprefix(".")
            for name, fqn in fqns.items()
            if fqn is not None
            for attribute in _held(found[name]) - self.attributes[fqn]
        }
        return Renaming(fqns=fqns, added=frozenset(added))


@dataclass(frozen=True, kw_only=True, slots=True)
class Renaming:
    """Names of a model with a variant on it, and those of the plain one.

    Fields:
        fqns: plain FQN by FQN; `None` of modules that the variant has put there.
        added: paths of attributes that the variant has given to modules of the plain model.
    """

    fqns: Mapping[str, str | None]
    added: frozenset[str]

    def plain(self, name: str) -> str:
        """Return the plain model's name of a parameter, buffer or attribute."""
        prefix, holder, rest = self._parts(name)
        fqn = self.fqns[holder]
        return name if fqn is None else prefix + f"{fqn}.{rest}".removeprefix(".")

    def is_own(self, name: str) -> bool:
        """Say whether a piece of state belongs to the variant: the plain model has nothing of the kind."""
        _, holder, rest = self._parts(name)
        attribute = re.split(r"[.\[(]", rest)[0]
        return self.fqns[holder] is None or f"{holder}.{attribute}".removeprefix(".") in self.added

    def _parts(self, name: str) -> tuple[str, str, str]:
        """Return the words before a path, the innermost module in it, and the rest."""
        prefix = next((each for each in _PREFIXES if name.startswith(each)), "")
        parts = name.removeprefix(prefix).split(".")
        ends = range(len(parts) - 1, -1, -1)
        end = next(end for end in ends if ".".join(parts[:end]) in self.fqns)  # the model itself at last
        return prefix, ".".join(parts[:end]), ".".join(parts[end:])

    def renamed(self, snapshot: Snapshot) -> Snapshot:
        """Return `snapshot` under the plain model's names, without what is the variant's own."""
        state = {name: value for name, value in snapshot.state.items() if not self.is_own(name)}
        named = {part: getattr(snapshot, part) for part in _NAMED} | {"state": state}
        return dataclasses.replace(
            snapshot,
            **{
                part: {self.plain(name): leaf for name, leaf in leaves.items()}
                for part, leaves in named.items()
            },
            input_gradients={_input_name(name): leaf for name, leaf in snapshot.input_gradients.items()},
            changed_state=frozenset(
                self.plain(name) for name in snapshot.changed_state if not self.is_own(name)
            ),
            uncompared=tuple(self.plain(name) for name in snapshot.uncompared if not self.is_own(name)),
            backward_order=tuple(map(self.plain, snapshot.backward_order)),
            blocks={fqn: frozenset(map(self.plain, names)) for fqn, names in snapshot.blocks.items()},
            checkpointed=frozenset(map(self.plain, snapshot.checkpointed)),
        )


def _held(module: nn.Module) -> frozenset[str]:
    return frozenset(vars(module)) | {name for name, _ in hooks_of(module)}


def _input_name(name: str) -> str:
    """Return an input as the caller calls it; of the first micro-batch without its number."""
    found = _INPUT.fullmatch(name)
    if found is None:
        return name
    place, path = found.groups()
    return f"inputs{path}" if place == "0" else f"inputs{path} of micro-batch {place}"
