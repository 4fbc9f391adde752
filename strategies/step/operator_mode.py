"""A dispatch mode that is given every operator of a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from strategies.estimate.patched import LeavesCompiled

_QUESTION = torch.ops.prim.device.default


class OperatorMode(LeavesCompiled, TorchDispatchMode):
    """A dispatch mode that sees operators on local tensors; wrappers such as DTensors come back unwrapped.

    Compiled functions run as they do without the mode, which sees the operators that they call. An operator
    of higher order, which calls another with the random numbers of forward, is one operator.

    Attributes:
        is_of_forward: whether the mode is on in the forward of a block alone, whose every operator it counts.
    """

    is_of_forward = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, unless it has a wrapper among its operands and must come back with local tensors."""
        if func is _QUESTION and isinstance(args[0], FakeTensor):
            # a fake tensor is asked in the middle of an operator, more often than operators run
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented
        return self.run(func, args, kwargs or {})

    @abstractmethod
    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `func` returns."""
