"""Counting how often a step asks Python about an operator, as selective checkpointing does.

It is a dispatch mode around a region, ours or torch's own: in forward and in recomputation Python is asked
about every operator, views too. On a CPU, and where a GPU waits for its host, such calls take longer than
small operators do.

Source: torch/utils/checkpoint.py, `_CachingTorchDispatchMode` and `_CachedTorchDispatchMode`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

from torch.utils import checkpoint

from strategies.estimate.patched import wrapped
from strategies.regions.kept_results import Keeping, Returning

_TORCHS = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)  # noqa: SLF001 (no public way)
_MODES = (*_TORCHS, Keeping, Returning)


class PolicyListener(Protocol):
    """Is told whenever Python is asked about an operator."""

    def asked(self) -> None:
        """Take note of one call."""


@contextmanager
def policies_heard(listeners: Sequence[PolicyListener]) -> Iterator[None]:
    """Tell all of `listeners`, which may come later, of each call of a policy inside the scope."""
    with ExitStack() as heard:
        for mode in _MODES:
            heard.enter_context(wrapped(mode, "__torch_dispatch__", partial(_heard, listeners)))
        yield


def _heard(
    listeners: Sequence[PolicyListener], original: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    for listener in listeners:
        listener.asked()
    return original(*args, **kwargs)
