"""Why a variant is not neutral, and what was tried and makes it so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

from harness.check.not_neutral import Neutrality
from harness.check.remedies import IN_ITS_PLACE, NOT_REENTRANT, Remedy, remedies_of, train_mode
from harness.check.workshop import Workshop
from harness.measure.probes.changed_since import StateChange
from harness.measure.probes.likely_causes import (
    IN_EVAL_MODE,
    LikelyCause,
    cause_of_inert,
    evidence_of,
    likely_cause,
)
from harness.measure.probes.probing import Probing
from harness.measure.probes.recomputed_values import RecomputedValues
from strategies import Strategy

OWN_CHECKPOINTING = "the plain model checkpoints itself already"

_BUT = ", with which what differed does not, but "
"""Stands between a change and what another probe finds with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Explains what one check has found.

    Fields:
        judge: returns what steps and probes say of the models of a workshop.
        is_equal: says whether the first steps of the two models of a workshop are equal, which costs less.
    """

    workshop: Workshop
    judge: Callable[[Workshop], Neutrality]
    is_equal: Callable[[Workshop, int], bool]

    def of(
        self,
        found: Neutrality,
        probing: Probing,
        values: RecomputedValues | None,
        changed: tuple[StateChange, ...],
        *,
        has_save_list: bool,
    ) -> Neutrality:
        """Return the same with what it looks like, and what was tried.

        Args:
            found: what steps and probes said.
            probing: asks more of the same models.
            values: how recomputed values compare; `None` where the step raises.
            changed: state that is another one when backward begins.
            has_save_list: a region keeps what operators of a list give.
        """
        if found.verdict == "inert":
            return self._of_inert(found)
        if found.first is None:
            return found
        # where nothing is recomputed, hooks and functions of the variant's own are left to look at
        saved = None if values is None or values.operators else probing.saved()
        evidence = evidence_of(
            found.first,
            found.parity,
            values,
            lost=found.lost,
            gained=found.gained,
            changed=changed,
            is_compiled=self.workshop.is_compiled,
            has_save_list=has_save_list,
            unpacked="" if saved is None else saved[1].unpacked,
            functions=() if saved is None else tuple(sorted(saved[1].functions - saved[0].functions)),
        )
        assert evidence is not None, "something differs"
        hides_error = (
            found.first["part"] == "hides_error"
        )  # the plain model is at fault: no option mends that
        if hides_error or not self.workshop.is_alone or self.workshop.is_compiled:
            return _guessed(found, likely_cause(evidence), with_option=not hides_error)
        found = self._with_remedy(found)
        tried = [words.partition(_BUT)[0] for words in found.in_vain]
        applied = [*tried, *([found.remedy.split(" ")[1]] if found.remedy else ())]
        cause = likely_cause(replace(evidence, is_of_calls=self._is_of_calls(found.remedy)), applied)
        advice = "" if cause is None or found.remedy else cause.advice
        return replace(found, cause="" if cause is None else str(cause), perhaps=advice)

    def _is_of_calls(self, remedy: str) -> bool:
        is_ours = isinstance(self.workshop.variant, Strategy)
        return NOT_REENTRANT in remedy or (not is_ours and IN_ITS_PLACE in remedy)

    def _with_remedy(self, found: Neutrality) -> Neutrality:
        first = found.first or {}
        steps = first.get("step", 0) + 1 if first["probe"] == "parity" else 1
        operator = "" if found.recomputation is None else found.recomputation.operator
        in_vain: list[str] = []
        for remedy in remedies_of(self.workshop, said=str(first["actual"]), operator=operator):
            remedied = self._found_with(remedy, steps)
            verdict = "" if remedied is None else remedied.verdict
            if verdict == "neutral":
                return replace(found, remedy=f"with {remedy.words} it is neutral", in_vain=tuple(in_vain))
            if verdict == "inert":
                words = f"with {remedy.words} nothing differs, and it is inert"
                return replace(found, remedy=words, in_vain=tuple(in_vain))
            if verdict == "differs":
                # a probe that fails where steps do not differ says nothing of steps that did
                other = remedied.reason if remedied and first["probe"] == "parity" else None
                in_vain.append(remedy.words if other is None else f"{remedy.words}{_BUT}{other}")
        return replace(found, in_vain=tuple(in_vain))

    def _found_with(self, remedy: Remedy, steps: int) -> Neutrality | None:
        """Return what is found with a remedy; `None` where the remedy is refused, or changes nothing.

        Most that do not help are known by the steps that differ without them, and are not judged further:
        these have no reason.
        """
        scope = nullcontext() if remedy.intervention is None else remedy.intervention.active()
        found = Neutrality(verdict="differs")
        try:
            with scope:
                if self.is_equal(remedy.workshop, steps) and remedy.has_applied:
                    found = self.judge(remedy.workshop)
        except ValueError:  # a strategy refuses the model, or the plain model does not train any more
            return None
        return found if remedy.has_applied else None

    def _of_inert(self, found: Neutrality) -> Neutrality:
        """Return why a variant did nothing, as far as something says so."""
        is_own = any(note.startswith(OWN_CHECKPOINTING) for note in found.notes)
        # a function that leaves other bytes than it found has changed something that is no region
        changes_nothing = found.saved_bytes == found.plain_saved_bytes
        if is_own and (isinstance(self.workshop.variant, Strategy) or changes_nothing):
            return replace(found, cause=OWN_CHECKPOINTING, perhaps="leave one of the two out")
        plain = self.workshop.plain()
        is_resting = any(not module.training for module in plain.modules())
        remedy = train_mode(self.workshop)
        if is_resting and not self.workshop.is_alone:  # nobody can try alone
            return replace(found, cause=str(IN_EVAL_MODE), perhaps=IN_EVAL_MODE.advice)
        trained = self._found_with(remedy, 1) if is_resting else None
        if trained is not None and trained.verdict == "neutral":
            return replace(found, cause=str(IN_EVAL_MODE), remedy=f"with {remedy.words} it is neutral")
        is_known = any(words in (found.reason or "") for words in ("ever fired", "frees nothing"))
        if isinstance(self.workshop.variant, Strategy) and not is_known:
            return found  # ours do not look at flags and modes
        cause_of = cause_of_inert(found.reason or "")
        return replace(found, cause=str(cause_of), perhaps=cause_of.advice)


def _guessed(found: Neutrality, cause: LikelyCause | None, *, with_option: bool) -> Neutrality:
    if cause is None:
        return found
    guesses = (cause.option if with_option else "", cause.advice)
    return replace(found, cause=str(cause), perhaps=", or ".join(filter(None, guesses)))
