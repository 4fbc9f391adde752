"""The largest value of a field whose step fits a memory, or the smallest number of ranks that makes it fit.

Bytes grow with batch, length and layers, along a line or a square, and fall with the ranks that share them.
So the search draws a curve through what it knows and asks where that meets the memory: some five predictions.
It is a bisection where the curve does not help. The value fits, and the next one does not; that is the answer
as far as bytes only ever grow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import gcd, prod
from typing import Any, TypeAlias

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.models.base import LanguageModelSpec
from harness.predict.hardware import Hardware
from harness.records.measured import MemoryNumbers
from strategies import StrategyError

SOLVABLE = (
    "batch_size",
    "sequence_length",
    "model.n_layers",
    "mesh.dp_shard",
    "mesh.tp",
    "mesh.pp",
    "microbatches",
)
"""Fields that can be solved for: the first three for their largest value, the mesh for its smallest."""

MemoryOf: TypeAlias = Callable[[Experiment], MemoryNumbers]
"""Predicts the bytes of one experiment."""

_MOST = 1 << 24
_PATIENCE = 7
"""Predictions after which the range is halved, because no curve has helped."""

_REACH = 64
"""How many times the largest value that fits a guess may be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """The answer for one point.

    Fields:
        value: its largest or smallest value that fits; `None` where none does.
        is_limit: whether nothing beyond `value` is possible, whatever the memory.
        predictions: number of values that were tried.
    """

    field: str
    value: int | None
    is_limit: bool
    predictions: int


def solve(
    experiment: Experiment, field: str, hardware: Hardware, memory_of: MemoryOf
) -> tuple[Solved, Experiment]:
    """Return the answer, and the experiment with it; where nothing fits, that of the smallest step.

    Args:
        experiment: the point; its own value of the field is tried first.
        field: one of `SOLVABLE`.
        hardware: what must be large enough.

    Raises:
        ConfigError: the point has no such field, or no value of it is allowed.
        StrategyError: no value of it suits the strategies.
    """
    values = _values(experiment, field)
    trials = _Trials(values, hardware, memory_of)
    last = len(values) - 1
    best = trials.largest(values.start) if values.is_growing else trials.smallest()
    solved = Solved(
        field=field,
        value=None if best is None else values[best],
        is_limit=best is not None and best == (last if values.is_growing else 0),
        predictions=trials.count,
    )
    smallest_step = 0 if values.is_growing else last
    return solved, trials.experiment(smallest_step if best is None else best)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Values(Sequence[int]):
    """The values that a field may have, in order, and the experiment with each.

    Fields:
        is_growing: whether a step needs more bytes with each.
        start: index of the first to try.
    """

    known: Sequence[int]
    is_growing: bool
    start: int
    make: Callable[[int], Experiment]

    def __len__(self) -> int:
        return len(self.known)

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return self.known[index]


class _Trials:
    """The predictions so far, by index of their value."""

    def __init__(self, values: _Values, hardware: Hardware, memory_of: MemoryOf) -> None:
        self._values = values
        self._hardware = hardware
        self._memory_of = memory_of
        self._memory: dict[int, MemoryNumbers] = {}
        self._refusals: dict[int, ConfigError | StrategyError] = {}

    @property
    def count(self) -> int:
        return len(self._memory) + len(self._refusals)

    def experiment(self, index: int) -> Experiment:
        """Return the experiment with a value; raise why it was refused."""
        self.fits(index)
        if index in self._refusals:
            raise self._refusals[index]
        return self._values.make(self._values[index])

    def fits(self, index: int) -> bool:
        """Return whether a value fits; one that is refused does not, such as too long a sequence."""
        if index not in self._memory and index not in self._refusals:
            try:
                self._memory[index] = self._memory_of(self._values.make(self._values[index]))
            except (ConfigError, StrategyError) as error:
                self._refusals[index] = error
        return index in self._memory and self._spare(index) >= 0

    def smallest(self) -> int | None:
        """Return the index of the first value that fits, where each later one needs less."""
        below, fitting = -1, len(self._values)
        while fitting - below > 1:
            middle = (below + fitting) // 2
            below, fitting = (below, middle) if self.fits(middle) else (middle, fitting)
        return None if fitting == len(self._values) else fitting

    def largest(self, start: int) -> int | None:
        """Return the index of the last value that fits, where each later one needs more."""
        fitting, above, guess = -1, len(self._values), start
        while True:
            fitting, above = (guess, above) if self.fits(guess) else (fitting, guess)
            if above - fitting == 1:
                return None if fitting < 0 else fitting
            is_open = above == len(self._values)
            # nothing is known of values far beyond the last one that fits, or below the first that does not
            end = min(above, _REACH * (fitting + 1)) if is_open else above
            halfway = 2 * fitting + 1 if is_open or fitting < 0 else (fitting + above) // 2
            is_lost = self.count >= _PATIENCE
            guess = halfway if is_lost else self._on_the_curve(fitting, end, halfway)
            guess = min(max(guess, fitting + 1), above - 1)

    def _on_the_curve(self, low: int, high: int, otherwise: int) -> int:
        """Return the last index from `low` to `high` where the curve through what is known fits.

        Args:
            otherwise: what to return where fewer than two values are known.
        """
        nearest = sorted(self._memory, key=lambda index: abs(self._spare(index)))[:3]
        if len(nearest) < 2:  # noqa: PLR2004 (a line has two points)
            return otherwise
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._interpolated(nearest, middle) >= 0 else (low, middle)
        return low

    def _interpolated(self, known: Sequence[int], index: int) -> float:
        """Return the spare bytes at `index` by the polynomial through `known` (Lagrange's form)."""
        weights = (
            prod((index - other) / (each - other) for other in known if other != each) for each in known
        )
        return sum(weight * self._spare(each) for weight, each in zip(weights, known, strict=True))

    def _spare(self, index: int) -> int:
        return self._hardware.usable_bytes - self._hardware.needed_bytes(self._memory[index])


def _values(experiment: Experiment, field: str) -> _Values:
    values = _RANGES[field](experiment)
    if not values:
        problem = f"no value of {field} is allowed for this point"
        raise ConfigError("solve", f"{problem}; change batch_size or the model's sizes")
    return values


def _batch_size(experiment: Experiment) -> _Values:
    """Return the batch sizes that data-parallel ranks and micro-batches can share."""
    unit = experiment.mesh.dp * experiment.microbatches
    return _Values(
        known=range(unit, _MOST, unit),
        is_growing=True,
        start=experiment.batch_size // unit - 1,
        make=lambda value: replace(experiment, batch_size=value),
    )


def _sequence_length(experiment: Experiment) -> _Values:
    model = experiment.model
    if not (isinstance(model, LanguageModelSpec) and model.reads_tokens()):
        raise ConfigError("solve", f"sequence_length has no effect on {model.name}; solve for batch_size")
    longest = model.longest_sequence() or _MOST
    return _Values(
        known=range(1, longest + 1),
        is_growing=True,
        start=min(experiment.sequence_length, longest) - 1,
        make=lambda value: replace(experiment, sequence_length=value),
    )


def _layers(experiment: Experiment) -> _Values:
    model = experiment.model
    if "n_layers" not in {each.name for each in fields(model)}:
        raise ConfigError("solve", f"model={model.name} has no option n_layers; solve for batch_size")
    start: int = getattr(model, "n_layers")  # noqa: B009 (not every family has it)
    return _Values(
        known=range(1, _MOST),
        is_growing=True,
        start=start - 1,
        make=lambda value: replace(experiment, model=replace(model, n_layers=value)),  # type: ignore[call-arg]
    )


def _dp_shard(experiment: Experiment) -> _Values:
    return _meshes(experiment, "dp_shard", experiment.batch_size // experiment.mesh.dp_replicate)


def _tp(experiment: Experiment) -> _Values:
    return _meshes(experiment, "tp", gcd(*experiment.model.tensor_parallel_sizes().values()))


def _pp(experiment: Experiment) -> _Values:
    """Return the numbers of ranks over which blocks can be cut into stages, as the schedule allows."""
    model, mesh = experiment.model, experiment.mesh
    if "n_layers" not in {each.name for each in fields(model)}:
        raise ConfigError("solve", f"model={model.name} has no option n_layers; solve for batch_size")
    blocks: int = getattr(model, "n_layers")  # noqa: B009 (not every family has it)

    def make(value: int) -> Experiment:
        # a whole model has no schedule to choose
        cut = replace(mesh, pp=value) if value > 1 else mesh.without_pipeline()
        return replace(experiment, mesh=cut)

    def is_allowed(value: int) -> bool:
        """Return whether every stage has a block, and the schedule an order."""
        try:
            return make(value).mesh.stages <= blocks
        except (ConfigError, StrategyError):
            return False

    known = [value for value in range(1, blocks + 1) if is_allowed(value)]
    return _Values(known=known, is_growing=False, start=0, make=make)


def _microbatches(experiment: Experiment) -> _Values:
    """Return the numbers of micro-batches that divide a rank's samples."""

    def make(value: int) -> Experiment:
        # with one there is no time to reduce gradients to choose
        mesh = replace(experiment.mesh, sync="each") if value == 1 else experiment.mesh
        return replace(experiment, microbatches=value, mesh=mesh)

    share = experiment.batch_size // experiment.mesh.dp
    known = [value for value in range(1, share + 1) if share % value == 0]
    return _Values(known=known, is_growing=False, start=0, make=make)


def _meshes(experiment: Experiment, dimension: str, whole: int) -> _Values:
    """Return the sizes of a mesh dimension that divide `whole` and make an experiment that is allowed."""

    def make(value: int) -> Experiment:
        sizes: dict[str, Any] = {dimension: value}
        return replace(experiment, mesh=replace(experiment.mesh, **sizes))

    def is_allowed(value: int) -> bool:
        """Return whether the model takes this value."""
        try:
            made = make(value)
            made.model.check(sequence_length=made.sequence_length, tp=made.mesh.tp)
        except ConfigError:
            return False
        return True

    known = [value for value in range(1, whole + 1) if whole % value == 0 and is_allowed(value)]
    return _Values(known=known, is_growing=False, start=0, make=make)


_RANGES: Mapping[str, Callable[[Experiment], _Values]] = dict(
    zip(SOLVABLE, (_batch_size, _sequence_length, _layers, _dp_shard, _tp, _pp, _microbatches), strict=True)
)
