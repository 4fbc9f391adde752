"""`ac=torchtitan`: the activation checkpointing policies of torchtitan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.base import StrategyError, take_names
from strategies.foreign.variant import OfBlocks

_POLICIES = ("full", "selective")


@dataclass(frozen=True, kw_only=True, slots=True)
class Torchtitan(OfBlocks):
    """Let a policy of torchtitan wrap each block: `FullAC`, or `SelectiveAC` with its own list of operators.

    Use when: what torchtitan does is to be compared with ours, on any model; needs the extra `torchtitan`.

    Saved: the inputs of each block; with `selective` the outputs of attention, of every second matmul, and
        of the other operators of torchtitan's list.
    Recomputed: all other operators of each block, once a step and to its end.
    Moved: nothing.

    Fields:
        layers_fqn: FQN of the container (ModuleList, ModuleDict, Sequential) whose children are the blocks.
        policy: `full` or `selective`.
        preserve_rng_state: recompute with the random numbers of forward.
        force_recompute_mm_shapes_by_fqns: parts of names of linears; each matmul with a weight of such a
            shape is recomputed.

    Source: torchtitan 0.3, `torchtitan.distributed.activation_checkpoint`.
    """

    package: ClassVar[str] = "torchtitan"
    installs: ClassVar[str] = "'acbench[torchtitan]'"

    policy: str = "selective"
    preserve_rng_state: bool = True
    force_recompute_mm_shapes_by_fqns: tuple[str, ...] = ("moe.router.gate",)

    def __post_init__(self) -> None:
        """Refuse an unknown policy, and names that are no list."""
        OfBlocks.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        if self.policy not in _POLICIES:
            raise StrategyError("ac.policy", f"must be one of {', '.join(_POLICIES)}, got {self.policy!r}")
        take_names(self, "ac.force_recompute_mm_shapes_by_fqns", "names")

    @property
    def unsplittable(self) -> str:
        """The name of the policy that is torch's selective checkpoint."""
        return "torchtitan's SelectiveAC" if self.policy == "selective" else ""
