"""Fake tensors, with the kernels that torch's own lack: those that say shape and layout of a result alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_map_only

from strategies.estimate.liveness import promoted_numbers
from strategies.tracing.fake_results import FakeCall

_aten = torch.ops.aten
_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default})  # noqa: SLF001 (its name)
_AWAITED = torch.ops._c10d_functional._wrap_tensor_autograd.default  # noqa: SLF001 (its name)
_WAIT = torch.ops._c10d_functional.wait_tensor.default  # noqa: SLF001 (as above)
_DEVICE = torch.ops.prim.device.default
_NORMS = {
    _aten.native_layer_norm.default: slice(2, 4),
    _aten.native_group_norm.default: slice(1, 3),
    _aten.native_batch_norm.default: slice(1, 4),
}
"""Norms, with their weight, bias and running mean among the arguments."""
_ALIGNED_BYTES = 16
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Fakes(FakeTensorMode):
    """torch's mode, with what its kernels say otherwise than those with data.

    * Grouped products of any dtype have a shape: torch's own take bfloat16 alone.
    * Views have the strides that they have with data in dimensions of size 1 too: a convolution chooses its
      layout, and so the order of dropout's numbers, by these.
    * What is made of a tensor and a Python number has the strides that it has with data there.
    * What a recurrent layer keeps for its backward has a size.
    * What a collective gives is waited for when it is used, and lies where the collective has put it.
    * The gradient of a layer norm's input is contiguous, whatever the layout of that of its output.
    * A norm on a CPU keeps its statistics in the dtype of its weight, which autocast leaves in float32.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NOTHING
    ) -> Any:
        """Run an operator as `answer` does, which torch does not wrap once more in each class."""
        return self.answer(func, types, args, kwargs)

    def answer(self, func: Any, types: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator on tensors without data, with strides as torch gives them with data."""
        if func is _DEVICE and type(args[0]) is FakeTensor:  # what torch itself asks most often
            return args[0].device
        call = FakeCall.of(self, func, args, kwargs)
        known = None if call is None else call.known()
        if call is not None and known is not None:
            return known.made(self, call.tensors)
        result = self._run(func, types, args, kwargs)
        # some calls change what their operands are, which no key says
        if call is not None and FakeCall.of(self, func, args, kwargs) == call:
            call.note(result)
        return result

    def _run(self, func: Any, types: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # its parts come back
        kernel = _kernel_of_class(func)
        if kernel is not None:
            return kernel(self, *args, **kwargs)
        if func in _VIEWS and _has_one((*args[0].shape, *args[1])):
            return self._view(func, types, *args)
        made = self._made_here(func, args, kwargs)
        if made is not None:
            return made
        return self._completed(func, args, super().__torch_dispatch__(func, types, args, kwargs))

    def _made_here(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return what torch's kernels do not make as with data; `None` for all other operators."""
        if func is _AWAITED:
            return AsyncCollectiveTensor(args[0])
        if func is _WAIT:
            waited: Tensor = args[0]
            return waited
        if func is _aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:  # noqa: SLF001 (its name)
            return self._grouped_product(*args[:2], *args[2:3] or [kwargs.get("offs")])
        return None

    def _completed(self, func: Any, args: Sequence[Any], result: Any) -> Any:
        if func is _aten.mkldnn_rnn_layer.default and torch.is_grad_enabled():
            *known, workspace = result
            return *known, workspace.new_empty(_workspace_shape(args))
        if func is _aten.native_layer_norm_backward.default and result[0] is not None:
            with self:
                return torch.empty_like(result[0], memory_format=torch.contiguous_format), *result[1:]
        if func in _NORMS and args[0].device.type == "cpu":
            return self._with_statistics(args[_NORMS[func]], *result)
        if func is _aten.native_group_norm_backward.default and result[0] is not None:
            with self:
                return result[0].to(args[0].dtype), *result[1:]
        if isinstance(result, Tensor) and _has_one(result.shape) and promoted_numbers(func, args):
            return self._beside_a_number(func, args, result)
        return result

    def _with_statistics(
        self, parameters: Sequence[Tensor | None], result: Tensor, *statistics: Tensor
    ) -> Any:
        """Return what a norm gives, with its statistics in the dtype of the first parameter that there is."""
        first = next((each for each in parameters if each is not None), None)
        if first is None:
            return result, *statistics
        with self:
            return result, *(each.to(first.dtype) for each in statistics)

    def _beside_a_number(self, func: Any, args: Sequence[Any], result: Tensor) -> Tensor:
        x, *others = (each for each in args if isinstance(each, Tensor))
        is_new = not func._schema.is_mutable and x.shape == result.shape  # noqa: SLF001 (no public name)
        if others or not is_new or not all(isinstance(size, int) for size in (*x.shape, *x.stride())):
            return result
        alike = torch.empty_strided(x.shape, x.stride(), device="meta")
        strides = alike.add(torch.empty((), device="meta")).stride()
        if strides == result.stride():
            return result
        with self:
            return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)

    def _view(self, func: Any, types: Sequence[Any], tensor: Tensor, shape: list[int]) -> Any:
        """Return a view with the strides that it has with data, where sizes of 1 leave them open."""
        result: Any = super().__torch_dispatch__(func, types, (tensor, shape))
        if not all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride())):
            return result
        with_data = torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(result.shape)
        if with_data.stride() == result.stride():
            return result
        given = tensor, result.shape, with_data.stride(), tensor.storage_offset()
        return super().__torch_dispatch__(_aten.as_strided.default, types, given)

    def _grouped_product(self, left: Tensor, right: Tensor, ends: Tensor | None) -> Tensor:
        """Return an empty product of groups of rows, of columns, or of batches.

        Rows begin aligned in builds for CUDA.
        """
        shape = [left.size(-2), right.size(-1)]
        if left.dim() == right.dim():
            assert ends is not None or left.dim() > 2  # noqa: PLR2004 (groups have ends, batches need none)
            shape = [left.size(0) if ends is None else ends.size(0), *shape]
        numbers = _ALIGNED_BYTES // left.element_size()
        row = -(-shape[-1] // numbers) * numbers if torch.version.cuda else shape[-1]
        strides = [shape[-2] * row, row, 1][-len(shape) :]
        with self:
            return torch.empty_strided(shape, strides, dtype=left.dtype, device=left.device)


def _has_one(sizes: Iterable[Any]) -> bool:
    """Say whether a size is 1, where it is a number: to ask that of one that depends on data is an error."""
    return any(isinstance(size, int) and size == 1 for size in sizes)


def _workspace_shape(args: Sequence[Any]) -> torch.Size:
    """Return the shape of what a recurrent layer keeps for its backward, which its library says in a run."""
    with _disable_current_modes():
        given = tree_map_only(Tensor, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), args)
        *_, workspace = _aten.mkldnn_rnn_layer.default(*given)
        return torch.Size(workspace.shape)


def _kernel_of_class(func: Any) -> Callable[..., Any] | None:
    """Return what torch before 2.13 runs of an operator of operators for its own class of modes alone."""
    if not isinstance(func, HigherOrderOperator) or any(func is each for each in registered_hop_fake_fns):
        return None
    found: Callable[..., Any] | None = func.python_key_table.get(FakeTensorMode)
    return found
