"""Selectors of operators by the module that calls them: `MODULE::OPERATOR`, or an operator wherever it runs.

A module is a pattern of whole FQNs, `layers.*.attention.wo`, and selects what the module itself calls, not
what modules inside of it do. An operator is named as in a save list: an exact overload, or a group.

Source: torchtitan, `full_recompute_save_ops` (https://github.com/pytorch/torchtitan/pull/4153).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from strategies.base import StrategyError
from strategies.regions import blocks, region
from strategies.regions.operator_names import SaveList
from strategies.regions.recomputation import Recomputation

SEPARATOR = "::"


@dataclass(kw_only=True, slots=True)
class Calling:
    """The modules of a block whose forwards run, the innermost last.

    Fields:
        fqns: their FQNs; that of the block is the first.
    """

    fqns: list[str] = field(default_factory=list)

    def of(self, entries: Iterable[str]) -> tuple[str, ...]:
        """Return the selectors among `entries` whose module is the innermost one."""
        return tuple(each for each in entries if _is_of(each, self.fqns[-1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Called:
    """The scope of one module's forward."""

    calling: Calling
    fqn: str

    def __enter__(self) -> None:
        self.calling.fqns.append(self.fqn)

    def __exit__(self, *_: object) -> None:
        self.calling.fqns.pop()


def enclose(found: Mapping[str, nn.Module], save_list: SaveList) -> None:
    """Put a region around each block, which keeps the results of what the selectors of `save_list` select.

    Args:
        found: blocks by FQN.
    """
    fired: set[str] = set()
    for fqn, block in found.items():
        calling = Calling(fqns=[fqn])
        recomputing = Recomputation(
            preserve_rng_state=True,
            early_stop=True,
            use_reentrant=False,
            save_list=save_list,
            within=calling,
            fired=fired,
            split_backward="hold",
        )
        region.enclose(block, recomputing)
        for name, module in inside(block).items():
            scope = _Called(calling=calling, fqn=f"{fqn}.{name}")
            region.enclose(module, region.InScope(scope=scope, shown=recomputing), holds_call=False)


def refuse_unmatched(selectors: Sequence[str], found: Mapping[str, nn.Module], where: str) -> None:
    """Refuse a selector whose module is nowhere in the blocks, with the nearest names.

    Args:
        found: blocks by FQN.
        where: the option that messages name.

    Raises:
        StrategyError: naming it, or a module whose forward no region can hold.
    """
    parts = {
        f"{fqn}.{name}": module for fqn, block in found.items() for name, module in inside(block).items()
    }
    for selector in selectors:
        if any(_is_of(selector, fqn) for fqn in (*found, *parts)):
            continue
        pattern = selector.partition(SEPARATOR)[0]
        problem = f"{pattern!r} matches no module of the blocks"
        raise StrategyError(where, f"{problem}; {nearest(pattern, [*found, *parts])}")
    region.refuse_own_forward(parts)


def refuse_idle(selectors: Sequence[str], run: Collection[tuple[str, str]], where: str) -> None:
    """Refuse a selector whose module runs other operators alone, and name these.

    Args:
        run: FQNs of modules with the operators that they run.
        where: the option that messages name.

    Raises:
        StrategyError: naming it.
    """
    for selector in selectors:
        pattern, separator, operator = selector.partition(SEPARATOR)
        found = {name for fqn, name in run if _is_of(selector, fqn)}
        if separator and operator not in found:
            near = difflib.get_close_matches(operator, sorted(found), n=3, cutoff=0.3)
            words = f"it runs {', '.join(near or sorted(found)[:3]) or 'none itself'}"
            raise StrategyError(where, f"{pattern!r} runs no {operator}; {words}")


def nearest(pattern: str, names: Iterable[str]) -> str:
    """Return the end of a message about a pattern of modules that matches none: names that are like it."""
    known = list(dict.fromkeys(_numberless(name) if "*" in pattern else name for name in names))
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3)
    return f"the nearest: {', '.join(map(repr, near or known[:3])) or 'none'}"


def _numberless(name: str) -> str:
    """Return a name as the pattern of it in all blocks: `layers.*.up`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def inside(block: nn.Module) -> dict[str, nn.Module]:
    """Return the modules inside a block, by their names there."""
    return {name: module for name, module in blocks.plain_named_modules(block) if name}


def _is_of(selector: str, fqn: str) -> bool:
    pattern, separator, _ = selector.partition(SEPARATOR)
    return not separator or fnmatchcase(fqn, pattern)
