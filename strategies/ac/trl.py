"""`ac=trl`: the activation checkpointing and offloading of TRL's trainers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.base import StrategyError
from strategies.foreign.variant import OfLibrary


@dataclass(frozen=True, kw_only=True, slots=True)
class Trl(OfLibrary):
    """Switch on what `SFTTrainer` of TRL switches on, by its own functions.

    Use when: what TRL does is to be compared with ours, on a model of transformers; needs the extra `trl`.

    Saved: the inputs of each layer, and with `selective` the outputs of fused attention.
    Recomputed: all other operators of each layer, once a step.
    Moved: with `activation_offloading` what autograd saves in tensors of at least 1 KiB, but for the head's.

    Attention with dropout is not one fused operator on a CPU, and is then recomputed.

    Fields:
        gradient_checkpointing: recompute layers.
        selective: keep what fused attention makes (`gradient_checkpointing_kwargs={'selective': True}`).
        activation_offloading: TRL's own setting of this name; only next to an accelerator.

    Source: trl 1.16, `trl.models.enable_selective_activation_checkpointing` and
        `trl.models.get_act_offloading_ctx_manager`.
    """

    package: ClassVar[str] = "trl"
    installs: ClassVar[str] = "'acbench[trl]'"

    gradient_checkpointing: bool = True
    selective: bool = True
    activation_offloading: bool = False

    def __post_init__(self) -> None:
        """Refuse a selection of what is recomputed where nothing is."""
        OfLibrary.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        if self.selective and not self.gradient_checkpointing:
            problem = (
                "is true where ac.gradient_checkpointing is false, as trl refuses it; set ac.selective=false"
            )
            raise StrategyError("ac.selective", problem)
