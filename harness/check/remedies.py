"""Changes that may make a variant neutral; each is tried before it is printed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness.check.workshop import Workshop, blocks_of
from harness.measure.probes.checkpoint_calls import (
    Change,
    Intervention,
    copying,
    not_reentrant,
    operator_called,
    preserving,
    reentrant,
    saving,
    to_the_end,
)
from strategies import Strategy, StrategyError
from strategies.ac.full import Full
from strategies.ac.nested import Nested
from strategies.ac.selective_op import SelectiveOp


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One change of a check.

    Fields:
        intervention: changes calls of torch's checkpoint; `None` for a change that needs none.
    """

    words: str
    workshop: Workshop
    intervention: Intervention | None = None

    @property
    def has_applied(self) -> bool:
        """True if it has changed anything, which is known when it was tried."""
        return self.intervention is None or self.intervention.count > 0


NOT_REENTRANT = "use_reentrant=False"
IN_ITS_PLACE = "in its place"
"""Words of remedies that call the same modules in another way."""

_OF_CALLS: dict[str, Change] = {
    "preserve_rng_state=True": preserving,
    NOT_REENTRANT: not_reentrant,
    "early_stop=False": to_the_end,
}
"""Options of torch's checkpoint, by the words that set them, and what sets them in a call of it."""

_OF_FIELDS: dict[str, tuple[str, bool]] = {
    "preserve_rng_state=True": ("preserve_rng_state", True),
    NOT_REENTRANT: ("use_reentrant", False),
    "early_stop=False": ("early_stop", False),
    "rewind=True": ("rewind", True),
}
"""The same of our strategies: fields and the values that they take."""

_ONCE = "already unpacked once"
"""What torch says where backward asks for a saved tensor twice, which a reentrant region allows."""


def remedies_of(workshop: Workshop, *, said: str, operator: str) -> Iterator[Remedy]:
    """Yield what may help, the smallest changes first.

    Args:
        workshop: makes the models of the check that failed.
        said: the error of the variant, or another value than the expected one.
        operator: the first whose recomputed value is another one, `aten.topk.default`; empty for none.
    """
    if workshop.precision.autocast is not None:
        precision = dataclasses.replace(workshop.precision, caches=False)
        yield Remedy(
            words="torch.autocast(…, cache_enabled=False)",
            workshop=dataclasses.replace(workshop, precision=precision),
        )
    yield from _options(workshop)
    if _ONCE in said:
        yield from _reentrant(workshop)
    yield Remedy(
        words="a copy of the arguments inside of the region",
        workshop=workshop,
        intervention=Intervention(change=copying),
    )
    yield from _other_strategies(workshop)
    if operator:
        yield from _saving(workshop, operator)


def train_mode(workshop: Workshop) -> Remedy:
    """Return the check of a model that is trained in the mode for it."""
    make = workshop.make
    return Remedy(words="make().train()", workshop=dataclasses.replace(workshop, make=lambda: make().train()))


def _options(workshop: Workshop) -> Iterator[Remedy]:
    """Yield options of the variant itself: fields of our strategies, or arguments of torch's checkpoint."""
    variant = workshop.variant
    if not isinstance(variant, Strategy):
        for words, change in _OF_CALLS.items():
            yield Remedy(words=words, workshop=workshop, intervention=Intervention(change=change))
        return
    for words, (name, value) in _OF_FIELDS.items():
        if getattr(variant, name, value) is not value:
            yield from _replaced(workshop, words, partial(_with, variant, name, value=value))


def _with(variant: Any, name: str, *, value: bool) -> Strategy:
    changed: Strategy = dataclasses.replace(variant, **{name: value})
    return changed


def _saving(workshop: Workshop, operator: str) -> Iterator[Remedy]:
    variant = workshop.variant
    if not isinstance(variant, Strategy):
        overload = operator_called(operator)
        if overload is not None:
            words = f"context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.{operator}])"
            change = Intervention(change=partial(saving, overload))
            yield Remedy(words=words, workshop=workshop, intervention=change)
    elif isinstance(variant, SelectiveOp) and not isinstance(variant.save_ops, str):
        listed = (*variant.save_ops, operator)
        yield from _replaced(
            workshop, f"save_ops={list(listed)}", partial(dataclasses.replace, variant, save_ops=listed)
        )
    elif isinstance(variant, Full):
        arguments = {field.name: getattr(variant, field.name) for field in dataclasses.fields(variant)}
        yield from _replaced(
            workshop,
            f"{SelectiveOp.__module__}.SelectiveOp(…, save_ops=[{operator!r}]) {IN_ITS_PLACE}",
            partial(SelectiveOp, **arguments, save_ops=(operator,)),
        )


def _reentrant(workshop: Workshop) -> Iterator[Remedy]:
    variant, words = workshop.variant, "use_reentrant=True"
    if not isinstance(variant, Strategy):
        yield Remedy(words=words, workshop=workshop, intervention=Intervention(change=reentrant))
    elif hasattr(variant, "use_reentrant"):
        yield from _replaced(workshop, words, partial(_with, variant, "use_reentrant", value=True))


def _other_strategies(workshop: Workshop) -> Iterator[Remedy]:
    """Yield strategies of ours in the place of the variant, on the same blocks."""
    layers_fqn = _layers_fqn(workshop)
    if layers_fqn is None:
        return
    others: tuple[tuple[Any, dict[str, Any]], ...] = ((Full, {}), (Full, {"rewind": True}), (Nested, {}))
    for strategy, options in others:
        made = f"{strategy.__module__}.{strategy.__name__}"
        arguments = ", ".join(
            f"{name}={value!r}" for name, value in {"layers_fqn": layers_fqn, **options}.items()
        )
        yield from _replaced(
            workshop,
            f"{made}({arguments}) {IN_ITS_PLACE}",
            partial(strategy, layers_fqn=layers_fqn, **options),
        )


def _replaced(workshop: Workshop, words: str, make: Callable[[], Strategy]) -> Iterator[Remedy]:
    """Yield the check of another strategy, unless that is refused or the same."""
    try:
        variant = make()
    except StrategyError:
        return
    if variant != workshop.variant:
        yield Remedy(words=words, workshop=dataclasses.replace(workshop, variant=variant))


def _layers_fqn(workshop: Workshop) -> str | None:
    """Return the container of blocks: the variant's own, or the first of the model; `None` without one."""
    named = getattr(workshop.variant, "layers_fqn", None)
    if isinstance(workshop.variant, Strategy) and named:
        return str(named)
    plain = workshop.plain()
    blocks = blocks_of(plain) or blocks_of(plain, fewest=1, trained=False)
    holder, _, _ = next(iter(blocks), "").rpartition(".")
    return holder or None
