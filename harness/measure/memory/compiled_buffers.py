"""Buffers of generated code, which allocates them outside of dispatch.

Source: torch/_inductor/codegen/wrapper.py: each generated module calls `empty_strided_cpu`, or that of
another device, which it has among its own globals.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor

from strategies.estimate.patched import wrapped
from strategies.step.live_storages import LiveStorages

_ALLOCATOR = "empty_strided_"


@contextmanager
def buffers_seen(live: LiveStorages) -> Iterator[None]:
    """Enter into `live`, inside the scope, every buffer that generated code allocates."""
    with ExitStack() as patches:
        for module in _generated_modules():
            for name in [name for name in vars(module) if name.startswith(_ALLOCATOR)]:
                patches.enter_context(wrapped(module, name, partial(_allocated, live, name)))
        yield


def _generated_modules() -> list[ModuleType]:
    """Return the modules that Inductor has generated; none where nobody has imported it, which takes long."""
    inductor = sys.modules.get("torch._inductor.codecache")
    return [] if inductor is None else list(inductor.PyCodeCache.modules)


def _allocated(live: LiveStorages, name: str, original: Callable[..., Tensor], *args: Any) -> Tensor:
    buffer = original(*args)
    live.add_made(buffer, f"inductor.{name}")
    return buffer
