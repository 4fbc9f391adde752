"""Operators of blocks that cost FLOPs, and whose results a written file keeps within a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from strategies.written.file_text import BlockRules

UNKNOWN_BYTES = 1 << 60


@dataclass(frozen=True, kw_only=True, slots=True)
class HeavyOperator:
    """One operator of a block's forward that costs FLOPs.

    Fields:
        rule: `module:family[#n]`, its name inside the block.
        number: its number among the operators of the block that plans count.
        flops: what it costs to run it again; 0 where data decides.
        result_bytes: bytes of the storages that it makes, which stay if its results are kept; `UNKNOWN_BYTES`
            where data decides, so that no number of bytes holds them.
        runs_again: whether a recomputation of the whole block gets as far as it; it ends where all is made
            that backward reads.
        is_written: whether a later operator writes to its results in place, so that they cannot be kept.
    """

    fqn: str
    rule: str
    number: int
    flops: int
    result_bytes: int
    runs_again: bool
    is_written: bool

    @property
    def family(self) -> str:
        """The family of the operator."""
        return self.rule.rpartition(":")[2].partition("#")[0]

    @property
    def can_be_kept(self) -> bool:
        """True if keeping its results is possible, and spares something."""
        return self.runs_again and not self.is_written


def rules_for(operators: Mapping[str, Sequence[HeavyOperator]], extra_bytes: float) -> dict[str, BlockRules]:
    """Return the rules that keep results of at most `extra_bytes` in all blocks, and spare many FLOPs.

    Results are taken by FLOPs a byte, of equal ones those of late blocks first, where they are part of what
    runs again at the peak. What is left over goes to results that still fit.

    Args:
        extra_bytes: bytes that kept results may take together; `math.inf` keeps all.
    """
    order = {fqn: place for place, fqn in enumerate(operators)}
    candidates = [each for found in operators.values() for each in found if each.can_be_kept]
    candidates.sort(key=lambda each: (-each.flops / max(each.result_bytes, 1), -order[each.fqn]))
    kept: set[tuple[str, str]] = set()
    left = extra_bytes
    for each in candidates:
        if each.result_bytes <= left:
            left -= each.result_bytes
            kept.add((each.fqn, each.rule))
    return rules_of(operators, lambda each: (each.fqn, each.rule) in kept)


def rules_of(
    operators: Mapping[str, Sequence[HeavyOperator]], is_kept: Callable[[HeavyOperator], bool]
) -> dict[str, BlockRules]:
    """Return the rules that keep the results of the operators that `is_kept` says."""
    return {
        fqn: BlockRules(
            keep=tuple(each.rule for each in found if is_kept(each)),
            again=tuple(each.rule for each in found if not is_kept(each)),
        )
        for fqn, found in operators.items()
    }


def recomputed_flops(
    operators: Mapping[str, Sequence[HeavyOperator]], rules: Mapping[str, BlockRules]
) -> int:
    """Return the FLOPs that run again under rules."""
    every = (each for found in operators.values() for each in found)
    return sum(each.flops for each in every if each.runs_again and each.rule not in rules[each.fqn].keep)
