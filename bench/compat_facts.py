"""Facts that differ between releases of torch, each found by asking the torch that is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from strategies.estimate.collectives import collective_name
from strategies.estimate.tensors import dtype_name, tensors_in
from strategies.regions.torch_facts import selective_takes_hooks
from strategies.step.operator_mode import OperatorMode

_aten = torch.ops.aten
_SIDE = 8


class _Seen(OperatorMode):
    """Notes every operator, with the dtypes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[torch.dtype]]] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append((func, [tensor.dtype for tensor in tensors_in(args)]))
        return func(*args, **kwargs)


def facts() -> dict[str, Any]:
    """Return what this torch answers to every question, as JSON values."""
    return {question: ask() for question, ask in QUESTIONS.items()}


def _policy_calls_in_recomputation() -> int:
    """Return how often the policy of selective AC is called while two saved products are recomputed."""
    seen = 0

    def policy(context: Any, _func: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        nonlocal seen
        seen += context.is_recompute
        return CheckpointPolicy.MUST_SAVE

    _selective(policy)
    return seen


def _bytes_that_hooks_get() -> int:
    """Return the bytes of saved tensors that hooks around a selective region get."""
    got = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal got
        got += tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        _selective([_aten.mm.default], respects=False)
    return got


def _selective(policy: Any, *, respects: bool | None = None) -> None:
    weight = torch.ones(_SIDE, _SIDE, requires_grad=True)
    options: dict[str, Any] = {}
    if respects is not None and selective_takes_hooks():
        options["respect_saved_tensors_hooks"] = respects
    checkpoint(
        lambda x: ((x @ weight).sin() @ weight).sin(),
        torch.ones(_SIDE, _SIDE, requires_grad=True),
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, policy),
        **options,
    ).sum().backward()


def _dtype_of_reduced_gradients() -> str:
    """Return the dtype in which FSDP2 reduces gradients where only that of computing is named."""
    if dist.is_initialized():
        raise RuntimeError("bench.compat_facts: a process group stands already; ask in a process without one")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = nn.Linear(_SIDE, _SIDE)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        with _Seen() as seen:
            model(torch.ones(2, _SIDE)).sum().backward()
    finally:
        dist.destroy_process_group()
    (reduced,) = (dtypes for func, dtypes in seen.calls if collective_name(func) == "reduce_scatter")
    return dtype_name(reduced[0])


def _reshape_of_a_product() -> str:
    """Return the operator with which a linear gives its product the rows of its input."""
    with _Seen() as seen:
        nn.Linear(_SIDE, _SIDE)(torch.ones(2, 2, _SIDE))
    return str(seen.calls[-1][0])


QUESTIONS: Mapping[str, Callable[[], Any]] = {
    "calls of a selective policy while two saved products are recomputed": _policy_calls_in_recomputation,
    "`checkpoint` asks whether hooks get what selective AC saves": selective_takes_hooks,
    "bytes that hooks around a selective region get, unless asked for": _bytes_that_hooks_get,
    "`FlopCounterMode` counts attention of the CPU": lambda: (
        _aten._scaled_dot_product_flash_attention_for_cpu in flop_registry  # noqa: SLF001 (its only name)
    ),
    "FSDP2 reduces gradients of bfloat16 parameters in, unless told": _dtype_of_reduced_gradients,
    "a linear ends with": _reshape_of_a_product,
}
"""What is asked, in the words of the compatibility page."""
