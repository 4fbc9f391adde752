"""Modules that a forward checkpoints twice: by the model's own switch, and by the variant around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from harness.measure.probes.checkpoint_calls import CheckpointCall, Intervention, is_backward
from harness.trial.checkpoint_errors import modules_in

_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class DoubledRegions:
    """Notes regions that lie directly in another one of the same module.

    Fields:
        modules: modules of the plain model by FQN.
    """

    modules: Mapping[str, nn.Module]
    _open: list[frozenset[int]] = field(default_factory=list)
    _doubled: dict[str, None] = field(default_factory=dict)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what calls of torch's checkpoint do within the scope."""
        with Intervention(change=self._noting).active():
            yield

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the sentence on what is checkpointed twice, if anything is."""
        names = [repr(name) for name in self._doubled]
        if not names:
            return ()
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        shown = ", ".join(names[:_SHOWN]) + more
        return (f"{shown}: checkpointed twice, one region directly in another; leave one of the two out",)

    def _noting(self, call: CheckpointCall) -> CheckpointCall | None:
        """Return the call of a function that notes which regions are open while it runs."""
        if is_backward():
            return None
        parameters = _parameters(next(modules_in(call.function), None))
        if parameters and parameters in self._open[-1:]:
            self._doubled.update(dict.fromkeys(self._names(parameters)))
        inner = call.function

        def function(*inputs: Any, **keywords: Any) -> Any:
            if is_backward():
                return inner(*inputs, **keywords)
            self._open.append(parameters)
            try:
                return inner(*inputs, **keywords)
            finally:
                self._open.pop()

        return replace(call, function=function)

    def _names(self, parameters: frozenset[int]) -> list[str]:
        """Return the plain model's name of the module that has these parameters; the outermost of several."""
        return [name for name, module in self.modules.items() if _parameters(module) == parameters][:1]


def _parameters(module: nn.Module | None) -> frozenset[int]:
    return frozenset() if module is None else frozenset(map(id, module.parameters()))
