"""`ac=selective_op`: save the outputs of expensive operators, recompute the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.ac.base import Recomputing
from strategies.base import Observation, RunnableStep, StrategyError, take_names
from strategies.budget.export import operator_modules
from strategies.regions import blocks, kept_modules, operator_names, recomputation, region
from strategies.regions.presets import check_names, is_known
from strategies.written import file_text
from strategies.written.heavy_operators import rules_of

if TYPE_CHECKING:
    from torch import nn

    from strategies.regions.operator_names import SaveList
    from strategies.regions.region import RegionCallSite


_USUAL = ("matmul", "conv", "attention")
DISPATCHING = (*_USUAL, "topk", "comm")
"""What is kept where ranks share experts: a recomputation chooses none anew, and sends no token again."""
_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "matmul": ("linear", "bmm"),
    "conv": ("convolution",),
    "attention": ("attention",),
}
"""Families of operators in written files, by group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveOp(Recomputing):
    """Checkpoint every block, but keep the outputs of named operators.

    Use when: memory suffices for outputs of matmuls, convolutions and attention, which cost most to repeat.

    Saved: the inputs of each block, and every output of the named operators, needed or not.
    Recomputed: all other operators of the block, once a step; of the matmuls every k-th, if asked.
    Moved: nothing.

    Fields:
        save_ops: groups (`matmul`, `conv`, `attention`, `comm`, `max`, `topk`) and exact overloads
            (`aten.mm.default`), or the name of a preset (`modalities`, `torchtitan`); `None` is the default,
            in an experiment with `mesh.ep` that of `DISPATCHING`.
        matmul_recompute_every: recompute the saved matmuls k, 2k, ... of each block call, k >= 2;
            0 recomputes none; `None` leaves it to the preset, and is 0 for a list.
        keep: patterns of names of modules inside a block (`*.attn`, which holds all in it, `*.attn.*`): named
            operators outside of these modules are recomputed; empty for none.

    A result that is written in place, by the block or after it, is not kept: its operator runs again, so
    that a GRU, whose cells write to their products, keeps none of them.

    On CPU, attention with dropout is not one operator: it runs as `aten.bmm`, which is in `matmul`.

    Source: https://pytorch.org/blog/activation-checkpointing-techniques; Korthikanti et al. 2022,
        arXiv:2205.05198, section 5; torchtitan for every second matmul.
    """

    acts_on_each_block_alone: ClassVar[bool] = True
    scales_with_batch: ClassVar[bool] = True

    save_ops: Any = _USUAL  # a name or a list of names; OmegaConf has no such union
    matmul_recompute_every: int | None = None
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse save lists that torch cannot follow, and operators that this build of torch lacks."""
        Recomputing.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        if self.use_reentrant:
            raise StrategyError(
                "ac.use_reentrant", "must be false: reentrant recomputation cannot save single operators"
            )
        if not isinstance(self.save_ops, str | Sequence | None):
            problem = "must be the name of a preset or a list of names"
            raise StrategyError("ac.save_ops", f"{problem}, got {self.save_ops!r}")
        given = _USUAL if self.save_ops is None else self.save_ops
        names = given if isinstance(given, str) else tuple(str(name) for name in given or ())
        object.__setattr__(self, "save_ops", names)
        take_names(self, "ac.keep", "patterns of module names")
        selector = next((each for each in names if "::" in each), None) if isinstance(names, tuple) else None
        if selector is not None:
            problem = (
                f"{selector!r} names a module; write such lines into a file, and use ac=file ac.path=FILE"
            )
            raise StrategyError("ac.save_ops", problem)
        check_names(names, self.matmul_recompute_every)
        if not is_known(names):
            self._save_list()  # refuses what this build of torch does not have

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:
        """Return `model`, with a region around each block, and around each module that `keep` matches.

        Raises:
            StrategyError: as of every variant, or a pattern matches nothing.
        """
        enclosed = Recomputing.apply(self, model, sample)
        found = blocks.find_blocks(model, layers_fqn=self.layers_fqn, module_classes=self.module_classes)
        for block in found.values() if self.keep else ():
            around = region.region_of(block)
            recomputing = around.inner if isinstance(around, region.Around) else around
            assert isinstance(recomputing, recomputation.Recomputation)
            assert isinstance(recomputing.within, kept_modules.Within)
            inner = region.InScope(scope=recomputing.within, shown=recomputing)
            for module in self._matching(block).values():
                region.enclose(module, inner, holds_call=False)
        return enclosed

    def call_site(self, model: nn.Module) -> RegionCallSite:
        """Return a callable that runs `model` as one region.

        Raises:
            StrategyError: the model is checkpointed already, or modules of blocks are named.
        """
        if self.keep:
            problem = "call_site makes the model one region, and ac.keep names modules inside blocks"
            raise StrategyError("wrap_order", f"{problem}; use inside_fsdp")
        return Recomputing.call_site(self, model)

    def check_compilation(self, order: str, scope: str) -> None:
        """Refuse regions around compiled code, of which they see no operator (pytorch#161889).

        Raises:
            StrategyError: naming the order.
        """
        Recomputing.check_compilation(self, order, scope)
        if self.keep:
            raise StrategyError("ac.keep", "names modules whose calls compiled code hides; use compile=none")
        if order == "compile_first":
            raise StrategyError(
                "compile_order",
                "compile_first hides all operators from ac=selective_op, and nothing is compiled around "
                "the modes that look for them; use compile_order=ac_first",
            )

    def observe(self, model: nn.Module) -> Observation:
        """Return what the regions showed; without `conv` where nobody has named it and nothing convolves."""
        seen = Recomputing.observe(self, model)
        if self.save_ops != _USUAL or len(seen.never_fired) == len(seen.named):
            return seen
        return replace(seen, never_fired=tuple(name for name in seen.never_fired if name != "conv"))

    def _file(
        self, header: Mapping[str, str], chosen: Sequence[str], step: Callable[[], RunnableStep]
    ) -> str:
        """Return the file that keeps these operators by their families, but for what nobody needs.

        Raises:
            StrategyError: an operator or a preset that rules have no words for.
        """
        self._refuse_without_words()
        if self.keep:
            problem = f"is {list(self.keep)}, which a written file has no words for; leave it out"
            raise StrategyError("ac.keep", problem)
        names = (self.save_ops,) if isinstance(self.save_ops, str) else self.save_ops
        unknown = next((name for name in names if name not in _FAMILIES), None)
        if unknown is not None:
            problem = f"a written file has no words for {unknown!r}"
            raise StrategyError("ac.save_ops", f"{problem}; it knows {', '.join(_FAMILIES)}")
        if self.matmul_recompute_every:
            problem = f"is {self.matmul_recompute_every}, which a written file has no words for; use 0"
            raise StrategyError("ac.matmul_recompute_every", problem)
        families = {family for name in names for family in _FAMILIES[name]}
        plain = step()
        modules = {fqn: plain.model.get_submodule(fqn) for fqn in chosen}
        operators = operator_modules.heavy_operators(plain, modules)
        rules = rules_of(operators, lambda each: each.can_be_kept and each.family in families)
        return file_text.rules_file(rules, **header)

    def _check_blocks(self, model: nn.Module, chosen: dict[str, nn.Module]) -> None:
        """Refuse patterns that match nothing, and matching modules whose forward no region can hold."""
        Recomputing._check_blocks(self, model, chosen)  # noqa: SLF001 (its own)
        names = {
            fqn: [name for name, _ in blocks.plain_named_modules(block)] for fqn, block in chosen.items()
        }
        kept_modules.refuse_unmatched(self.keep, names)
        for fqn, block in chosen.items():
            matching = self._matching(block)
            region.refuse_own_forward({f"{fqn}.{name}": module for name, module in matching.items()})

    def _matching(self, block: nn.Module) -> dict[str, nn.Module]:
        modules = dict(blocks.plain_named_modules(block))
        return {name: modules[name] for name in kept_modules.matching(self.keep, modules)}

    def _save_list(self) -> SaveList | None:
        return operator_names.resolve(self.save_ops, self.matmul_recompute_every)

    def _within(self) -> kept_modules.Within | None:
        return kept_modules.Within() if self.keep else None
