"""The maker of the two models of a check: fresh ones, plain or with the variant, of the same weights."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.check.arguments import Precision
from harness.check.plain_names import PlainNames
from harness.check.subject import Subject, default_loss, optimizer_of
from harness.errors import ConfigError
from harness.measure.parity.snapshot import Snapshot, steps
from harness.measure.probes.micro_batches import MicroBatched
from harness.measure.rng import seeded
from harness.measure.step import runnable_step, write_plan
from harness.models.base import Batch, joined
from harness.models.parts.containers import is_container
from harness.models.parts.given_inputs import by_position
from strategies import Observation, PlansFromStep, Strategy, Tolerance
from strategies.estimate.global_state import GlobalState
from strategies.estimate.outer_state import OuterState
from strategies.estimate.tensors import tensors_in

_MAKING = -1
"""Stands for the step in the seed of what is drawn while a model is made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workshop:
    """Makes the models of one check.

    Fields:
        make: returns a fresh plain model.
        variant: a strategy, or a function that turns the model into the one to use.
        loss_fn: function of the outputs; `None` for `default_loss`.
        batches: micro-batches of a step.
        seed: seed of everything that is drawn.
        accepted: how far numbers may be apart; `None` asks for equal bits.
        recomputed: FQNs of what the variant recomputes.
        precision: dtypes of forward and loss.
        is_quick: whether a model takes one step.
    """

    make: Callable[[], nn.Module]
    variant: Strategy | Callable[[Any], Any]
    loss_fn: Callable[[Any], Any] | None
    batches: tuple[Batch, ...]
    seed: int
    accepted: Tolerance | None = None
    recomputed: tuple[str, ...] = ()
    precision: Precision = field(default_factory=Precision)
    is_quick: bool = False
    _outer: list[OuterState] = field(default_factory=list)
    _global: list[GlobalState] = field(default_factory=list)
    _left: dict[str, None] = field(default_factory=dict)
    _compiled: list[bool] = field(default_factory=list)
    _device: list[torch.device] = field(default_factory=list)
    _spare: list[nn.Module] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The device of the models."""
        (device,) = self._device
        return device

    @property
    def whole_step(self) -> tuple[Batch, ...]:
        """The micro-batches of a step."""
        return self.batches

    @property
    def rank(self) -> int:
        """This rank."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def dp_rank(self) -> int:
        """Zero: the random numbers of a step are the same on all ranks."""
        return 0

    @property
    def is_alone(self) -> bool:
        """True if there is no process group."""
        return not dist.is_initialized()

    @property
    def takes_any_size(self) -> bool:
        """True: the plain model says whether it takes what is cut."""
        return True

    @property
    def is_compiled(self) -> bool:
        """True if somebody has compiled something since the check began."""
        dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
        if dynamo is not None and any(each is not None for each in dynamo.cached_backends.values()):
            self._compiled.append(True)
        return bool(self._compiled)

    def anywhere(self, seen: bool) -> bool:
        """Say whether something was seen on any rank."""
        if not dist.is_initialized():
            return seen
        flags: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(flags, seen)
        return any(flags)

    def begin_anew(self) -> None:
        """Forget what earlier models have left, before the next two are made."""
        if not self._spare:  # where models are kept for later, none has been trained
            gc.collect()
        if self.is_compiled:
            torch.compiler.reset()  # under the meters nothing is compiled, and dynamo remembers that

    def check(self) -> None:
        """Refuse a `make` whose models no comparison could be made of; a quick check trains the two it makes.

        Raises:
            ConfigError: it makes no modules, nothing to train, one module for all calls, or other weights at
                each call.
        """
        if not self.is_quick:  # a quick check leaves garbage to Python
            self.begin_anew()
        self._compiled.clear()
        one = self._made()
        self._outer.append(OuterState(one))
        self._global.append(GlobalState(one))
        other = self._made()
        if one is other:
            problem = "returns the same model each time"
            raise ConfigError("make", f"{problem}; make it inside, or return a copy.deepcopy of it")
        if next(one.parameters(), None) is None:
            raise ConfigError("make", "returns a model without parameters: there is nothing to train")
        difference = _first_unlike(dict(_tensors(one)), dict(_tensors(other)))
        if difference is not None:
            raise ConfigError(
                "make",
                f"returns another model each time: {difference!r} differs although the seed is the same; "
                "draw its numbers from the global generators of torch, Python or NumPy",
            )
        self._device.append(next(one.parameters()).device)
        self._spare.extend((one, other) if self.is_quick else ())

    @property
    def unplanned(self) -> PlansFromStep | None:
        """The variant, where it plans from a step and has no plan."""
        variant = self.variant
        planner = variant.step_planner if isinstance(variant, Strategy) else None
        return planner if planner is not None and planner.plan_file is None else None

    def write_plan(self, variant: PlansFromStep, file: Path) -> None:
        """Let `variant` plan for a step, and write its plan on rank 0.

        The step is the plain model's, on the largest micro-batch: each has its own backward, and a plan takes
        smaller ones. Probes begin with smaller inputs, so that a plan for the first call would be one for
        these. All ranks take the step.

        Raises:
            PassError: the plain model raised.
            StrategyError: there is no plan, on rank 0.
        """
        trainee = self.trainee(is_variant=False)
        step = runnable_step(trainee, joined([max(self.batches, key=_elements)]).to(self.device))
        with step.around():
            step.run()  # makes optimizer state
        write_plan(variant, [step], file)

    def with_plan(self, variant: PlansFromStep, file: Path) -> Workshop:
        """Return the workshop of `variant` with the plan in `file`, which all ranks get from rank 0."""
        if dist.is_initialized():
            text = [file.read_text(encoding="utf-8") if self.rank == 0 else ""]
            dist.broadcast_object_list(text, src=0)
            file.write_text(text[0], encoding="utf-8")
        return replace(self, variant=variant.with_plan(file))

    def leave(self) -> None:
        """Put back what models of the check have changed outside of themselves."""
        for state in self._global:
            self._left.update(dict.fromkeys(state.put_back()))
        for outer in self._outer:
            outer.put_back()

    @property
    def left_behind(self) -> tuple[str, ...]:
        """Names of the global state that models of the check have changed, and that was put back."""
        return tuple(self._left)

    def subject(self, *, is_variant: bool) -> Subject:
        """Return a fresh model with its optimizer, with the variant or without.

        What models keep outside of themselves is then as it was before the first of them.

        Raises:
            ConfigError: the variant returned nothing that can be called.
            StrategyError: the strategy does not suit the model.
        """
        self.leave()
        made = self._spare.pop() if self._spare else self._made()
        names, blocks = PlainNames.of(made), blocks_of(made)
        returned = self._varied(made) if is_variant else made
        model = returned if isinstance(returned, nn.Module) else made
        strategy = self.variant if is_variant and isinstance(self.variant, Strategy) else None
        return Subject(
            model=model,
            call=returned,
            optimizer=optimizer_of(model, for_one_step=self.is_quick),
            blocks=blocks,
            checkpointed={},
            loss_fn=default_loss if self.loss_fn is None else self.loss_fn,
            names=names,
            observe=Observation if strategy is None else lambda: strategy.observe(model),
            is_variant=is_variant,
            computed=partial(self.precision.computed, self.device),
        )

    def trainee(self, *, is_variant: bool) -> MicroBatched:
        """Return a fresh model that takes micro-batches.

        Raises:
            ConfigError, StrategyError: as of `subject`.
        """
        subject = self.subject(is_variant=is_variant).with_parts(checkpointed=self.recomputed)
        return MicroBatched(inner=subject, is_variant=is_variant)

    def modules(self, trainee: MicroBatched) -> Mapping[str, nn.Module]:
        """Return the modules of a model by the plain model's names."""
        subject = trainee.inner
        assert isinstance(subject, Subject), "this source has made it"
        return subject.names.modules

    def trained(self, trainee: MicroBatched, batches: Iterable[Batch]) -> Iterator[Snapshot]:
        """Train on `batches`, one a step, and yield what each computed, in the plain names."""
        subject = trainee.inner
        assert isinstance(subject, Subject), "this source has made it"
        renaming = subject.names.renaming(subject.model)
        snapshots = steps(trainee, batches, seed=self.seed)
        outer = self._outer[0].forked()  # the other model trains in between
        # what a variant has changed for all is the variant's alone
        settings = self._global[0].now() if trainee.is_variant else self._global[0].forked()
        while True:
            with settings.entered(), outer.entered():
                snapshot = next(snapshots, None)
            if snapshot is None:
                return
            yield renaming.renamed(snapshot)
            del snapshot  # the consumer decides how long it lives

    def plain(self) -> nn.Module:
        """Return a fresh plain model, which nobody trains."""
        self.leave()
        return self._made()

    def _made(self) -> nn.Module:
        with seeded(self.seed, step=_MAKING, dp_rank=0, device=_default_device()):
            made = self.make()
        if not isinstance(made, nn.Module):
            raise ConfigError("make", f"must return an nn.Module, got {type(made).__name__}")
        return self.precision.cast(made)

    def _varied(self, model: nn.Module) -> Any:
        """Return `model` as the variant returns it; what returns nothing has changed it in place."""
        with seeded(self.seed, step=_MAKING, dp_rank=0, device=_default_device()):
            returned = self._applied(model)
        if returned is None:
            return model
        if not callable(returned):
            problem = f"must return the model to use, got {type(returned).__name__}"
            raise ConfigError("variant", problem)
        return returned

    def _applied(self, model: nn.Module) -> Any:
        if not isinstance(self.variant, Strategy):
            return self.variant(model)
        inputs, keywords = self.batches[0].inputs, self.batches[0].keywords
        if keywords and not inputs:
            inputs = _positions(model, keywords)
        return self.variant.apply(model, inputs)


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _positions(model: nn.Module, keywords: Mapping[str, Any]) -> tuple[Any, ...]:
    try:
        return by_position(inspect.signature(model.forward), keywords)[0]
    except (TypeError, ValueError):  # forward tells no names
        return ()


def blocks_of(model: nn.Module, *, fewest: int = 2, trained: bool = True) -> dict[str, nn.Module]:
    """Return the children of the first container with several that train.

    Args:
        fewest: children with weights that the container has at least.
        trained: only weights that are trained count.
    """
    for fqn, module in model.named_modules():
        children = {f"{fqn}.{name}" if fqn else name: child for name, child in module.named_children()}
        weighted = [
            each
            for each in children.values()
            if any(p.requires_grad or not trained for p in each.parameters())
        ]
        if is_container(module) and len(weighted) >= fewest:
            return children
    return {}


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _elements(batch: Batch) -> int:
    return sum(each.numel() for each in tensors_in((batch.inputs, batch.keywords)))


def _first_unlike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str | None:
    for name in dict.fromkeys((*one, *other)):
        if name not in one or name not in other or not _is_same(one[name], other[name]):
            return name
    return None


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors, or this rank's parts of them, are equal, NaN included."""
    local, second = (each.to_local() if hasattr(each, "to_local") else each.detach() for each in (one, other))
    if local.is_meta or local.shape != second.shape or local.dtype != second.dtype:
        return bool(local.shape == second.shape and local.dtype == second.dtype)
    return torch.equal(local, second) or bool(
        torch.equal(local.isnan(), second.isnan()) and torch.equal(local.nan_to_num(), second.nan_to_num())
    )
