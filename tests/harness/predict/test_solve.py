"""The largest that fits, by bytes that follow from the field: exact, and with few predictions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.models.llama import LlamaSpec
from harness.predict.solve import SOLVABLE, solve
from harness.records.measured import MemoryNumbers
from tests.harness.composing import experiment_of
from tests.harness.predict.predicted import by_bytes, hardware

GIB = 1 << 30
MEMORY = hardware(usable_gib=80.0)
_LINE = "model=llama_nano data=synthetic"


def _tokens(experiment: Experiment) -> int:
    return experiment.batch_size // experiment.mesh.dp * experiment.sequence_length


def _squared(experiment: Experiment) -> int:
    return experiment.sequence_length**2 * 4096


def _layers(experiment: Experiment) -> int:
    assert isinstance(experiment.model, LlamaSpec)
    return experiment.model.n_layers * GIB + GIB // 2


def _share(experiment: Experiment) -> int:
    return 400 * GIB // (experiment.mesh.dp_shard * experiment.mesh.tp)


CASES: dict[str, tuple[str, str, Callable[[Experiment], int], int | None, int]] = {
    "batch along a line": ("", "batch_size", lambda each: GIB + _tokens(each) * 1_000_000, 662, 5),
    "batch of ranks that see different data": (
        "mesh.dp_shard=8",
        "batch_size",
        lambda each: GIB + _tokens(each) * 1_000_000,
        8 * 662,
        5,
    ),
    "batch that is too large to begin with": (
        "batch_size=4096",
        "batch_size",
        lambda each: GIB + _tokens(each) * 1_000_000,
        662,
        5,
    ),
    "batch in steps": ("", "batch_size", lambda each: _tokens(each) // 1024 * GIB, 647, 24),
    "length by a square": ("model.max_positions=65536", "sequence_length", _squared, 4579, 12),
    "length up to the positions": ("", "sequence_length", _tokens, 1024, 3),
    "layers": ("", "model.n_layers", _layers, 79, 5),
    "nothing fits": ("", "batch_size", lambda each: 100 * GIB + _tokens(each), None, 9),
    "fewest shards": ("batch_size=64", "mesh.dp_shard", _share, 8, 4),
    "fewest tensor-parallel ranks": ("mesh.dp_shard=4", "mesh.tp", _share, 2, 3),
    "fewest stages, of which one is a whole model": (
        "mesh=pp2 mesh.pp_schedule=gpipe microbatches=8 model.n_layers=8",
        "mesh.pp",
        lambda each: 400 * GIB // each.mesh.pp,
        5,
        4,
    ),
    "fewest micro-batches": (
        "batch_size=64 mesh.dp_shard=4",
        "microbatches",
        lambda each: 400 * GIB // each.microbatches,
        8,
        4,
    ),
    "shards are too few at most": ("batch_size=4", "mesh.dp_shard", _share, None, 3),
}


@pytest.mark.parametrize(("line", "field", "needed", "value", "most"), CASES.values(), ids=CASES)
def test_the_value_fits_and_the_next_one_does_not(
    line: str, field: str, needed: Callable[[Experiment], int], value: int | None, most: int
) -> None:
    solved, found = solve(experiment_of(f"{_LINE} {line}"), field, MEMORY, by_bytes(needed))
    assert solved.value == value
    assert solved.predictions <= most
    assert (needed(found) <= MEMORY.usable_bytes) is (value is not None)


def test_a_limit_that_is_not_of_the_memory_is_said() -> None:
    solved, _ = solve(experiment_of(_LINE), "sequence_length", MEMORY, by_bytes(_tokens))
    assert solved.is_limit


def test_a_value_that_is_refused_does_not_fit() -> None:
    def memory_of(experiment: Experiment) -> MemoryNumbers:
        if experiment.batch_size > 20:
            raise ConfigError("chunk.budget_mib", "no plan fits")
        return by_bytes(_tokens)(experiment)

    solved, _ = solve(experiment_of(_LINE), "batch_size", MEMORY, memory_of)
    assert solved.value == 20


def test_a_point_that_is_refused_at_every_value_says_why() -> None:
    def memory_of(_: Experiment) -> MemoryNumbers:
        raise ConfigError("model", "no")

    with pytest.raises(ConfigError, match="model: no"):
        solve(experiment_of(_LINE), "mesh.tp", MEMORY, memory_of)


@pytest.mark.parametrize(
    ("line", "field", "message"),
    [
        pytest.param(
            "model=vit_nano data=synthetic",
            "sequence_length",
            "solve: sequence_length has no effect on vit_nano; solve for batch_size",
            id="no tokens",
        ),
        pytest.param(
            "model=evoformer data=synthetic",
            "mesh.tp",
            "solve: no value of mesh.tp is allowed for this point; change batch_size or the model's sizes",
            id="no tensor parallel plan",
        ),
    ],
)
def test_a_field_that_a_point_does_not_have_is_refused(line: str, field: str, message: str) -> None:
    assert field in SOLVABLE
    with pytest.raises(ConfigError) as error:
        solve(experiment_of(line), field, MEMORY, by_bytes(_tokens))
    assert str(error.value) == message
