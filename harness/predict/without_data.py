"""Operations of torch on the data of tensors, done for tensors without data.

Torch takes a fake tensor for a sign that somebody compiles, reads parameters to compare them between ranks,
and asks collectives for their results. A step that is predicted must run as one with data does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import _flat_param
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.parallel import distributed
from torch.utils._python_dispatch import _disable_current_modes

from strategies.estimate.liveness import key_of
from strategies.estimate.patched import outside_of_modes, replaced, wrapped
from strategies.estimate.tensors import tensors_in
from strategies.step.operator_mode import OperatorMode


@contextmanager
def as_with_values() -> Iterator[None]:
    """Let torch treat fake tensors as tensors with data; what it warns of, a trial says."""
    held: list[dist.ProcessGroup] = []
    with (
        warnings.catch_warnings(action="ignore"),
        replaced(torch.utils, "swap_tensors", _swap),
        replaced(distributed, "_verify_param_shape_across_processes", lambda *_: None),
        replaced(_functional_collectives, "_are_we_tracing", _is_compiling),
        replaced(_flat_param, "_same_storage", _is_same_storage),
        replaced(FakeTensor, "data_ptr", _address),
        wrapped(DeviceMesh, "__init__", outside_of_modes),  # its coordinates are read
        wrapped(dist.Reducer, "_rebuild_buckets", _with_indices),  # type: ignore[attr-defined]
        wrapped(dist, "Reducer", partial(_answered, held)),
    ):
        yield


def _is_compiling() -> bool:
    """Say if a compiler traces: torch's own question, without its look at whether tensors have data."""
    by_dispatcher = torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher)  # noqa: SLF001 (no public way)
    return torch.compiler.is_dynamo_compiling() or by_dispatcher or get_proxy_mode() is not None


def _swap(parameter: Tensor, other: Tensor) -> None:
    """Change a parameter as a module's `to` does; torch refuses tensors that weak references know."""
    parameter.data = other.data


def _is_same_storage(one: Tensor, other: Tensor) -> bool:
    """Return whether two plain tensors of FSDP1 lie on one storage; it compares addresses of data."""
    return key_of(one) == key_of(other)


def _address(tensor: Tensor) -> int:
    """Return a number that tensors share which begin at one place of one storage, as FSDP1 asks."""
    return key_of(tensor) + int(tensor.storage_offset()) * tensor.element_size()


def _answered(held: list[dist.ProcessGroup], original: Callable[..., Any], /, *args: Any) -> Any:
    """Make DDP's reducer, for a group whose collectives have results; `held` is what keeps it in Python."""
    parameters, buckets, limits, group, *options = args
    held.append(_Answering(group))
    return original(parameters, buckets, limits, held[-1], *options)


def _with_indices(original: Callable[..., bool], /, *args: Any) -> bool:
    """Let DDP put its buckets in the order of the gradients, of which it sends a list to all ranks."""
    with _RealIndices():
        return original(*args)


class _RealIndices(OperatorMode):
    """Gives data to tensors of 32-bit integers, and to what is done with them."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func`, outside of fake tensors where it has no fake operand."""
        operands = list(tensors_in((args, kwargs)))
        is_list = kwargs.get("dtype") is torch.int32 if not operands else not any(map(is_fake, operands))
        with _disable_current_modes() if is_list else nullcontext():
            return func(*args, **kwargs)


class _Answering(dist.ProcessGroup):
    """Passes all-reduces on to another group and says that they have given their operands back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group

    def allreduce(self, tensors: Any, options: Any = None) -> dist.Work:  # type: ignore[override]
        """Return work that is done."""
        self._group.allreduce(tensors, options)
        return _Done(tensors)

    def broadcast(self, tensors: Any, options: Any = None) -> dist.Work:  # type: ignore[override]
        """Return work that is done."""
        self._group.broadcast(tensors, options)
        return _Done(tensors)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return `fake`."""
        return "fake"


class _Done(dist._Work):  # type: ignore[name-defined,misc]  # noqa: SLF001 (what Python may derive from)
    def __init__(self, results: list[Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result(results)

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 (torch's signature)
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future
