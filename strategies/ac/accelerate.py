"""`ac=accelerate`: the activation checkpointing of accelerate's FSDP2 plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.base import take_names
from strategies.foreign.variant import OfLibrary


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerate(OfLibrary):
    """Put the wrappers around layers that accelerate puts there with `fsdp_activation_checkpointing`.

    Use when: what accelerate, and trainers on it, do under FSDP2 is to be compared; needs the extra
        `accelerate`. It restores no random numbers: with dropout, gradients are wrong.

    Saved: the inputs of each wrapped layer.
    Recomputed: the forward of each wrapped layer, once a step.
    Moved: with `activation_checkpointing_offload` the saved inputs, to host memory and back.

    Fields:
        transformer_cls_names_to_wrap: class names of the layers; empty for those that a model of
            transformers names itself (`_no_split_modules`), which are none in other models.
        activation_checkpointing_offload: put `offload_wrapper` around each checkpointed layer.

    Source: accelerate 1.15, `fsdp2_apply_ac`.
    """

    package: ClassVar[str] = "accelerate"
    installs: ClassVar[str] = "'acbench[accelerate]'"

    transformer_cls_names_to_wrap: tuple[str, ...] = ()
    activation_checkpointing_offload: bool = False

    def __post_init__(self) -> None:
        """Refuse names of classes that are no list."""
        OfLibrary.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        take_names(self, "ac.transformer_cls_names_to_wrap", "class names")
