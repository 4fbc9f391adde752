"""Engines of `bench.stale`: how a program of each kind stands in for a model."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh

from bench.stale_changes import Session
from bench.stale_programs import B, D, Program, S
from strategies.ac.nested import Nested
from strategies.base import PlannedStep
from strategies.chunk import ChunkPlan
from strategies.chunk.planning.chunk_plan import InfeasibleBudget, Planner
from strategies.chunk.running.chunked_forward import chunked_forwards
from strategies.errors import StrategyError
from strategies.shard.base import Sharding
from strategies.shard.cheapest import Cheapest
from strategies.shard.megatron import Megatron
from strategies.shard.model.graph import TensorAxis

RANKS = 2
_PATIENCE_S = 1200
_SLOW = Cheapest(latency_s=0.0, flops_per_s=1e6, bandwidth_bytes_per_s=3e9)
_SPLITS = {"layers.*.up": "column", "layers.*.down": "row"}
_LABELS = {"layers.0.norm": [0], "layers.0.up": [0], "layers.1.down": [1]}
_FRACTIONS = (None, 0.6, 0.4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A program that an engine can run.

    Fields:
        seed: its seed.
        apply: changes the model to run as the engine does, and returns it.
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
        """Return the program of a seed; `None` where the engine refuses it."""
        raise NotImplementedError

    def recorded(self, session: Session) -> int:
        """Return the number of programs that were recorded for a model and are kept; 0 where none are."""
        return sum(len(forward.programs) for forward in chunked_forwards(session.model).values())

    def bound(self, session: Session) -> float:
        """Return how far values may differ, as a share of the largest."""
        dtype = session.model.head.weight.dtype
        is_half = session.autocasts and dtype is torch.float32
        return self.bounds.get(torch.bfloat16 if is_half else dtype, 0.0)

    def outcomes(self, seeds: Iterable[int], examine: Callable[..., Iterator[Any]]) -> list[Any]:
        """Return what `examine` yields for every seed."""
        with _group(1, 0):
            return [outcome for seed in seeds for outcome in examine(self, seed)]


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


class ChunkEngine(Engine):
    """A plan for half of the bytes, forward alone or with backward."""

    name = "chunk"
    bounds: ClassVar = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}

    def ready(self, seed: int) -> Ready | None:
        """As `Engine.ready`."""
        training = seed % 2 == 0
        step = PlannedStep(loss=_loss) if training else None
        fraction = _FRACTIONS[seed % 3]
        try:
            planner = Planner.of(built(seed), _sample(seed), training=training, step=step)
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
        return Ready(seed=seed, apply=plan.apply, mode="grad" if training else "no_grad")


class ShardEngine(Engine):
    """Megatron's plan, or the cheapest on slow ranks, on two ranks; programs without random numbers."""

    name = "shard"
    bounds: ClassVar = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}

    def ready(self, seed: int) -> Ready | None:
        """As `Engine.ready`."""
        model = built(seed)
        if "drops" in model.idioms:
            return None
        strategy: Sharding = Megatron() if seed % 2 else _SLOW
        try:
            plan = strategy.plan(model, _sample(seed), TensorAxis(ranks=RANKS, splits=_SPLITS))
        except StrategyError:
            return None
        assert plan is not None
        mesh = init_device_mesh("cpu", (RANKS,))
        return Ready(seed=seed, apply=lambda model: strategy.realise(model, plan, mesh))

    def outcomes(self, seeds: Iterable[int], examine: Callable[..., Iterator[Any]]) -> list[Any]:
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
            found = [pickle.loads(path.read_bytes()) for path in sorted(Path(folder).glob("*.pickle"))]  # noqa: S301 (our own)
        if len(found) != RANKS or found[0] != found[1]:
            raise RuntimeError("the ranks did not end, or disagree about what became of a program")
        outcomes: list[Any] = found[0]
        return outcomes


ENGINES: dict[str, type[Engine]] = {each.name: each for each in (NestedEngine, ChunkEngine, ShardEngine)}


def built(seed: int) -> Program:
    """Return the program of a seed, of four one in single precision."""
    program = Program(seed).train()
    return program if seed % 4 == 1 else program.double()


def _sample(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = built(seed).head.weight.dtype
    return torch.zeros(B, S, D, dtype=dtype), torch.ones(B, S, D, dtype=dtype)


def _loss(outputs: Any) -> torch.Tensor:
    given: torch.Tensor = outputs["outputs"] if isinstance(outputs, dict) else outputs
    return given.square().mean()


def _rank(rank: int, folder: str, seeds: Sequence[int], examine: Callable[..., Iterator[Any]]) -> None:
    torch.set_num_threads(1)
    with _group(RANKS, rank, folder):
        engine = ShardEngine()
        found = [outcome for seed in seeds for outcome in examine(engine, seed)]
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))


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
