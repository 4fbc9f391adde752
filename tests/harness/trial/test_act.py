from __future__ import annotations

from typing import Any

import pytest

from harness.records.measured import MeasuredMemory, MeasuredWork, Observed
from harness.trial.act import Act
from tests.harness.records_fixture import rank_result


def act(saved_bytes: int = 8, recomputed: int = 0, *, peak_bytes: int = 16, **observed: Any) -> Act:
    work = MeasuredWork(
        forward_flops=0, backward_flops=0, recomputed_flops=0, recomputed_ops={"mm": recomputed}
    )
    memory = rank_result()["memory"] | {"saved_bytes": saved_bytes, "peak_bytes": peak_bytes}
    return Act(memory=MeasuredMemory(**memory), work=work, observation=Observed(**observed))


@pytest.mark.parametrize(
    ("variant", "is_idle"),
    [
        pytest.param(act(recomputed=1), True, id="recomputes what the twin does"),
        pytest.param(act(recomputed=2), True, id="recomputes more, and frees nothing"),
        pytest.param(act(7), False, id="saves"),
        pytest.param(act(9), True, id="saves more"),
        pytest.param(act(9, peak_bytes=15), False, id="has a lower peak"),
        pytest.param(act(chunks=2), True, id="chunks, and frees nothing"),
        pytest.param(act(7, offloaded_bytes=2), False, id="offloads"),
        pytest.param(act(7, named=("mm",), never_fired=("mm",)), True, id="nothing that it names"),
        pytest.param(act(unneeded="fits"), False, id="rightly idle"),
    ],
)
def test_a_strategy_is_idle_that_does_no_more_than_the_plain_model(variant: Act, is_idle: bool) -> None:
    assert variant.is_idle(act(recomputed=1)) == is_idle
