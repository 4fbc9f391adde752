"""Engines of `tests.matrix.stale`: how each of them stands in for a model."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

from strategies.ac.budget import Budget
from strategies.ac.nested import Nested
from strategies.base import InfeasibleBudget, PlannedStep, StrategyError
from strategies.chunk import ChunkPlan
from strategies.chunk.planning.chunk_plan import ChunkPlanner
from strategies.chunk.running.chunked_forward import ChunkProgram, chunked_forwards
from strategies.shard.base import Sharding
from strategies.shard.candidate import OneCandidate
from strategies.shard.cheapest import Cheapest
from strategies.shard.megatron import Megatron
from strategies.shard.model.graph import TensorAxis
from strategies.shard.model.shard_plan import ShardPlan
from strategies.tracing.guard import Programs
from tests.matrix.stale.changes import Session, mesh_of
from tests.matrix.stale.programs import B, D, Program, S

RANKS = 2
_PATIENCE_S = 1200
_SPLITS = {"layers.*.up": "column", "layers.*.down": "row"}
_SHARDINGS: tuple[tuple[Sharding, dict[str, Any]], ...] = (
    (Cheapest(latency_s=0.0, flops_per_s=1e6, bandwidth_bytes_per_s=3e9), _SPLITS),  # slow ranks divide work
    (Megatron(), _SPLITS),
    (OneCandidate(candidate="RS0 = RR x RS0"), {}),
    (OneCandidate(candidate="RR = RS0 x S0R", modules="*.down"), {}),
)
_LABELS = {"layers.0.norm": [0], "layers.0.up": [0], "layers.1.down": [1]}
_FRACTIONS = (None, 0.6, 0.4)
_IN_PARTS = 3  # of four seeds, the one whose plan has a loop over the batch, where a proof allows it
_BUDGETS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

Examine: TypeAlias = Callable[..., Iterator[Any]]
"""Yields what becomes of the programs of an engine and a seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A model that an engine can run.

    Fields:
        seed: its seed.
        apply: changes a model like it to run as the engine does, and returns it.
        mode: grad mode of the first call.
    """

    seed: int
    apply: Callable[[nn.Module], nn.Module]
    mode: str = "grad"

    def sessions(self) -> tuple[Session, Session]:
        """Return the plain model and the engine's, alike and new."""
        plain, planned = built(self.seed), built(self.seed)
        applied = self.apply(planned)
        return (
            Session(model=plain, call=plain, mode=self.mode),
            Session(model=planned, call=applied, mode=self.mode),
        )


class Engine:
    """What stands in for models; `bounds` are shares of the largest value by dtype, 0 for bitwise."""

    name: ClassVar[str]
    bounds: ClassVar[dict[torch.dtype, float]] = {}

    def ready(self, seed: int) -> Ready | None:
        """Return the model of a seed; `None` where the engine refuses it."""
        raise NotImplementedError

    def recorded(self, session: Session) -> int:
        """Return the number of programs that were recorded for a model and are kept; 0 where none are."""
        return sum(len(forward.programs) for forward in chunked_forwards(session.model).values())

    def bound(self, session: Session) -> float:
        """Return how far values may differ, as a share of the largest.

        What coarser numbers have left in a buffer stays there, so that the bound never shrinks.
        """
        dtype = session.model.head.weight.dtype
        is_half = session.autocasts and dtype is torch.float32
        session.bound = max(session.bound, self.bounds.get(torch.bfloat16 if is_half else dtype, 0.0))
        return session.bound

    def outcomes(self, seeds: Iterable[int], examine: Examine) -> tuple[list[Any], float]:
        """Return what `examine` yields for every seed, and the CPU time of that in seconds."""
        torch.set_num_threads(1)
        begin = time.process_time()
        found: list[Any] = []
        with _group(1, 0), redirect_stderr(StringIO()), _collecting_seldom():
            for seed in seeds:
                found += examine(self, seed)
                gc.collect()
        return found, time.process_time() - begin


class NestedEngine(Engine):
    """Regions of whole blocks, or of the calls inside one."""

    name = "nested"

    def ready(self, seed: int) -> Ready | None:
        """As `Engine.ready`."""
        strategy = Nested(layers_fqn="layers", levels=[1]) if seed % 2 else Nested(labels=_LABELS)
        try:
            strategy.apply(built(seed), _sample(seed))
        except StrategyError:
            return None
        return Ready(seed=seed, apply=strategy.apply)


class BudgetEngine(Engine):
    """The tightest of some budgets that a plan of the first call keeps."""

    name = "budget"

    def ready(self, seed: int) -> Ready | None:
        """As `Engine.ready`."""
        for fraction in _BUDGETS:
            strategy = Budget(layers_fqn="layers", fraction=fraction)
            try:
                _loss(strategy.apply(built(seed))(*_sample(seed))).backward()  # type: ignore[no-untyped-call]
            except StrategyError:
                continue
            return Ready(seed=seed, apply=strategy.apply)
        return None


class ChunkEngine(Engine):
    """A plan for half of the bytes, with backward or forward alone; half of the latter in parts."""

    name = "chunk"
    bounds: ClassVar = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}

    def ready(self, seed: int) -> Ready | None:
        """As `Engine.ready`."""
        training = seed % 2 == 0
        step = PlannedStep(loss=_loss) if training else None
        fraction = _FRACTIONS[seed % 3]
        try:
            planner = ChunkPlanner.of(built(seed), _sample(seed), training=training, step=step)
            budget = None if fraction is None else int(fraction * planner.unchunked_peak_bytes)
            plan: ChunkPlan = planner.plan(budget)
        except InfeasibleBudget:
            plan = planner.plan(None)
        except StrategyError:
            return None
        if seed % 8:  # what is not planned for gets no loops, which is quicker than a search for some
            eased = {
                fqn: replace(each, share=None, goal_bytes=2**60) for fqn, each in plan.schedulers.items()
            }
            plan = replace(plan, schedulers=eased)
        if seed % 4 == _IN_PARTS:
            plan = replace(plan, batch=1)
        return Ready(seed=seed, apply=_Sharing(plan), mode="grad" if training else "no_grad")


class _Sharing:
    """Applies a plan to models that are alike, which take over the programs of each other.

    That is what blocks that are alike do inside of one model: a program that does not fit is a difference
    all the same, and one that fits is not recorded again for every chain.
    """

    def __init__(self, plan: ChunkPlan) -> None:
        self._plan = plan
        self._shared: dict[str, tuple[Programs[ChunkProgram], Programs[ChunkProgram]]] = {}

    def __call__(self, model: nn.Module) -> nn.Module:
        """Apply the plan."""
        applied = self._plan.apply(model)
        for fqn, forward in chunked_forwards(model).items():
            own = forward.alike, forward.recorded
            forward.alike, forward.recorded = self._shared.setdefault(fqn, own)
        return applied


class ShardEngine(Engine):
    """One of several plans on two ranks, the first that is possible; models without random numbers."""

    name = "shard"
    bounds: ClassVar = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}

    def ready(self, seed: int) -> Ready | None:
        """As `Engine.ready`."""
        model, sample = built(seed), _sample(seed)
        if "drops" in model.idioms:
            return None
        first = seed % len(_SHARDINGS)
        for strategy, splits in (*_SHARDINGS[first:], *_SHARDINGS[:first]):
            try:
                plan = strategy.plan(model, sample, TensorAxis(ranks=RANKS, splits=splits))
            except StrategyError:
                continue
            assert plan is not None
            return Ready(seed=seed, apply=partial(_realised, strategy, plan))
        return None

    def outcomes(self, seeds: Iterable[int], examine: Examine) -> tuple[list[Any], float]:
        """As `Engine.outcomes`; both ranks run all of it, and must agree."""
        context = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory() as folder:
            arguments = [(rank, folder, list(seeds), examine) for rank in range(RANKS)]
            ranks = [context.Process(target=_rank, args=each) for each in arguments]
            for each in ranks:
                each.start()
            for each in ranks:
                each.join(_PATIENCE_S)
                each.kill()
            found = [pickle.loads(path.read_bytes()) for path in sorted(Path(folder).glob("*.pickle"))]
        if len(found) != RANKS:
            raise RuntimeError("the ranks did not end")
        for pair in zip_longest(*(outcomes for outcomes, _ in found)):
            one, other = (sorted(repr(each)) for each in pair)  # torch prints sets, in any order
            if one != other:
                raise RuntimeError(f"the ranks disagree about what became of a program: {pair}")
        return found[0][0], sum(seconds for _, seconds in found)


def _realised(strategy: Sharding, plan: ShardPlan, model: nn.Module) -> nn.Module:
    assert dist.group.WORLD is not None
    return strategy.realise(model, plan, mesh_of(dist.group.WORLD)["tensor"])


ENGINES: dict[str, type[Engine]] = {
    each.name: each for each in (NestedEngine, BudgetEngine, ChunkEngine, ShardEngine)
}


def built(seed: int) -> Program:
    """Return the model of a seed, of four one in single precision."""
    program = Program(seed).train()
    return program if seed % 4 == 1 else program.double()


def _sample(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = built(seed).head.weight.dtype
    return torch.zeros(B, S, D, dtype=dtype), torch.ones(B, S, D, dtype=dtype)


def _loss(outputs: Any) -> torch.Tensor:
    given: torch.Tensor = outputs["outputs"] if isinstance(outputs, dict) else outputs
    return given.square().mean()


def _rank(rank: int, folder: str, seeds: Sequence[int], examine: Examine) -> None:
    with _group(RANKS, rank, folder):
        found = Engine.outcomes(ShardEngine(), seeds, examine)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Leave garbage to who asks: half of the time went to looking for it among all that torch holds."""
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def _group(ranks: int, rank: int, folder: str | None = None) -> Iterator[None]:
    """Run with a process group of gloo, unless there is one."""
    if dist.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as own:
        store = FileStore(str(Path(folder or own, "store")), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        try:
            yield
        finally:
            dist.destroy_process_group()
