"""DTensor's own questions, kept from the meters of a step.

For sizes that it has not met before, DTensor runs an operator on tensors without data, to learn the shape of
the result. Sizes that depend on data are new in every step, so the step before does not answer for this one.
Nothing is computed: such an operator is no work of the step, and has no memory.

Source: torch/distributed/tensor/_sharding_prop.py, `_propagate_tensor_meta_non_cached`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.tensor._sharding_prop import ShardingPropagator

from strategies.estimate.patched import outside_of_modes, wrapped


@contextmanager
def unseen_sharding_rules() -> Iterator[None]:
    """Let DTensor ask for shapes outside of all modes inside the scope."""
    with wrapped(ShardingPropagator, "_propagate_tensor_meta_non_cached", outside_of_modes):
        yield
