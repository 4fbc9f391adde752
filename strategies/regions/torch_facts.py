"""Facts of this torch that differ between releases; asked of torch itself, never told by its version."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint


@cache
def selective_takes_hooks() -> bool:
    """Return whether `checkpoint` asks if hooks of saved tensors also get what selective AC saves.

    Where it is not told, it warns, and says that its answer will change. Releases that do not ask never give
    it to them.

    Source: torch/utils/checkpoint.py, `respect_saved_tensors_hooks`.
    """
    return "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters


def parameter_groups(unit: FSDPModule) -> Sequence[Any]:
    """Return the groups of parameters that an FSDP2 unit gathers; older releases have one at most.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_state.py.
    """
    state: Any = unit._get_fsdp_state()  # noqa: SLF001 (no public way to ask)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)  # noqa: SLF001
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # noqa: SLF001
