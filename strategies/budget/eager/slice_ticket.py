"""Tickets: what the autograd graph holds for a tensor that a block's operator has made."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from strategies.budget.eager.contents import Content, compute
from strategies.regions.split_backward import runs_again
from strategies.regions.versions import Version, modified
from strategies.step.late_value import AskedAgain, given, second_backward
from strategies.step.memory_layout import MemoryLayout
from strategies.step.ordered_mode import Pause


class SliceTicket(AskedAgain):
    """Redeemed for what was kept, or by the operators that it needs, by one node in each part of a backward.

    Args:
        content: what the tensor's storage held.
        layout: where in it the tensor lies.
        version: version of the tensor when it was saved, as autograd counts it.
        pause: on while the ticket is redeemed.
        device: that of the tensor.

    Attributes:
        layout: the layout.
        device: the device.
        before: runs before the value is made, and returns what runs after that, if anything does.
        is_late: whether backward reads the value later than it asks for it.
    """

    __slots__ = ("__weakref__", "_content", "_pause", "_version", "before", "device", "is_late", "layout")

    def __init__(
        self, content: Content, layout: MemoryLayout, version: Version, pause: Pause, device: torch.device
    ) -> None:
        super().__init__()
        self._content: Content | None = content
        self.layout, self._version, self._pause, self.device = layout, version, pause, device
        self.is_late = False
        self.before: Callable[[], Callable[[], None] | None] | None = None

    def __call__(self) -> Tensor:
        """Return what backward gets."""
        return given(self.redeem, self.layout, self.device) if self.is_late else self.redeem()

    @property
    def content(self) -> Content | None:
        """The content that it stands for; `None` where it was redeemed for the last time."""
        return self._content

    def follow(self, latest: Content) -> None:
        """Stand for what the storage holds when forward ends, unless autograd counts a write to it since.

        An operator may write to what autograd has saved of it before: leaky units to their noise.
        """
        if self._content is not None and self._content.is_past and not self._version.is_past():
            self._content = latest

    def redeem(self) -> Tensor:
        """Return the tensor as it was saved.

        Raises:
            StrategyError: it was redeemed before, or something that it needs was changed since.
            RuntimeError: it was written to in place, in the words of autograd.
        """
        if self.before is None:
            return self._redeemed()
        after = self.before()
        try:
            return self._redeemed()
        finally:
            if after is not None:
                after()

    def _redeemed(self) -> Tensor:
        known, content = self.value(), self._content
        if known is not None:
            return known
        if not runs_again():
            self._content = None
        if content is None:
            raise second_backward()
        if content.is_past:
            saved = f"[{self.layout.dtype} {list(self.layout.size)}]"
            raise modified(f"{saved}, saved at version {self._version.expected}")
        asked, made_again = [content], self._pause.made_again
        in_forward = content if made_again is not None else None
        del content
        had_grad = torch.is_grad_enabled()
        if had_grad:
            torch._C._set_grad_enabled(False)  # noqa: SLF001 (a third of the time of its context)
        was_paused, self._pause.is_on = self._pause.is_on, True
        try:
            tensor = self.layout.on(compute(asked))
        finally:
            self._pause.is_on = was_paused
            if had_grad:
                torch._C._set_grad_enabled(True)  # noqa: SLF001 (as above)
        self._version.refuse_past(tensor)
        if made_again is not None:
            made_again(in_forward, tensor)
        self.give(tensor)
        return tensor
