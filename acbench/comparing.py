"""`acbench.compare` and `acbench.measure`: what variants do to one training step, measured here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from torch import nn

from acbench.html import html_table
from harness.check import NotNeutral, assert_neutral
from harness.check.arguments import Precision
from harness.check.given_batches import given_batches
from harness.check.neutrality import promises_nothing
from harness.check.workshop import Workshop
from harness.errors import ConfigError, require_at_least
from harness.fit.progress import progress_shown
from harness.measure.probes.micro_batches import MicroBatched
from harness.measure.probes.pass_error import PassError
from harness.measure.rng import seeded
from harness.measure.speed.timing import StepFunction, clock_for, in_turns
from harness.measure.step import StepReport, instrument
from harness.models.base import Batch, joined
from harness.records.bound import merge_bounds
from harness.records.measured import MeasuredMemory, MeasuredWork
from harness.records.verdict import freed_nothing
from harness.report.facts.number_words import human_bytes, human_flops
from harness.trial.distance import measured_bound
from harness.trial.twin_step import TwinStep
from strategies import Strategy, StrategyError, ac_variants, generators
from strategies.regions.block_search import FoundBlocks, search_blocks
from strategies.regions.blocks import classes_outside

Variant: TypeAlias = str | Strategy | Callable[[Any], Any]
"""A name of ours, a strategy, or a function that takes the model and returns the one to use."""

_HEAD = ("variant", "verdict", "saved", "peak", "recomputed FLOPs", "above bound", "step time", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The effect of one variant on a training step on the device at hand.

    Fields:
        variant: its name.
        verdict: `neutral`, `differs`, `inert` or `unverified`; of `none` always `neutral`.
        reason: why the verdict is another one; empty where it is neutral.
        saved_bytes: what forward leaves for backward.
        peak_bytes: the highest total of live storages in the step, parameters and optimizer included.
        recomputed_flops: FLOPs of forward operators that run again in backward.
        points_above: what runs again above the least that any schedule of the plain step's operators must at
            this peak, in percent of the plain step's FLOPs; `None` where nobody knows.
        ratio: step time divided by the plain model's, both taken in turns; `None` where it was not timed.
    """

    variant: str
    verdict: str
    reason: str = ""
    saved_bytes: int = 0
    peak_bytes: int = 0
    recomputed_flops: int = 0
    points_above: float | None = None
    ratio: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as people read it."""
        ratio = "" if self.ratio is None else f"{self.ratio:.2f} \N{MULTIPLICATION SIGN}"
        numbers = (
            human_bytes(self.saved_bytes),
            human_bytes(self.peak_bytes),
            human_flops(self.recomputed_flops),
            "-" if self.points_above is None else f"{self.points_above:.2f}",
        )
        has_run = self.peak_bytes > 0
        return (self.variant, self.verdict, *(numbers if has_run else [""] * 4), ratio, self.reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(Sequence[Row]):
    """The rows of `compare`, in the order that was asked for; a notebook shows them as a table.

    Fields:
        rows: one a variant.
        device: where they were measured.
    """

    rows: tuple[Row, ...]
    device: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        """Return a row by its number, or by the name of its variant."""
        if isinstance(index, str):
            return next(each for each in self.rows if each.variant == index)
        return self.rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __str__(self) -> str:
        """Return the table as text."""
        lines = [_HEAD, *(each.cells for each in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
        shown = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
        return "\n".join(shown)

    def _repr_html_(self) -> str:
        """Return the table."""
        title = f"One training step on {self.device}, beside the plain model"
        return html_table(_HEAD, [each.cells for each in self.rows], title=title)


def compare(
    make: Callable[[], nn.Module],
    batch: Any,
    variants: Sequence[Variant] | Mapping[str, Variant] = ("none", "full"),
    loss_fn: Callable[[Any], Any] | None = None,
    *,
    pairs: int = 5,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> Comparison:
    """Return what variants do to one training step, measured here, each next to the plain model.

    Each is proven by one step (outputs, loss, gradients, buffers, random numbers and parameters bit for bit),
    counted in another, and timed in turns with the plain model. No process group is needed. The source is
    `harness.check` and `harness.measure`; docs/measuring.md defines the numbers.

    Args:
        make: returns a fresh plain model on the device to measure on.
        batch: a tuple of positional inputs, a dict of keyword inputs, or a list of several of these.
        variants: names of ours (`acbench.strategies`) on the blocks that are found, strategies, or functions
            that take the model and return the one to use; a mapping gives them names.
        loss_fn: takes what the model returns and gives a scalar; by default as `assert_neutral`.
        pairs: timed steps of each; 0 times nothing.
        autocast: dtype of `torch.autocast` around forward and loss of all of them, timed and counted too.
        dtype: dtype of the models' floating-point parameters.

    Returns:
        A row a variant: verdict, saved and peak bytes, recomputed FLOPs, distance from its bound, ratio of
        step times. A plan is made for this step, as in a trial. One that cannot be applied has the reason and
        no numbers.

    Raises:
        ConfigError: a `ValueError`; an argument is wrong, or the plain model does not train on `batch`.
    """
    require_at_least("pairs", pairs, 0)
    named = _named(variants)
    rows = []
    case = _Case(make, batch, loss_fn, autocast, dtype)
    with progress_shown() as tell:
        for name, variant in named.items():
            tell(name)
            try:
                rows.append(case.row(name, variant, pairs))
            except StrategyError as error:
                rows.append(Row(variant=name, verdict="unverified", reason=str(error)))
    return Comparison(rows=tuple(rows), device=case.device)


def measure(
    make: Callable[[], nn.Module],
    batch: Any,
    variant: Variant = "none",
    loss_fn: Callable[[Any], Any] | None = None,
    *,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[MeasuredMemory, MeasuredWork]:
    """Return the bytes and the work of one training step under a variant, on the device of the model.

    Args:
        make, batch, variant, loss_fn, autocast, dtype: as of `compare`, one variant.

    Returns:
        Memory in bytes (`saved_bytes`, `peak_bytes`, `peak_parts`, `saved_by_module`, `timeline`, …) and work
        in FLOPs (`forward_flops`, `backward_flops`, `recomputed_flops`, `recomputed_ops`); docs/measuring.md
        defines them.

    Raises:
        ConfigError, StrategyError: as `assert_neutral`.
    """
    case = _Case(make, batch, loss_fn, autocast, dtype)
    with TemporaryDirectory() as folder:
        workshop = case.workshop(case.resolved(variant))
        try:
            workshop = case.planned(workshop, Path(folder))
            report = case.report(workshop, is_variant=variant != "none")
        finally:
            workshop.leave()
    return report.memory, report.work


class _Case:
    """One model and batch, on which variants are tried; what is the plain model's is found once."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        batch: Any,
        loss_fn: Callable[[Any], Any] | None,
        autocast: torch.dtype | None,
        dtype: torch.dtype | None,
    ) -> None:
        self._make, self._batch, self._loss_fn = make, batch, loss_fn
        self._precision = Precision(autocast=autocast, dtype=dtype)

    @cached_property
    def device(self) -> str:
        """The device of the models."""
        return str(self._workshop.device)

    def row(self, name: str, variant: Variant, pairs: int) -> Row:
        """Return what a variant does."""
        is_plain = variant == "none"
        with TemporaryDirectory() as folder:
            workshop = self.workshop(self.resolved(variant))
            verdict, reason = "neutral", ""
            try:
                workshop = self.planned(workshop, Path(folder))
                if not is_plain:
                    verdict, reason = self._verdict(workshop.variant)
                plain = self._plain
                own = plain if is_plain else self.report(workshop, is_variant=True)
                ratio = 1.0 if is_plain else self._ratio(workshop, pairs)
            except PassError:
                if verdict == "neutral":
                    raise
                return Row(variant=name, verdict=verdict, reason=reason)  # it does not train at all
            finally:
                workshop.leave()
        work = own.work.beyond(plain.work)
        promises = not promises_nothing(workshop.variant)
        idle = freed_nothing(own.memory, plain.memory) if promises else None
        if verdict == "neutral" and idle is not None:
            verdict, reason = "inert", idle
        return Row(
            variant=name,
            verdict=verdict,
            reason=reason,
            saved_bytes=own.memory.saved_bytes,
            peak_bytes=own.memory.peak_bytes,
            recomputed_flops=work.recomputed_flops,
            points_above=self._points_above(own) if promises and not workshop.is_compiled else None,
            ratio=ratio if pairs else None,
        )

    def planned(self, workshop: Workshop, folder: Path) -> Workshop:
        """Return the workshop of a variant that has its plan, of the step that is measured here."""
        variant = workshop.unplanned
        if variant is None:
            return workshop
        file = folder / "plan.json"
        try:
            workshop.write_plan(variant, file)
        except PassError as error:  # the step that is planned raised: a strategy's words are its own
            raise error.error from error
        return workshop.with_plan(variant, file)

    def _points_above(self, own: StepReport) -> float | None:
        """Return the distance of a step from its bound; a step of micro-batches has none."""
        if len(self._workshop.batches) > 1:
            return None
        plain = TwinStep.of(self._plain, self._plain.memory)
        bound = merge_bounds([measured_bound(own.memory, own.work, plain, is_ordered=True)])
        return None if bound is None else bound.points_above

    def resolved(self, variant: Variant) -> Strategy | Callable[[Any], Any]:
        """Return a strategy or function; a name becomes a strategy on the blocks that are found.

        Raises:
            ConfigError: there is no such name, it needs a number, or the model has no blocks.
        """
        if not isinstance(variant, str):
            return variant
        if variant not in ac_variants:
            raise ConfigError("variants", f"unknown {variant!r}; options: {', '.join(ac_variants)}")
        if variant == "none":
            return ac_variants["none"]()
        found = self._blocks
        if found is None:
            problem = f"{variant!r} needs blocks, and no module of the model repeats"
            name = next(iter(classes_outside(self._without_memory)), None)
            remedy = (
                f"pass acbench.strategies[{variant!r}](module_classes=[{name!r}]) for blocks of that class"
            )
            raise ConfigError("variants", f"{problem}; {remedy if name else 'put its stages into modules'}")
        named = {"layers_fqn": found.layers_fqn, "module_classes": found.module_classes}
        cls = ac_variants[variant]
        known = getattr(cls, "__dataclass_fields__", {})
        try:
            return cls(**{key: value for key, value in named.items() if key in known and value})
        except StrategyError as error:
            remedy = f"pass acbench.strategies[{variant!r}](…) with what it needs"
            raise ConfigError("variants", f"{variant!r} alone says too little: {error}; {remedy}") from error

    def workshop(self, variant: Strategy | Callable[[Any], Any]) -> Workshop:
        """Return what makes the models."""
        workshop = replace(self._workshop, variant=variant)
        workshop.begin_anew()
        return workshop

    def report(self, workshop: Workshop, *, is_variant: bool) -> StepReport:
        """Return the bytes and the work of a step."""
        trainee, step = self.trainee(workshop, is_variant=is_variant)
        return instrument(trainee, step)

    def trainee(self, workshop: Workshop, *, is_variant: bool) -> tuple[MicroBatched, Batch]:
        """Return a model that has taken one step, and a batch for the next."""
        subject = workshop.subject(is_variant=is_variant)
        trainee = MicroBatched(
            inner=subject.with_parts(blocks=dict(subject.names.modules)), is_variant=is_variant
        )
        batch = joined(workshop.batches)
        with seeded(0, step=0, dp_rank=0, device=workshop.device):
            trainee.zero_grad()
            trainee.backward(trainee.forward(batch.to(workshop.device))[1])
            trainee.update()
        return trainee, batch.to(workshop.device)

    def _verdict(self, variant: Strategy | Callable[[Any], Any]) -> tuple[str, str]:
        try:
            assert_neutral(
                self._make,
                self._batch,
                variant,
                self._loss_fn,
                quick=True,
                autocast=self._precision.autocast,
                dtype=self._precision.dtype,
            )
        except NotNeutral as error:
            return error.verdict, str(error).splitlines()[0].removeprefix(f"{error.verdict}: ")
        return "neutral", ""

    def _ratio(self, workshop: Workshop, pairs: int) -> float | None:
        """Return the step time of the variant, of the plain model's, both taken in turns."""
        if not pairs:
            return None
        steps = [self._step(workshop, is_variant=is_variant) for is_variant in (False, True)]
        plain_s, variant_s = in_turns(steps, warmup=1, turns=pairs, clock=clock_for(workshop.device))
        return statistics.median(variant_s) / statistics.median(plain_s)

    def _step(self, workshop: Workshop, *, is_variant: bool) -> StepFunction:
        trainee, batch = self.trainee(workshop, is_variant=is_variant)

        def step() -> None:
            trainee.zero_grad()
            trainee.backward(trainee.forward(batch)[1])
            trainee.update()

        return step

    @cached_property
    def _workshop(self) -> Workshop:
        """The maker of plain models; each variant has it with itself in it."""
        precision = self._precision
        made = Workshop(
            make=self._make,
            variant=ac_variants["none"](),
            loss_fn=self._loss_fn,
            batches=tuple(each.changed(precision.cast_inputs) for each in given_batches(self._batch)),
            seed=0,
            precision=precision,
        )
        made.check()
        return made

    @cached_property
    def _plain(self) -> StepReport:
        return self.report(self._workshop, is_variant=False)

    @cached_property
    def _without_memory(self) -> nn.Module:
        with generators.restored(), torch.device("meta"):
            made = self._make()
        if not isinstance(made, nn.Module):
            raise ConfigError("make", f"must return an nn.Module, got {type(made).__name__}")
        return made

    @cached_property
    def _blocks(self) -> FoundBlocks | None:
        return search_blocks(self._without_memory)


def _named(variants: Sequence[Variant] | Mapping[str, Variant]) -> dict[str, Variant]:
    """Return the variants by a name of each; the second of one name has a number."""
    if isinstance(variants, Mapping):
        return dict(variants)
    if isinstance(variants, str):
        raise ConfigError("variants", f"must be a list, got {variants!r}; write [{variants!r}]")
    found: dict[str, Variant] = {}
    for variant in variants:
        base = name = (
            variant if isinstance(variant, str) else getattr(variant, "__name__", type(variant).__name__)
        )
        number = 2
        while name in found:
            name, number = f"{base} {number}", number + 1
        found[name] = variant
    return found
