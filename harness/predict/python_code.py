"""Counting the Python code that checkpointing adds to the operators of a step.

Selective checkpointing is a dispatch mode around a region, ours or torch's own: in forward and in
recomputation Python is asked about every operator, views too. The tape of a plan notes operators. A region
runs the code of its block again. On a CPU, and where a GPU waits for its host, all that takes longer than
small operators do.

Source: torch/utils/checkpoint.py, `_CachingTorchDispatchMode` and `_CachedTorchDispatchMode`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

from torch.utils import checkpoint

from harness.measure.step import StepReport
from strategies.budget.eager.block_tape import BlockTape
from strategies.budget.eager.contents import TapedOperator
from strategies.estimate.patched import wrapped
from strategies.regions.kept_results import Keeping, Returning
from strategies.step.position import Position

PythonCode: TypeAlias = "Counter[tuple[str, str]]"
"""How often Python does what, by the phase of the step and the kind of `estimate.machine.PYTHON_S`."""

_TORCHS = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)  # noqa: SLF001 (no public way)
_ENTERED: Mapping[str, Sequence[tuple[Any, str]]] = {
    "asked": [(mode, "__torch_dispatch__") for mode in (*_TORCHS, Keeping, Returning)],
    "taped": [(BlockTape, "note")],
    "from a tape": [(TapedOperator, "run")],
}


@contextmanager
def counted(calls: PythonCode, position: Position) -> Iterator[None]:
    """Count what is asked and noted inside the scope, by the phase of the step that `position` tells."""
    with ExitStack() as entered:
        for kind, methods in _ENTERED.items():
            for owner, name in methods:
                entered.enter_context(wrapped(owner, name, partial(_counted, calls, kind, position)))
        yield


def with_regions(calls: PythonCode, report: StepReport) -> PythonCode:
    """Return what was counted in a step, with the regions that ran again and their operators."""
    found = Counter(calls)
    again = Counter(
        each.work.phase for each in report.operators if each.work.is_recomputed and each.work.dtype
    )
    for phase, count in again.items():
        found[phase, "again"] = count - found.pop((phase, "from a tape"), 0)
    asked_by = report.work.recomputations
    found["backward", "region"] = sum(count for asker, count in asked_by.items() if asker != "forward")
    return +found


def _counted(
    calls: PythonCode,
    kind: str,
    position: Position,
    original: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    calls[position.phase, kind] += 1
    return original(*args, **kwargs)
