"""Versions of saved tensors: whether one was written in place after it was saved.

Autograd asks this of every saved tensor, except where `saved_tensors_hooks` are set.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nested._internal.nested_tensor import NestedTensor

PLAIN = frozenset({Tensor, nn.Parameter})
"""Types of tensors that no `__torch_dispatch__` of their own stands behind."""

_COUNTED = torch._C.DispatchKey.ADInplaceOrView  # noqa: SLF001 (no public way)
_exclude_guard = torch._C._SetExcludeDispatchKeyGuard  # noqa: SLF001 (no public way)


@cache
def _nothing_on(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


class Version(NamedTuple):
    """A state of a tensor, as the counter of its in-place writes shows it.

    Fields:
        counter: a tensor with the counter of the tensor and of its views.
    """

    counter: Tensor
    expected: int

    def is_past(self) -> bool:
        """Return whether the tensor was written since."""
        return self._current() != self.expected

    def serves(self, other: Version) -> bool:
        """Return whether what the memory held at this version, it holds at `other`, of another tensor on it.

        Tensors on one storage may have counters of their own: `.data`, results of `unsafe_chunk`, a DTensor
        and its local tensor. A counter that stands at 0 has never counted a write; of another one only the
        counter itself knows when it did.
        """
        return not self.is_past() and (other.expected == 0 or _have_one_counter(self.counter, other.counter))

    def refuse_past(self, saved: Tensor) -> None:
        """Refuse to go on with `saved` if it was written since.

        Raises:
            RuntimeError: in the words of autograd.
        """
        if self.counter._version != self.expected:  # noqa: SLF001 (as autograd checks it)
            now = f"is at version {self._current()}; expected version {self.expected} instead."
            raise modified(f"[{saved.dtype} {list(saved.shape)}] {now}")

    def _current(self) -> int:
        return self.counter._version  # noqa: SLF001 (as autograd checks it)


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the counts of in-place writes of `tensors`; -1 for those of which nobody counts them."""
    try:
        return [each._version for each in tensors]  # noqa: SLF001 (as autograd checks it)
    except RuntimeError:  # made in inference mode
        return [-1 if each.is_inference() else each._version for each in tensors]  # noqa: SLF001 (as above)


def modified(what: str) -> RuntimeError:
    """Return the refusal of a saved tensor that was written since, in the words of autograd."""
    words = "one of the variables needed for gradient computation has been modified by an inplace operation"
    return RuntimeError(f"{words}: {what}")


def _have_one_counter(one: Tensor, other: Tensor) -> bool:
    """Return whether a write to one of two tensors is counted for both; nothing is written to find out."""
    before = one._version  # noqa: SLF001 (as autograd checks it)
    if other._version != before:  # noqa: SLF001
        return False
    put = torch._C._autograd._unsafe_set_version_counter  # noqa: SLF001 (what `increment_version` has no way back from)
    put((one,), (before + 1,))
    is_one = other._version != before  # noqa: SLF001
    put((one,), (before,))
    return is_one


def alias_of_plain(tensor: Tensor) -> Tensor:
    """Return another tensor on the memory of a plain one, with its counter, unseen by modes."""
    with torch._C._DisableTorchDispatch():  # noqa: SLF001 (no public way)
        return tensor.detach()


def alias_inside(tensor: Tensor) -> Tensor:
    """Return the same inside of a dispatch mode, where aliases have counters of their own."""
    with _exclude_guard(_COUNTED, False):
        return alias_of_plain(tensor)


def version_of(tensor: Tensor) -> Version:
    """Return the version of `tensor` now, without holding its memory."""
    if type(tensor) in PLAIN:
        with torch._C._DisableTorchDispatch():  # noqa: SLF001 (no public way)
            counter = tensor.detach()  # shares the counter
            counter.data = _nothing_on(tensor.device)  # keeps it
        return Version(counter, tensor._version)  # noqa: SLF001 (as autograd checks it)
    counter = tensor.detach()  # shares the counter
    with torch.no_grad():
        if isinstance(counter, DTensor):
            counter._local_tensor = _nothing_like(counter._local_tensor)  # noqa: SLF001 (the only memory it holds)
        elif isinstance(counter, NestedTensor):
            counter._values = _nothing_like(counter._values)  # noqa: SLF001 (as above)
        else:
            counter.data = _nothing_like(counter)  # keeps the counter
    return Version(counter=counter, expected=tensor._version)  # noqa: SLF001


def _nothing_like(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
