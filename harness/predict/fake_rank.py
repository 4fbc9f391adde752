"""One rank of a trial without memory and without the other ranks: fake tensors, a fake process group.

The code is that of a trial: `assemble` builds the model, `warm_up` takes the steps that nobody watches,
`instrument` counts the next one. So a prediction counts what a measurement counts.
"""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from harness.measure.step import StepReport, instrument, runnable_step
from harness.models.base import Batch
from harness.predict.compiled_step import compiling_fakes, fakes_of
from harness.predict.fake_pipelines import fake_pipelines
from harness.predict.python_code import PythonCode, counted, with_regions
from harness.predict.step_log import StepLog
from harness.predict.without_data import as_with_values
from harness.trial.assemble import Assembled, assemble
from harness.trial.batches import batches
from harness.trial.build import Build
from harness.trial.models_error import overflow
from harness.trial.parallel import cpu_stands_in_for_cuda, device_mesh
from harness.trial.plan_budget import PLAN_FILE, with_plan
from harness.trial.steps import UNMEASURED_STEPS, warm_up
from strategies import RunnableStep
from strategies.base import alone
from strategies.estimate.patched import is_frozen
from strategies.last_words import last_words
from strategies.tracing.balanced_routing import BalancedFakes
from strategies.tracing.following import as_with_data

Seen = TypeVar("Seen")

_KNOWN = {
    ".numpy() is not supported": "NumPy reads values of a tensor, which a prediction has not",
    "does not support sparse gradients": "the optimizer takes no sparse gradients; use optimizer=sgd",
}
"""What fake tensors and optimizers say, and what that means."""

DEVICE = "cpu"
"""Type of the device for which steps can be predicted."""

_CPU = torch.device(DEVICE)


def step_log(
    experiment: Experiment,
    rank: int | None = None,
    look: Callable[[StepReport], None] = lambda _: None,
    most: Callable[..., tuple[int, ...]] | None = None,
) -> StepLog:
    """Run one instrumented step of `experiment` on one rank and return what it does.

    Args:
        experiment: the variant or its twin.
        rank: number of the rank; `None`: the one whose step takes most, where there are no stages.
        most: function of `RunnableStep`, as there are no other ranks here.

    Raises:
        ConfigError: something of the model depends on data.
        StrategyError: a strategy does not fit the model.
        RuntimeError: this process has a process group.
    """
    mesh = experiment.mesh
    rank = mesh.most_loaded if rank is None else rank
    with _fake_trial(experiment, rank) as (make, batch, fakes), TemporaryDirectory() as folder:
        file = Path(folder) / PLAN_FILE
        experiment = _with_plan(experiment, make, batch, file, rank=rank, most=most)
        trainee = make(experiment)
        fakes.assumes = ()  # what cuts a model into stages calls all of it once, which no step does
        _warm_up(mesh, trainee, batch)
        calls: PythonCode = Counter()
        report = instrument(trainee, batch(UNMEASURED_STEPS), around=partial(counted, calls))
        look(report)
        return StepLog(
            history=report.history,
            operators=[operator.work for operator in report.operators],
            python_code=with_regions(calls, report),
            block_calls=report.work.calls,
            recomputations=report.work.recomputations,
            pipeline=None if trainee.pipeline is None else trainee.pipeline.shown(report),
            ranks_per_node=mesh.world_size // mesh.nodes,
            observation=trainee.observe(),
            trained=trainee.trained,
            compiled=report.compiled,
            assumes=fakes.assumes,
        )


def planned_on_fake_rank(experiment: Experiment, file: Path) -> Experiment:
    """Return `experiment` with the plan of its AC in `file`, where its AC plans from a step.

    Raises:
        ConfigError, StrategyError, RuntimeError: as of `step_log`; there is no plan.
    """
    with _fake_trial(experiment, 0) as (make, batch, _):
        return _with_plan(experiment, make, batch, file)


def seen_on_fake_rank(experiment: Experiment, look: Callable[[RunnableStep], Seen]) -> Seen:
    """Return what `look` sees of a step of the plain model, after those that nobody watches.

    Args:
        experiment: a trial; its recomputation and chunks are left out.

    Raises:
        ConfigError, StrategyError, RuntimeError: as of `step_log`.
    """
    plain = experiment.plain()
    with _fake_trial(plain, plain.mesh.most_loaded) as (make, batch, _):
        trainee = make(plain)
        _warm_up(plain.mesh, trainee, batch)
        return look(runnable_step(trainee, batch(UNMEASURED_STEPS)))


def _with_plan(
    experiment: Experiment,
    make: Callable[[Experiment], Assembled],
    batch: Callable[[int], Batch],
    file: Path,
    *,
    rank: int = 0,
    most: Callable[..., tuple[int, ...]] | None = None,
) -> Experiment:
    return with_plan(
        experiment,
        make,
        batch,
        file,
        device=_CPU,
        rank=rank,
        warmed=partial(_warm_up, experiment.mesh),
        most=most or alone,
    )


@contextmanager
def _fake_trial(
    experiment: Experiment, rank: int
) -> Iterator[tuple[Callable[[Experiment], Assembled], Callable[[int], Batch], BalancedFakes]]:
    """Give what makes a model of the trial on one rank, what gives a batch, and the mode of both."""
    if experiment.mesh.cp_method == "torch":
        problem = "torch runs kernels of CUDA over parts, and a prediction has those of the CPU"
        raise ConfigError("mesh.cp_method", f"{problem}; predict ring, or run the trial, which measures")
    if experiment.compile == "inductor":
        problem = "kernels that Inductor generates have no tensors without data to run on"
        raise ConfigError(
            "compile", f"{problem}; predict compile=aot_eager, or run the trial, which measures"
        )
    mesh = experiment.mesh
    fakes = fakes_of(experiment)
    given = batches(experiment, _CPU, mesh.data_rank(rank), is_empty=True)
    with _named_errors():
        batch = [given(step).changed(_Fakery(fakes)) for step in range(UNMEASURED_STEPS + 1)]
    with _ranks(mesh, rank), cpu_stands_in_for_cuda(mesh, _CPU), _named_errors(), _little_garbage():
        devices = device_mesh(mesh, _CPU)
        sample = batch[0].parts()[0]
        build = Build.of(experiment, sample.inputs, _CPU)
        make = partial(assemble, device=_CPU, devices=devices, sample=sample, build=build)
        with as_with_data(), as_with_values(), compiling_fakes(experiment), fakes:
            yield make, batch.__getitem__, fakes


class _Fakery:
    """Gives fake tensors for those of one batch; what shares memory there shares it here."""

    def __init__(self, fakes: BalancedFakes) -> None:
        self._fakes = fakes
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor on the device for one that has data, or is on the meta device."""
        if not tensor.is_meta:
            return self._fakes.from_tensor(tensor)
        storage = tensor.untyped_storage()
        with self._fakes:
            if storage._cdata not in self._storages:  # noqa: SLF001 (a storage has no public identity)
                held = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_CPU)
                self._storages[storage._cdata] = held.untyped_storage()  # noqa: SLF001 (as above)
            made = torch.empty(0, dtype=tensor.dtype, device=_CPU)
            made.set_(
                self._storages[storage._cdata],  # noqa: SLF001 (as above)
                tensor.storage_offset(),
                tensor.size(),
                tensor.stride(),
            )
            return made.requires_grad_(tensor.requires_grad)


def _warm_up(mesh: Mesh, trainee: Assembled, batch: Callable[[int], Batch]) -> None:
    """Take the steps after which nothing changes: the second has its use under DDP alone.

    Of a pipeline without DDP each stage runs one micro-batch: that makes all the state which a step leaves.
    """
    is_replicated = mesh.gradient_ranks > 1 and not mesh.is_sharded
    if is_replicated or trainee.pipeline is None:
        warm_up(trainee, batch, steps=UNMEASURED_STEPS if is_replicated else UNMEASURED_STEPS - 1)
        return
    with trainee.context():
        trainee.pipeline.rehearse(batch(0).parts()[0], trainee.loss, trainee.autocast)
    trainee.update()


@contextmanager
def _ranks(mesh: Mesh, rank: int) -> Iterator[None]:
    if dist.is_initialized():
        raise RuntimeError("predict: this process has a process group; predict in a process without one")
    if mesh.world_size == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.world_size)
    try:
        with fake_pipelines():
            yield
    finally:
        dist.destroy_process_group()
        if mesh.tp > 1:  # torch remembers shardings with the groups of the first rank that had them
            debug._clear_sharding_prop_cache()  # noqa: SLF001 (torch has no public name)


@contextmanager
def _little_garbage() -> Iterator[None]:
    """Collect garbage of the step alone: to go through all of torch takes longer than a step.

    What a fork server or a caller has frozen stays so, with what lives here: each later collection would go
    through all of torch again.
    """
    was_frozen = is_frozen()
    if was_frozen:
        gc.collect()  # what is garbage now would never be found
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        what = "shape" if isinstance(error, DynamicOutputShapeException) else "value"
        problem = f"{error.func} gives a {what} that depends on data, which a prediction has not"
        raise ConfigError("model", f"{problem}{_place(error)}; a trial measures it") from error
    except RuntimeError as error:
        if (refusal := overflow(error)) is not None:
            raise refusal from error
        known = next((why for words, why in _KNOWN.items() if words in last_words(error).message), None)
        if known is None:
            raise
        raise ConfigError("model", f"{known}{_place(error)}; a trial measures or refuses it") from error


def _place(error: Exception) -> str:
    """Return the innermost module that ran, with the line of its code; nothing where none did."""
    frames = [
        (frame.f_locals["self"], Path(frame.f_code.co_filename).name, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if isinstance(frame.f_locals.get("self"), nn.Module) and frame.f_code.co_name == "forward"
    ]
    if not frames:
        return ""
    (root, *_), (module, file, line) = frames[0], frames[-1]
    fqn = next((name for name, each in root.named_modules() if each is module), "")
    return f" (in {fqn or type(module).__name__!r}, {file}, line {line})"
