"""What a record says of the bytes of a step follows from what came and went."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from harness.measure.memory.storage_history import (
    LARGEST_AT_PEAK,
    LARGEST_SAVED,
    MOST_MOMENTS,
    Birth,
    StorageChange,
    StorageHistory,
    in_order,
)
from harness.records.measured import LivingTensor, MeasuredMemory, Moment, SavedTensor, StageAction


def _memory(
    *changes: StorageChange, start: dict[str, int] | None = None, saved: Sequence[SavedTensor] = ()
) -> MeasuredMemory:
    return _history([[], changes], start, saved).memory()


def _history(
    stretches: Sequence[Sequence[StorageChange]],
    start: dict[str, int] | None = None,
    saved: Sequence[SavedTensor] = (),
) -> StorageHistory:
    return StorageHistory(
        start=start or {},
        start_host_bytes=0,
        stretches=stretches,
        saved=saved,
        parameter_bytes=0,
        gradient_bytes=0,
        optimizer_bytes=0,
    )


def _saved(nbytes: int, module: str = "m") -> SavedTensor:
    return SavedTensor(bytes=nbytes, op="mm", module=module, shape=(), dtype="float32")


def test_the_timeline_has_the_highest_total_of_each_stay_in_a_module() -> None:
    memory = _memory(
        StorageChange(10, "forward", "a", "temporary"),
        StorageChange(20, "forward", "a", "temporary"),
        StorageChange(-20, "forward", "a", "temporary"),
        StorageChange(5, "forward", "b", "temporary"),
        StorageChange(-10, "backward", "b", "temporary"),
        StorageChange(1, "backward", "a", "temporary"),
        start={"parameters": 100},
    )
    assert memory.timeline == (
        Moment(bytes=130, phase="forward", module="a"),
        Moment(bytes=115, phase="forward", module="b"),
        Moment(bytes=105, phase="backward", module="b"),
        Moment(bytes=106, phase="backward", module="a"),
    )


def test_what_dies_side_by_side_has_one_order() -> None:
    born = StorageChange(9, "forward", "a", "temporary")
    three, one, two = (StorageChange(-size, "forward", "a", "temporary") for size in (7, 9, 8))
    elsewhere = StorageChange(-1, "forward", "b", "temporary")
    ordered = in_order([(4, born), (3, three), (1, one), (2, two), (0, elsewhere), (5, born)])
    assert ordered == [born, one, two, three, elsewhere, born]


def test_of_a_long_step_the_timeline_has_the_highest_of_neighbours() -> None:
    moments = _memory(
        *(StorageChange(1, "forward", str(number), "temporary") for number in range(2 * MOST_MOMENTS))
    ).timeline
    assert [moment.bytes for moment in moments] == [2 * number for number in range(1, MOST_MOMENTS + 1)]


def test_an_action_has_the_highest_total_since_the_end_of_the_one_before() -> None:
    dropped = [StorageChange(-50, "forward", "a", "gradients")]
    first = [StorageChange(10, "forward", "a", "saved"), StorageChange(-4, "forward", "a", "saved")]
    second = [StorageChange(9, "backward", "a", "temporary", on_host=True)]
    optimizer = [StorageChange(70, "optimizer", "a", "optimizer")]
    history = _history([dropped, first, second, optimizer], start={"gradients": 50, "parameters": 100})
    found = history.actions(["0F0", "0B0"])
    assert found == (StageAction(action="0F0", bytes=110), StageAction(action="0B0", bytes=106))
    assert history.actions([]) == ()


def test_what_lives_at_the_first_highest_total_sums_to_it() -> None:
    memory = _memory(
        StorageChange(10, "forward", "a", "saved"),
        StorageChange(-60, "forward", "b", "parameters"),
        StorageChange(60, "backward", "c", "gradients"),
        start={"parameters": 100, "optimizer": 7},
    )
    assert (memory.peak_bytes, memory.peak_phase, memory.peak_module) == (117, "forward", "a")
    assert memory.peak_parts == {"parameters": 100, "optimizer": 7, "saved": 10}


def test_the_largest_at_the_peak_are_what_the_step_has_made_and_not_yet_dropped() -> None:
    up = Birth("aten.mm.default", "layers.0.up", "model.py:7", (4, 8), "float32")
    down = up._replace(module="layers.0.down", source="model.py:8")
    memory = _memory(
        StorageChange(30, "forward", "a", "saved", birth=up),
        StorageChange(30, "forward", "a", "saved", birth=up),
        StorageChange(40, "forward", "b", "temporary", birth=down),
        StorageChange(9, "forward", "b", "saved", on_host=True, birth=down),
        StorageChange(-30, "backward", "b", "saved", birth=up),
        StorageChange(60, "backward", "c", "gradients", birth=down),
        StorageChange(70, "backward", "c", "unsharded_parameters"),
        StorageChange(-40, "backward", "c", "temporary", birth=down),
        start={"parameters": 1000},
    )
    assert memory.peak_bytes == 1000 + 30 + 40 + 60 + 70
    assert memory.largest_at_peak == (
        LivingTensor(bytes=60, part="gradients", **down._asdict()),
        LivingTensor(bytes=40, part="temporary", **down._asdict()),
        LivingTensor(bytes=30, part="saved", **up._asdict()),
    )


def test_equal_tensors_at_the_peak_are_counted_and_a_few_are_listed() -> None:
    births = [Birth("op", str(number), "", (), "") for number in range(LARGEST_AT_PEAK)]
    changes = [StorageChange(1, "forward", "a", "saved", birth=birth) for birth in births]
    twice = StorageChange(5, "forward", "a", "saved", birth=Birth("op", "twice"))
    memory = _memory(*changes, twice, twice)
    assert memory.largest_at_peak[0] == LivingTensor(bytes=10, count=2, part="saved", op="op", module="twice")
    assert [each.module for each in memory.largest_at_peak[1:]] == [birth.module for birth in births[:-1]]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(
            StorageChange(9, "forward", "m", "temporary", is_activation=True), (9, 9, 0), id="activation"
        ),
        pytest.param(StorageChange(9, "backward", "m", "gradients"), (9, 0, 0), id="gradient of a parameter"),
        pytest.param(StorageChange(9, "forward", "m", "temporary", on_host=True), (0, 0, 9), id="host copy"),
    ],
)
def test_peaks_of_device_activations_and_host(change: StorageChange, expected: tuple[int, int, int]) -> None:
    memory = _memory(change)
    assert (memory.peak_bytes, memory.activation_peak_bytes, memory.host_peak_bytes) == expected


def test_saved_tensors_are_listed_largest_first() -> None:
    small = [_saved(1, "a") for _ in range(LARGEST_SAVED)]
    memory = _memory(saved=[*small, _saved(5, "b")])
    assert memory.saved_bytes == LARGEST_SAVED + 5
    assert memory.largest_saved == (_saved(5, "b"), *small[1:])
    assert list(memory.saved_by_module.items()) == [("b", 5), ("a", LARGEST_SAVED)]
