"""A partition function as Inductor takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._inductor.custom_graph_pass import CustomPartitionerFn


class AsCustomPass(CustomPartitionerFn):  # type: ignore[misc]  # (torch types it as Any)
    """A partition function in the form of Inductor's option `custom_partitioner_fn`.

    Args:
        name: stands for it in keys of caches.
    """

    def __init__(self, partition: Callable[..., Any], name: str) -> None:
        self._partition = partition
        self._name = name

    def __call__(self, gm: Any, joint_inputs: Any, **options: Any) -> Any:
        """Return the graphs of forward and backward."""
        return self._partition(gm, joint_inputs, **options)

    def uuid(self) -> str:
        """Return what differs where the function does."""
        return self._name
