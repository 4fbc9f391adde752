"""Counting how often a step asks Python about an operator, as selective checkpointing does.

It is a dispatch mode around a region, ours or torch's own: in forward and in recomputation Python is asked
about every operator, views too. On a CPU, and where a GPU waits for its host, such calls take longer than
small operators do.

Source: torch/utils/checkpoint.py, `_CachingTorchDispatchMode` and `_CachedTorchDispatchMode`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.utils import checkpoint

from strategies.estimate.patched import wrapped
from strategies.regions.kept_results import Keeping, Returning
from strategies.step.position import Position

_TORCHS = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)  # noqa: SLF001 (no public way)
_MODES = (*_TORCHS, Keeping, Returning)


@contextmanager
def policies_counted(calls: Counter[str], position: Position) -> Iterator[None]:
    """Count calls of policies inside the scope, by the phase of the step that `position` tells."""
    with ExitStack() as counted:
        for mode in _MODES:
            counted.enter_context(wrapped(mode, "__torch_dispatch__", partial(_counted, calls, position)))
        yield


def _counted(
    calls: Counter[str], position: Position, original: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    calls[position.phase] += 1
    return original(*args, **kwargs)
