"""The ledger: totals of selected storages over time."""

from __future__ import annotations

import pytest

from strategies.step.ledger import Kind, Ledger, Life, Peak


def life(
    nbytes: int, *, kind: Kind = Kind.CREATED, phase: str = "forward", module: str = "m", op: str = ""
) -> Life:
    return Life(nbytes=nbytes, kind=kind, phase=phase, module=module, op=op)


def everything(_: Life) -> bool:
    return True


def test_an_empty_ledger_peaks_at_nothing() -> None:
    assert Ledger().peak(everything) == Peak(nbytes=0, phase="forward", module="(model)")


def test_what_stands_before_the_step_counts_from_the_start_however_late_it_is_known() -> None:
    ledger = Ledger()
    ledger.resize(ledger.add(life(10)), 0, phase="forward", module="m")
    ledger.add_standing(life(100, kind=Kind.STANDING))
    assert (ledger.start_bytes(everything), ledger.peak(everything).nbytes) == (100, 110)


def test_the_peak_is_where_the_total_is_first_highest() -> None:
    ledger = Ledger()
    first = ledger.add(life(10, module="a"))
    second = ledger.add(life(20, module="b"))
    ledger.resize(first, 0, phase="backward", module="b")
    ledger.add(life(10, phase="backward", module="c"))
    ledger.resize(second, 0, phase="backward", module="c")
    assert ledger.peak(everything) == Peak(nbytes=30, phase="forward", module="b")


def test_a_storage_that_grows_and_shrinks_counts_as_it_does() -> None:
    ledger = Ledger()
    sharded = ledger.add_standing(life(0, kind=Kind.STANDING))
    for nbytes in (64, 64, 0, 32):
        ledger.resize(sharded, nbytes, phase="forward", module="unit")
    assert ledger.peak(everything) == Peak(nbytes=64, phase="forward", module="unit")
    assert (ledger.start_bytes(everything), ledger.total(everything)) == (0, 32)


def test_a_peak_is_taken_with_what_is_known_at_the_end() -> None:
    ledger = Ledger()
    gradient = ledger.add(life(50))
    ledger.add(life(5))
    ledger.mark([gradient], Kind.GRADIENT)
    assert ledger.peak(lambda one: one.kind is Kind.CREATED).nbytes == 5


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        pytest.param(Kind.OUTPUT, Kind.STANDING, id="is no result of the step"),
        pytest.param(Kind.BACKEND, Kind.BACKEND, id="may turn out to be the backend's"),
    ],
)
def test_what_stood_before(mark: Kind, expected: Kind) -> None:
    ledger = Ledger()
    number = ledger.add_standing(life(1, kind=Kind.STANDING))
    ledger.mark([number], mark)
    assert ledger.lives[number].kind is expected


def test_the_largest_birth_of_each_operator_largest_first() -> None:
    ledger = Ledger()
    for op, nbytes in (("mm", 3), ("conv", 9), ("mm", 7)):
        number = ledger.add(life(nbytes, op=op, kind=Kind.WORKSPACE))
        ledger.resize(number, 0, phase="forward", module="m")
    assert list(ledger.largest(lambda one: one.kind is Kind.WORKSPACE).items()) == [("conv", 9), ("mm", 7)]
