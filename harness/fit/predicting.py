"""Options with their predictions: each is traced as it is, so its bytes are those of a measured step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment, name_of
from harness.fit.in_process import with_rows
from harness.fit.largest_batch import largest_batch
from harness.fit.options import TIE, Option, Writer, words_of_classes
from harness.fit.subject import Blocks, Subject
from harness.predict.fake_rank import planned_on_fake_rank, seen_on_fake_rank
from harness.predict.prediction import step_of
from harness.predict.step_log import FakeStep
from harness.predict.step_time import bound_by, timed_on
from harness.records import files
from harness.records.measured import MeasuredMemory
from harness.report.facts.number_words import human_bytes
from strategies import RunnableStep, StrategyError, chunk_variants
from strategies.ac.file import File
from strategies.budget.export.operator_modules import heavy_operators
from strategies.budget.planning.planner import BudgetBelowMinimum
from strategies.regions.blocks import find_blocks
from strategies.written.file_text import BlockRules, offloading_file, recomputing_file, rules_file
from strategies.written.heavy_operators import HeavyOperator, rules_for

_TRIES = 3
"""Files that are traced for one set of blocks until one keeps the limit."""
_GIB = 1 << 30


@dataclass(kw_only=True, slots=True)
class Predictions:
    """The options of one subject, as far as they have been asked for.

    Fields:
        folder: where files are put that are traced.
        tell: is told what is traced next.
    """

    subject: Subject
    blocks: Blocks
    folder: Path
    tell: Callable[[str], None]
    options: list[Option] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _least_budget_bytes: int | None = None
    _heavy: Mapping[str, Sequence[HeavyOperator]] | None = None
    _steps: dict[str, FakeStep] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """FQNs of the blocks, in order."""
        return list(self.blocks.classes)

    def predict(self) -> None:
        """Predict the options that the subject has a use for.

        Raises:
            ConfigError: the device has no rate for the dtype of the step; something depends on data.
        """
        subject = self.subject
        self.add("none", "none", subject.plain, write=None)
        self._attempt("full", f"all {len(self.names)} blocks again", subject.variant("full"), self._again)
        self._attempt(
            "selective_op", "products and attention stay", subject.variant("selective_op"), self._kept
        )
        if self._fits("none"):
            return
        if "full" not in self._steps:  # blocks cannot run again as a whole; their operators may
            self._budget()
            return
        if self._fits("full"):
            self._first_blocks()
            half = self.names[1::2]
            title = f"every second of {len(self.names)} blocks again"
            self._attempt(
                "selective_layer", title, subject.variant("selective_layer"), partial(self._some, half)
            )
            self._rules()
            self._budget()
            return
        self._attempt("offload", "saved values in host memory", subject.variant("offload"), self._offloaded)
        if self._stands_alone():
            return
        self._budget()
        offloaded = subject.variant("full", offload=True)
        self._attempt("full_offload", "full, block inputs in host memory", offloaded, None)
        if self._chunks_may_be_used():
            chunked = subject.under(subject.experiment.ac, chunk=chunk_variants["minimum"]())
            self._attempt("full_chunked", "full, operators in chunks", chunked, None)

    def add(
        self,
        variant: str,
        title: str,
        experiment: Experiment,
        write: Writer | None,
        **others: Any,
    ) -> Option:
        """Predict one option, and keep it."""
        self.tell(title)
        step, hardware = step_of(experiment), self.subject.hardware
        plain = step_of(self.subject.plain)
        seconds = timed_on(hardware)
        step_s, plain_s = (seconds(each.trace).step_s for each in (step, plain))
        option = Option(
            variant=variant,
            title=title,
            experiment=experiment,
            overrides=others.pop("overrides", _overrides(experiment)),
            peak_bytes=hardware.needed_bytes(step.memory),
            saved_bytes=step.memory.saved_bytes,
            extra_flops=step.work.beyond(plain.work).recomputed_flops,
            step_time_s=step_s,
            slowdown=step_s / plain_s,
            fits=hardware.needed_bytes(step.memory) <= self.subject.limit_bytes,
            bound_by=bound_by(step.trace, hardware),
            write=write,
            **others,
        )
        self.options.append(option)
        self._steps[variant] = step
        return option

    def rewound(self) -> Option | None:
        """Predict and return `full` that puts state back; `None` where it has no prediction."""
        experiment = self.subject.variant("full", rewind=True)
        self._attempt("full_rewind", "full, state put back before it runs again", experiment, None)
        return next((each for each in self.options if each.variant == "full_rewind"), None)

    def with_largest_batch(self, option: Option) -> Option:
        """Return an option with its largest batch, where the batch may change and the option follows it."""
        experiment = option.experiment
        is_planned = name_of(experiment.ac) == "budget" or name_of(experiment.chunk) != "none"
        if not self.subject.has_batch or is_planned:
            return option
        if _standing_bytes(self._steps[option.variant].memory) > self.subject.limit_bytes:
            return replace(option, largest_batch=0)
        self.tell(f"largest batch, {option.title}")

        def memory_of(size: int) -> int:
            step = step_of(with_rows(experiment, size))
            return self.subject.hardware.needed_bytes(step.memory)

        memory = self._steps[option.variant].memory
        memory = replace(memory, peak_bytes=option.peak_bytes)
        limit, unit = self.subject.limit_bytes, experiment.mesh.dp
        return replace(
            option, largest_batch=largest_batch(memory, experiment.batch_size, limit, unit, memory_of)
        )

    def least_plan_bytes(self) -> int | None:
        """Return what a step needs under the smallest plan; `None` where none was sought, or one fits."""
        if self._least_budget_bytes is None:
            return None
        self.tell("the smallest plan of ac=budget")
        asked = self.subject.variant("budget", budget_gib=self._least_budget_bytes / _GIB)
        planned = planned_on_fake_rank(asked, self.folder / "least_plan.json")
        return self.subject.hardware.needed_bytes(step_of(planned).memory)

    def _fits(self, variant: str) -> bool:
        return any(each.fits for each in self.options if each.variant == variant)

    def _stands_alone(self) -> bool:
        """Say if no activation has to be there for a step not to fit, so that nothing here helps; say so."""
        standing = _standing_bytes(self._steps["full"].memory)
        if standing <= self.subject.limit_bytes:
            return False
        self.notes.append(
            f"parameters, gradients and optimizer alone take {human_bytes(standing)}, so plans and chunks "
            "cannot help and are not predicted"
        )
        return True

    def _chunks_may_be_used(self) -> bool:
        """Return whether `full` in chunks may be as fast as what fits, though slower than `full`."""
        fastest_s = min((each.step_time_s for each in self.options if each.fits), default=math.inf)
        return fastest_s * (1 + TIE) >= self._of("full").step_time_s

    def _of(self, variant: str) -> Option:
        return next(each for each in self.options if each.variant == variant)

    def _attempt(self, variant: str, title: str, experiment: Experiment, write: Writer | None) -> None:
        """Predict an option that the model may not allow; say why where it does not."""
        try:
            self.add(variant, title, experiment, write, needs_acbench=write is None)
        except (ConfigError, StrategyError, RuntimeError) as error:  # the last one of the model's own code
            self.notes.append(f"{variant} has no prediction: {str(error).splitlines()[0]}")

    def _first_blocks(self) -> None:
        """Add the first k blocks again, with the smallest k that fits; early ones are far from the peak."""
        total, limit = len(self.names), self.subject.limit_bytes
        needed = {0: self._of("none").peak_bytes, total: self._of("full").peak_bytes}
        share = (needed[0] - limit) / max(1, needed[0] - needed[total])
        count = min(total - 1, max(1, math.ceil(share * total)))
        while 0 < count < total and count not in needed:
            self.tell(f"first {count} of {total} blocks")
            step = step_of(self.subject.variant("selective_layer", first=count))
            needed[count] = self.subject.hardware.needed_bytes(step.memory)
            fits = needed[count] <= limit
            freed = {each: (needed[0] - nbytes) / each for each, nbytes in needed.items() if 0 < each < total}
            if freed[count] > 0 and list(freed.values()).count(freed[count]) > 1:
                # each block frees as much as the others: so many are needed
                count = math.ceil((needed[0] - limit) / freed[count])
            else:
                count += -1 if fits else 1
        fitting = [each for each, nbytes in needed.items() if each < total and nbytes <= limit]
        if fitting:
            count = min(fitting)
            experiment = self.subject.variant("selective_layer", first=count)
            chosen = partial(self._some, self.names[:count])
            self.add(f"first_{count}", f"first {count} of {total} blocks again", experiment, chosen)

    def _rules(self) -> None:
        """Add files with rules: some results stay in blocks that otherwise run again, as bytes allow."""
        total, limit = len(self.names), self.subject.limit_bytes
        first = next((each for each in self.options if each.variant.startswith("first_")), None)
        counts = [total] if first is None else [int(first.variant.removeprefix("first_")), total]
        found: list[tuple[Option, FakeStep]] = []
        for count in counts:
            blocks = self.names[:count]
            base = self._of("full") if count == total else first
            assert base is not None, "only the first blocks are fewer than all"
            spare = float(limit - base.peak_bytes)
            for _ in range(_TRIES):
                rules = {
                    fqn: each
                    for fqn, each in rules_for(self._operators(blocks), spare).items()
                    if fqn in blocks
                }
                if not any(each.keep for each in rules.values()):
                    break
                option = self._ruled(rules, f"rules on {count} of {total} blocks")
                self.options.remove(option)
                if option.fits:
                    found.append((option, self._steps["rules"]))
                    break
                spare -= option.peak_bytes - limit
        if found:
            best, step = min(found, key=lambda each: each[0].step_time_s)
            self.options.append(best)
            self._steps["rules"] = step

    def _ruled(self, rules: Mapping[str, BlockRules], title: str) -> Option:
        text = rules_file(rules, title=self._title(title), name="apply_rules")
        file = self.folder / f"rules_{len(list(self.folder.iterdir()))}.py"
        files.write_atomically(file, text)
        experiment = self.subject.under(File(path=str(file)))
        return self.add("rules", title, experiment, partial(self._ruled_text, rules, title), overrides=())

    def _budget(self) -> None:
        budget_gib = self.subject.limit_bytes / _GIB
        self.tell("plan of ac=budget")
        file = self.folder / "plan.json"
        try:
            asked = self.subject.variant("budget", budget_gib=budget_gib)
            planned = planned_on_fake_rank(asked, file)
            self.add(
                "budget",
                "plan of acbench",
                planned,
                None,
                overrides=("ac=budget", f"ac.budget_gib={budget_gib:.6g}", *words_of_classes(asked)),
                needs_acbench=True,
                plan=file.read_text(encoding="utf-8"),
            )
        except (ConfigError, StrategyError) as error:
            self.notes.append(f"budget has no plan: {error}")
            if isinstance(error.__cause__, BudgetBelowMinimum):
                self._least_budget_bytes = error.__cause__.minimum_feasible_bytes

    def _operators(self, blocks: Sequence[str]) -> dict[str, Sequence[HeavyOperator]]:
        """Return the operators of some blocks that cost FLOPs."""
        if self._heavy is None:

            def look(step: RunnableStep) -> Mapping[str, Sequence[HeavyOperator]]:
                return heavy_operators(step, find_blocks(step.model, **self.subject.named_blocks))

            self._heavy = seen_on_fake_rank(self.subject.experiment, look)
        return {fqn: self._heavy[fqn] for fqn in blocks if fqn in self._heavy}

    def _title(self, what: str) -> str:
        return f"{what}: activation checkpointing of {self.subject.label}."

    def _again(self, blocks: Sequence[str]) -> str:
        return recomputing_file(
            blocks, title=self._title("all blocks run again in backward"), name="apply_full"
        )

    def _some(self, chosen: Sequence[str], blocks: Sequence[str]) -> str | None:
        """Return the file that runs some blocks again, as far as they are among `blocks`."""
        known = [fqn for fqn in chosen if fqn in blocks]
        first = list(chosen) == self.names[: len(chosen)]
        name = f"first_{len(chosen)}" if first else "selective_layer"
        what = f"{len(chosen)} of {len(self.names)} blocks run again in backward"
        return recomputing_file(known, title=self._title(what), name=f"apply_{name}") if known else None

    def _kept(self, blocks: Sequence[str]) -> str:
        rules = rules_for(self._operators(blocks), math.inf)
        title = self._title("products, convolutions and attention stay, all else of the blocks runs again")
        return rules_file(rules, title=title, name="apply_selective_op")

    def _ruled_text(self, rules: Mapping[str, BlockRules], title: str, blocks: Sequence[str]) -> str | None:
        known = {fqn: each for fqn, each in rules.items() if fqn in blocks}
        return rules_file(known, title=self._title(title), name="apply_rules") if known else None

    def _offloaded(self, blocks: Sequence[str]) -> str:
        title = self._title("what blocks save for backward waits in host memory")
        return offloading_file(blocks, title=title, name="apply_offload")


def _standing_bytes(memory: MeasuredMemory) -> int:
    """Return what is there at the end of backward, with any batch and whatever is done with activations."""
    return memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes


def _overrides(experiment: Experiment) -> tuple[str, ...]:
    """Return the words of `acbench` that choose the strategies of an experiment."""
    words = [f"ac={name_of(experiment.ac)}"]
    first = getattr(experiment.ac, "first", None)
    if first is not None:
        words.append(f"ac.first={first}")
    if getattr(experiment.ac, "offload", False) is True:
        words.append("ac.offload=true")
    if getattr(experiment.ac, "rewind", False) is True:
        words.append("ac.rewind=true")
    words += words_of_classes(experiment)
    if name_of(experiment.chunk) != "none":
        words.append(f"chunk={name_of(experiment.chunk)}")
    return tuple(words)
