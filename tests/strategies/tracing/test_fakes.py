"""Fake tensors have the shapes, strides and bytes that tensors with data have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strategies.tracing.fakes import Fakes

D = 8


_WATCHED = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten.div.Tensor,
        torch.ops.aten.div.Tensor_mode,
        torch.ops.aten._grouped_mm.default,
        torch.ops.aten.native_layer_norm.default,
        torch.ops.aten.native_layer_norm_backward.default,
        torch.ops.aten.native_group_norm.default,
        torch.ops.aten.native_group_norm_backward.default,
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten.native_batch_norm_backward.default,
        torch.ops.aten.mkldnn_rnn_layer.default,
    }
)


class _Layouts(TorchDispatchMode):
    """Notes shape, strides and dtype of what some operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[object] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _WATCHED:
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self.found.append((str(func), [(tuple(t.shape), t.stride(), t.dtype) for t in tensors]))
        return result


def _picture_of_one(x: Tensor) -> Tensor:
    image = x[:1].transpose(1, 2).view(1, D, 4, 4)
    return torch.conv2d(image, x.new_ones(D, D, 1, 1))


def _picture_over_a_number(x: Tensor) -> Tensor:
    image = x[:1].transpose(1, 2).view(1, D, 4, 4)
    return image / 2.0 + torch.div(image, 3, rounding_mode="floor")


def _experts(x: Tensor) -> Tensor:
    ends = torch.tensor([5, x.size(0) * x.size(1)], dtype=torch.int32)
    return torch._grouped_mm(x.flatten(0, 1), x.new_ones(2, D, 12), offs=ends)


def _gradient_of_a_norm(x: Tensor) -> Tensor:
    image = x.clone().requires_grad_()
    outputs = torch.nn.functional.layer_norm(image, [D])
    (gradient,) = torch.autograd.grad(outputs, image, torch.ones(2, D, 16).transpose(1, 2))
    return gradient


def _norms_within_autocast(x: Tensor) -> Tensor:
    x = x.bfloat16().requires_grad_()
    picture = x.mT.contiguous()
    results = [torch.nn.LayerNorm(D)(x), torch.nn.GroupNorm(2, D)(picture), torch.nn.BatchNorm1d(D)(picture)]
    results += [torch.nn.BatchNorm1d(D, affine=False)(picture)]
    with torch.no_grad():  # their backward takes no bias of another dtype without a weight
        torch.native_layer_norm(x, [D], None, torch.zeros(D), 1e-5)
        torch.native_group_norm(picture, None, torch.zeros(D), 2, D, 16, 2, 1e-5)
    total = torch.stack([each.float().sum() for each in results]).sum()
    total.backward()  # type: ignore[no-untyped-call]
    return total


_LAYER = torch.nn.LSTM(D, D, batch_first=True)


def _recurrent(x: Tensor) -> Tensor:
    outputs: Tensor = _LAYER(x)[0]
    return outputs


@pytest.mark.parametrize(
    "body",
    [
        _picture_of_one,
        _picture_over_a_number,
        _experts,
        _gradient_of_a_norm,
        _norms_within_autocast,
        _recurrent,
    ],
)
def test_layouts_are_those_with_data(body: Callable[[Tensor], Tensor]) -> None:
    with _Layouts() as expected:
        body(torch.ones(2, 16, D))
    with Fakes(allow_non_fake_inputs=True), _Layouts() as actual:
        body(torch.ones(2, 16, D))
    assert actual.found == expected.found


def test_groups_of_columns_are_matrices() -> None:
    with Fakes(allow_non_fake_inputs=True):
        ends = torch.tensor([4, 16], dtype=torch.int32)
        assert torch._grouped_mm(torch.ones(D, 16), torch.ones(16, 12), offs=ends).shape == (2, D, 12)
        assert torch._grouped_mm(torch.ones(3, D, 16), torch.ones(3, 16, 12)).shape == (3, D, 12)
