"""Collectives by one name and one size, however they were called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from strategies.estimate.tensors import tensors_in

_OPERATORS = {
    "all_reduce": """
        c10d::allreduce_ c10d::allreduce_coalesced_ _c10d_functional::all_reduce
        _c10d_functional::all_reduce_ _c10d_functional::all_reduce_coalesced
        _c10d_functional::all_reduce_coalesced_
    """,
    "all_gather": """
        c10d::allgather_ c10d::allgather_coalesced_ c10d::_allgather_base_
        c10d::allgather_into_tensor_coalesced_ _c10d_functional::all_gather_into_tensor
        _c10d_functional::all_gather_into_tensor_out _c10d_functional::all_gather_into_tensor_coalesced
    """,
    "reduce_scatter": """
        c10d::reduce_scatter_ c10d::_reduce_scatter_base_ c10d::reduce_scatter_tensor_coalesced_
        _c10d_functional::reduce_scatter_tensor _c10d_functional::reduce_scatter_tensor_out
        _c10d_functional::reduce_scatter_tensor_coalesced
    """,
    "broadcast": "c10d::broadcast_ _c10d_functional::broadcast _c10d_functional::broadcast_",
    "all_to_all": "c10d::alltoall_ c10d::alltoall_base_ _c10d_functional::all_to_all_single",
    "reduce": "c10d::reduce_",
    "gather": "c10d::gather_",
    "scatter": "c10d::scatter_",
    "send": "c10d::send",
    "recv": "c10d::recv_ c10d::recv_any_source_",
    "barrier": "c10d::barrier",
}
"""Operators that start a collective, by its name."""

NAMES: Mapping[str, str] = MappingProxyType(
    {operator: name for name, operators in _OPERATORS.items() for operator in operators.split()}
)

# methods of a process group, in one release of torch or another, that write into tensors they are given
_GROUP_METHODS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)


def collective_name(func: Any) -> str | None:
    """Return the collective that an operator starts, or `None`; a wait starts no collective."""
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    return None if schema is None else NAMES.get(schema.name)


def group_methods() -> Iterator[str]:
    """Yield the names of those methods of a process group that start collectives, in this torch."""
    return (name for name in _GROUP_METHODS if hasattr(dist.ProcessGroup, name))


def payload_bytes(args: tuple[Any, ...], result: Any) -> int:
    """Return the payload on this rank: the larger of what it gives and what it gets.

    That is the gathered tensor of an all-gather, the full gradient of a reduce-scatter, the tensor of an
    all-reduce or broadcast. What travels per link depends on the algorithm and is not counted.
    """
    return max(_nbytes(operand) for operand in (*args, result))


def _nbytes(value: Any) -> int:
    tensors: list[Tensor] = list(tensors_in(value))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
