"""The kept step is the step of the record: the same bytes at every moment, and every operator."""

from __future__ import annotations

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.measure.step import instrument
from harness.measure.step_trace import traced
from harness.models.base import Batch
from tests.harness.measure.metered import REGIONS, Metered, tokens, transformer, warmed


@pytest.mark.parametrize("region", REGIONS)
def test_the_peak_of_the_trace_is_that_of_the_record(region: str) -> None:
    report = instrument(transformer(region), tokens())
    trace = traced(report, rank=3)
    assert (trace.rank, len(trace.operators)) == (3, len(report.operators))
    assert max(trace.totals()) == report.memory.peak_bytes
    assert sum(each.flops for each in trace.operators) == report.work.step_flops
    assert [change.operators for change in trace.changes] == sorted(
        change.operators for change in trace.changes
    )
    # what an operator has made has its name
    made = [change for change in trace.changes if change.delta > 0 and trace.storages[change.storage].op]
    named = {trace.storages[change.storage].op: trace.operators[change.operators - 1].name for change in made}
    assert {op for op, name in named.items() if op != name} <= {"torch.get_rng_state"}


def test_fake_tensors_leave_the_same_trace() -> None:
    targets = tokens().targets
    assert targets is not None
    real = traced(instrument(transformer("full"), tokens()), rank=0)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        batch = Batch(inputs=(mode.from_tensor(tokens().inputs[0]),), targets=mode.from_tensor(targets))
        fake = Metered(transformer("full").model)
        assert traced(instrument(warmed(fake, batch), batch), rank=0) == real
