"""What this torch does that others do not; asked of torch itself, never told by its version."""

from __future__ import annotations

import inspect
from functools import cache

from torch.utils.checkpoint import checkpoint


@cache
def selective_takes_hooks() -> bool:
    """Whether `checkpoint` asks if hooks of saved tensors also get what selective AC saves.

    Where it is not told, it warns, and says that its answer will change. Releases that do not ask never give
    it to them.

    Source: torch/utils/checkpoint.py, `respect_saved_tensors_hooks`.
    """
    return "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
