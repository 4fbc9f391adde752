"""Schedules of pipelines on one rank of a fake process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules

from strategies.estimate.patched import replaced

_ASKING = [
    each
    for each in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti)
    if hasattr(each, "_warmup_p2p")
]
"""Schedules whose stages ask all ranks what they hand on: not in torch 2.11, not with fake ranks in 2.15."""


@contextmanager
def fake_pipelines() -> Iterator[None]:
    """Let schedules run on fake tensors inside the scope, and hold what they send as long as gloo does."""
    with ExitStack() as scope:
        for each in _ASKING:
            scope.enter_context(replaced(each, "_warmup_p2p", _given_shapes))
        started = partial(_started, schedules._batch_p2p)  # noqa: SLF001 (no public place)
        scope.enter_context(replaced(schedules, "_batch_p2p", started))
        yield


class _Sent:
    """Tensors on their way to another rank, which gloo holds as long as the schedule keeps the work."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> None:
        """Do nothing: they have arrived."""


def _given_shapes(_schedule: Any, stages: Sequence[Any], *_: Any, **__: Any) -> None:
    """Say of the stages that their shapes are given; torch asks all ranks, and reads their answer."""
    for stage in stages:
        stage._inference_mode = schedules.InferenceMode.STATIC  # type: ignore[attr-defined]  # noqa: SLF001 (torch sets it so)


def _started(
    original: Callable[..., list[Any]], operations: Sequence[Any], *args: Any, **options: Any
) -> list[Any]:
    """Start sends and receives, with one more to wait for, which holds what is sent."""
    tensors = [each.tensor for each in operations if each.op is dist.isend]
    works = original(operations, *args, **options)
    return [*works, _Sent(tensors)] if tensors else works
