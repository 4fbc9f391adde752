"""The life of a trial inside one rank: build, instrument, prove parity, time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it when it is made: here, once for all ranks
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness.experiment.experiment import Experiment
from harness.experiment.protocol import Protocol
from harness.measure.environment import describe
from harness.measure.memory.allocator import install
from harness.measure.nvml import energy_meter
from harness.measure.routing import RoutingLog
from harness.measure.speed.peak_rates import peak_flops
from harness.measure.speed.timing import PairedTimes, clock_for, consecutive, interleave
from harness.measure.step import StepReport, allocator_truth, instrument
from harness.measure.step_trace import traced
from harness.models.base import Batch
from harness.ranks.entry import RankContext
from harness.records.fields import encode
from harness.records.measured import MeasuredBaseline, MeasuredTime, Observed, RankResult
from harness.records.parity_result import Parity
from harness.records.probed import Probed
from harness.records.statistics import is_narrow
from harness.records.step_trace import write_step
from harness.trial.act import Act
from harness.trial.asking import TrialModels
from harness.trial.assemble import Assembled, assemble
from harness.trial.batches import batches
from harness.trial.build import Build
from harness.trial.compilation import compiling
from harness.trial.distance import measured_bound, unbounded
from harness.trial.kept_plans import plans_kept_in
from harness.trial.links import Link, chain
from harness.trial.parallel import cpu_stands_in_for_cuda, device_mesh, mean_over_context
from harness.trial.plan_budget import PLAN_FILE, with_plan
from harness.trial.proof import Prover
from harness.trial.shared_results import SharedResults
from harness.trial.steps import UNMEASURED_STEPS, train, warm_up
from harness.trial.trial_plan import TrialPlan
from harness.trial.twin_step import TwinStep, is_repeatable
from strategies.estimate.global_state import ledger

_OTHER_SEEDS = range(1, 7)
"""Of steps that are looked at where a strategy has done nothing in the measured one, whose seed is 0."""

_LEFT = "left behind by the trial, and put back"

_NEVER = 1 << 40
"""A step that no trial takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bench:
    """The parts that the phases of one rank share.

    Fields:
        context: context of the rank; phases and steps are reported to it.
        devices: the device mesh; `None` for one rank.
        batch: returns this rank's share of a step's batch, on its device.
        build: what all models of the trial share.
    """

    plan: TrialPlan
    context: RankContext
    devices: DeviceMesh | None
    batch: Callable[[int], Batch]
    build: Build

    def assemble(
        self, experiment: Experiment, *, is_dense: bool = False, inductor: Sequence[str] = ()
    ) -> Assembled:
        """Return a fresh model; its weights are those of every other one of this seed."""
        return assemble(
            experiment,
            self.context.device,
            self.devices,
            self.batch(0).parts()[0],
            build=self.build,
            is_dense=is_dense,
            inductor=inductor,
        )

    def stepper(self, experiment: Experiment) -> Callable[[], None]:
        """Return a function that trains a fresh model by one step, on one batch over and over."""
        trainee, batch = self.assemble(experiment), self.batch(0)
        return lambda: train(trainee, batch.to(self.context.device))


def run(plan: TrialPlan, context: RankContext, devices: DeviceMesh | None = None) -> dict[str, Any]:
    """Run one trial in this rank and return its rank result.

    Args:
        devices: the mesh, for a process that runs several trials on one; made here by default. Its groups
            stay, with threads of their own, until the process ends.

    Phases `build` and `instrument` concern the variant alone; everything that needs the twin happens in
    `parity` and `timing`, so that running out of memory there never hides what the variant needs.
    """
    with ledger() as changed:
        result = _run(plan, context, devices)
    left = [name for name in changed if not name.startswith("generator ")]  # a trial may draw
    if left and result.probes is not None:
        notes = (*result.probes.notes, f"{_LEFT}: {', '.join(left)}")
        result = replace(result, probes=replace(result.probes, notes=notes))
    encoded: dict[str, Any] = encode(result)
    return encoded


def _run(plan: TrialPlan, context: RankContext, devices: DeviceMesh | None) -> RankResult:
    """Run one trial in this rank, as `run` does, and leave behind what its models do."""
    mesh = plan.experiment.mesh
    install()
    with cpu_stands_in_for_cuda(mesh, context.device), compiling(plan.experiment):
        context.phase("build")
        devices = devices or device_mesh(mesh, context.device)
        batch = batches(plan.experiment, context.device, mesh.data_rank(context.rank))
        bench = _Bench(
            plan=plan,
            context=context,
            devices=devices,
            batch=batch,
            build=Build.of(plan.experiment, batch(0).parts()[0].inputs, context.device),
        )
        file = context.trial_dir / PLAN_FILE
        with plans_kept_in(context.trial_dir.parent, plan.experiment, context.device):
            planned = with_plan(
                plan.experiment, bench.assemble, bench.batch, file, device=context.device, rank=context.rank
            )
        gc.collect()  # the model that the plan was made with
        plan = replace(plan, experiment=planned)
        bench = replace(bench, plan=plan)
        # the chunks that its prediction has planned, unless the user's code decides what they are planned for
        folder = context.trial_dir.parent if is_repeatable(plan.experiment, context.device) else None
        with plans_kept_in(folder, plan.experiment, context.device):
            result = _measure(
                bench,
                plan.experiment,
                on_built=lambda: context.phase("instrument"),
                on_report=lambda report: write_step(traced(report, context.rank), context.trial_dir),
            )
        context.phase("parity")
        if not context.rank:  # a record has that of rank 0
            result = replace(result, environment=describe(context.device, plan.experiment.files))
        context.keep(encode(result))
        why = unbounded(plan.experiment, has_twin=plan.baseline != "none")
        result = replace(result, unbounded=why)
        if plan.baseline != "none":
            twin = _twin_step(bench)
            if why is None:
                is_ordered = mesh.world_size == 1
                bound = measured_bound(result.memory, result.work, twin, is_ordered=is_ordered)
                result = replace(result, bound=bound)
            variant_act = Act(memory=result.memory, work=result.work, observation=result.observation)
            twin_act = Act(memory=twin.memory, work=twin.work, observation=None)
            acts = _acts_otherwise(bench, variant_act, twin_act)
            result = replace(
                result,
                baseline=MeasuredBaseline(memory=twin.memory, work=twin.work),
                work=replace(result.work.beyond(twin.work), acted_otherwise=acts),
            )
            context.keep(encode(result))
            parity = _prove(bench)
            result = replace(result, parity=parity, routing=bench.build.routing.routings())
            context.keep(encode(result))
            # probes call a whole model, and hold several forwards, of which a router knows the last
            is_asked = plan.experiment.protocol.probes and mesh.pp == mesh.ep == 1
            if is_asked and plan.baseline == "paired":  # else there is no room for two
                result = replace(result, probes=_probe(bench, parity))
                context.keep(encode(result))
        context.phase("timing")
        assert result.trained is not None, "it was measured here"
        computes_in: torch.dtype = getattr(torch, result.trained.computes_in)
        time = _time(bench, computes_in)
        return replace(result, time=time, routing=bench.build.routing.routings())


def _measure(
    bench: _Bench,
    experiment: Experiment,
    on_built: Callable[[], None] = lambda: None,
    on_report: Callable[[StepReport], None] = lambda _: None,
) -> RankResult:
    """Return memory, work and observation of one step of `experiment`, alone in this process.

    Args:
        experiment: the variant or its twin.
        on_built: called when the model stands and before its first step.
    """
    trainee = _prepared(bench, experiment, on_built)
    batch = bench.batch(UNMEASURED_STEPS)
    report = instrument(trainee, batch)
    on_report(report)
    observation = trainee.observe()
    batch = bench.batch(UNMEASURED_STEPS)  # as it was: a forward may have changed its inputs
    truth = allocator_truth(trainee, batch, report.live)
    _release(trainee)
    return RankResult(
        rank=bench.context.rank,
        local_rank=bench.context.local_rank,
        memory=replace(report.memory, allocator=truth),
        work=report.work,
        pipeline=None if trainee.pipeline is None else trainee.pipeline.shown(report),
        routing=bench.build.routing.routings(),
        observation=Observed(**asdict(observation)),
        trained=trainee.trained,
    )


def _twin_step(bench: _Bench) -> TwinStep:
    """Return the measured step of the twin, alone in this process or in an earlier trial's."""
    experiment, device = bench.plan.experiment, bench.context.device
    twin = experiment.twin()
    apart = replace(bench, build=replace(bench.build, routing=RoutingLog()))

    def measured() -> TwinStep:
        reports: list[StepReport] = []
        result = _measure(apart, twin, on_report=reports.append)
        return TwinStep.of(reports.pop(), result.memory, result.routing)

    found = (
        _shared(bench).once("twin", TwinStep, twin, measured) if is_repeatable(experiment, device) else None
    )
    step = found or measured()
    bench.build.routing.note(step.routing)
    return step


def _prepared(
    bench: _Bench, experiment: Experiment, on_built: Callable[[], None] = lambda: None
) -> Assembled:
    """Return a model that has taken the steps that nobody watches."""
    trainee = bench.assemble(experiment)
    on_built()
    warm_up(trainee, bench.batch, is_compared=bench.plan.baseline != "none")
    if trainee.compiled is not None:
        trainee.compiled.note_breaks()
    return trainee


def _acts_otherwise(bench: _Bench, variant: Act, twin: Act) -> bool:
    """Say whether the strategy does something with other random numbers, where it did nothing so far.

    A model may drop the blocks of one step, all of them.
    """
    experiment = bench.plan.experiment
    has_acted = experiment == experiment.twin() or not variant.is_idle(twin)
    if _earliest(bench.context.device, 0 if has_acted else None) is not None:  # on one of the ranks
        return False
    pairs = zip(_other_acts(bench, experiment), _other_acts(bench, experiment.twin()), strict=True)
    return any(not one.is_idle(other) for one, other in pairs)


def _other_acts(bench: _Bench, experiment: Experiment) -> list[Act]:
    """Return what `experiment` does in steps of other random numbers."""
    trainee = _prepared(bench, experiment)
    acts = []
    for seed in _OTHER_SEEDS:
        batch = bench.batch(UNMEASURED_STEPS)
        report = instrument(trainee, batch, seed=seed)
        acts.append(Act(memory=report.memory, work=report.work, observation=trainee.observe()))
    _release(trainee)
    return acts


def _prove(bench: _Bench) -> Parity:
    """Train variant and twin from the same weights on the same data and compare every step."""
    experiment, context = bench.plan.experiment, bench.context
    earliest, data_rank = partial(_earliest, context.device), experiment.mesh.data_rank(context.rank)
    prover = Prover(
        assembled=bench.assemble,
        dense=partial(bench.assemble, is_dense=True),
        with_inductor=lambda options, each: bench.assemble(each, inductor=options),
        once=partial(_once, bench),
        batch=bench.batch,
        whole_batch=batches(experiment.dense(), context.device, data_rank // experiment.mesh.cp),
        averaged=partial(mean_over_context, bench.devices, experiment.mesh),
        rank=context.rank,
        dp_rank=data_rank,
        is_sequential=bench.plan.baseline == "sequential",
        progress=context.progress,
        earliest=earliest,
    )
    with _deterministic(enabled=experiment.protocol.deterministic):
        return prover.prove(experiment)


def _probe(bench: _Bench, parity: Parity) -> Probed:
    """Ask variant and twin what steps in a row do not show."""
    experiment, context = bench.plan.experiment, bench.context
    models = TrialModels(
        link=chain(experiment)[0],
        assembled=bench.assemble,
        batch=bench.batch,
        device=context.device,
        rank=context.rank,
        dp_rank=experiment.mesh.data_rank(context.rank),
        earliest=partial(_earliest, context.device),
    )
    with _deterministic(enabled=experiment.protocol.deterministic):
        return models.asked(parity)


def _once(bench: _Bench, link: Link, compare: Callable[[], Parity | None]) -> Parity | None:
    """Return what `compare` gives, or gave in another trial of the sweep, whatever that one times."""
    shown = replace(link.variant, protocol=Protocol())
    return _shared(bench).once("dense", Parity, shown, compare)


def _shared(bench: _Bench) -> SharedResults:
    context = bench.context
    return SharedResults(
        folder=context.trial_dir.parent,
        rank=context.rank,
        device=context.device,
        earliest=partial(_earliest, context.device),
    )


def _earliest(device: torch.device, step: int | None) -> int | None:
    """Return the earliest of the steps that the ranks give, `None` where none gives any."""
    if not dist.is_initialized():
        return step
    given = torch.tensor(_NEVER if step is None else step, device=device)
    dist.all_reduce(given, dist.ReduceOp.MIN)
    earliest = int(given.item())
    return None if earliest == _NEVER else earliest


def _time(bench: _Bench, computes_in: torch.dtype) -> MeasuredTime | None:
    """Return the step times of variant and twin in this rank; `None` where the protocol times nothing."""
    experiment, context = bench.plan.experiment, bench.context
    if experiment.protocol.timed_pairs == 0:
        return None
    samples, energy_j = _samples(bench)
    rate = peak_flops(context.device, computes_in, shared=context.trial_dir.parent)
    return MeasuredTime(
        variant_s=samples.variant_s,
        twin_s=samples.twin_s,
        tokens_per_step=experiment.tokens_per_step,
        devices=experiment.mesh.world_size,
        peak_flops_per_s=rate.flops_per_s,
        peak_flops_per_s_source=rate.source,
        energy_j=energy_j,
    )


def _samples(bench: _Bench) -> tuple[PairedTimes, float | None]:
    """Return the timed steps in seconds, and the energy of a variant's step in joules.

    `paired` times both sides in turn. `sequential` times the twin first and frees it, `none` times
    the variant alone.
    """
    experiment, protocol = bench.plan.experiment, bench.plan.experiment.protocol
    clock, progress = clock_for(bench.context.device), bench.context.progress
    warmup, pairs = protocol.warmup_steps, protocol.timed_pairs
    if bench.plan.baseline == "paired":
        variant, twin = bench.stepper(experiment), bench.stepper(experiment.twin())
        samples = interleave(
            variant,
            twin,
            warmup=warmup,
            pairs=pairs,
            clock=clock,
            progress=progress,
            is_enough=partial(_is_narrow, bench.context.device),
        )
        return samples, _energy_j(bench, variant)
    twin_s: tuple[float, ...] = ()
    if bench.plan.baseline == "sequential":
        twin_s = consecutive(
            bench.stepper(experiment.twin()), warmup=warmup, count=pairs, clock=clock, progress=progress
        )
        gc.collect()
    variant = bench.stepper(experiment)
    variant_s = consecutive(variant, warmup=warmup, count=pairs, clock=clock, progress=progress)
    return PairedTimes(variant_s=variant_s, twin_s=twin_s), _energy_j(bench, variant)


def _is_narrow(device: torch.device, samples_s: Sequence[Sequence[float]]) -> bool:
    """Say whether variant and twin were timed often enough; a step is as slow as its slowest rank."""
    slowest = torch.tensor(samples_s, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return is_narrow(*slowest.tolist())


def _energy_j(bench: _Bench, step: Callable[[], None]) -> float | None:
    """Return the joules of one step, from the device's counter over as many steps as were timed."""
    device, count = bench.context.device, bench.plan.experiment.protocol.timed_pairs
    if device.type != "cuda":
        return None
    with energy_meter(device.index) as energy:
        for _ in range(count):
            step()
        torch.cuda.synchronize(device)
    return None if energy.joules is None else energy.joules / count


@contextmanager
def _deterministic(*, enabled: bool) -> Iterator[None]:
    """Ask for deterministic kernels within the scope; what has none raises and names itself."""
    torch.use_deterministic_algorithms(enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _release(trainee: Assembled) -> None:
    """Give the memory of `trainee` back before the next model is built."""
    trainee.zero_grad()
    gc.collect()
