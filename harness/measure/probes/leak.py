"""Bytes that live after a step, over several steps: what a model holds must not grow."""

from __future__ import annotations

import gc
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness.measure.gloo.wait import settled_collectives
from harness.measure.memory.locator import Locator
from harness.measure.probes.tried import together
from harness.measure.rng import seeded
from harness.measure.trainee import Trainee
from strategies.estimate.patched import without_collector
from strategies.step.ledger import Kind, Ledger, Life, is_storage
from strategies.step.live_storages import LiveStorages

STEPS = 20
"""Steps of a model that grows."""

_FIRST_STEPS = 4
"""Steps after which a model that has not grown in each of the last three is let go."""

_GROWING = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """The bytes that a model holds after each of several steps.

    Fields:
        live_bytes: bytes of live storages made since the first step began, after each.
        made_by: operator and module that made most of what the last steps have left more than those before.
        is_garbage: what has grown lives in reference cycles until Python collects garbage.
    """

    live_bytes: tuple[int, ...]
    made_by: str = ""
    is_garbage: bool = False

    @property
    def bytes_per_step(self) -> int:
        """Bytes by which each of the last steps has left more than the one before; 0 where one has not."""
        later = self.live_bytes[-_GROWING - 1 :]
        return max(0, min((after - before for before, after in itertools.pairwise(later)), default=0))


def growth(
    trainee: Trainee,
    batch: Callable[[], Any],
    *,
    seed: int,
    device: torch.device,
    dp_rank: int = 0,
    anywhere: Callable[[bool], bool] = bool,
) -> Growth:
    """Return what `trainee` holds after each of up to `STEPS` steps, none of which garbage is collected in.

    Args:
        trainee: a model that nobody else trains.
        batch: returns a new copy of the batch at each call.
        dp_rank: index of the rank's batch among all data-parallel ones.
        anywhere: says whether something was seen on any rank; all take as many steps.

    Raises:
        NoRoomError: a rank is out of memory.
    """
    locator = Locator(trainee.model, {})
    live = LiveStorages(locator, device=device.type)
    found: list[int] = []
    made: deque[Counter[str]] = deque(maxlen=_GROWING + 1)
    gc.collect()
    with without_collector(), settled_collectives(), locator, live:
        for step in range(STEPS):
            with seeded(seed, step=step, dp_rank=dp_rank, device=device):
                together(lambda: _step(trainee, batch(), locator))
            found.append(live.ledger.total(_is_made))
            made.append(_made_by(live.ledger))
            if step + 1 >= _FIRST_STEPS and not anywhere(
                bool(Growth(live_bytes=tuple(found)).bytes_per_step)
            ):
                break
        seen = Growth(live_bytes=tuple(found))
        if not seen.bytes_per_step:
            return seen
        grown = made[-1] - made[0]
        made_by = max(grown, key=grown.__getitem__, default="")
        gc.collect()
        return replace(seen, made_by=made_by, is_garbage=live.ledger.total(_is_made) <= found[0])


def _made_by(ledger: Ledger) -> Counter[str]:
    made: Counter[str] = Counter()
    for life in ledger.lives:
        if _is_made(life):
            made[f"{life.op} in {life.module!r}"] += life.nbytes
    return made


def _step(trainee: Trainee, batch: Any, locator: Locator) -> None:
    """Train by one step of which nothing is left but the state of the optimizer."""
    locator.phase = "forward"
    trainee.zero_grad()
    _, loss = trainee.forward(batch)
    locator.phase = "backward"
    trainee.backward(loss)
    locator.phase = "optimizer"
    trainee.update()
    trainee.zero_grad()


def _is_made(life: Life) -> bool:
    return is_storage(life) and life.kind is not Kind.STANDING
