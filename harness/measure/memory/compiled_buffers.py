"""Buffers of generated code, which allocates them outside of dispatch.

Source: torch/_inductor/codegen/wrapper.py: each generated module calls `empty_strided_cpu`, or that of
another device, which it has among its own globals.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from strategies.estimate.patched import wrapped
from strategies.step.live_storages import LiveStorages

_ALLOCATOR = "empty_strided_"


@contextmanager
def buffers_seen(live: LiveStorages) -> Iterator[None]:
    """Enter into `live`, inside the scope, every buffer that generated code allocates."""
    with ExitStack() as patches:
        inductor = sys.modules.get("torch._inductor.codecache")
        for module in [] if inductor is None else list(inductor.PyCodeCache.modules):
            for name in [name for name in vars(module) if name.startswith(_ALLOCATOR)]:
                patches.enter_context(wrapped(module, name, partial(_allocated, live, name)))
        yield


def _allocated(live: LiveStorages, name: str, original: Callable[..., Tensor], *args: Any) -> Tensor:
    buffer = original(*args)
    live.add_made(buffer, f"inductor.{name}")
    return buffer
