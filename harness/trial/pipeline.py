"""A rank's stages of a pipeline, run by a schedule of `torch.distributed.pipelining`.

Shapes are given and not inferred: torch's own inference asks for gradients by `autograd.grad`, which
reentrant regions refuse, and takes a step that is no step of the trial. Gradients are not scaled afterwards:
each micro-batch's loss is its part of the mean, as it is without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.utils._pytree import tree_leaves

from harness.experiment.mesh import Mesh
from harness.measure.step import StepReport
from harness.measure.trainee import BackwardPart, Watcher
from harness.models.base import Batch, LossFunction
from harness.records.measured import StagesInFlight

_SCHEDULES: Mapping[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
_OF_ONE_STAGE = ("gpipe", "1f1b")


class InFlight(NamedTuple):
    """The most calls of stages that a rank holds at once, under its schedule.

    Fields:
        inputs: those whose forward has run, and the gradient of whose input has not been computed.
        weights: those whose forward has run, and the gradients of whose weights have not been computed.
    """

    inputs: int
    weights: int


class Pipeline:
    """The stages of one rank, with the schedule that runs them.

    Args:
        stages: the rank's stages by number, as they are called: recomputed, sharded, wrapped.
        microbatches: number of those of a step.
        between: what a stage gives the next.
        on_microbatch: told the number of each micro-batch whose forward or backward begins.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        mesh: Mesh,
        group: ProcessGroup,
        device: torch.device,
        microbatches: int,
        sample: Batch,
        between: Tensor,
        on_microbatch: Callable[[int], None] = lambda _number: None,
    ) -> None:
        self.stages = dict(stages)
        self._around: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._parts: Sequence[Batch] = ()
        self._loss: LossFunction
        self._latest = 0
        self._outputs: Any = None
        self._watcher = Watcher()
        self._on_microbatch = on_microbatch
        self._last, self._between = mesh.stages - 1, between
        given = between.detach().requires_grad_()
        made = [
            _Stage(
                module,
                index,
                mesh.stages,
                device,
                pipeline=self,
                input_args=given if index else sample.inputs,
                output_args=given,  # nobody reads that of the last stage
                group=group,
                dw_builder=None if mesh.pp_split_backward else _nothing_left,
            )
            for index, module in stages.items()
        ]
        for each in made:
            each.has_backward = True  # which torch 2.11 says in the first step, after buffers were made
        self._schedule = _SCHEDULES[mesh.pp_schedule](
            made[0] if mesh.pp_schedule in _OF_ONE_STAGE else made,
            n_microbatches=microbatches,
            loss_fn=self._loss_of_latest,
            scale_grads=False,
        )
        order = self._schedule.pipeline_order[made[0].group_rank]
        self.in_flight = in_flight(order, is_split=mesh.splits_backward)

    def step(
        self,
        parts: Sequence[Batch],
        loss: LossFunction,
        watcher: Watcher,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Accumulate the gradients of all micro-batches.

        Args:
            watcher: told of what this rank does.
            around: makes the context in which stages and the loss run.

        Raises:
            RuntimeError: a stage raises, in its own words.
        """
        self._parts, self._loss, self._watcher, self._around = parts, loss, watcher, around
        # stages look their micro-batch up: torch would cut what it is given along the first dimension
        try:
            self._schedule.step(target=torch.empty(len(parts)), return_outputs=False)
        finally:
            self._parts, self._watcher = (), Watcher()

    def rehearse(
        self,
        part: Batch,
        loss: LossFunction,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Make the state that a step leaves, at less cost: nothing is sent, and the schedule does not run.

        Each stage of this rank runs forward and backward of a micro-batch, for the lazy state of its modules.
        Torch makes its buffers for what other ranks send, which it does in the first step.

        Args:
            loss: as of `step`.
            around: as of `step`.
        """
        name = "_initialize_stages" if hasattr(self._schedule, "_initialize_stages") else "_initialize_stage"
        getattr(self._schedule, name)((), {})
        for index, module in self.stages.items():
            taken = (self._between.detach().requires_grad_(),) if index else part.inputs
            with around():
                outputs = module(*taken, **({} if index else part.keywords))
                end = loss(outputs, part) if index == self._last else outputs
            torch.autograd.backward(end, torch.ones_like(end))

    def shown(self, report: StepReport) -> StagesInFlight:
        """Return what a record says of the stages, after a step that was measured."""
        return StagesInFlight(
            stages=tuple(self.stages),
            in_flight=self.in_flight.inputs,
            in_flight_weights=self.in_flight.weights,
            bytes_a_microbatch=report.microbatch_bytes,
            forwards=report.forwards,
            actions=report.actions,
        )

    def forward(self, run: Callable[..., Any], number: int, args: tuple[Any, ...], stage: _Stage) -> Any:
        """Run the forward of a stage on a micro-batch; the first reads it, the last goes on to the loss."""
        self._on_microbatch(number)
        self._watcher.on_action(f"{stage.stage_index}F{number}")
        self._watcher.enter("forward")
        self._latest = number
        with _own_words(), self._around():
            part = self._parts[number]
            outputs = run(part.inputs, dict(part.keywords)) if stage.is_first else run(args, {})
        if not stage.is_last:
            self._watcher.on_forward(outputs, None)
        return outputs

    def backward(self, run: Callable[[], None], part: BackwardPart, action: str, number: int) -> None:
        """Run the backward of a stage on a micro-batch, or one part of it, which an action `2I3` names."""
        self._on_microbatch(number)
        self._watcher.on_action(f"{action}{number}")
        self._watcher.enter("backward", part)
        with _own_words():
            run()
        self._watcher.on_backward()

    def tensors_of(self, outputs: Any) -> Any:
        """Return the tensors among what the last stage gives: of them alone torch lets the graph go."""
        self._outputs = outputs
        if isinstance(outputs, Tensor):
            return outputs
        return tuple(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))

    def _loss_of_latest(self, _outputs: Any, _number: Tensor) -> Tensor:
        """Return the part of the mean loss that the micro-batch has whose forward has just returned."""
        outputs, self._outputs = self._outputs, None
        with self._around():
            loss = self._loss(outputs, self._parts[self._latest]) / len(self._parts)
        self._watcher.on_forward(outputs, loss)
        return loss


def in_flight(order: Sequence[Any], *, is_split: bool) -> InFlight:
    """Return how many calls of its stages a rank holds at most.

    Args:
        order: actions of the rank, of torch's schedule; `None` where it waits.
        is_split: whether gradients of weights come later than those of inputs.
    """
    inputs = weights = most_inputs = most_weights = 0
    for action in order:
        kind = "" if action is None else action.computation_type.name
        inputs += (kind == "FORWARD") - (kind in {"FULL_BACKWARD", "BACKWARD_INPUT"})
        ends = {"FULL_BACKWARD", "BACKWARD_WEIGHT" if is_split else "BACKWARD_INPUT"}
        weights += (kind == "FORWARD") - (kind in ends)
        most_inputs, most_weights = max(most_inputs, inputs), max(most_weights, weights)
    return InFlight(inputs=most_inputs, weights=most_weights)


class _Stage(PipelineStage):
    """A stage that says what it does."""

    def __init__(self, module: nn.Module, index: int, *args: Any, pipeline: Pipeline, **options: Any) -> None:
        super().__init__(module, index, *args, **options)
        self._pipeline = pipeline

    def forward_one_chunk(
        self, number: int, args: tuple[Any, ...], _kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """Run the forward of one micro-batch."""

        def run(given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return PipelineStage.forward_one_chunk(self, number, given, named, save_forward_output)

        return self._pipeline.forward(run, number, args, self)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        outputs = super().forward_maybe_with_nosync(*args, **kwargs)
        return self._pipeline.tensors_of(outputs) if self.is_last else outputs

    def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
        """Return what torch 2.11 sends before the first step, without what a rank sends to itself."""
        own = dist.get_rank()
        return [each for each in super()._get_init_p2p_neighbors_ops() if each.peer != own]

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Do nothing: torch 2.11 compares outputs with what was said, which is wrong of the last stage."""

    def backward_one_chunk(
        self, number: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of one micro-batch, or compute the gradient of its input."""
        run = partial(PipelineStage.backward_one_chunk, self, number, loss, full_backward, last_backward)
        self._pipeline.backward(run, "input", f"{self.stage_index}{'B' if full_backward else 'I'}", number)

    def backward_weight_one_chunk(self, number: int, last_backward: bool = False) -> None:
        """Compute the gradients of weights of one micro-batch."""
        run = partial(PipelineStage.backward_weight_one_chunk, self, number, last_backward)
        self._pipeline.backward(run, "weight", f"{self.stage_index}W", number)


def _nothing_left() -> Callable[[], None]:
    """Return what is to be done for weights after a backward that was taken as a whole."""
    return lambda: None


@contextmanager
def _own_words() -> Iterator[None]:
    """Raise what a stage raised; torch raises a list of its tensors."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None
