"""What is predicted of trials, and how that differs from what is measured of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.predict.prediction import predict
from harness.records.record import Record
from strategies import StrategyError
from tests.matrix.facts import Run

Refusal: TypeAlias = ConfigError | StrategyError
VIEWS = "recomputed_ops"
QUANTITIES = {
    "memory": (
        *("peak_bytes", "saved_bytes", "activation_peak_bytes", "parameter_bytes", "gradient_bytes"),
        *("optimizer_bytes", "host_peak_bytes"),
    ),
    "work": (
        *("forward_flops", "backward_flops", "recomputed_flops", "offloaded_bytes", "chunks"),
        *(VIEWS, "collectives", "collective_bytes", "calls"),
    ),
}


def differences(predicted: Record, measured: Record) -> dict[str, tuple[Any, Any]]:
    """Return the quantities that differ, each as predicted and measured."""
    pairs = {
        name: (getattr(getattr(predicted, part), name), getattr(getattr(measured, part), name))
        for part, names in QUANTITIES.items()
        for name in names
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def findings(chosen: Sequence[Experiment], run: Run) -> list[tuple[Record | Refusal, Record]]:
    """Return the prediction of each experiment, all made before anything runs, and its measurement."""
    predictions = [_predicted(each) for each in chosen]
    return list(zip(predictions, run(chosen), strict=True))


def problem(predicted: Record | Refusal, measured: Record) -> str | None:
    """Say what is wrong with a prediction; `None` where it is exact, or both refuse.

    A prediction that assumes something of the data, as of experts, is an estimate: its numbers may differ.
    Loops of chunks make other views than those of a prediction; they cost nothing.
    """
    if isinstance(predicted, Refusal):
        return None if measured.status == "refused" else f"refused: {predicted}"
    if measured.memory is None:
        return f"{measured.status}: {measured.error}"
    wrong = {name: pair for name, pair in differences(predicted, measured).items() if name != VIEWS}
    return f"{wrong}" if wrong and not predicted.assumes else None


def _predicted(experiment: Experiment) -> Record | Refusal:
    try:
        return predict(experiment)
    except (ConfigError, StrategyError) as error:
        return error
