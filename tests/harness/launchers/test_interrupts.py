"""Ctrl-C: asked once, the sweep stops by itself; asked twice, at once."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.launchers.interrupts import Interrupts


def test_the_first_only_asks_and_the_second_interrupts(capsys: pytest.CaptureFixture[str]) -> None:
    with Interrupts(is_patient=True) as interrupts:
        assert not interrupts.stop_requested
        signal.raise_signal(signal.SIGINT)
        assert interrupts.stop_requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    said = "acbench: stopping after the running points; Ctrl-C again stops at once\n"
    assert capsys.readouterr().err == said


def test_the_first_interrupts_where_there_is_one_trial_only() -> None:
    with Interrupts(is_patient=False) as interrupts, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not interrupts.stop_requested


@pytest.mark.parametrize("is_patient", [True, False], ids=["a sweep", "one trial"])
def test_the_handler_before_is_back_afterwards(is_patient: bool) -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(is_patient=is_patient):
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) is before


def test_a_thread_that_may_have_no_handlers_has_none() -> None:
    def enter() -> bool:
        with Interrupts(is_patient=True) as interrupts:
            return interrupts.stop_requested

    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(enter).result()
    assert signal.getsignal(signal.SIGINT) is before
