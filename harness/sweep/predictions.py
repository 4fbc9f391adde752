"""Predictions of many points, in processes that have imported torch; their progress goes to stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context

from harness.errors import ConfigError, UnplannedError
from harness.experiment.experiment import Experiment
from harness.predict import prediction, step_time
from harness.predict.solve import solve
from harness.ranks.last_words import last_words
from harness.records.measured import MemoryNumbers
from harness.report.facts.number_words import human_bytes
from harness.sweep.question import FOLLOWED, Answer, Question
from strategies import StrategyError


def answers(questions: Sequence[Question], processes: int = 2) -> list[Answer]:
    """Return the answers in the order of the questions; one that is refused keeps no other from its own.

    Args:
        questions: all of a command.
        processes: most that predict at the same time, forks of this one, whose traces they share.
    """
    found: dict[int, Answer] = {}
    if len(questions) == 1 or processes == 1:
        for number, question in enumerate(questions):
            found[number] = answer(question)
            _tell(questions, found, number)
        return [found[number] for number in range(len(questions))]
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        asked = {pool.submit(answer, question): number for number, question in enumerate(questions)}
        for done in as_completed(asked):
            number = asked[done]
            found[number] = _result(done)
            _tell(questions, found, number)
    return [found[number] for number in range(len(questions))]


def answer(question: Question) -> Answer:
    """Return the prediction for one point, or why there is none."""
    hardware = question.hardware
    seconds = None if hardware is None else step_time.timed_on(hardware)
    predict = partial(prediction.predict, device=FOLLOWED, seconds=seconds)
    try:
        if question.field is None:
            return Answer(record=predict(question.experiment))
        assert hardware is not None, "the command line refuses to solve without hardware"
        solved, experiment = solve(question.experiment, question.field, hardware, _memory)
        return Answer(record=predict(experiment), solved=solved)
    except (ConfigError, StrategyError) as error:
        return Answer(refusal=error)
    except Exception as error:  # noqa: BLE001 (a defect of ours in one point is told, and the others go on)
        words = last_words(error)
        sys.stderr.write(words.traceback)
        problem = f"a defect here kept this point from being predicted: {words.kind}: {words.message}"
        return Answer(
            refusal=UnplannedError("acbench-plan", f"{problem}; report it with the traceback on stderr")
        )


def _memory(experiment: Experiment) -> MemoryNumbers:
    return prediction.step_of(experiment, FOLLOWED).memory


def _result(done: Future[Answer]) -> Answer:
    """Return what a process has answered; one that was killed, or whose answer cannot be sent, has not."""
    try:
        return done.result()
    except BrokenProcessPool:
        problem = "the process that predicted this point, or one beside it, was killed"
        return Answer(refusal=UnplannedError("acbench-plan", f"{problem}; is there enough memory?"))
    except Exception as error:  # noqa: BLE001 (whatever pickles cannot do: the other points go on)
        problem = f"no answer came back for this point: {type(error).__name__}: {error}"
        return Answer(refusal=UnplannedError("acbench-plan", problem))


def _tell(questions: Sequence[Question], found: dict[int, Answer], number: int) -> None:
    """Write a line about the answer that was just found."""
    question, said = questions[number], found[number]
    sys.stderr.write(f"[{len(found)}/{len(questions)}] {question.label}: {_in_words(said)}\n")


def _in_words(said: Answer) -> str:
    """Return an answer for a line of progress."""
    if said.record is None or said.record.memory is None:
        return "refused"
    peak = f"{human_bytes(said.record.memory.peak_bytes)} at the peak"
    if said.solved is None:
        return peak
    return f"{said.solved.field} {said.solved.value}, {peak}, {said.solved.predictions} predictions"
