"""A small transformer to put under the meters, each block a region of the kind asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from harness.measure.trainee import Watcher, forward_and_backward
from harness.measure.work.compiled_graphs import CompiledGraphs
from harness.models.base import Batch

WIDTH, HEADS, VOCABULARY, LAYERS = 32, 2, 64, 2
BATCH_SIZE, LENGTH = 2, 16

Region = Callable[[nn.Module, Tensor], Tensor]

_saving_addmm = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

REGIONS: dict[str, Region] = {
    "none": nn.Module.__call__,
    "full": partial(checkpoint, use_reentrant=False),
    "full to the end": partial(checkpoint, use_reentrant=False, early_stop=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "without RNG state": partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=_saving_addmm),
}


class Block(nn.Module):
    """Attention and feed-forward with dropout, a number given for a tensor, and both ways to a gather."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + functional.dropout(self.out(a.transpose(1, 2).reshape(x.shape)), self.dropout)
        top = x.topk(WIDTH // 2)[0]
        picked = x.index_select(1, torch.arange(length - 1, -1, -1))
        result: Tensor = x + self.down(functional.gelu(self.up(picked * 0.5)))
        return result + functional.pad(top, (0, WIDTH // 2))


class Transformer(nn.Module):
    def __init__(self, region: Region, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.region = region

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.region(layer, x)
        logits: Tensor = self.head(x)
        return logits


class Metered:
    """A trainee around any model with a list of `layers`."""

    compiled: CompiledGraphs | None = None

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self.optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
        layers: Any = getattr(model, "layers", [])
        self.blocks: Mapping[str, nn.Module] = {f"layers.{i}": layer for i, layer in enumerate(layers)}
        self.checkpointed = self.blocks

    def forward(self, batch: Batch) -> tuple[Any, Tensor]:
        outputs = self.model(*batch.inputs)
        if batch.targets is None:
            return outputs, outputs.sum()
        return outputs, functional.cross_entropy(outputs.flatten(0, 1).float(), batch.targets.flatten())

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, batch: Batch, watcher: Watcher) -> None:
        parts = batch.parts()
        for part in parts:
            forward_and_backward(self, part, watcher, microbatches=len(parts))

    def update(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


def transformer(region: str = "none", *, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> Metered:
    """Return a trainee that has taken one step; every call gives the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Transformer(REGIONS[region], dropout)
        if dtype != torch.float32:  # a fake model cannot be converted
            model = model.to(dtype)
    return warmed(Metered(model), tokens())


def tokens() -> Batch:
    """Return the batch of the transformer."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randint(VOCABULARY, (BATCH_SIZE, LENGTH), generator=generator) for _ in range(2))
    return Batch(inputs=(inputs,), targets=targets)


def warmed(trainee: Metered, batch: Batch) -> Metered:
    """Take the step that makes the optimizer's state."""
    trainee.zero_grad()
    _, loss = trainee.forward(batch)
    trainee.backward(loss)
    trainee.update()
    return trainee
