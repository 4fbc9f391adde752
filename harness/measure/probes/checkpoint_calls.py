"""Calls of torch's `checkpoint` by whoever makes them: watched, or made with other arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from strategies.estimate.anatomy import CONSTANTS
from strategies.estimate.patched import replaced
from strategies.estimate.tensors import tensors_held_by

_OPTIONS = frozenset(
    {"use_reentrant", "preserve_rng_state", "early_stop", "context_fn", "determinism_check", "debug"}
)
_OF_NON_REENTRANT = _OPTIONS - {"use_reentrant", "preserve_rng_state"}
_ENTRY = "__dynamo_disable"
"""Where torch's own wrapper of `checkpoint` looks for the function to call, each time that it is called.
People hold the wrapper, by many names; what it looks up reaches them all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCall:
    """One call.

    Fields:
        inputs: its positional arguments.
        keywords: its keyword arguments, and options of the region.
    """

    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @property
    def is_reentrant(self) -> bool:
        """True if the older implementation takes it, which is torch's default still."""
        return self.keywords.get("use_reentrant") is not False

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the function."""
        return (*self.inputs, *(each for name, each in self.keywords.items() if name not in _OPTIONS))

    def given(self, **options: Any) -> CheckpointCall:
        """Return the call with other options."""
        return replace(self, keywords={**self.keywords, **options})


Change: TypeAlias = Callable[[CheckpointCall], CheckpointCall | None]
"""Returns the call to make instead; `None` where the change does not apply to it."""


@dataclass(kw_only=True, slots=True)
class Intervention:
    """A change of all calls within a scope.

    Fields:
        count: calls that it was done to. They are not kept: that would be a leak.
    """

    change: Change
    count: int = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the change within the scope."""
        inner: Any = getattr(checkpoint, "__wrapped__", None)
        before = getattr(inner, _ENTRY, None)
        call_torch = inner if before is None else before

        def entry(function: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
            call = CheckpointCall(function=function, inputs=inputs, keywords=keywords)
            changed = self.change(call)
            self.count += changed is not None
            made = changed or call
            return call_torch(made.function, *made.inputs, **made.keywords)

        with nullcontext() if inner is None else replaced(inner, _ENTRY, entry):
            yield


def preserving(call: CheckpointCall) -> CheckpointCall | None:
    """Let the recomputation draw the random numbers of forward."""
    is_off = call.keywords.get("preserve_rng_state", True) is False
    return call.given(preserve_rng_state=True) if is_off else None


def not_reentrant(call: CheckpointCall) -> CheckpointCall | None:
    """Take the newer implementation."""
    return call.given(use_reentrant=False) if call.is_reentrant else None


def reentrant(call: CheckpointCall) -> CheckpointCall | None:
    """Take the older implementation, which has no options and no keywords."""
    if call.is_reentrant or not set(call.keywords) <= _OPTIONS or "context_fn" in call.keywords:
        return None
    kept = {name: value for name, value in call.keywords.items() if name not in _OF_NON_REENTRANT}
    return replace(call, keywords={**kept, "use_reentrant": True})


def to_the_end(call: CheckpointCall) -> CheckpointCall | None:
    """Run recomputations to their end."""
    stops = not call.is_reentrant and call.keywords.get("early_stop", True)
    return call.given(early_stop=False) if stops else None


def saving(operator: Any, call: CheckpointCall) -> CheckpointCall | None:
    """Keep what an operator gives, and compute nothing of it again."""
    if call.is_reentrant or "context_fn" in call.keywords:
        return None
    return call.given(context_fn=partial(create_selective_checkpoint_contexts, [operator]))


def with_save_list(call: CheckpointCall) -> CheckpointCall | None:
    """Leave the call as it is, and count it where its region keeps what some operators give."""
    contexts = call.keywords.get("context_fn", noop_context_fn)
    rewinds = noop_context_fn in getattr(contexts, "args", ())
    return None if contexts is noop_context_fn or rewinds else call


def operator_called(name: str) -> Any:
    """Return the operator `aten.topk.default`; `None` where torch has none of the name."""
    found: Any = torch.ops
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            return None
    return found if isinstance(found, torch._ops.OpOverload) else None  # noqa: SLF001 (no public name)


def copying(call: CheckpointCall) -> CheckpointCall | None:
    """Let the function work on a copy of what it is given, in forward and recomputation."""
    if not any(_can_change(each) for each in call.arguments):
        return None
    function = call.function

    def on_copies(*inputs: Any, **keywords: Any) -> Any:
        given = (inputs, keywords)
        known: dict[int, Any] = {id(each): each.clone() for each in tensors_held_by(given)}
        kept = {id(each): each for each in _modules(given)}
        copied_inputs, copied_keywords = copy.deepcopy(given, {**kept, **known})
        return function(*copied_inputs, **copied_keywords)

    return replace(call, function=on_copies)


def is_backward() -> bool:
    """Say whether autograd runs, so that a call is of a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)  # type: ignore[attr-defined]  # noqa: SLF001 (no public name)


def _can_change(value: Any) -> bool:
    """Say whether what is called may change a value: no constant, module or function."""
    return not isinstance(value, (*CONSTANTS, nn.Module)) and not callable(value)


def _modules(given: Any) -> Iterator[nn.Module]:
    inputs, keywords = given
    yield from (each for each in (*inputs, *keywords.values()) if isinstance(each, nn.Module))
