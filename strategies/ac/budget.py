"""`ac=budget`: the peak of a step within a budget of bytes, at the least recomputation."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from strategies.ac.base import ActivationCheckpointing
from strategies.base import Observation, Partition, RunnableStep, StrategyError, alone
from strategies.budget.compiled import compiled_capture, compiled_planning
from strategies.budget.eager import carrying_out, first_call
from strategies.budget.export import operator_modules, words_of_others
from strategies.budget.plan import Plan, bounded
from strategies.budget.planning import known_plans, planner
from strategies.regions import blocks, region
from strategies.step import plan_capture

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from strategies.budget.planning.cost import Objective
    from strategies.regions.region import RegionCallSite

_GIB = 1 << 30

_OBJECTIVES = ("both", "flops", "time")
_EXECUTORS = ("eager", "compiled")
_UNDECIDED: Mapping[str, Any] = MappingProxyType({"objective": "both", "host_gib": 0.0})
"""What decides how a plan is made, with the values that ask for nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget(ActivationCheckpointing):
    """Keep the peak of a training step within a budget of bytes, at the least recomputation.

    Use when: a step must fit a number of bytes; it says what that costs, and what it costs at least. A trial
        runs the plain model to plan, so a model that fits only with recomputation runs out of memory there;
        plan it where it fits, and give the plan by `ac.plan_file`.

    Saved: of each block, the storages that the plan keeps: any set, another one for each block.
    Recomputed: the operators that the other saved tensors follow from, each once.
    Moved: the storages that the plan offloads, inputs of blocks among them, to the host and back.

    Fields:
        budget_gib: GiB of a rank that the peak of the whole step may reach, above 0.
        fraction: the same as a share of the peak without activation checkpointing, above 0 and at most 1.
        objective: what is least of what runs again: `flops`, `time` by the machine's numbers, or `both`: of
            plans of at most a hundredth of a step's FLOPs more than the cheapest, one that is faster.
        host_gib: GiB of host memory, of each rank, in which values may wait for backward, at least 0; 0
            offloads nothing.
        executor: `eager` follows the operators of blocks; `compiled` splits the graphs of compiled blocks,
            needs `compile=aot_eager` or `inductor`, and offloads nothing.
        plan_file: plan that an earlier trial has written. Exactly one of it, `budget_gib` and `fraction` is
            given.

    Source: the certificate is a linear programme over the operators of the step; for the choice among options
        of blocks, Beaumont et al. 2020, INRIA RR-9302 (rotor).
    """

    views: ClassVar[tuple[str, ...]] = ("plan", "file", "torch_remat")

    budget_gib: float | None = None
    fraction: float | None = None
    objective: str = "both"
    host_gib: float = 0.0
    executor: str = "eager"
    plan_file: str | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range, and any number of budgets but one."""
        ActivationCheckpointing.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        _require_above_0("budget_gib", self.budget_gib, math.inf)
        _require_above_0("fraction", self.fraction, 1)
        if not _is_number(self.host_gib) or not 0 <= self.host_gib < math.inf:
            raise StrategyError("ac.host_gib", f"must be at least 0 and finite, got {self.host_gib!r}")
        _require_one_of("objective", self.objective, _OBJECTIVES)
        _require_one_of("executor", self.executor, _EXECUTORS)
        if self.needs_compiler and self.host_gib:
            problem = "must be 0 for ac.executor=compiled, whose graphs move nothing to the host"
            raise StrategyError("ac.host_gib", f"{problem}, got {self.host_gib!r}; use ac.executor=eager")
        names = ("budget_gib", "fraction", "plan_file")
        given = [f"ac.{name}" for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            listed = ", ".join(f"ac.{name}" for name in names)
            raise StrategyError("ac", f"give exactly one of {listed}, got {found}")
        if self.plan_file is not None:
            self._refuse_beside_plan_file()

    def _refuse_beside_plan_file(self) -> None:
        for name, value in _UNDECIDED.items():
            if getattr(self, name) != value:
                problem = "decides how a plan is made, and the one in ac.plan_file is made"
                raise StrategyError(f"ac.{name}", f"{problem}; leave one of the two out")

    @property
    def needs_compiler(self) -> bool:
        """True if partitions of graphs carry the plan out."""
        return self.executor == "compiled"

    @property
    def step_planner(self) -> Budget:
        """Itself: the plan is made of a step that the plain model takes."""
        return self

    def with_plan(self, file: Path) -> Budget:
        """Return the variant with the plan in `file`."""
        decided = {"budget_gib": None, "fraction": None, **_UNDECIDED}
        return replace(self, **decided, plan_file=str(file))

    def within(self, nbytes: int) -> Budget:
        """Return the variant for a budget of so many bytes."""
        return replace(self, fraction=None, budget_gib=nbytes / _GIB)

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:  # noqa: ARG002 (it has no loss)
        """Return `model`, with a region around each block that its plan does not leave as it is.

        Without a plan, the first call of the model that trains plans for itself: for a step whose loss is the
        sum of its outputs. Trials plan for their own step before. With `executor="compiled"` the model stays
        as it is: who compiles its blocks does so with `partitions`.

        Raises:
            StrategyError: no such blocks, the model is checkpointed already, or the plan is another model's.
        """
        region.refuse_enclosed(model)
        modules = self.modules_of(model)
        region.refuse_own_forward(modules.blocks)
        if self.needs_compiler:
            if self.plan_file is not None:
                carrying_out.require_blocks(self._given(self.plan_file), modules)
        elif self.plan_file is None:
            region.enclose(
                blocks.unwrapped(model), first_call.PlansAtFirstCall(budget=self), holds_call=False
            )
        else:
            carrying_out.enclose(self._given(self.plan_file).of_stage(modules.blocks), modules)
        return model

    def partitions(self, model: nn.Module, compiler: str) -> Mapping[str, Partition]:
        """Return the partition functions that carry out the plan, by FQN of blocks; none where it is plain.

        What stands next to the blocks is not compiled: call `enclose_beside` when the blocks are.

        Args:
            model: a model that `apply` returned.
            compiler: the backend of `torch.compile` that calls them.

        Raises:
            StrategyError: there is no plan, or it is for another compiler or model.
        """
        return compiled_planning.partitions(self._required(), self.blocks_of(model), compiler)

    def enclose_beside(self, model: nn.Module) -> None:
        """Put regions around what stands next to the blocks, once these are compiled with `partitions`."""
        carrying_out.enclose_beside(self._required(), self.modules_of(model))

    def view(
        self,
        name: str,
        model: nn.Module,
        sample: tuple[Any, ...],
        keywords: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the plan as text, or in the words of what others run.

        Args:
            name: `plan`; `file`: a file for torch alone, which keeps the operators that cost FLOPs and that
                the plan does not run again; `torch_remat`: submodules of each block that torch-remat shall
                keep.
            model: a plain model; without a plan, one is made for a step whose loss is the sum of its outputs.
            sample: example positional inputs.
            keywords: inputs that the model takes by name alone.

        Raises:
            StrategyError: no plan keeps the budget, or it is another model's.
        """
        given = self._required() if self.needs_compiler or self.plan_file is not None else None
        plan = given or self.plan(first_call.shadow_step(model, sample, dict(keywords or {})))
        if name == "plan":
            return plan.describe()
        self._require_words(name, plan)
        step = first_call.shadow_step(model, sample, dict(keywords or {}))
        forwards = operator_modules.block_forwards(step, self.blocks_of(step.model))
        export_of = words_of_others.plan_file if name == "file" else words_of_others.remat_regions
        return export_of(plan, forwards)

    def _require_words(self, name: str, plan: Plan) -> None:
        if self.needs_compiler:
            problem = f"compiled numbers the operators of graphs, which {name} has no words for"
            raise StrategyError("ac.executor", f"{problem}; use show=plan or ac.executor=eager")
        if plan.chunk is not None:
            problem = f"the plan numbers operators of programs in chunks, which {name} has no words for"
            raise StrategyError("chunk", f"{problem}; use show=plan, or chunk=none")
        first = next((block.group for block in plan.blocks if block.group), None)
        if first is not None:
            problem = f"the plan runs the group of {first!r} again as one, which {name} has no words for"
            raise StrategyError("show", f"{problem}; use show=plan, or a budget that needs no groups")

    def call_site(self, model: nn.Module) -> RegionCallSite:  # noqa: ARG002 (refused whatever the model)
        """Refuse: one region around the whole model has no blocks to plan. Raises StrategyError: always."""
        problem = "call_site makes the model one region, and budget plans blocks"
        raise StrategyError("wrap_order", f"{problem}; use inside_fsdp")

    def check_compilation(self, order: str, scope: str) -> None:
        """Refuse compiled code around a tape, and partitions of what is no block.

        Raises:
            StrategyError: always for `executor="eager"`.
        """
        if not self.needs_compiler:
            problem = "ac=budget ac.executor=eager follows the operators of eager blocks"
            remedy = "use compile=none, ac.executor=compiled or ac=compiler_budget"
            raise StrategyError("compile", f"{problem}; {remedy}")
        if order != "ac_first":
            problem = "must be ac_first for ac.executor=compiled, whose plans are part of what is compiled"
            raise StrategyError("compile_order", f"{problem}, got {order}")
        if scope != "blocks":
            problem = "must be blocks for ac.executor=compiled, which plans the graphs of blocks"
            raise StrategyError("compile_scope", f"{problem}, got {scope}")

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model without the blocks. Raises StrategyError: they are not there."""
        self.blocks_of(model)

    def write_plan(self, step: RunnableStep, file: Path) -> None:
        """Make the plan of `step` and write it to `file`.

        Raises:
            StrategyError: no plan keeps the budget, with the smallest that one keeps; no block ran.
        """
        self.plan(step).save(file)

    def attend_plan(self, step: RunnableStep) -> None:
        """Take the steps that `write_plan` takes on another rank, with the same collectives.

        Raises:
            StrategyError: a block is not one graph, with `executor="compiled"`.
        """
        if self.needs_compiler:
            compiled_capture.attend_capture(step, self.blocks_of(step.model))
            return
        with step.around():
            step.run()

    def write_best_plan(self, steps: Iterable[RunnableStep], file: Path, *, spare_bytes: int = 0) -> None:
        """Make the cheapest plan of a step that can be taken in several ways, and write it to `file`.

        Args:
            steps: without chunks, then in chunks of several plans.
            file: what it is written to.
            spare_bytes: bytes below its budget that the plan is to stay.

        Raises:
            StrategyError: no plan keeps the budget, with the smallest that one keeps; no block ran.
        """
        self._best_plan(steps, spare_bytes).save(file)

    def plan(self, step: RunnableStep) -> Plan:
        """Return the plan of `step`.

        Raises:
            StrategyError: no plan keeps the budget, with the smallest that one keeps; no block ran.
        """
        return self._best_plan([step])

    def _best_plan(self, steps: Iterable[RunnableStep], spare_bytes: int = 0) -> Plan:
        found: Mapping[str, nn.Module] = {}
        of_executor: Callable[[Plan], Plan] = _same
        ways: list[known_plans.WayToPlan] = []
        objective = cast("Objective", self.objective)
        if self.needs_compiler and objective == "both":  # compiled code has no tapes
            objective = "flops"
        most: Callable[..., tuple[int, ...]] = alone
        for step in steps:
            modules, most = self._modules_of(step), step.most
            found = modules.blocks
            if self.needs_compiler:
                graph, of_executor = compiled_planning.captured(step, modules)
            else:
                with step.around():
                    graph = plan_capture.capture(
                        step.run,
                        modules,
                        device=step.device,
                        standing=step.standing,
                        lasting=step.lasting,
                    )
            ways.append(
                known_plans.WayToPlan(
                    graph=replace(graph, stages=tuple(step.stages)),
                    objective=objective,
                    host_bytes=int(min(self.host_gib * _GIB, sys.maxsize)),
                    nests=not (self.needs_compiler or step.chunk or step.stages),
                    is_taped=not self.needs_compiler,
                    chunk=step.chunk,
                )
            )
        plans = known_plans.KnownPlans(ways, objective)
        return of_executor(self._fitting(plans, spare_bytes, *most(*plans.range_bytes())).with_idle(found))

    def _modules_of(self, step: RunnableStep) -> blocks.ModelModules:
        """Return what a plan decides about in a step: in stages of a pipeline, their blocks alone."""
        if not step.stages:
            return self.modules_of(step.model)
        return blocks.ModelModules(
            blocks={fqn: block for model in step.models for fqn, block in self.blocks_of(model).items()}
        )

    def _fitting(
        self, plans: known_plans.KnownPlans, spare_bytes: int, plain_peak_bytes: int, least_bytes: int
    ) -> Plan:
        """Return the plan for the budget, which stays below it by `spare_bytes`.

        Args:
            plans: those of the step.
            plain_peak_bytes: bytes of which a fraction is a share: the highest of all ranks.
            least_bytes: smallest budget that each rank has a plan for.

        Raises:
            StrategyError: no plan keeps it.
        """
        if self.budget_gib is not None:
            where, most = "ac.budget_gib", min(self.budget_gib * _GIB, sys.maxsize)
        else:
            assert self.fraction is not None, "one of the two is given"
            where, most = "ac.fraction", self.fraction * plain_peak_bytes
        try:
            return plans.plan(int(most), spare_bytes)
        except planner.BudgetBelowMinimum as error:
            needed = least_bytes + spare_bytes
            share = math.ceil(1e4 * needed / plain_peak_bytes) / 1e4
            gib = math.ceil(1e9 * needed / _GIB) / 1e9
            smallest = f"ac.fraction={share:g} or ac.budget_gib={gib:.9g}"
            proven = f"{bounded(plans.chunkings)} needs less than {error.proven_minimum_bytes} bytes"
            raise StrategyError(
                where,
                f"no plan{_of_stages(plans.stages)} keeps {int(most)} bytes; the smallest that one keeps is "
                f"{needed} bytes, {smallest}; no schedule of {proven}{_spared(spare_bytes)}{error.limits}",
            ) from error

    def observe(self, model: nn.Module) -> Observation:
        """Return the bytes that the latest step moved, and the plan."""
        if self.plan_file is not None:
            plan: Plan | None = self._given(self.plan_file)
        else:
            first = region.regions(blocks.unwrapped(model)).get("")
            plan = first.plan if isinstance(first, first_call.PlansAtFirstCall) else None
        of_blocks = ActivationCheckpointing.observe(self, model)
        return Observation(
            offloaded_bytes=of_blocks.offloaded_bytes,
            plan=None if plan is None else plan.to_dict(),
            unneeded=_unneeded(plan) if plan and plan.is_plain else None,
        )

    def blocks_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the blocks below their wrappers, by plain FQN."""
        found = blocks.find_blocks(model, layers_fqn=self.layers_fqn, module_classes=self.module_classes)
        return {fqn: blocks.unwrapped(block) for fqn, block in found.items()}

    def modules_of(self, model: nn.Module) -> blocks.ModelModules:
        """Return what a plan may decide about."""
        return blocks.ModelModules.of(model, self.blocks_of(model))

    def _required(self) -> Plan:
        if self.plan_file is None:
            problem = "is needed for ac.executor=compiled, whose plans are those of a step"
            remedy = "write one by Budget.write_plan, as trials do, or use ac.executor=eager"
            raise StrategyError("ac.plan_file", f"{problem}; {remedy}")
        return self._given(self.plan_file)

    def _given(self, file: str) -> Plan:
        try:
            plan = Plan.load(Path(file))
        except OSError as error:
            raise StrategyError("ac.plan_file", f"{file!r} cannot be read: {error.strerror}") from error
        if plan.executor != self.executor:
            problem = f"{file!r} was made for ac.executor={plan.executor}, not {self.executor}"
            raise StrategyError("ac.plan_file", f"{problem}; use that one, or make the plan again")
        return plan


def _spared(spare_bytes: int) -> str:
    """Return what kernels need besides a plan, for the end of a sentence."""
    return f"; kernels of a plan were measured to need {spare_bytes} bytes more" if spare_bytes else ""


def _of_stages(stages: Sequence[int]) -> str:
    """Return the stages of a rank, for the middle of a sentence."""
    return f" of stage {' and '.join(map(str, stages))}" if stages else ""


def _same(plan: Plan) -> Plan:
    return plan


def _unneeded(plan: Plan) -> str:
    if plan.budget_bytes == plan.plain_peak_bytes:
        return "the budget needs nothing: the step fits it as it is"
    return (
        f"the budget needs nothing: {plan.budget_bytes} bytes are above the peak without activation "
        f"checkpointing, {plan.plain_peak_bytes} bytes"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_one_of(name: str, value: Any, options: Sequence[str]) -> None:
    if value not in options:
        raise StrategyError(f"ac.{name}", f"must be {' or '.join(options)}, got {value!r}")


def _require_above_0(name: str, value: Any, most: float) -> None:
    """Refuse what is no number above 0 and at most `most`."""
    if value is None:
        return
    if not _is_number(value) or not 0 < value <= most or math.isinf(value):
        limit = "" if math.isinf(most) else f" and at most {most:g}"
        raise StrategyError(f"ac.{name}", f"must be above 0{limit}, got {value!r}")
