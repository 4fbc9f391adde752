"""Collectives by one name and one size, however they were called."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from harness.measure.tensors import tensors_in

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "c10d::allreduce_": "all_reduce",
        "c10d::allreduce_coalesced_": "all_reduce",
        "c10d::allgather_": "all_gather",
        "c10d::allgather_coalesced_": "all_gather",
        "c10d::_allgather_base_": "all_gather",
        "c10d::allgather_into_tensor_coalesced_": "all_gather",
        "c10d::reduce_scatter_": "reduce_scatter",
        "c10d::_reduce_scatter_base_": "reduce_scatter",
        "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
        "c10d::broadcast_": "broadcast",
        "c10d::alltoall_": "all_to_all",
        "c10d::alltoall_base_": "all_to_all",
        "c10d::reduce_": "reduce",
        "c10d::gather_": "gather",
        "c10d::scatter_": "scatter",
        "c10d::send": "send",
        "c10d::recv_": "recv",
        "c10d::recv_any_source_": "recv",
        "c10d::barrier": "barrier",
        "_c10d_functional::all_reduce": "all_reduce",
        "_c10d_functional::all_reduce_": "all_reduce",
        "_c10d_functional::all_reduce_coalesced": "all_reduce",
        "_c10d_functional::all_reduce_coalesced_": "all_reduce",
        "_c10d_functional::all_gather_into_tensor": "all_gather",
        "_c10d_functional::all_gather_into_tensor_out": "all_gather",
        "_c10d_functional::all_gather_into_tensor_coalesced": "all_gather",
        "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
        "_c10d_functional::reduce_scatter_tensor_out": "reduce_scatter",
        "_c10d_functional::reduce_scatter_tensor_coalesced": "reduce_scatter",
        "_c10d_functional::all_to_all_single": "all_to_all",
        "_c10d_functional::broadcast": "broadcast",
        "_c10d_functional::broadcast_": "broadcast",
    }
)


def collective_name(func: Any) -> str | None:
    """Return the collective that an operator starts, or `None`; waiting for one is none."""
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    return None if schema is None else NAMES.get(schema.name)


def payload_bytes(args: tuple[Any, ...], result: Any) -> int:
    """Return the payload on this rank: the larger of what it gives and what it gets.

    That is the gathered tensor of an all-gather, the full gradient of a reduce-scatter, the tensor of an
    all-reduce or broadcast. What travels per link depends on the algorithm and is not counted.
    """
    return max(_nbytes(operand) for operand in (*args, result))


def _nbytes(value: Any) -> int:
    tensors: list[Tensor] = list(tensors_in(value))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
