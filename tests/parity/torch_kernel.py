"""A kernel of the CPU for torch's ring of attention, which has rules for those of CUDA alone.

The ring, its collectives and its backward are torch's; the rule is that parts of sequences stay parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as experimental
from torch.nn import functional

from harness.models.parts import torch_context
from harness.models.parts.context_attention import ContextAttention, Ring

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _forward(_operator: Any, args: Sequence[Any], named: dict[str, Any]) -> Sequence[DTensor]:
    q, k, v, *options = map(_local, args)
    is_causal = options[1] if len(options) > 1 else False
    group = args[0].device_mesh.get_group()
    found = experimental._templated_ring_attention(
        group, 2, _FORWARD, q, k, v, is_causal=is_causal, dropout_p=0.0, scale=named.get("scale")
    )
    return _parts(args[0], found[:2])


def _backward(_operator: Any, args: Sequence[Any], named: dict[str, Any]) -> Sequence[DTensor]:
    gradient, q, k, v, output, lse, _, is_causal = map(_local, args[:8])
    group = args[0].device_mesh.get_group()
    found = experimental._templated_ring_attention_backward(
        group, 2, _BACKWARD, gradient.contiguous(), "grad_out", q, k, v, output, lse,
        is_causal=is_causal, dropout_p=0.0, scale=named.get("scale"),
    )  # fmt: skip
    return _parts(args[0], found[:3])


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _parts(like: DTensor, tensors: Sequence[Tensor]) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(each, like.device_mesh, [Shard(2)], run_check=False) for each in tensors)


@contextmanager
def kernel_of_cpu() -> Iterator[None]:
    """Let torch's ring run with the CPU's kernel inside the scope."""
    with (
        mock.patch.dict(experimental.custom_ops, {_FORWARD: _forward, _BACKWARD: _backward}),
        mock.patch.object(torch_context, "DEVICES", {"cpu"}),
    ):
        yield


def errors_of_ring(devices: DeviceMesh, *, dtype: torch.dtype, is_causal: bool) -> list[float]:
    """Return how far output and gradients of this rank's part are from attention of whole sequences."""
    rank, ranks, length = devices.get_local_rank(), devices.size(), 64
    generator = torch.Generator().manual_seed(0)
    q, k, v, gradient = (
        torch.randn(2, heads, length * ranks, 32, generator=generator).to(devices.device_type, dtype)
        for heads in (4, 2, 2, 4)
    )
    own = slice(rank * length, (rank + 1) * length)
    attend = ContextAttention(method="torch", ring=Ring(devices.get_group(), ranks, rank, devices))
    parts = [each[:, :, own].clone().requires_grad_() for each in (q, k, v)]
    is_on_cpu = devices.device_type == "cpu"
    with kernel_of_cpu() if is_on_cpu else nullcontext(), torch_context.dispatched_by_torch():
        output = attend(*parts, dropout_p=0.0, is_causal=is_causal, enable_gqa=True)
        found = (output, *torch.autograd.grad(output, parts, gradient[:, :, own]))
    whole = [each.requires_grad_() for each in (q, k, v)]
    output = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    expected = (output, *torch.autograd.grad(output, whole, gradient))
    pairs = zip(expected, found, strict=True)
    return [float((one[:, :, own] - other).abs().max() / one.abs().max()) for one, other in pairs]
