"""What peers are, and the step that all train: few blocks, their data, what the meters say of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.trials import experiments
from harness.experiment.experiment import Experiment
from harness.measure.step import instrument
from harness.models.base import Batch
from harness.trial.assemble import Assembled, assemble
from harness.trial.batches import batches
from harness.trial.steps import UNMEASURED_STEPS, warm_up

SIZES = ("batch_size=8", "mesh.device=cpu", "ac=none")
_EIGHT, _TWELVE = "model.n_layers=8", "model.n_layers=12"
_OF_TRANSFORMERS = (
    "model=hf",
    "model.config_class=LlamaConfig",
    "model.layers_fqn=model.layers",
    "model.overrides={intermediate_size: 384}",
)
_OF_CLASS = ("model.width=null", "model.n_heads=null", "model.n_layers=null")
_STAGES = "model.overrides={hidden_sizes: [16, 16, 32, 64], depths: [1, 1, 2, 4], groups_width: 8}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the meters say of a step.

    Fields:
        peak_bytes: highest total of live storages, parameters and optimizer included.
        flops: of forward and backward.
    """

    peak_bytes: int
    flops: int


@dataclass(frozen=True)
class Workload:
    """A training step on one CPU.

    Args:
        name: of the workload.
        overrides: of the experiment.
        has_explicit_softmax: attention is matmuls and a softmax that saves S x S scores, not one operator.
    """

    name: str
    overrides: tuple[str, ...]
    has_explicit_softmax: bool = False

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Let attention compute as the workload asks."""
        if not self.has_explicit_softmax:
            yield
            return
        with sdpa_kernel(SDPBackend.MATH):
            yield

    def experiment(self, *overrides: str) -> Experiment:
        """Return the experiment, with more overrides."""
        (made,) = experiments([[*self.overrides, *overrides]])
        return made

    @cached_property
    def plain(self) -> Experiment:
        """The experiment without activation checkpointing."""
        return self.experiment()

    @cached_property
    def batch(self) -> Callable[[int], Batch]:
        """Returns the batch of a step."""
        return batches(self.plain, torch.device("cpu"), dp_rank=0)

    def trainee(
        self, experiment: Experiment | None = None, change: Callable[[Assembled], None] | None = None
    ) -> Assembled:
        """Return a model after the steps that nobody measures.

        Args:
            experiment: describes it; `None`: the plain one.
            change: what to do to it before its first step.
        """
        made = assemble(experiment or self.plain, torch.device("cpu"), None, self.batch(0))
        if change is not None:
            change(made)
        warm_up(made, self.batch)
        return made

    def measured(self, trainee: Assembled) -> Measured:
        """Return what the meters say of the next step of `trainee`."""
        report = instrument(trainee, self.batch(UNMEASURED_STEPS))
        return Measured(peak_bytes=report.memory.peak_bytes, flops=report.work.step_flops)

    def gradients(self, trainee: Assembled) -> list[Tensor]:
        """Return the gradients of the next step of `trainee`; it is not updated."""
        trainee.zero_grad()
        trainee.backward(trainee.forward(self.batch(UNMEASURED_STEPS))[1])
        found = [each.grad for each in trainee.model.parameters() if each.grad is not None]
        trainee.zero_grad()
        return found


class CannotRunError(Exception):
    """A peer does not run here; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One setting of one peer.

    Fields:
        name: of the peer.
        setting: its options, as people write them; empty where it has none.
        change: puts it on a plain trainee, in place.
        overrides: of the experiment, for peers that stand in the compiler.
    """

    name: str
    setting: str = ""
    change: Callable[[Workload, Assembled], None] = lambda _workload, _trainee: None
    overrides: tuple[str, ...] = ()


WORKLOADS: dict[str, Workload] = {
    each.name: each
    for each in (
        Workload("gpt", ("model=gpt_nano", _EIGHT, *SIZES)),
        Workload("llama", ("model=llama_nano", _EIGHT, *SIZES)),
        Workload("llama_softmax", ("model=llama_nano", _EIGHT, *SIZES), has_explicit_softmax=True),
        Workload("vit", ("model=vit_nano", _EIGHT, *SIZES)),
        Workload("moe", ("model=moe_nano", _EIGHT, *SIZES)),
        Workload("gpt_12", ("model=gpt_nano", _TWELVE, *SIZES)),
        Workload("llama_12", ("model=llama_nano", _TWELVE, *SIZES)),
        Workload("hf_llama", (*_OF_TRANSFORMERS, _EIGHT, *SIZES)),
    )
}
"""Workloads by name."""

_SMALL = ("model.n_layers=4", "model.width=64", "batch_size=4", "mesh.device=cpu", "ac=none")
KNOWN: Mapping[str, Workload] = WORKLOADS | {
    name: Workload(name, ("model=hf", f"model.config_class={config}Config", *_SMALL, *changes))
    for name, config, *changes in (
        ("convnext2", "ConvNextV2", *_OF_CLASS, _STAGES.replace(", groups_width: 8", "")),
        ("fnet", "FNet", "model.n_heads=null", "model.overrides={intermediate_size: 256}"),
        (
            "griffin",
            "RecurrentGemma",
            "model.overrides={intermediate_size: 192, lru_width: 64, head_dim: 16}",
        ),
        ("poolformer", "PoolFormer", *_OF_CLASS, "model.overrides={hidden_sizes: [16, 32, 64, 128]}"),
        ("regnet", "RegNet", *_OF_CLASS, _STAGES),
    )
}
"""The same, and networks of `transformers` that nothing was tuned on."""


def blocks_of(trainee: Assembled) -> dict[str, nn.Module]:
    """Return the blocks of a trainee as its model has them now, by FQN."""
    return {fqn: trainee.model.get_submodule(fqn) for fqn in trainee.blocks}
