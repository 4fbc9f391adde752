"""The frozen description of one trial, and its content address."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import ConfigError, require_at_least, require_at_most, require_one_of
from harness.experiment.compilers import (
    COMPILERS,
    ORDERS,
    SCOPES,
    tolerance_of,
    tolerance_of_recomputation,
)
from harness.experiment.data import DataSpec, data_specs
from harness.experiment.mesh import Mesh
from harness.experiment.protocol import Protocol
from harness.models.base import ModelSpec
from harness.records.later_options import without_later, without_models_blocks
from strategies import (
    Strategy,
    Tolerance,
    ac_variants,
    chunk_variants,
    eager_variants,
    shard_variants,
)

if TYPE_CHECKING:
    from strategies.shard.base import Sharding

_OF_COMPILATION = ("compile_order", "compile_scope")
WRAP_ORDERS = ("inside_fsdp", "outside_fsdp", "call_site")
_MOST_ROWS = 2**31 - 1  # no machine holds more; products of two such sizes are still 64-bit numbers
_MAX_SEED = 2**63 - 1  # torch takes no more on every device


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The training of the model: the scalar fields of an experiment.

    Fields:
        wrap_order: order of AC and FSDP. `inside_fsdp`: AC comes before FSDP; a region holds no all-gather.
            `outside_fsdp`: AC comes after FSDP; a region around a unit repeats its all-gather. With
            `ac.module_classes` it stands inside an FSDP1 unit. `call_site`: one region around the call of the
            whole model.
        compile: backend of `torch.compile`. `aot_eager` runs the graphs of forward and backward operator by
            operator, `inductor` generates kernels of them, and `none` compiles nothing.
        compile_order: order of AC and compilation. `ac_first`: compiled code holds the regions, and the
            compiler decides what backward recomputes. `compile_first`: a region holds compiled code, which
            runs once more in backward.
        compile_scope: what is compiled: each of the `blocks`, or the whole `model`.
        optimizer: `adamw` or `sgd`.
        learning_rate: > 0.
        dtype: `fp32`, `bf16` (parameters too), `bf16_mixed` (parameters in fp32), or `own`: each parameter
            and buffer as it is made.
        seed: seed of parameters, data and dropout, in [0, 2**63).
        batch_size: samples a step over all ranks; for language models, sequences.
        sequence_length: tokens a sequence; only language models use it.
        microbatches: forwards and backwards of a step, each with as many of its samples; their gradients
            accumulate to those of the whole batch.
        stage_ac: AC of each stage of a pipeline, by name: that of `ac` with its options, others as they are
            by default; empty: `ac` on all stages.
    """

    wrap_order: str = "inside_fsdp"
    compile: str = "none"
    compile_order: str = "ac_first"
    compile_scope: str = "blocks"
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    dtype: str = "fp32"
    seed: int = 0
    batch_size: int = 8
    sequence_length: int = 128
    microbatches: int = 1
    stage_ac: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse words that are no option, and numbers out of range."""
        require_one_of("wrap_order", self.wrap_order, WRAP_ORDERS)
        require_one_of("optimizer", self.optimizer, ("adamw", "sgd"))
        require_one_of("dtype", self.dtype, ("own", "fp32", "bf16", "bf16_mixed"))
        require_at_least("seed", self.seed, 0)
        require_at_least("batch_size", self.batch_size, 1)
        require_at_least("sequence_length", self.sequence_length, 1)
        require_at_least("microbatches", self.microbatches, 1)
        require_at_most("batch_size", self.batch_size, _MOST_ROWS)
        require_at_most("sequence_length", self.sequence_length, _MOST_ROWS)
        require_one_of("compile", self.compile, COMPILERS)
        require_one_of("compile_order", self.compile_order, ORDERS)
        require_one_of("compile_scope", self.compile_scope, SCOPES)
        require_at_most("seed", self.seed, _MAX_SEED)
        if not self.learning_rate > 0:  # NaN too
            raise ConfigError("learning_rate", f"must be above 0, got {self.learning_rate}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment(Recipe):
    """Everything that decides what a trial computes and how it is measured; nothing else.

    Fields:
        model: what is trained.
        mesh: arrangement of the ranks, with the options of FSDP.
        ac: variant of activation checkpointing.
        chunk: variant of chunking.
        shard: variant of sharding; `none` leaves it to the mesh.
        data: where tokens come from.
        protocol: how often is compared and timed.

    Raises:
        ConfigError: fields that do not go together; the message names one to change.
    """

    model: ModelSpec
    mesh: Mesh
    ac: Strategy
    chunk: Strategy
    shard: Sharding
    data: DataSpec
    protocol: Protocol

    def __post_init__(self) -> None:
        """Refuse choices that do not go together."""
        # slots=True makes a new class, so a bare super() would look at the one it replaced
        Recipe.__post_init__(self)
        if self.batch_size % self.mesh.dp:
            problem = f"must be a multiple of the {self.mesh.dp} data-parallel ranks of {self.mesh.label}"
            raise ConfigError("batch_size", f"{problem}, got {self.batch_size}")
        share = self.batch_size // self.mesh.dp
        if share % self.microbatches:
            of = f"each of the {self.mesh.dp} data-parallel ranks" if self.mesh.dp > 1 else "a step"
            raise ConfigError(
                "microbatches",
                f"must divide the {share} samples of {of}, got {self.microbatches}; make batch_size a "
                f"multiple of {self.mesh.dp * self.microbatches}",
            )
        self._require_parts()
        self._require_reduced_gradients()
        if self.mesh.pp > 1:
            self._require_stages()
        if self.stage_ac:
            self._require_ac_of_stages()
        self._require_ranks_to_shard_over()
        self._require_whole_forwards()
        self._require_one_budget()
        if self.wrap_order == "outside_fsdp" and not self.mesh.is_sharded:
            problem = f"outside_fsdp needs FSDP, but {self.mesh.label} shards nothing"
            raise ConfigError("wrap_order", f"{problem}; use mesh=shard2 or inside_fsdp")
        if self.mesh.fsdp == "fsdp1":
            self._require_readable_parameters()
        if self.is_compiled:
            self._require_compilable()
        elif self.ac.needs_compiler:
            problem = f"none leaves nobody to carry out {self._carried_out}"
            raise ConfigError("compile", f"{problem}; use compile=aot_eager or inductor")

    @property
    def _carried_out(self) -> str:
        executor = " ac.executor=compiled" if self.plans_graphs else ""
        return f"ac={name_of(self.ac)}{executor}"

    @property
    def is_compiled(self) -> bool:
        """True if `torch.compile` stands on the model."""
        return self.compile != "none"

    @property
    def plans_graphs(self) -> bool:
        """True if AC is a partition of each compiled block's graph."""
        return self.ac.needs_compiler and not self.ac.partitioner

    @property
    def is_sharded(self) -> bool:
        """True if a sharding variant decides where operators run."""
        return name_of(self.shard) != "none"

    @property
    def is_placed_as_twin(self) -> bool:
        """True if each rank holds the same parts of parameters as in the twin."""
        return self._saves_memory or self.is_compiled or not self.is_sharded

    @property
    def is_reduced(self) -> bool:
        """True if something is computed in half precision."""
        return self.model.is_reduced() if self.dtype == "own" else self.dtype != "fp32"

    @property
    def recomputes_in_kernels(self) -> bool:
        """True if generated kernels may compute again what forward stored."""
        is_inside = self.ac.needs_compiler or self.compile_order == "ac_first"
        return self.compile == "inductor" and is_inside and name_of(self.ac) != "none"

    @property
    def tolerance(self) -> Tolerance | None:
        """The difference that variant and twin may have: the widest tolerance of what stands between them."""
        return _widest([each for each in self._declared() if each is not None])

    @property
    def files(self) -> tuple[Path, ...]:
        """The user's files that decide what the trial computes."""
        return (*self.model.files(), *self.data.files())

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of a step over all ranks; `None` for a model that reads none, or its own batch."""
        return self.batch_size * self.sequence_length if self.model.reads_tokens() else None

    @property
    def samples_per_forward(self) -> int:
        """Samples that each rank runs forward at once."""
        return self.batch_size // (self.mesh.dp * self.microbatches)

    def twin(self) -> Experiment:
        """Return the baseline of this experiment: the same with `ac=none chunk=none`.

        Where it has neither AC nor chunks, the baseline is the same model uncompiled. Where it is not
        compiled either, the baseline is the model with `shard=none`, as the mesh alone shards it.
        """
        if self._saves_memory:
            return self.plain()
        if self.is_compiled:
            return self.uncompiled()
        return dataclasses.replace(self, shard=shard_variants["none"]())

    def plain(self) -> Experiment:
        """Return this experiment with the same sharding, without recomputation and chunks."""
        return dataclasses.replace(
            self, ac=ac_variants["none"](), chunk=chunk_variants["none"](), stage_ac=()
        )

    def at_stage(self, index: int) -> Experiment:
        """Return this experiment with the AC of one stage on every stage."""
        if not self.stage_ac:
            return self
        name, ac = self.stage_ac[index], self.ac
        if name != name_of(ac):
            variant = ac_variants[name]
            names_blocks = "layers_fqn" in {field.name for field in dataclasses.fields(variant)}
            ac = variant(**({"layers_fqn": self.model.layers_fqn} if names_blocks else {}))
        return dataclasses.replace(self, ac=ac, stage_ac=())

    def dense(self) -> Experiment:
        """Return this experiment on a mesh whose ranks hold whole sequences and all experts.

        Options of stages and of FSDP have their defaults where that mesh has no stages, or no FSDP.
        """
        mesh, usual = self.mesh.dense(), Recipe()
        has_no_fsdp = self.wrap_order == "outside_fsdp" and not mesh.is_sharded
        return dataclasses.replace(
            self,
            mesh=mesh,
            stage_ac=self.stage_ac if mesh.pp > 1 else usual.stage_ac,
            wrap_order=usual.wrap_order if has_no_fsdp else self.wrap_order,
        )

    def uncompiled(self) -> Experiment:
        """Return this experiment with nothing compiled."""
        usual = Recipe()
        return dataclasses.replace(
            self,
            compile=usual.compile,
            compile_order=usual.compile_order,
            compile_scope=usual.compile_scope,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved experiment as JSON values; every group states its `name`."""
        recipe = {field.name: getattr(self, field.name) for field in dataclasses.fields(Recipe)}
        # options of compilation came later, too: the address of what they say nothing of stays
        unsaid = () if self.is_compiled else _OF_COMPILATION
        recipe = without_later("", {name: value for name, value in recipe.items() if name not in unsaid})
        groups = {
            "model": shown_model(self.model),
            "mesh": {"name": self.mesh.label, **self.mesh.asked()},
            "protocol": without_later("protocol", dataclasses.asdict(self.protocol)),
        }
        for group in ("ac", "chunk", "shard"):
            strategy = getattr(self, group)
            options = without_later(group, dataclasses.asdict(strategy))
            groups[group] = {"name": name_of(strategy), **options}
        groups["ac"] = without_models_blocks(groups["ac"], self.model.layers_fqn)
        data = next(name for name, cls in data_specs().items() if cls is type(self.data))
        groups["data"] = {"name": data, **dataclasses.asdict(self.data)}
        resolved: dict[str, Any] = json.loads(json.dumps({**groups, **recipe}))
        return resolved

    def _declared(self) -> Sequence[Tolerance | None]:
        if self._saves_memory:
            of_kernels = tolerance_of_recomputation(is_reduced=self.is_reduced)
            declared = self._tolerance_of(self.ac), self._tolerance_of(self.chunk)
            return (*declared, of_kernels if self.recomputes_in_kernels else None)
        if self.is_compiled:
            may_drop_out = self.model.may_drop_out()
            return (tolerance_of(self.compile, is_reduced=self.is_reduced, may_drop_out=may_drop_out),)
        return (self._tolerance_of(self.shard if self.is_sharded else self.ac),)

    def _tolerance_of(self, strategy: Strategy | Sharding) -> Tolerance | None:
        reduced = strategy.reduced_tolerance if self.is_reduced else None
        return reduced or strategy.tolerance

    @property
    def _saves_memory(self) -> bool:
        return name_of(self.ac) != "none" or name_of(self.chunk) != "none"

    def _require_compilable(self) -> None:
        """Refuse what cannot be compiled, and orders that mean nothing."""
        if self.compile_scope == "blocks" and not self.model.layers_fqn:
            problem = "blocks needs model.layers_fqn"
            raise ConfigError("compile_scope", f"{problem}; name the blocks, or use compile_scope=model")
        if name_of(self.chunk) != "none":
            raise ConfigError(
                "compile",
                f"{self.compile} does not suit chunk={name_of(self.chunk)}, whose programs no compiler "
                "enters; use compile=none or chunk=none",
            )
        self.ac.check_compilation(self.compile_order, self.compile_scope)
        if self.plans_graphs:
            self._require_original_parameters()
        elif self.ac.partitioner:
            self._require_measurable_graphs()
        elif name_of(self.ac) != "none":
            self._require_compile_order()

    def _require_original_parameters(self) -> None:
        """Refuse flat parameters of FSDP1, whose blocks Dynamo makes no graph of."""
        if self.mesh.is_sharded and self.mesh.fsdp == "fsdp1" and not self.mesh.use_orig_params:
            raise ConfigError(
                "mesh.use_orig_params",
                f"must be true for {self._carried_out}: torch compiles no block whose parameters FSDP1 has "
                "made flat, got False; or use mesh.fsdp=fsdp2",
            )

    def _require_measurable_graphs(self) -> None:
        """Refuse graphs that hold a device mesh, of which torch's partitioner cannot tell the bytes."""
        if self.mesh.tp > 1:
            raise ConfigError(
                "mesh.tp",
                f"must be 1 for ac={name_of(self.ac)}, got {self.mesh.tp}: torch's partitioner cannot size "
                "the device mesh in graphs of sharded tensors; use mesh=shard2 or another ac",
            )

    def _require_compile_order(self) -> None:
        """Refuse an order of AC and compilation that their places, or torch, do not allow."""
        if self.compile_order == "ac_first" and self.mesh.tp > 1:
            # AOTAutograd would save the device mesh for backward, and asserts that it is a tensor
            raise ConfigError(
                "compile_order",
                f"ac_first does not suit mesh.tp={self.mesh.tp}: torch does not compile regions of sharded "
                "tensors; use compile_order=compile_first",
            )
        if self.compile_order == "ac_first" and self.wrap_order != "inside_fsdp":
            raise ConfigError(
                "compile_order",
                f"ac_first needs wrap_order=inside_fsdp: with {self.wrap_order} regions stand around what is "
                "compiled; use compile_order=compile_first",
            )
        if (
            self.compile_order == "compile_first"
            and self.compile_scope == "model"
            and self.wrap_order != "call_site"
        ):
            raise ConfigError(
                "compile_order",
                "compile_first with compile_scope=model needs wrap_order=call_site: no block of a compiled "
                "model can be made a region; use compile_scope=blocks or compile_order=ac_first",
            )

    def _require_parts(self) -> None:
        """Refuse parts of sequences and logits that the model, its length or another option does not suit."""
        mesh = self.mesh
        options = {
            "sp": mesh.sp,
            "loss_parallel": mesh.loss_parallel,
            "cp": mesh.cp > 1,
            "ep": mesh.ep > 1,
        }
        option = next((f"mesh.{name}" for name, is_asked in options.items() if is_asked), None)
        if option is None:
            return
        length = self.sequence_length
        if mesh.ep > 1:
            self.model.check_experts(mesh.ep)
            self._require_eager_dispatch()
        if mesh.cp > 1:
            self._require_context()
            self.model.check_context(sequence_length=length, cp=mesh.cp, cp_method=mesh.cp_method, tp=mesh.tp)
            length //= mesh.cp
        if mesh.tp > 1:
            self.model.check_split(
                sequence_length=length, tp=mesh.tp, sp=mesh.sp, loss_parallel=mesh.loss_parallel
            )
        if self.is_sharded:
            problem = f"is part of the mesh's own plan, and shard={name_of(self.shard)} makes another"
            raise ConfigError(option, f"{problem}; use shard=none")
        if self.is_compiled:
            raise ConfigError(option, f"runs eagerly alone, got compile={self.compile}; use compile=none")

    def _require_reduced_gradients(self) -> None:
        """Refuse a time to reduce gradients that means nothing, or at which FSDP1 loses some."""
        if self.mesh.sync == "last" and self.microbatches == 1:
            problem = "last has no effect with one micro-batch"
            raise ConfigError("mesh.sync", f"{problem}; use microbatches=2, or mesh.sync=each")
        if self.mesh.sync == "last" and self.mesh.is_sharded and self.ac.step_planner is not None:
            raise ConfigError(
                "mesh.sync",
                f"must be each for ac={name_of(self.ac)} with FSDP, got last: a plan counts no unsharded "
                "gradients that wait for the last micro-batch; or use mesh=ddp2",
            )
        # the documentation of FullyShardedDataParallel: not "outside no_sync() when using CPU offloading"
        is_offloaded = self.mesh.fsdp == "fsdp1" and self.mesh.cpu_offload
        if is_offloaded and self.mesh.sync == "each" and self.microbatches > 1:
            raise ConfigError(
                "mesh.sync",
                "must be last for fsdp1 with mesh.cpu_offload: torch supports no accumulation of gradients "
                "that are reduced each time, got each; or use mesh.fsdp=fsdp2",
            )

    def _require_stages(self) -> None:
        """Refuse what no stage of a pipeline can have, and micro-batches that its schedule cannot order."""
        mesh = self.mesh
        stages = f"mesh.pp={mesh.pp} cuts the model into stages"
        if self.wrap_order == "call_site":
            problem = f"{stages}, and call_site makes one region of the whole"
            raise ConfigError("wrap_order", f"{problem}; use inside_fsdp, or mesh.pp=1 without its options")
        self._require_compiled_blocks(stages)
        for group in ("chunk", "shard"):
            if (chosen := name_of(getattr(self, group))) != "none":
                problem = f"{stages}, and {group}={chosen} plans the whole"
                raise ConfigError(group, f"{problem}; use {group}=none, or mesh.pp=1 without its options")
        if mesh.cp > 1:
            self._require_parts_in_stages(stages)
        if mesh.ep > 1 and self.ac.step_planner is not None:
            problem = f"{stages}, and no plan of ac={name_of(self.ac)} was proven with experts in them"
            raise ConfigError("mesh.ep", f"{problem}; use mesh.ep=1 or mesh.pp=1, each without its options")
        if mesh.sync == "last":
            problem = "last has no effect: schedules reduce gradients once, after all micro-batches"
            raise ConfigError("mesh.sync", f"{problem}; leave it at each")
        if getattr(self.ac, "host_gib", 0):
            problem = f"must be 0: {stages}, and plans of stages move nothing to the host"
            given = f"{self.ac.host_gib:g}"  # type: ignore[attr-defined]  # of those that have it
            raise ConfigError("ac.host_gib", f"{problem}, got {given}; or use mesh.pp=1 without its options")
        if mesh.splits_backward:
            self._require_splittable_backward()
        self._require_ordered_microbatches()

    def _require_compiled_blocks(self, stages: str) -> None:
        """Refuse compiled code that is more than a block of a stage, and plans that see one call of it."""
        if self.is_compiled and self.compile_scope != "blocks":
            problem = f"must be blocks: {stages}, whose forwards end in the middle of the model's"
            raise ConfigError("compile_scope", f"{problem}, got {self.compile_scope}; or use compile=none")
        if self.plans_graphs:
            problem = f"must be eager: {stages}, whose calls in flight no plan of one graph counts"
            raise ConfigError("ac.executor", f"{problem}, got compiled; or use mesh.pp=1 without its options")
        if self.ac.partitioner and self.model.may_drop_out():
            # torch's partitioner runs dropout again in backward, and leaves the generator where that ends
            problem = f"{name_of(self.ac)} draws random numbers in backward: {stages}, where a later forward"
            remedy = "use ac=full, or no dropout"
            raise ConfigError("ac", f"{problem} of another micro-batch finds them drawn; {remedy}")
        if self.compile == "inductor" and self.mesh.splits_backward:
            problem = f"inductor does not suit {self.mesh.pp_schedule}, whose two parts of a backward run"
            remedy = "use aot_eager, mesh.pp_split_backward=false or mesh.pp_schedule=1f1b"
            raise ConfigError("compile", f"{problem} generated code twice; {remedy}")

    def _require_parts_in_stages(self, stages: str) -> None:
        """Refuse parts of sequences that a stage does not take.

        Args:
            stages: the beginning of what a refusal says.
        """
        if not self.model.has_outputs_of_parts:
            problem = f"{stages}, and {self.model.name!r} cuts sequences inside of the first"
            raise ConfigError("mesh.cp", f"{problem}; use mesh.cp=1 or mesh.pp=1, each without its options")
        if self.ac.step_planner is not None:
            problem = f"{stages}, and ac={name_of(self.ac)} plans them for whole sequences"
            raise ConfigError("mesh.cp", f"{problem}; use mesh.cp=1 or mesh.pp=1, each without its options")

    def _require_ac_of_stages(self) -> None:
        """Refuse a list that is not one variant a stage, each of which could stand on all stages."""
        own, count = name_of(self.ac), len(self.stage_ac)
        if count != self.mesh.stages or self.mesh.pp == 1:
            stages = f"{self.mesh.stages} stages" if self.mesh.pp > 1 else "no stages, which mesh=pp2 has"
            raise ConfigError("stage_ac", f"must name one variant a stage, got {count}; there are {stages}")
        if self.ac.step_planner is not None:
            problem = f"must be empty for ac={own}, which plans for each stage"
            raise ConfigError(
                "stage_ac", f"{problem}, got {', '.join(map(str, self.stage_ac))}; leave it out"
            )
        planless = [
            name for name, each in eager_variants.items() if each.step_planner is Strategy.step_planner
        ]
        for name in self.stage_ac:
            if not isinstance(name, str) or name not in (own, *planless):
                problem = f"must be of {', '.join(dict.fromkeys((own, *planless)))}, got {name!r}"
                remedy = "; ac=budget plans for each stage, without stage_ac" if name == "budget" else ""
                raise ConfigError("stage_ac", f"{problem}{remedy}")
        if own == "none" or own not in self.stage_ac:
            other = next((name for name in self.stage_ac if name != "none"), None)
            problem = f"must have {own} for a stage" if own != "none" else "has no effect with ac=none"
            remedy = "leave it out" if other is None else f"use ac={other}"
            raise ConfigError("stage_ac", f"{problem}, got {', '.join(self.stage_ac)}; {remedy}")
        for index in range(count):
            self.at_stage(index)  # each could stand on all stages

    def _require_splittable_backward(self) -> None:
        """Refuse regions that a backward in two parts asks twice, and gradients that nobody would add up."""
        schedule, options = self.mesh.pp_schedule, "mesh.pp_split_backward=false or mesh.pp_schedule=1f1b"
        if getattr(self.ac, "use_reentrant", False):
            problem = f"true does not suit {schedule}, which asks for gradients of inputs by autograd.grad"
            raise ConfigError("ac.use_reentrant", f"{problem}; use {options}")
        if self.ac.unsplittable:
            who = self.ac.unsplittable
            problem = f"{who} does not suit {schedule}, whose two parts of a backward ask it twice"
            raise ConfigError("ac", f"{problem}: it recomputes a region once; use {options}, or ac=full")
        if self.mesh.is_sharded and self.mesh.reshard_after_forward:
            problem = (
                f"true does not suit {schedule}: torch looks for the weights of a backward in two parts "
            )
            problem += "among those that FSDP has freed, and loses their gradients"
            if self.mesh.dp_shard == 1 and self.mesh.cp > 1:
                problem += f"; ranks of mesh.cp={self.mesh.cp} share weights by FSDP here"
            raise ConfigError("mesh.reshard_after_forward", f"{problem}; use false, or {options}")
        if self.mesh.gradient_ranks > 1 and not self.mesh.is_sharded:
            problem = f"does not suit {schedule}: DDP sees no gradients that autograd.grad returns"
            raise ConfigError("mesh.dp_replicate", f"{problem}; use {options}, or mesh.dp_shard")

    def _require_ordered_microbatches(self) -> None:
        """Refuse numbers of micro-batches for which a schedule has no order."""
        schedule, pp, count = self.mesh.pp_schedule, self.mesh.pp, self.microbatches
        if schedule == "1f1b" and count < pp:
            problem = f"must be at least the {pp} stages for mesh.pp_schedule=1f1b, got {count}"
            raise ConfigError("microbatches", f"{problem}; use mesh.pp_schedule=gpipe, or more")
        rounds = max(1, count // pp)
        if schedule in {"interleaved", "zero_bubble"} and count % rounds:
            problem = (
                f"must be a multiple of the {rounds} rounds that {schedule} makes of them over {pp} ranks"
            )
            raise ConfigError("microbatches", f"{problem}, got {count}; use a multiple of {pp}")

    def _require_eager_dispatch(self) -> None:
        """Refuse what plans operators whose sizes depend on where tokens go."""
        if name_of(self.chunk) != "none":
            problem = f"must be none for mesh.ep={self.mesh.ep}, which exchanges tokens between operators"
            raise ConfigError("chunk", f"{problem}, got {name_of(self.chunk)}")
        if self.ac.step_planner is not None and self.mesh.ep_capacity is None:
            problem = (
                f"null does not suit ac={name_of(self.ac)}, which plans sizes of one step: those of experts"
            )
            takes_one = self.mesh.cp == self.mesh.pp == 1
            remedy = f"{'set one, or ' if takes_one else ''}use ac=full or selective_op"
            raise ConfigError("mesh.ep_capacity", f"{problem} without a capacity change with each; {remedy}")

    def _require_context(self) -> None:
        """Refuse what plans a step of whole sequences."""
        if name_of(self.chunk) != "none":
            raise ConfigError(
                "mesh.cp",
                f"must be 1 for chunk={name_of(self.chunk)}, which plans operators and no collectives "
                f"between them, got {self.mesh.cp}; use chunk=none",
            )
        if self.mesh.cp_method == "torch":
            self._require_context_of_torch()

    def _require_context_of_torch(self) -> None:
        """Refuse what torch's own ring of attention computes wrongly, or not at all, and plans of it."""
        if self.ac.step_planner is not None:
            problem = f"torch does not suit ac={name_of(self.ac)}: no plan was proven with torch's own ring"
            raise ConfigError("mesh.cp_method", f"{problem}; use gather, ring or ulysses")
        if self.model.may_drop_out():
            # each piece of a ring draws its weights, and the state of the last alone is saved for backward
            problem = "torch does not suit dropout: its backward drops other weights than forward did"
            raise ConfigError("mesh.cp_method", f"{problem}; use gather, ring or ulysses, or no dropout")
        if not self.model.has_outputs_of_parts:
            problem = f"torch does not suit {self.model.name!r}, whose last part is padded"
            raise ConfigError("mesh.cp_method", f"{problem}; use gather, ring or ulysses")

    def _require_ranks_to_shard_over(self) -> None:
        """Refuse sharding of operators on a mesh whose ranks share no tensors."""
        if self.is_sharded and self.mesh.tp == 1:
            problem = f"must be above 1 for shard={name_of(self.shard)}, which shards over its ranks, got 1"
            raise ConfigError("mesh.tp", f"{problem}; use mesh=tp2 or shard=none")

    def _require_whole_forwards(self) -> None:
        """Refuse chunks on meshes that take a forward apart."""
        if name_of(self.chunk) != "none" and self.mesh.tp > 1:
            raise ConfigError(
                "mesh.tp",
                f"must be 1 for chunk={name_of(self.chunk)}, which plans operators of whole tensors and no "
                f"collectives between them, got {self.mesh.tp}; use mesh=shard2 or chunk=none",
            )

        if name_of(self.chunk) != "none" and self.mesh.is_sharded and self.mesh.fsdp == "fsdp1":
            raise ConfigError(
                "mesh.fsdp",
                f"must be fsdp2 for chunk={name_of(self.chunk)}: FSDP1 hides the shapes of parameters from a "
                "forward that is planned for other inputs; leave it out or use chunk=none",
            )

    def _require_one_budget(self) -> None:
        if name_of(self.chunk) == "none":
            return
        plans = self.ac.step_planner is not None
        if plans and not self.chunk.follows:
            problem = f"ac={name_of(self.ac)} plans blocks and chunks for one budget, its own"
            remedy = "use chunk=budget without chunk.budget_mib and chunk.fraction, or chunk=none"
            raise ConfigError("chunk", f"{problem}; {remedy}")
        if self.chunk.chunk_offers is not None and not plans:
            problem = "give one of chunk.budget_mib and chunk.fraction, got neither"
            raise ConfigError("chunk", f"{problem}; without one chunk=budget follows ac=budget")

    def _require_readable_parameters(self) -> None:
        """Refuse an AC variant that reads parameters which FSDP1 has flattened or freed."""
        if self.wrap_order == "outside_fsdp" and self.ac.reads_parameters:
            raise ConfigError(
                "wrap_order",
                f"outside_fsdp does not suit ac={name_of(self.ac)}, which reads the shapes of parameters "
                "that fsdp1 flattens; use inside_fsdp or mesh.fsdp=fsdp2",
            )
        reentrant = getattr(self.ac, "use_reentrant", False)
        resharding = self.mesh.is_sharded and self.mesh.sharding_strategy != "NO_SHARD"
        inside = self.wrap_order == "inside_fsdp" or bool(getattr(self.ac, "module_classes", None))
        if reentrant and resharding and inside:
            raise ConfigError(
                "ac.use_reentrant",
                "true inside a sharded FSDP1 unit reads weights that the unit frees after its first "
                "backward; use ac.use_reentrant=false, wrap_order=outside_fsdp or "
                "mesh.sharding_strategy=NO_SHARD",
            )


def shown_model(model: ModelSpec) -> dict[str, Any]:
    """Return family and options of a model; one with a default only where it has another value.

    So an option that comes later leaves the address of what does not ask for it.
    """
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(model)
    }
    options = dataclasses.asdict(model)
    asked = {name: value for name, value in options.items() if value != defaults[name]}
    return {"family": name_of(model), **asked}


def _widest(declared: Sequence[Tolerance]) -> Tolerance | None:
    """Return the tolerance that all of `declared` keep; `None` where there are none."""
    if not declared:
        return None
    return Tolerance(
        relative=max(each.relative for each in declared),
        parameters=max(each.parameters or each.relative for each in declared),
        floor=max(each.floor for each in declared),
        reason="; ".join(each.reason for each in declared),
    )


def name_of(spec: object) -> str:
    """Return the name a specification is found by: that of the module that defines it."""
    return type(spec).__module__.rpartition(".")[2]
