"""The meter of live storages on fake tensors, as rehearsals use it: bytes are those of real tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

from strategies.estimate.tensors import plain_tensors, plain_tensors_in, tensors_in
from strategies.step.ledger import Kind, is_activation
from strategies.step.live_storages import LiveStorages
from strategies.step.position import Position


def view_of_freed(x: Tensor) -> Tensor:
    made = x.detach().sin()
    made.untyped_storage().resize_(0)  # as FSDP frees weights
    return made.detach().untyped_storage().nbytes() + x.detach().cos().exp()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a result": lambda x: x.sin(),
    "a chain whose middle dies": lambda x: x.sin().cos().exp(),
    "a number that a product saves": lambda x: (x * 2.0).sum(),
    "a number that a sum drops": lambda x: (x + 2.0).sum(),
    "a loss reduced in the memory of its elements": lambda x: functional.mse_loss(x, torch.zeros_like(x)),
    "an operand read in backward": lambda x: (x.sin() * x.cos()).sum(),
    "a view of memory that was freed": view_of_freed,
}


def activation_peak_bytes(function: Callable[[Tensor], Tensor], x: Tensor) -> int:
    live = LiveStorages(Position(), device="cpu")
    with live:
        live.add_standing([x])
        result = function(x)
        if result.requires_grad and not result.dim():
            result.backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None
            live.ledger.mark(live.numbers([x.grad]), Kind.GRADIENT)
        return live.ledger.peak(is_activation).nbytes


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("has_gradient", [False, True])
def test_fake_tensors_peak_as_real_ones(name: str, *, has_gradient: bool) -> None:
    real = activation_peak_bytes(FUNCTIONS[name], torch.ones(4, 8, requires_grad=has_gradient))
    with FakeTensorMode():
        fake = activation_peak_bytes(FUNCTIONS[name], torch.ones(4, 8, requires_grad=has_gradient))
    assert fake == real > 0


def test_data_may_decide_about_the_size_of_what_is_viewed() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()), LiveStorages(Position(), device="cpu"):
        assert torch.ones(8, 4).nonzero().t().shape[0] == 2


def test_what_stands_is_no_activation() -> None:
    x = torch.ones(4, 8)
    live = LiveStorages(Position(), device="cpu")
    with live:
        standing = live.add_standing([x])
        assert live.numbers([x.view(8, 4)]) == standing
    assert live.ledger.peak(is_activation).nbytes == 0


def test_memory_of_another_device_is_host_memory() -> None:
    live = LiveStorages(Position(), device="cuda")
    with live:
        kept = torch.ones(4, 8).sin()
    assert kept.device.type == "cpu"
    assert [life.on_host for life in live.ledger.lives] == [True, True]


@dataclass
class Held:
    tensor: Tensor
    name: str = "held"


def _values() -> dict[str, Any]:
    x = torch.arange(6.0)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    return {
        "a tensor": x,
        "a parameter": nn.Parameter(x),
        "a fake tensor": fake,
        "a buffer": nn.Buffer(x),
        "a sparse tensor": x.to_sparse(),
        "a wrapper": TwoTensor(x, x + 1),
        "operands": ((x, [x + 1, None], 2, "mean"), {"weight": x * 2, "eps": 1e-5}),
        "a named tuple": torch.return_types.max((x, x.long())),
        "sizes": x.size(),
        "a dataclass": [Held(x), Held],
        "a number": 3,
        "nothing": None,
    }


@pytest.mark.parametrize("name", _values())
def test_plain_tensors_of_operands(name: str) -> None:
    value = _values()[name]

    def described(tensors: list[Tensor]) -> list[object]:
        return [(type(each), each.dtype, each.shape, each.untyped_storage()._cdata) for each in tensors]

    if "sparse" in name:  # whose parts are made when they are asked for
        assert [each.tolist() for each in plain_tensors_in(value)] == [
            each.tolist() for each in plain_tensors(tensors_in(value))
        ]
    else:
        assert described(plain_tensors_in(value)) == described(list(plain_tensors(tensors_in(value))))
