"""The probes of a trial, on the models of its first link."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from harness.experiment.experiment import Experiment, name_of
from harness.measure.parity.snapshot import Snapshot, steps
from harness.measure.probes.late_reads import LateReads
from harness.measure.probes.likely_causes import evidence_of, likely_cause
from harness.measure.probes.micro_batches import MicroBatched
from harness.measure.probes.probing import Probing
from harness.measure.probes.recomputed_values import RecomputedValues
from harness.measure.probes.tried import NoRoomError
from harness.models.base import Batch
from harness.records.parity_result import Parity
from harness.records.probed import Finding, Probed
from harness.trial.assemble import Assembled
from harness.trial.links import Link
from harness.trial.proof import accepted_by
from strategies import Tolerance

_UNSEEN = "recomputed values, and what the variant keeps, are not looked at in compiled code"
_TOO_LARGE = "the probes were given up, because they need more memory than there is"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialModels:
    """The source of variant and twin for the probes of a trial.

    Fields:
        batch: returns this rank's share of a step's batch.
        rank, dp_rank: this rank, and the index of its batch.
        earliest: returns the earliest of the steps that the ranks give; they all call it.
    """

    link: Link
    assembled: Callable[[Experiment], Assembled]
    batch: Callable[[int], Batch]
    device: torch.device
    rank: int
    dp_rank: int
    earliest: Callable[[int | None], int | None]

    @property
    def seed(self) -> int:
        """The seed of each step."""
        return self.link.variant.seed

    @property
    def accepted(self) -> Tolerance | None:
        """The difference that the two may have."""
        return accepted_by(self.link)

    @property
    def is_alone(self) -> bool:
        """True if there is one rank."""
        return self.link.variant.mesh.world_size == 1

    @property
    def takes_any_size(self) -> bool:
        """True if nothing was planned or compiled for one size."""
        variant = self.link.variant
        return not (variant.is_compiled or variant.is_sharded) and name_of(variant.chunk) == "none"

    @property
    def batches(self) -> tuple[Batch, ...]:
        """One micro-batch, of which a smaller one may be cut, or those with which two steps begin."""
        steps = (0,) if self.takes_any_size else (0, 1)
        return tuple(self.batch(step).parts()[0] for step in steps)

    @property
    def whole_step(self) -> tuple[Batch, ...]:
        """The micro-batches of the first step."""
        return self.batch(0).parts()

    def trainee(self, *, is_variant: bool) -> MicroBatched:
        """Return a fresh model."""
        inner = self.assembled(self.link.variant if is_variant else self.link.baseline)
        return MicroBatched(inner=inner, is_variant=is_variant)

    def modules(self, trainee: MicroBatched) -> Mapping[str, nn.Module]:
        """Return the modules of a model, which strategies leave their names."""
        return dict(trainee.model.named_modules())

    def trained(self, trainee: MicroBatched, batches: Iterable[Batch]) -> Iterator[Snapshot]:
        """Train on `batches`, one a step, and yield what each computed."""
        return steps(trainee, batches, seed=self.seed, dp_rank=self.dp_rank, whole=self.link.whole)

    def anywhere(self, seen: bool) -> bool:
        """Say whether something was seen on any rank."""
        return self.earliest(0 if seen else None) is not None

    def begin_anew(self) -> None:
        """Let go of the models before."""
        gc.collect()

    def asked(self, parity: Parity) -> Probed:
        """Return what the probes find, on all ranks alike.

        Args:
            parity: how the two compare, on this rank. Where they differ, recomputed values alone are asked
        """
        try:
            probed = self._asked(parity)
        except NoRoomError:  # on all ranks
            probed = Probed(notes=(_TOO_LARGE,))
        gc.collect()
        return probed

    def _asked(self, parity: Parity) -> Probed:
        """Ask the probes that a comparison leaves open; return what they found."""
        probing, has_variant = Probing(source=self), self.link.variant != self.link.baseline
        is_seen = has_variant and not self.link.variant.is_compiled
        values = probing.values() if is_seen else None
        names: tuple[str, ...] = ("recomputed_values",) if is_seen else ()
        late = LateReads()
        finding, compared, notes = None, parity, () if is_seen or not has_variant else (_UNSEEN,)
        if not self.anywhere(not parity.is_equal):
            probes = probing.probes(is_plain=not has_variant, is_compiled=self.link.variant.is_compiled)
            asked = probing.ask(probes)
            names, notes = (*names, *asked.names), (*notes, *asked.notes)
            finding, compared = asked.finding, asked.parity or parity
            if is_seen and self.is_alone and finding is None:
                late, names = probing.late_reads(), (*names, "late_reads")
                notes = (*notes, *late.notes)
        return Probed(
            asked=names,
            finding=finding,
            recomputation=str(values.first) if values is not None and values.first is not None else "",
            cause=self._cause(probing, finding, compared, values),
            late_reads=late.names,
            notes=notes,
        )

    def _cause(
        self, probing: Probing, finding: Finding | None, parity: Parity, values: RecomputedValues | None
    ) -> str:
        """Return what a difference looks like; empty where nothing differs on any rank."""
        if not self.anywhere(finding is not None or parity.first is not None):
            return ""
        changed, is_compiled = probing.changed(), self.link.variant.is_compiled
        evidence = evidence_of(finding, parity, values, changed=changed, is_compiled=is_compiled)
        cause = None if evidence is None else likely_cause(evidence)
        return "" if cause is None else cause.untried
