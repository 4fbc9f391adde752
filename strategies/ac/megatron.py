"""`ac=megatron`: parts of blocks by the labels of Megatron-Core's `recompute_modules`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from strategies.ac.base import ByName
from strategies.base import StrategyError
from strategies.regions import blocks
from strategies.regions.fates import EVERY_OPERATOR, Fate, Rules

if TYPE_CHECKING:
    from torch import nn

_ALL_AGAIN: Rules = ((EVERY_OPERATOR, Fate.RECOMPUTE),)
_DISCARDED: Rules = ((EVERY_OPERATOR, Fate.DISCARD),)
_KEPT: Rules = ((EVERY_OPERATOR, Fate.KEEP),)
_ACTIVATIONS: Rules = tuple(
    (f"aten.{name}", Fate.DISCARD)
    for name in ("silu.default", "gelu.default", "sigmoid.default", "relu.default", "mul.Tensor")
)
"""Activations of experts, and the product of a gated one with its gate."""
_POSITIONS: Rules = tuple(
    (f"aten.{name}.*", Fate.DISCARD)
    for name in ("cat", "mul", "add", "neg", "stack", "new_empty", "copy_", "clone")
)
"""Operators that make queries and keys of up-projections: rotation by position, joined parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Megatron(ByName):
    """Recompute the parts of each block that labels of Megatron-Core name.

    Use when: what trainers on Megatron-Core set by `recompute_modules` is to be compared, on any model.

    Saved: all activations but those of the parts, whose inputs stay; of `layernorm`, `moe_act` and
        `mla_up_proj` the outputs do not stay either.
    Recomputed: the operators of these parts that backward needs, once a step.
    Moved: nothing.

    Fields:
        modules: labels. `core_attn`: what attention does between its projections, rotation of queries and
            keys too. `mlp`: feed-forwards without experts; `moe`: those with experts; `shared_experts`: of
            these, the ones that each token visits. `layernorm`: norms in front of attention and
            feed-forwards; `moe_act`: activations inside of experts; `mla_up_proj`: up-projections of latent
            attention, and rotations. A label that no block has is refused.

    Source: Megatron-Core 0.16, `TransformerConfig.recompute_modules` and `CheckpointWithoutOutput`.
    """

    modules: tuple[str, ...] = ("core_attn",)

    def __post_init__(self) -> None:
        """Refuse labels that Megatron does not have, and none at all."""
        ByName.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        names: Any = self.modules
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        unknown = next((each for each in names if each not in _LABELS), None) if is_list else None
        if not is_list or not names or unknown is not None:
            got = repr(names if unknown is None else unknown)
            raise StrategyError("ac.modules", f"must be a list of {', '.join(_LABELS)}, got {got}")
        object.__setattr__(self, "modules", tuple(dict.fromkeys(names)))

    def _check_blocks(self, model: nn.Module, chosen: dict[str, nn.Module]) -> None:  # noqa: ARG002 (blocks say all)
        """Refuse a label that no block has."""
        found = {label for label in _LABELS for block in chosen.values() if _LABELS[label](_Parts(block))}
        for label in self.modules:
            if label not in found:
                known = ", ".join(each for each in _LABELS if each in found) or "none of them"
                raise StrategyError("ac.modules", f"the blocks have no {label!r}; they have {known}")

    def _rules(self, block: nn.Module) -> Mapping[str, Rules]:
        parts, found = _Parts(block), dict[str, Rules]()
        for label in _LABELS:  # rules of single operators go before those of all, and children before nobody
            if label in self.modules:
                for name, rules in _LABELS[label](parts).items():
                    found[name] = _joined(found.get(name, ()), rules)
        whole = [f"{name}." for name, rules in found.items() if rules == _ALL_AGAIN and name in parts.whole]
        inside = [name for name in found if name.startswith(tuple(whole))] if whole else []
        return {"": _KEPT, **{name: rules for name, rules in found.items() if name not in inside}}


class _Parts:
    """The modules of a block that labels may mean.

    Attributes:
        children: those that the block holds itself.
        experts: names of those children that hold experts.
        whole: the parts that run again as a whole, with what is in them.
    """

    def __init__(self, block: nn.Module) -> None:
        self.named = dict(blocks.plain_named_modules(block))
        self.children = {name: each for name, each in self.named.items() if name and "." not in name}
        self.experts = [name for name in self.children if f"{name}.experts" in self.named]
        self.whole = [*self.experts, *self.mlps()]

    def mlps(self) -> list[str]:
        """Return the names of feed-forwards without experts."""
        return [
            name
            for name, each in self.children.items()
            if name not in self.experts
            and (
                any(word in _class_of(each) for word in ("mlp", "feedforward", "swiglu"))
                or name in {"mlp", "feed_forward"}
            )
        ]

    def attentions(self) -> list[str]:
        """Return the names of modules that attend and hold their projections, the innermost."""
        found = [
            name
            for name, each in self.named.items()
            if name and "attention" in _class_of(each) and "multihead" not in _class_of(each)
        ]
        return [name for name in found if not any(other.startswith(f"{name}.") for other in found)]

    def projections(self, attention: str) -> list[str]:
        """Return the names of an attention's children that have parameters."""
        begin = f"{attention}."
        return [
            name
            for name, each in self.named.items()
            if name.startswith(begin)
            and "." not in name.removeprefix(begin)
            and next(each.parameters(), None) is not None
        ]


def _class_of(module: nn.Module) -> str:
    return blocks.plain_class(module).__name__.lower()


def _core_attention(parts: _Parts) -> dict[str, Rules]:
    attentions = [name for name in parts.attentions() if parts.projections(name)]
    kept = {name: _KEPT for each in attentions for name in parts.projections(each)}
    return dict.fromkeys(attentions, _ALL_AGAIN) | kept


def _up_projections(parts: _Parts) -> dict[str, Rules]:
    latent = [name for name in parts.attentions() if f"{name}.kv_b_proj" in parts.named]
    ups = [f"{name}.{up}" for name in latent for up in ("q_b_proj", "kv_b_proj")]
    return dict.fromkeys(latent, _POSITIONS) | {name: _DISCARDED for name in ups if name in parts.named}


def _activations(parts: _Parts) -> dict[str, Rules]:
    return {name: _ACTIVATIONS for each in parts.experts for name in _called(parts, f"{each}.experts")}


def _called(parts: _Parts, experts: str) -> Iterator[str]:
    """Yield what forward calls of the experts: themselves, or what a container of them holds."""
    if not isinstance(parts.named[experts], blocks.CONTAINERS):
        yield experts
        return
    yield from (f"{experts}.{name}" for name, _ in parts.named[experts].named_children())


def _joined(known: Rules, added: Rules) -> Rules:
    """Return the rules of two labels for one module, those of single operators first."""
    both = (*added, *known)
    single = tuple(each for each in both if each[0] != EVERY_OPERATOR)
    return (*single, *tuple(each for each in both if each[0] == EVERY_OPERATOR)[:1])


_LABELS: Mapping[str, Callable[[_Parts], dict[str, Rules]]] = MappingProxyType(
    {
        "core_attn": _core_attention,
        "mla_up_proj": _up_projections,
        "layernorm": lambda parts: {
            name: _DISCARDED for name, each in parts.children.items() if "norm" in _class_of(each)
        },
        "mlp": lambda parts: dict.fromkeys(parts.mlps(), _ALL_AGAIN),
        "moe": lambda parts: dict.fromkeys(parts.experts, _ALL_AGAIN),
        "moe_act": _activations,
        "shared_experts": lambda parts: {
            f"{name}.{each}": _ALL_AGAIN
            for name in parts.experts
            for each in ("shared_experts", "shared_expert")
            if f"{name}.{each}" in parts.named
        },
    }
)
"""The modules that a label means in a block, with what becomes of what they make."""
