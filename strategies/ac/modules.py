"""`ac=modules`: what becomes of values, by the names of the modules and operators that make them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strategies.ac.base import ByName
from strategies.base import StrategyError, take_names
from strategies.regions import blocks, kept_modules
from strategies.regions.fates import EVERY_OPERATOR, Fate, Rules

if TYPE_CHECKING:
    from torch import nn

_FATES = {fate.value: fate for fate in Fate}


@dataclass(frozen=True, kw_only=True, slots=True)
class Modules(ByName):
    """Keep, recompute, discard or offload what named modules of each block make.

    Use when: you know which values are cheap to make again, as norms and activations are, or dear to hold.

    Saved: what autograd saves of modules that are kept, and what operators read that run again.
    Recomputed: the operators that lead to the other values that backward needs, each once a step.
    Moved: what autograd saves of `offload`, once to host memory and once back.

    An entry is a pattern of names inside a block, `*.mlp` or `mlp`, with what is in that module. It may go on
    with a pattern of operators: `*.attention::aten.bmm*`, or `::aten.gelu*` of the whole block. Of entries
    for modules inside one another the inner one counts. What none names is kept; where `keep` stands without
    `recompute` and `discard`, it is made again.

    Fields:
        keep: made once, and held until backward.
        recompute: made again in backward; what an operator of another module reads or saves is held.
        discard: made again in backward, results that other modules have saved included: a norm's, an
            activation's.
        offload: held in host memory.

    Source: Korthikanti et al. 2022, arXiv:2205.05198 (by module); Megatron-Core's `CheckpointWithoutOutput`
        for `discard`.
    """

    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    discard: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what is no list of patterns, and no names at all."""
        ByName.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        for option in _FATES:
            take_names(self, f"ac.{option}", "patterns of module names")
        if not any(getattr(self, option) for option in _FATES):
            options = ", ".join(f"ac.{option}" for option in _FATES)
            problem = f"modules names no module; give one of {options}, such as ac.discard=['*norm']"
            raise StrategyError("ac", problem)

    def _check_blocks(self, model: nn.Module, chosen: dict[str, nn.Module]) -> None:  # noqa: ARG002 (blocks say all)
        """Refuse patterns that match no module of any block."""
        names = {
            fqn: [name for name, _ in blocks.plain_named_modules(block)] for fqn, block in chosen.items()
        }
        for option in _FATES:
            patterns = [module for module, _ in self._entries(option) if module]
            kept_modules.refuse_unmatched(patterns, names, where=f"ac.{option}")

    def _rules(self, block: nn.Module) -> Mapping[str, Rules]:
        names = [name for name, _ in blocks.plain_named_modules(block)]
        of_modules: dict[str, dict[str, str]] = {"": {}}
        for option in _FATES:
            for module, operator in self._entries(option):
                for name in kept_modules.matching([module], names) if module else [""]:
                    known = of_modules.setdefault(name, {}).setdefault(operator, option)
                    if known != option:
                        where = f"{name!r}" if operator == EVERY_OPERATOR else f"{operator!r} in {name!r}"
                        problem = f"names {where}, and so does ac.{known}; name it in one of them"
                        raise StrategyError(f"ac.{option}", problem)
        rest = Fate.DISCARD if self.keep and not (self.recompute or self.discard) else Fate.KEEP
        found = {name: tuple(self._ordered(operators)) for name, operators in of_modules.items()}
        return {**found, "": (*found[""], (EVERY_OPERATOR, rest))}

    def _entries(self, option: str) -> Iterator[tuple[str, str]]:
        for entry in getattr(self, option):
            module, _, operator = entry.partition("::")
            yield module, operator or EVERY_OPERATOR

    def _ordered(self, operators: Mapping[str, str]) -> Iterator[tuple[str, Fate]]:
        """Yield the rules of a module, that of every operator last."""
        for operator in sorted(operators, key=lambda pattern: pattern == EVERY_OPERATOR):
            fate = _FATES[operators[operator]]
            # single operators have no inside where their results could be made again alone
            is_single = operator != EVERY_OPERATOR and fate is Fate.RECOMPUTE
            yield operator, Fate.DISCARD if is_single else fate

    def _named_modules(self) -> Sequence[str]:
        every = (entry for option in _FATES for entry in self._entries(option))
        return tuple(dict.fromkeys(module for module, operator in every if operator == EVERY_OPERATOR))

    def _named_operators(self) -> Sequence[str]:
        every = (operator for option in _FATES for _, operator in self._entries(option))
        return tuple(dict.fromkeys(operator for operator in every if operator != EVERY_OPERATOR))
