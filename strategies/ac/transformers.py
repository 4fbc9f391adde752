"""`ac=transformers`: what `model.activation_checkpointing_enable()` of transformers does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.base import StrategyError
from strategies.foreign.variant import OfLibrary


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformers(OfLibrary):
    """Switch on the checkpointing of a `transformers` model, by its own method.

    Use when: what a trainer on `transformers` switches on is to be compared with ours; needs the extra `hf`.

    Saved: the inputs of each checkpointed layer, and all activations of the others.
    Recomputed: the forward of ceil(L / every_n_layers) of the L layers, once a step.
    Moved: with `offload` the inputs of checkpointed layers, to pinned host memory and back.

    Fields:
        every_n_layers: checkpoint layers 0, n, 2n, ..., >= 1. `selective_layer` takes n-1, 2n-1, ...
        offload: keep the saved inputs in pinned host memory; only next to an accelerator.
        use_reentrant: use the older implementation of torch, which runs forward without autograd.

    Source: transformers 5.23, `PreTrainedModel.activation_checkpointing_enable`.
    """

    package: ClassVar[str] = "transformers"
    installs: ClassVar[str] = "'acbench[hf]'"

    every_n_layers: int = 1
    offload: bool = False
    use_reentrant: bool = False

    def __post_init__(self) -> None:
        """Refuse a number of layers below 1."""
        OfLibrary.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        if self.every_n_layers < 1:
            raise StrategyError("ac.every_n_layers", f"must be at least 1, got {self.every_n_layers}")
