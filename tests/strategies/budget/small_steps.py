"""Small steps: a model of blocks that trains on the CPU, and graphs that are written down."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.budget.planning.planner import Planner
from strategies.estimate.tensors import plain_tensors
from strategies.step.ledger import is_on_device, is_on_host
from strategies.step.live_storages import LiveStorages
from strategies.step.position import Position
from strategies.step.step_graph import OUTSIDE, StepGraph, StepOperator
from strategies.step.step_recorder import OperatorWork

WIDTH = 16
NO_WRITES: Mapping[int, int] = {}

P = TypeVar("P", bound=Planner)


class GatedBlock(nn.Module):
    """Attention with explicit softmax and a gated MLP, whose values have several readers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        scores = self.query(y) @ self.key(y).transpose(-1, -2) / WIDTH**0.5
        x = x + self.dropout(scores.softmax(-1) @ self.value(y))
        y = self.norms[1](x)
        outputs: Tensor = x + self.dropout(self.down(functional.silu(self.gate(y)) * self.up(y)))
        return outputs


class WithBlocks(nn.Module):
    """A model with blocks under `layers`."""

    layers: nn.ModuleList

    @property
    def blocks(self) -> dict[str, nn.Module]:
        return {f"layers.{index}": block for index, block in enumerate(self.layers)}


class Gated(WithBlocks):
    """Blocks under `layers`, and a head."""

    def __init__(self, dropout: float = 0.0, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(GatedBlock(dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        outputs: Tensor = self.head(x)
        return outputs


class NormedBlock(nn.Module):
    """Two linears with a batch norm between them."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.up(x).transpose(1, 2)).relu_()
        outputs: Tensor = x + self.down(y.transpose(1, 2))
        return outputs


def normed(norm: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(WIDTH)) -> Gated:
    """Return a model whose blocks have norms."""
    model = Gated(blocks=4)
    model.layers = nn.ModuleList(NormedBlock(norm()) for _ in range(4))
    return model


class AttendingBlock(nn.Module):
    """Attention by hand, and an activation that is read three times."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        sizes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
        self.qkv, self.out, self.up, self.down = (nn.Linear(*each) for each in sizes)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)
        h = self.up(self.norms[1](x))
        outputs: Tensor = x + self.down(h.tanh() * h.sigmoid() + h.relu())
        return outputs


class Attending(WithBlocks):
    """Blocks with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AttendingBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class DiscardingBlock(nn.Module):
    """Computes what nobody goes on with: autograd saves more for it than Python holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        discarded = (x @ y.transpose(-1, -2)).softmax(-1) @ x
        discarded = functional.dropout(discarded.sigmoid(), 0.1)
        return x + y.tanh()


class Discarding(WithBlocks):
    """Blocks under `layers`, whose forwards end with what they discard."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(DiscardingBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        for block in self.layers:
            x = block(x)
        return x


def step_of(model: nn.Module, *inputs: Tensor) -> Callable[[], None]:
    """Return what runs forward and backward of `model`, from no gradients on."""

    def run() -> None:
        model.zero_grad()
        model(*inputs).square().mean().backward()

    return run


def remembering(planner: P) -> P:
    """Return a planner that makes the plan of each budget once."""
    vars(planner)["plan"] = cache(planner.plan)
    return planner


def measured_peak_bytes(
    model: nn.Module,
    inputs: Sequence[Tensor],
    run: Callable[[], None],
    *,
    on_host: bool = False,
    accumulates: bool = False,
) -> int:
    """Return the highest total of what lies on the device in a step, or of what is offloaded.

    Args:
        accumulates: leave the gradients that stand.
    """
    if not accumulates:
        model.zero_grad()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    live = LiveStorages(Position(), device="cpu")
    with live:
        live.add_standing(plain_tensors([*model.parameters(), *model.buffers(), *inputs, *gradients]))
        run()
    return live.ledger.peak(is_on_host if on_host else is_on_device).nbytes


def written_step(
    *rows: tuple[Sequence[int], Sequence[int], int],
    nbytes: Sequence[int],
    writes: Mapping[int, int] = NO_WRITES,
    backward: int | None = None,
) -> StepGraph:
    """Return the graph of a step without blocks.

    Args:
        rows: what each operator reads and makes, and its FLOPs.
        nbytes: bytes of each storage.
        writes: storage that an operator writes to in place, by number of the row.
        backward: first row of backward; without one, rows without FLOPs belong to it.
    """
    operators = [
        StepOperator(
            work=OperatorWork(phase="", name=f"aten.row{index}.default", flops=flops),
            call=OUTSIDE,
            ordinal=OUTSIDE,
            is_forward=flops > 0 if backward is None else index < backward,
            start=index,
            end=index + 1,
            reads=frozenset(reads) | _written(writes, index),
            writes=_written(writes, index),
            makes={storage: position for position, storage in enumerate(makes)},
            seconds=0.0,
            private_bytes=0,
            random_states=0,
            is_repeatable=True,
            node="",
        )
        for index, (reads, makes, flops) in enumerate(rows)
    ]
    return StepGraph(
        operators=operators,
        calls=[],
        nbytes=dict(enumerate(nbytes)),
        deaths={},
        held_bytes=np.zeros(1, dtype=np.int64),
        gradients=frozenset(),
        fixed_bytes=0,
        device="cpu",
    )


def _written(writes: Mapping[int, int], row: int) -> frozenset[int]:
    return frozenset({writes[row]} if row in writes else ())


class Remembering:
    """Keeps JSON values for one test, as text."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def read(self, name: str) -> Any:
        return json.loads(self.texts.get(name, "null"))

    def write(self, name: str, found: Any) -> None:
        self.texts[name] = json.dumps(found)
