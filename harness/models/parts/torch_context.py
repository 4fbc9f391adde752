"""Torch's own attention over parts of sequences: the ring of `torch.distributed.tensor.experimental`.

Torch's `context_parallel` cuts buffers in place and lets attention run as a ring of kernels. What it switches
on for attention is used here, and its cutting is not: so parts, positions and losses are those of the other
methods, successive and not balanced. Torch has rules for kernels of CUDA alone.

Shapes: B batch, S tokens of a part, H query heads, G key-value heads, K head width.

Source: `torch/distributed/tensor/experimental/_context_parallel/_attention.py` of torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import _attention as experimental
from torch.nn import functional

from harness.errors import ConfigError

_SEQUENCE = 2
"""Dimension of the sequence in operands of attention."""

DEVICES = frozenset({"cuda"})
"""Types of devices for whose kernels torch has rules."""


def require_rules(device_type: str) -> None:
    """Refuse devices for whose kernels torch has no rules.

    Raises:
        ConfigError: naming the option.
    """
    if device_type not in DEVICES:
        problem = f"torch has rules for kernels of {', '.join(sorted(DEVICES))} alone, got {device_type}"
        raise ConfigError("mesh.cp_method", f"{problem}; use gather, ring or ulysses")


@contextmanager
def dispatched_by_torch() -> Iterator[None]:
    """Let torch run attention over parts inside the scope, and its backward.

    Without the scope torch would run a kernel on the part that a rank has.
    """
    options = experimental._cp_options  # noqa: SLF001 (torch has no public name)
    was_balanced, options.enable_load_balance = options.enable_load_balance, False
    experimental._enable_context_parallel_dispatcher()  # noqa: SLF001 (as above)
    try:
        yield
    finally:
        experimental._disable_context_parallel_dispatcher()  # noqa: SLF001 (as above)
        options.enable_load_balance = was_balanced


def attention_by_torch(
    devices: DeviceMesh,
    q_BHSK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Return the output of this rank's queries, of shape (B, H, S, K), inside of `dispatched_by_torch`.

    Args:
        devices: the ranks that hold the parts, in order.
        q_BHSK: queries of this rank's part.
        k_BGSK: its keys.
        v_BGSK: its values.
        is_causal: whether a query sees no later key.
        scale: factor of the scores; `None` for one over the root of K.
    """
    style = experimental._ContextParallel(  # noqa: SLF001 (torch has no public name)
        _SEQUENCE,
        experimental._ContextParallel.AttentionType.SDPA,  # noqa: SLF001 (as above)
    )
    # in float32 the one kernel of CUDA takes as many key heads as query heads
    k, v = (each.repeat_interleave(q_BHSK.size(1) // each.size(1), dim=1) for each in (k_BGSK, v_BGSK))
    (q, k, v), _ = style.sdpa_input_fn(None, (q_BHSK, k, v), {}, devices)
    given = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
    output: Tensor = style.sdpa_output_fn(None, None, given, devices)
    return output
