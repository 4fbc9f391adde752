"""Routers whose recomputation sends tokens of one rank to other experts, in three designs of a dispatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.experiment.experiment import Experiment
from harness.measure.routing import RoutingLog
from harness.measure.trainee import Watcher
from harness.models.moe import MoESpec
from harness.models.parts.feed_forward import RoutedExperts
from harness.records.measured import Routing
from harness.trial.assemble import assemble
from harness.trial.batches import batches
from harness.trial.build import Build
from tests.parity import cases


class Flipping(nn.Module):
    """Scores that send two tokens of each recomputation to other experts, on one rank of those that share."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.out_features = linear.out_features

    def forward(self, x_TD: Tensor) -> Tensor:
        signs = torch.ones(len(x_TD), 1)
        if torch._C._current_graph_task_id() != -1 and dist.get_rank() % 2:
            signs[3:5] = -1
        scores_TE: Tensor = self.linear(x_TD) * signs
        return scores_TE


def flipped(rank: int, case: Experiment, is_kept: bool) -> tuple[Routing, ...]:
    """Return what is noted of a step whose second block routes otherwise when it is recomputed."""
    batch = batches(case, torch.device("cpu"), case.mesh.data_rank(rank))(0)
    build = Build()
    sizes = _sizes_kept(build.routing) if is_kept else nullcontext()
    with mock.patch.object(MoESpec, "build", _with_flips(MoESpec.build)), sizes:
        trainee = assemble(
            case, torch.device("cpu"), cases.devices_of(case.mesh), batch.parts()[0], build=build
        )
        trainee.step(batch, Watcher())
    return build.routing.routings()


def _with_flips(build: Callable[[MoESpec], nn.Module]) -> Callable[[MoESpec], nn.Module]:
    def flipping(spec: MoESpec) -> nn.Module:
        model = build(spec)
        layer = model.get_submodule("layers.1.feed_forward")
        assert isinstance(layer, RoutedExperts)
        layer.router = Flipping(layer.router)  # type: ignore[assignment]
        return model

    return flipping


@contextmanager
def _sizes_kept(log: RoutingLog) -> Iterator[None]:
    """Let a recomputation take the sizes of forward, which ranks do not tell each other again."""
    told = dist.all_to_all_single
    kept: dict[int, list[Tensor]] = defaultdict(list)

    def from_forward(taken: Tensor, given: Tensor, **options: Any) -> None:
        of_forward = kept[log.microbatch]
        if torch._C._current_graph_task_id() == -1:
            told(taken, given, **options)
            of_forward.append(taken.clone())
        else:  # blocks come back in the other order
            taken.copy_(of_forward.pop())

    with mock.patch.object(dist, "all_to_all_single", from_forward):
        yield
