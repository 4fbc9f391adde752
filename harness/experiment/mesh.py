"""Device meshes: the number of ranks, their arrangement, and the options of FSDP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from harness.errors import ConfigError, require_at_least, require_one_of
from harness.records.later_options import without_later
from harness.records.record import RANK_SIZES

CP_METHODS = ("gather", "ring", "ulysses", "torch")
SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
SIZES = (*RANK_SIZES, "ep")
"""Options that say how ranks are arranged, and make the name of a mesh."""

_HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
_FSDP_OPTIONS = ("fsdp", "reshard_after_forward", "cpu_offload", "use_orig_params", "sharding_strategy")
_TP_OPTIONS = ("sp", "loss_parallel")
_STAGES_PER_RANK: Mapping[str, tuple[int, int | None]] = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved": (2, None),
    "zero_bubble": (1, None),
    "zbv": (2, 2),
}
"""Schedules of a pipeline: the fewest and the most stages that a rank has under each."""

_SPLITTING = ("zero_bubble", "zbv")
"""Schedules that ask for the gradients of a stage's inputs first, and for those of its weights later."""

_OF_PIPELINES = ("pp", "pp_schedule", "pp_stages_per_rank", "pp_split_backward")


class Coordinate(NamedTuple):
    """The place of a rank along each dimension of its mesh."""

    dp_replicate: int
    pp: int
    dp_shard: int
    cp: int
    tp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The arrangement of ranks as `dp_replicate x pp x dp_shard x cp x tp`, row-major.

    Fields:
        dp_replicate: replicas of the (sharded) model; alone it is DDP.
        dp_shard: ranks that share parameters, gradients and optimizer state (FSDP).
        tp: ranks that share every column- and row-parallel linear (Megatron, arXiv:1909.08053).
        cp: ranks that hold parts of each sequence; they reduce gradients as ranks with other samples do.
        cp_method: `gather`: each rank gathers all keys and values. `ring`: they are passed on from rank to
            rank (arXiv:2310.01889). `ulysses`: ranks exchange parts of the sequence for heads
            (arXiv:2309.14509). `torch`: the ring of `torch.distributed.tensor.experimental`, on CUDA.
        ep: ranks that share the experts of each mixture, and send tokens to them and back (Lepikhin et al.
            2020, arXiv:2006.16668). They are ranks of `dp_shard x cp`, and no others: each stage of a
            pipeline shares its own experts, and so does each place along `tp`.
        ep_capacity: tokens that an expert takes from each rank, as a multiple of an equal share; choices
            beyond are dropped. `None` drops none.
        sp: ranks of `tp` hold the residual in parts of the sequence between those linears (Korthikanti et al.
            2022, arXiv:2205.05198).
        loss_parallel: ranks of `tp` hold logits in parts of the vocabulary, and the loss is computed on them.
        pp: ranks that hold successive stages of the model, and pass micro-batches on.
        pp_schedule: order of the micro-batches. `gpipe` (arXiv:1811.06965): all forwards, then all backwards.
            `1f1b` (PipeDream, arXiv:1806.03377): a backward as soon as there is one. `interleaved`
            (arXiv:2104.04473): the same with several stages a rank. `zero_bubble` and `zbv`
            (arXiv:2401.10241): gradients of inputs first, those of weights where a rank would wait.
        pp_stages_per_rank: stages of a rank; null is what the schedule usually has: 2 of `interleaved`,
            `zero_bubble` and `zbv`, else 1.
        pp_split_backward: `false` lets a schedule that splits backward take it as a whole, at the place of
            the gradients of inputs.
        fsdp: `fsdp2` (`fully_shard`) or `fsdp1` (`FullyShardedDataParallel`).
        reshard_after_forward: FSDP2 frees a block's parameters between its forward and its backward. In a
            pipeline it gathers them for each micro-batch; `mesh=shard2_pp2` keeps them, as torchtitan does.
        cpu_offload: FSDP keeps parameters, gradients and optimizer state in host memory.
        use_orig_params: FSDP1 exposes the plain parameters in place of flat ones.
        sharding_strategy: FSDP1's `ShardingStrategy` by name.
        nodes: machines; ranks are spread over them evenly.
        device: `auto` (CUDA where there is one), `cuda` (NCCL) or `cpu` (gloo).
        sync: data-parallel ranks reduce gradients after `each` micro-batch of a step, or after the `last` one
            alone; until then each rank holds its own, unsharded.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    cp_method: str = "gather"
    ep: int = 1
    ep_capacity: float | None = None
    sp: bool = False
    loss_parallel: bool = False
    pp: int = 1
    pp_schedule: str = "1f1b"
    pp_stages_per_rank: int | None = None
    pp_split_backward: bool = True
    fsdp: str = "fsdp2"
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    use_orig_params: bool = True
    sharding_strategy: str = "FULL_SHARD"
    nodes: int = 1
    device: str = "auto"
    sync: str = "each"

    def __post_init__(self) -> None:
        """Refuse sizes, words and combinations that make no mesh."""
        for name in (*SIZES, "nodes"):
            require_at_least(f"mesh.{name}", getattr(self, name), 1)
        require_one_of("mesh.fsdp", self.fsdp, ("fsdp2", "fsdp1"))
        require_one_of("mesh.sync", self.sync, ("each", "last"))
        require_one_of("mesh.cp_method", self.cp_method, CP_METHODS)
        require_one_of("mesh.pp_schedule", self.pp_schedule, tuple(_STAGES_PER_RANK))
        require_one_of("mesh.device", self.device, ("auto", "cuda", "cpu"))
        require_one_of("mesh.sharding_strategy", self.sharding_strategy, SHARDING_STRATEGIES)
        if self.world_size % self.nodes:
            problem = f"must divide the {self.world_size} ranks of {self.label}, got {self.nodes}"
            raise ConfigError("mesh.nodes", problem)
        self._require_pipeline()
        self._require_meaning()
        self._require_experts()
        if self.fsdp == "fsdp1":
            self._require_fsdp1()

    @property
    def world_size(self) -> int:
        """Ranks of the whole trial."""
        return self.gradient_ranks * self.pp * self.tp

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        return self.world_size // self.nodes

    @property
    def dp(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which gradients are averaged: those with other samples, or other parts of them."""
        return self.dp * self.cp

    @property
    def stages(self) -> int:
        """Stages of the whole model, over all ranks of `pp`; 1 without a pipeline."""
        usual = 1 if self.pp_schedule in {"gpipe", "1f1b"} else 2
        return 1 if self.pp == 1 else self.pp * (self.pp_stages_per_rank or usual)

    @property
    def splits_backward(self) -> bool:
        """True if gradients of inputs and of weights are taken in two parts."""
        return self.pp > 1 and self.pp_schedule in _SPLITTING and self.pp_split_backward

    def coordinate(self, rank: int) -> Coordinate:
        """Return the place of a rank of the trial."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        rest, dp_shard = divmod(rest, self.dp_shard)
        dp_replicate, pp = divmod(rest, self.pp)
        return Coordinate(dp_replicate, pp, dp_shard, cp, tp)

    def kind(self, rank: int) -> int:
        """Return which of the unlike steps a rank takes, from 0 on in the order of ranks.

        Stages have other blocks, in a causal ring a later part meets the keys of more parts, and ranks that
        share experts have others each.
        """
        steps = list(dict.fromkeys(map(self._step, range(self.world_size))))
        return steps.index(self._step(rank))

    def first_ranks(self, *, is_balanced: bool = False) -> tuple[int, ...]:
        """Return the first rank of each kind.

        Args:
            is_balanced: whether experts count by their sizes alone.
        """
        steps = [self._step(rank, is_balanced=is_balanced) for rank in range(self.world_size)]
        return tuple(steps.index(step) for step in dict.fromkeys(steps))

    def _step(self, rank: int, *, is_balanced: bool = False) -> tuple[int, int, int]:
        """Return what tells a rank's step from unlike ones: its stages, its part, and its experts."""
        at, data_rank = self.coordinate(rank), self.data_rank(rank)
        part = at.cp if self.cp_method == "ring" else 0
        if self.ep == 1 or is_balanced:
            return at.pp, part, 0
        # ranks that share experts are next to each other
        return at.pp, part, data_rank % self.ep

    @property
    def most_loaded(self) -> int:
        """The rank whose step takes most, of those without stages: the first, but in a ring the last part's.

        Its queries see the keys of all parts.
        """
        return (self.cp - 1) * self.tp if self.cp_method == "ring" else 0

    def data_rank(self, rank: int) -> int:
        """Return which samples a rank reads, and which part of them: `samples * cp + part`.

        Ranks of one `pp` or `tp` group read the same.
        """
        at = self.coordinate(rank)
        return (at.dp_replicate * self.dp_shard + at.dp_shard) * self.cp + at.cp

    def dense(self) -> Mesh:
        """Return the mesh whose ranks hold whole sequences and all experts.

        Where ranks held parts of sequences it has no pipeline and no options that nothing would read there.
        """
        if self.cp == 1:
            return replace(self, ep=1, ep_capacity=None)
        defaults: dict[str, Any] = {each.name: each.default for each in fields(self)}
        of_parts = ("cp", "cp_method", "ep", "ep_capacity", "nodes", *_OF_PIPELINES)
        unread = (*of_parts, "sync", *_FSDP_OPTIONS)
        whole = replace(self, **{name: defaults[name] for name in unread})
        read = _FSDP_OPTIONS if whole.is_sharded else ()
        if whole.dp > 1:
            read = (*read, "sync")
        return replace(whole, **{name: getattr(self, name) for name in read})

    def without_pipeline(self) -> Mesh:
        """Return the mesh whose ranks hold the whole model, without options that nothing would read there."""
        defaults: dict[str, Any] = {each.name: each.default for each in fields(self)}
        return replace(self, **{name: defaults[name] for name in _OF_PIPELINES})

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages of a rank of `pp`: every `pp`-th, and for `zbv` one going there and one back."""
        if self.pp_schedule == "zbv":
            return pp_rank, self.stages - 1 - pp_rank
        return tuple(range(pp_rank, self.stages, self.pp))

    @property
    def is_sharded(self) -> bool:
        """True if FSDP wraps the model; replicas of a tensor-parallel model are FSDP shards of one.

        So are ranks that hold parts of sequences and experts of their own, and ranks that hold parts of
        sequences under a backward in two parts, which DDP does not see.
        """
        are_apart = self.tp * self.ep > 1 or (self.cp > 1 and self.splits_backward)
        return self.dp_shard > 1 or (self.gradient_ranks > 1 and are_apart)

    @property
    def label(self) -> str:
        """The mesh as the presets spell it: `single`, `ddp2`, `hsdp2x2`, `shard2_tp2`, `shard2_pp2`."""
        if self.dp_replicate > 1 and self.dp_shard > 1:
            data = [f"hsdp{self.dp_replicate}x{self.dp_shard}"]
        elif self.dp_replicate > 1:
            data = [f"ddp{self.dp_replicate}"]
        else:
            are_one = self.dp_shard == self.ep and self.cp == 1  # ep2: shards are the ranks of experts
            data = [f"shard{self.dp_shard}"] if self.dp_shard > 1 and not are_one else []
        stages = [f"pp{self.pp}"] if self.pp > 1 else []
        tensor = [f"{'sp_' if self.sp else ''}tp{self.tp}"] if self.tp > 1 else []
        context = [f"cp{self.cp}"] if self.cp > 1 else []
        experts = [f"ep{self.ep}"] if self.ep > 1 else []
        return "_".join(data + stages + context + experts + tensor) or "single"

    def asked(self) -> dict[str, Any]:
        """Return all options; one that came later only where it has another value than its default.

        Of a pipeline all its own are returned, so that points of several schedules show which is which.
        """
        defaults = {field.name: field.default for field in fields(self)}
        unsaid = () if self.pp > 1 else _OF_PIPELINES
        options = without_later("mesh", asdict(self)).items()
        return {name: value for name, value in options if name not in unsaid or value != defaults[name]}

    def _require_meaning(self) -> None:
        """Refuse an option that nothing would read: two trials that differ in it would be one."""
        defaults = {field.name: field.default for field in fields(self)}
        unread = next((name for name in _TP_OPTIONS if getattr(self, name) and self.tp == 1), None)
        if unread is not None:
            raise ConfigError(f"mesh.{unread}", f"needs mesh.tp above 1, got {self.label}; use mesh=tp2")
        if self.cp == 1 and self.cp_method != defaults["cp_method"]:
            raise ConfigError("mesh.cp_method", f"needs mesh.cp above 1, got {self.label}; use mesh=cp2")
        if self.cp_method == "torch" and self.device == "cpu":
            problem = "torch has no rules for kernels of the CPU, got mesh.device=cpu"
            raise ConfigError("mesh.cp_method", f"{problem}; use gather, ring or ulysses")
        if self.ep == 1 and self.ep_capacity is not None:
            raise ConfigError("mesh.ep_capacity", f"needs mesh.ep above 1, got {self.label}; use mesh=ep2")
        changed = [name for name in _FSDP_OPTIONS if getattr(self, name) != defaults[name]]
        if changed and not self.is_sharded:
            problem = f"is an option of FSDP, but {self.label} shards nothing"
            if self.pp > 1 and self.cp > 1:
                problem += f" under {self.pp_schedule}; leave it out, or"
            else:
                problem += ";"
            raise ConfigError(f"mesh.{changed[0]}", f"{problem} use mesh=shard2")
        if self.sync != "each" and self.gradient_ranks == 1:
            problem = f"last needs data-parallel ranks, which reduce gradients, but {self.label} has one"
            raise ConfigError("mesh.sync", f"{problem}; use mesh=ddp2")
        self._require_options_of_its_fsdp(changed)

    def _require_pipeline(self) -> None:
        """Refuse options of a pipeline where there is none, and what its schedule or torch cannot do."""
        if self.pp == 1:
            defaults = {field.name: field.default for field in fields(self)}
            changed = [name for name in _OF_PIPELINES[1:] if getattr(self, name) != defaults[name]]
            if changed:
                problem = f"is an option of pipelines, but {self.label} has one stage"
                raise ConfigError(f"mesh.{changed[0]}", f"{problem}; leave it out, or use mesh=pp2")
            return
        schedule, asked = self.pp_schedule, self.pp_stages_per_rank
        fewest, most = _STAGES_PER_RANK[schedule]
        if asked is not None and not fewest <= asked <= (most or asked):
            wanted = fewest if most == fewest else f"at least {fewest}"
            problem = f"must be {wanted} for mesh.pp_schedule={schedule}"
            raise ConfigError("mesh.pp_stages_per_rank", f"{problem}, got {asked}")
        if not self.pp_split_backward and schedule not in _SPLITTING:
            problem = f"false has no effect: {schedule} takes backward as a whole"
            raise ConfigError("mesh.pp_split_backward", f"{problem}; leave it at true")
        if self.is_sharded and self.fsdp == "fsdp1":
            problem = "fsdp1 does not compose with pp > 1: torch's stages know fsdp2 and DDP"
            raise ConfigError("mesh.fsdp", f"{problem}; use mesh.fsdp=fsdp2")

    def _require_experts(self) -> None:
        """Refuse ranks that cannot share experts, and a capacity that is none."""
        if self.ep == 1:
            return
        shards = self.dp_shard * self.cp
        if shards % self.ep:
            problem = f"must divide the {shards} ranks of mesh.dp_shard x mesh.cp, which share the experts"
            fewer = f"mesh.ep={shards}, or " if shards > 1 else ""
            raise ConfigError("mesh.ep", f"{problem}, got {self.ep}; use {fewer}mesh.dp_shard={self.ep}")
        if self.ep % self.cp:
            problem = f"must be a multiple of mesh.cp, {self.cp}, whose ranks share experts too"
            raise ConfigError("mesh.ep", f"{problem}, got {self.ep}; use mesh.ep={shards}")
        if self.sp:
            problem = f"does not suit mesh.ep={self.ep}, whose routers read whole sequences"
            raise ConfigError("mesh.sp", f"{problem}; use false")
        if self.fsdp == "fsdp1":
            raise ConfigError("mesh.fsdp", "fsdp1 does not compose with ep > 1; use mesh.fsdp=fsdp2")
        if self.ep_capacity is None:
            return
        if not 0 < self.ep_capacity < math.inf:  # NaN neither
            problem = f"must be above 0, or null to drop no token, got {self.ep_capacity}"
            raise ConfigError("mesh.ep_capacity", problem)
        if self.cp > 1:
            problem = f"must be null for mesh.cp={self.cp}, whose parts of a sequence would drop other tokens"
            remedy = "or use mesh.cp=1 without its options"
            raise ConfigError("mesh.ep_capacity", f"{problem}, got {self.ep_capacity}; {remedy}")

    def _require_options_of_its_fsdp(self, changed: Sequence[str]) -> None:
        """Refuse an option of one FSDP with the other; `changed` are those that have another value."""
        if self.fsdp == "fsdp2" and "sharding_strategy" in changed:
            problem = f"belongs to fsdp1, got {self.sharding_strategy} with fsdp2"
            raise ConfigError("mesh.sharding_strategy", f"{problem}; use mesh.reshard_after_forward")
        if self.fsdp == "fsdp2" and "use_orig_params" in changed:
            problem = "belongs to fsdp1: fsdp2 always has them"
            raise ConfigError("mesh.use_orig_params", f"{problem}; use mesh.fsdp=fsdp1")
        if self.fsdp == "fsdp1" and "reshard_after_forward" in changed:
            raise ConfigError(
                "mesh.reshard_after_forward",
                "belongs to fsdp2; with fsdp1 use mesh.sharding_strategy=SHARD_GRAD_OP",
            )

    def _require_fsdp1(self) -> None:
        """Refuse what FSDP1 cannot do on this mesh."""
        if self.cp > 1:
            raise ConfigError("mesh.fsdp", "fsdp1 does not compose with cp > 1; use mesh.fsdp=fsdp2")
        if self.tp > 1:
            raise ConfigError("mesh.fsdp", "fsdp1 does not compose with tp > 1; use mesh.fsdp=fsdp2")
        hybrid = self.sharding_strategy in _HYBRID
        if self.is_sharded and hybrid != (self.dp_replicate > 1):
            raise ConfigError(
                "mesh.sharding_strategy",
                f"{self.sharding_strategy} does not fit {self.label}; {' and '.join(_HYBRID)} need "
                "dp_replicate > 1 and dp_shard > 1, the others dp_replicate of 1",
            )
