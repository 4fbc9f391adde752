"""Kinds of a region's saved tensors that can move to host memory."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

OffloadKind: TypeAlias = Literal["all", "inputs", "internals"]
"""What of a region's saved tensors is moved: all, those of its inputs, or all but those."""

OFFLOAD_KINDS: tuple[str, ...] = get_args(OffloadKind)
"""Every `OffloadKind`."""
