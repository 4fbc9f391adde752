"""A trial that is refused in shared ranks takes no other result with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

from bench.trials import PRELOAD, experiments, records
from harness.ranks.agent import Agent
from harness.ranks.forkserver import ForkServer
from strategies.ac.full import Full
from tests.forked_servers import forks_of

SIZES = (
    "model=mlp",
    "model.n_layers=1",
    "model.width=8",
    "data=synthetic",
    "batch_size=2",
    "sequence_length=4",
)


def test_one_refusal_hides_no_other_result(rank_server: ForkServer, tmp_path: Path) -> None:
    common = [*SIZES, "protocol=parity", "protocol.parity_steps=1"]
    good, bad = experiments([[*common, "ac=full"], [*common, "ac=full"]])
    ac = replace(cast("Full", bad.ac), layers_fqn="nowhere")
    with forks_of(rank_server), Agent(preload=PRELOAD) as agent:
        found = records(agent, [good, replace(bad, ac=ac)], tmp_path)
    assert [(record.status, record.verdict) for record in found] == [
        ("ok", "neutral"),
        ("refused", "unverified"),
    ]
    assert found[1].error is not None
    assert found[1].error.message.startswith("ac.layers_fqn: ")
