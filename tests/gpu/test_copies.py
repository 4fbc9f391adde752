"""How offloading copies on the GPU: into pinned memory, on a stream of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.experiment.mesh import Mesh
from harness.models.base import Batch
from strategies.ac.offload import Offload
from tests.gpu.devices import CUDA
from tests.parity import cases


class Copies(TorchDispatchMode):
    """Notes of every copy between host and device: is the host side pinned, is it off the main stream."""

    def __init__(self) -> None:
        super().__init__()
        self.to_host: list[tuple[bool, bool]] = []
        self.to_device: list[tuple[bool, bool]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].device.type != args[1].device.type:
            host, noted = (
                (args[0], self.to_host) if args[0].device.type == "cpu" else (args[1], self.to_device)
            )
            aside = torch.cuda.current_stream() != torch.cuda.default_stream()
            noted.append((host.is_pinned(), aside))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", [CUDA])
def test_every_copy_is_pinned_and_runs_beside_the_computation(device: str) -> None:
    experiment = cases.experiment(model="gpt", variant="none", mesh=Mesh(device=device))
    with torch.device(device):
        model = experiment.model.build()
    Offload(layers_fqn="layers").apply(model)
    tokens = torch.zeros(2, 8, dtype=torch.int64, device=device)
    batch = Batch(inputs=(tokens,), targets=tokens)
    with Copies() as copies:
        loss = experiment.model.loss(model(*batch.inputs), batch)
        loss.backward()  # type: ignore[no-untyped-call]
    is_apart = device == "cuda"  # on the CPU host and device are one
    expected = {(True, True)} if is_apart else set()
    assert (set(copies.to_host), set(copies.to_device)) == (expected, expected)
