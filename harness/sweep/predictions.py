"""Predictions of many points, in processes that have imported torch; their progress goes to stderr."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import torch

from harness.errors import ConfigError, UnplannedError
from harness.experiment.experiment import Experiment
from harness.predict import batch_sizes, kept_steps, prediction, step_time
from harness.predict.hardware import Hardware
from harness.predict.solve import solve
from harness.records.files import make_folder
from harness.records.measured import MemoryNumbers
from harness.records.record import Record
from harness.report.facts.number_words import human_bytes
from harness.sweep.question import Answer, Question
from harness.trial.models_error import raised_by_model
from strategies import StrategyError
from strategies.last_words import last_words


def answers(questions: Sequence[Question], processes: int = 2) -> list[Answer]:
    """Return the answers in the order of the questions; one that is refused keeps no other from its own.

    Args:
        processes: most that predict at the same time, forks of this one, whose traces they share.
    """
    found: dict[int, Answer] = {}
    for number, said in _answered(questions, processes):
        found[number] = said
        _tell(questions, found, number)
    return [found[number] for number in range(len(questions))]


def _answered(questions: Sequence[Question], processes: int) -> Iterator[tuple[int, Answer]]:
    """Yield the number of each question with its answer; those that share traces are of one process."""
    groups = _groups(questions)
    asked = [[questions[number] for number in numbers] for numbers in groups]
    if len(questions) == 1 or processes == 1:
        for numbers, group in zip(groups, asked, strict=True):
            yield from zip(numbers, _answers_of_one_group(group), strict=True)
        return
    # a fork has none of its parent's threads, and would wait for them forever
    alone = partial(torch.set_num_threads, 1)
    with ProcessPoolExecutor(processes, mp_context=get_context("fork"), initializer=alone) as pool:
        numbers_of = {
            pool.submit(_all_answers, group): numbers for group, numbers in zip(asked, groups, strict=True)
        }
        for done in as_completed(numbers_of):
            yield from zip(numbers_of[done], _results(done, len(numbers_of[done])), strict=True)


def _groups(questions: Sequence[Question]) -> list[list[int]]:
    """Return the numbers of the questions, those together whose steps are one or follow from one another."""
    by_step: defaultdict[str, list[int]] = defaultdict(list)
    for number, question in enumerate(questions):
        alone = f"{number} " if question.field is not None else ""
        by_step[alone + prediction.shared_key(question.experiment)].append(number)
    return [group for numbers in by_step.values() for group in _apart(questions, numbers)]


def _apart(questions: Sequence[Question], numbers: Sequence[int]) -> list[list[int]]:
    """Return questions about steps that may follow from one another, by batch size where they do not."""
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    for number in numbers:
        by_size[questions[number].experiment.batch_size].append(number)
    first = questions[numbers[0]].experiment
    return [list(numbers)] if batch_sizes.traced_batch_sizes(first, list(by_size)) else list(by_size.values())


def _answers_of_one_group(questions: Sequence[Question]) -> Iterator[Answer]:
    batch_sizes = [each.experiment.batch_size for each in questions]
    return (answer(question, batch_sizes) for question in questions)


def _all_answers(questions: Sequence[Question]) -> list[Answer]:
    return list(_answers_of_one_group(questions))


def answer(question: Question, batch_sizes: Sequence[int] = ()) -> Answer:
    """Return the prediction for one point, or why there is none.

    Args:
        batch_sizes: those of all points that differ in them alone.
    """
    hardware = question.hardware
    seconds = None if hardware is None else step_time.timed_on(hardware)
    predict = partial(prediction.predict, seconds=seconds)
    try:
        if question.field is None:
            record = _kept(question, predict(question.experiment, batch_sizes=batch_sizes))
            return Answer(record=record, bound_by=_bound_by(question.experiment, hardware, batch_sizes))
        assert hardware is not None, "the command line refuses to solve without hardware"
        solved, experiment = solve(question.experiment, question.field, hardware, highest_of_ranks)
        record = _kept(replace(question, experiment=experiment), predict(experiment))
        return Answer(record=record, solved=solved, bound_by=_bound_by(experiment, hardware))
    except (ConfigError, StrategyError) as error:
        return Answer(refusal=error)
    except Exception as error:  # noqa: BLE001 (a defect of ours in one point is told, and the others go on)
        raised = raised_by_model(error)
        if raised is not None:
            problem = f"raises when its step is predicted, on tensors without data: {raised}"
            return Answer(refusal=ConfigError("model", problem))
        words = last_words(error)
        sys.stderr.write(words.traceback)
        problem = f"a defect here kept this point from being predicted: {words.kind}: {words.message}"
        return Answer(
            refusal=UnplannedError("acbench-plan", f"{problem}; report it with the traceback on stderr")
        )


def _kept(question: Question, record: Record) -> Record:
    """Keep the steps of a predicted trial where that is asked for; return its record with what they show."""
    if question.kept_in is None:
        return record
    assert record.memory is not None, "a prediction has bytes"
    folder = question.kept_in / record.trial_id
    make_folder(folder, within=question.kept_in)
    largest = kept_steps.keep_steps(question.experiment, folder)
    return replace(record, memory=replace(record.memory, largest_at_peak=largest))


def _bound_by(
    experiment: Experiment, hardware: Hardware | None, batch_sizes: Sequence[int] = ()
) -> str | None:
    """Return what a step that was just predicted waits for longest; `None` without hardware, or in stages.

    Of ranks with unlike steps it is the slowest one's.
    """
    if hardware is None or experiment.mesh.pp > 1:
        return None
    first, *others = (each.trace for each in prediction.steps_of(experiment, batch_sizes))
    seconds = step_time.timed_on(hardware)
    slowest = max(first, *others, key=lambda trace: seconds(trace).step_s) if others else first
    return step_time.bound_by(slowest, hardware)


def highest_of_ranks(experiment: Experiment) -> MemoryNumbers:
    """Return the predicted bytes of the rank that needs the most."""
    memories = [each.memory for each in prediction.steps_of(experiment)]
    return max(memories, key=lambda memory: memory.peak_bytes)


def _results(done: Future[list[Answer]], count: int) -> list[Answer]:
    """Return what a process has answered; one that was killed, or whose answers cannot be sent, has not."""
    try:
        return done.result()
    except BrokenProcessPool:
        problem = "the process that predicted this point, or one beside it, was killed"
        return [Answer(refusal=UnplannedError("acbench-plan", f"{problem}; is there enough memory?"))] * count
    except Exception as error:  # noqa: BLE001 (whatever pickles cannot do: the other points go on)
        problem = f"no answer came back for this point: {type(error).__name__}: {error}"
        return [Answer(refusal=UnplannedError("acbench-plan", problem))] * count


def _tell(questions: Sequence[Question], found: dict[int, Answer], number: int) -> None:
    question, said = questions[number], found[number]
    sys.stderr.write(f"[{len(found)}/{len(questions)}] {question.label}: {_in_words(said)}\n")


def _in_words(said: Answer) -> str:
    if said.record is None or said.record.memory is None:
        return "refused"
    peak = f"{human_bytes(said.record.memory.peak_bytes)} at the peak"
    if said.solved is None:
        return peak
    return f"{said.solved.field} {said.solved.value}, {peak}, {said.solved.predictions} predictions"
