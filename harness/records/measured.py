"""The measurements of one rank, which it hands over as JSON.

Bytes are integers. FLOPs count multiply and add as two. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from harness.records.bound import MeasuredBound
from harness.records.parity_result import Parity
from harness.records.probed import Probed

PEAK_PARTS = (
    "parameters", "unsharded_parameters", "gradients", "optimizer", "buffers", "inputs", "saved", "outputs",
    "communication", "temporary",
)  # fmt: skip
"""What lives at the peak.

`saved` is what forward has left for backward by then; `communication` are storages that stood before the step
and are reachable from nowhere, such as DDP's buckets; `temporary` is all else that the step has made.
"""

_KEEPING = ("MUST_SAVE", "PREFER_SAVE")
_ANSWERS = (*_KEEPING, "MUST_RECOMPUTE", "PREFER_RECOMPUTE")
"""What torch knows of a policy outside of its compiler, in `_CachingTorchDispatchMode`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocator:
    """The memory of an uninstrumented step, as the allocator saw it.

    Fields:
        source: name of the allocator, or of the meter that stands in for it.
        peak_requested_bytes: highest total of requested bytes; it starts from the bytes of the storages that
            stood before the step, so it compares with the peak of live storages.
        peak_allocated_bytes: highest total of the process after rounding to blocks; `None` on CPU, whose
            allocator has no blocks.
        peak_reserved_bytes: highest total taken from the device; `None` on CPU.
        workspace_bytes: `peak_requested_bytes` above the peak of live storages: private memory of kernels. 0
            where that peak is the higher one: storages may come from elsewhere, such as NumPy's arrays.
        backend_bytes: highest total of what process groups allocated on CPU: temporaries of gloo.
    """

    source: str
    peak_requested_bytes: int
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    workspace_bytes: int | None = None
    backend_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """One storage that forward left for backward.

    Fields:
        op, module: the operator that made it, and the FQN of the module that ran the operator.
        shape, dtype: those of the operator's result.
    """

    bytes: int
    op: str
    module: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LivingTensor:
    """Storages of one kind that a step has made and that live at its peak.

    Fields:
        part: what they are, one of `PEAK_PARTS`.
        op, module: the operator that made them, and the FQN of the module that ran it.
        source: `file:line` of the model's code that did so: the innermost frame outside of torch and acbench.
            What backward made has the line of forward. Empty where no such code was there.
        shape, dtype: those of the operator's result.
    """

    bytes: int
    count: int = 1
    part: str
    op: str
    module: str
    source: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A stay of the step in a module: the highest total of live storages on the device there."""

    bytes: int
    phase: str
    module: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakBytes:
    """The two sums of bytes by which steps are compared.

    Fields:
        saved_bytes: storages made by forward (model and loss) that are alive when it has returned; without
            parameters, buffers, inputs, outputs and the loss. RNG states that checkpointing stashes count.
        peak_bytes: highest total on the device during the step, everything included.
    """

    saved_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBytes(PeakBytes):
    """The bytes of distinct storages in one instrumented step on one rank.

    Fields:
        activation_peak_bytes: highest total of the storages made by forward and backward; without the
            gradients of parameters and FSDP's unsharded parameters.
        parameter_bytes: storages of the parameters at the start of the step (this rank's shards).
        gradient_bytes: storages of the gradients when backward has returned.
        optimizer_bytes: storages of the optimizer's state at the end of the step.
        host_peak_bytes: highest total of storages off the device; on CPU, of what a strategy declares host
            memory.
    """

    activation_peak_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    host_peak_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNumbers(StepBytes):
    """The bytes of a step, and where and how they were seen.

    Fields:
        peak_phase, peak_module: where `peak_bytes` was first reached.
        random_state_bytes: those of `saved_bytes` that are states of random generators.
        allocator: numbers of the allocator for the same step; `None` where it has none.
    """

    peak_phase: str
    peak_module: str
    random_state_bytes: int = 0
    allocator: Allocator | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredMemory(MemoryNumbers):
    """The memory of one training step on one rank.

    Fields:
        largest_saved: the largest of the saved storages, largest first, at most 20.
        saved_by_module: saved bytes by the FQN of the module that made them.
        peak_parts: bytes on the device at the moment of `peak_bytes`, by `PEAK_PARTS`; they sum to it. A part
            without bytes is missing.
        largest_at_peak: the largest, at most 20, of what the step has made and what lives at the moment of
            `peak_bytes`, largest first. What stood before the step is in `peak_parts` alone. Empty of a
            predicted step that is composed of those of models with fewer blocks.
        timeline: highest total on the device in each stay in a module, in order of time; of a long step, the
            highest of neighbouring stays, at most 200 in all.
    """

    largest_saved: tuple[SavedTensor, ...] = ()
    saved_by_module: dict[str, int] = field(default_factory=dict)
    peak_parts: dict[str, int] = field(default_factory=dict)
    largest_at_peak: tuple[LivingTensor, ...] = ()
    timeline: tuple[Moment, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class UncountedOperator:
    """An operator of a step that computes more than its bytes tell, without a formula of FLOPs.

    Fields:
        seconds_share: its part of the step's seconds in [0, 1], by a roofline of bytes: a lower bound.
    """

    count: int
    seconds_share: float


@dataclass(frozen=True, kw_only=True)  # without slots: Python joins two classes with slots to none
class StepFlops:
    """The FLOPs of one step on one rank.

    Fields:
        forward_flops: FLOPs of the model and the loss.
        backward_flops: FLOPs of the backward pass, recomputation included.
    """

    forward_flops: int
    backward_flops: int

    @property
    def step_flops(self) -> int:
        """FLOPs of forward and backward."""
        return self.forward_flops + self.backward_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredWork(StepFlops):
    """The work of one instrumented step on one rank: FLOPs, operators, collectives.

    Fields:
        recomputed_flops: FLOPs of forward operators that ran during the backward pass, beyond those that the
            twin recomputes by itself; all of them where no twin was measured.
        recomputed_ops: number of those operators by name.
        recomputed_seconds_share: seconds of those operators, with and without FLOPs / those of all others of
            the step, as plans count seconds: by FLOPs and bytes, on a machine whose numbers are fixed.
        kernel_recomputed_flops: FLOPs of attention scores that backward kernels compute once more, part of
            `backward_flops`.
        causal_attention_flops: FLOPs of attention with a causal mask, counted as whole squares, forward and
            backward; a kernel may leave half of them out.
        uncounted_ops: operators whose FLOPs are in none of these numbers, by name.
        calls: forward calls by block FQN, recomputation included.
        recomputations: forward calls of all blocks by what asked for them: `forward`; `input`, a backward or
            its part for the gradient of the input; `weight`, its part for the gradients of weights.
        collectives: number of collectives started on this rank, by phase and name.
        collective_bytes: payload of the collectives on this rank, by phase.
        collectives_repeated: by name, how many of them recomputation started, beyond those of the twin's
            recomputation.
        acted_otherwise: the strategy did nothing in this step, and something with other random numbers.
        compiled_graphs: graphs that `torch.compile` made of the model, those of backward among them.
        graph_breaks: number of places at which it gave up a graph, by its reason.
        policy_answers: how often policies of torch's selective checkpointing answered what: names of
            `CheckpointPolicy`, or how else Python writes the answer. Compiled code asks none in a step.
    """

    recomputed_flops: int
    recomputed_ops: dict[str, int]
    recomputed_seconds_share: float = 0.0
    kernel_recomputed_flops: int = 0
    causal_attention_flops: int = 0
    uncounted_ops: dict[str, UncountedOperator] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    recomputations: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)
    collective_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    collectives_repeated: dict[str, int] = field(default_factory=dict)
    acted_otherwise: bool = False
    compiled_graphs: int = 0
    graph_breaks: dict[str, int] = field(default_factory=dict)
    policy_answers: dict[str, int] = field(default_factory=dict)

    def beyond(self, twin: MeasuredWork) -> MeasuredWork:
        """Return the same with what is recomputed beyond what `twin`, the plain model, recomputes."""
        return replace(
            self,
            recomputed_flops=max(0, self.recomputed_flops - twin.recomputed_flops),
            recomputed_ops=_more(self.recomputed_ops, twin.recomputed_ops),
            recomputed_seconds_share=max(0.0, self.recomputed_seconds_share - twin.recomputed_seconds_share),
            collectives_repeated=_more(self.collectives_repeated, twin.collectives_repeated),
            policy_answers=_more(self.policy_answers, twin.policy_answers),
        )

    def policy_notes(self) -> Iterator[str]:
        """Yield what torch does in silence: answers that it takes as others, policies that keep nothing."""
        for answer, count in self.policy_answers.items():
            if answer not in _ANSWERS:
                yield (
                    f"a policy answers {answer} for {count} operators, and torch takes it as "
                    f"PREFER_RECOMPUTE: return one of CheckpointPolicy's {', '.join(_ANSWERS)}, or a bool"
                )
        if self.policy_answers and self.policy_answers.keys().isdisjoint(_KEEPING):
            asked = sum(self.policy_answers.values())
            yield f"a policy was asked about {asked} operators and keeps none of their results"


def _more(counts: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    """Return by how much counts exceed those of the same names among `others`."""
    beyond = {name: count - others.get(name, 0) for name, count in counts.items()}
    return {name: count for name, count in beyond.items() if count > 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredBaseline:
    """The twin, measured the same way."""

    memory: MeasuredMemory
    work: MeasuredWork


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """The counts of the strategy itself in the latest step.

    Fields:
        named: operators and groups that the configuration names.
        never_fired: those of `named` that no operator has matched.
        offloaded_bytes: bytes moved to host memory.
        plan: what the strategy decided; `None` where it decides nothing.
        unneeded: why chunks had nothing to do, where that is as it should be.
    """

    named: tuple[str, ...] = ()
    never_fired: tuple[str, ...] = ()
    offloaded_bytes: int = 0
    chunks: int = 0
    plan: dict[str, Any] | None = None
    unneeded: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTime:
    """Uninstrumented step times of one rank.

    Fields:
        variant_s, twin_s: seconds; equal indices were taken side by side, and on all ranks together.
        devices: number of devices that a step runs on, >= 1; a prediction has the times of one rank of them.
        peak_flops_per_s: peak rate of one device; `None` where unknown, with its source otherwise.
        energy_j: joules a step that this rank's device used; `None` where the driver gives none.
    """

    variant_s: tuple[float, ...]
    twin_s: tuple[float, ...] = ()
    devices: int
    tokens_per_step: int | None = None
    peak_flops_per_s: float | None = None
    peak_flops_per_s_source: str | None = None
    energy_j: float | None = None


AROUND = "regions stand around"
"""How the remark begins that questions which blocks have regions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """The model before any strategy, as its factory made it, and what was changed of it.

    Fields:
        elements: elements of parameters by dtype, before they are sharded.
        computes_in: dtype of most matrix multiplications.
        changed: number of tensors by what `dtype` did to them (`parameters from float32 to bfloat16`).
        inputs: `tokens` of `data`; `samples` that the model draws; `example`, of which each data-parallel
            rank computes all; or `example rows`, which they share.
        remarks: what else was decided about the model.
        replaced: what stands in for what the user's code decides, such as `use_cache: True -> False`.
    """

    elements: dict[str, int]
    computes_in: str
    changed: dict[str, int] = field(default_factory=dict)
    inputs: str = "tokens"
    remarks: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StageAction:
    """An action of a rank's schedule.

    Fields:
        action: stage, kind and micro-batch, such as `2I3`. `F` is a forward, `B` a backward, `I` its part for
            the gradient of the input, `W` its part for the gradients of weights.
        bytes: highest total on the device from the end of the action before to the end of this one.
    """

    action: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StagesInFlight:
    """The stages of one rank of a pipeline, and what its schedule holds of them.

    Fields:
        stages: numbers of the rank's stages.
        in_flight: the most forwards whose input has no gradient yet.
        in_flight_weights: the most forwards whose weights have no gradient of it yet; more than `in_flight`
            where a schedule computes them later.
        bytes_a_microbatch: the most activations that one forward has left, what it returns included.
        forwards: forward calls of each block by what asked for them, as of `MeasuredWork.recomputations`.
        actions: what the rank did, in order of time; of a long step, the highest of neighbouring actions, at
            most 200 in all.
    """

    stages: tuple[int, ...]
    in_flight: int
    in_flight_weights: int
    bytes_a_microbatch: int
    forwards: dict[str, dict[str, int]] = field(default_factory=dict)
    actions: tuple[StageAction, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """A router of experts that ranks share, over all steps of a trial.

    Fields:
        margin: the least distance of a token's worst chosen score to its best other one; rounding of that
            size changes the experts of a token. `None` where a token visits all experts, or scores alone do
            not decide, as with groups of experts or a bias.
        changed_tokens: the most tokens that one recomputation has sent to other experts than forward.
    """

    router: str
    tokens: int
    margin: float | None = None
    changed_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """Everything that one rank reports about a trial that ended well.

    `unbounded` says why there is no `bound`.
    """

    rank: int
    local_rank: int
    memory: MeasuredMemory
    work: MeasuredWork
    pipeline: StagesInFlight | None = None
    routing: tuple[Routing, ...] = ()
    observation: Observed = field(default_factory=Observed)
    baseline: MeasuredBaseline | None = None
    bound: MeasuredBound | None = None
    unbounded: str | None = None
    parity: Parity | None = None
    probes: Probed | None = None
    time: MeasuredTime | None = None
    trained: TrainedModel | None = None
    environment: dict[str, Any] = field(default_factory=dict)
