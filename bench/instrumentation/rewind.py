"""What `ac.rewind=true` costs: steps of `ac=full` with it and without it in turns, and what forward keeps.

python -m bench.instrumentation --part rewind --models gpt_nano evoformer --pairs 30
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import median

import torch
from torch import nn

from bench.instrumentation.steps import WARMUP, harness_step, process_time_s
from bench.output import parser, publish
from bench.table import table_of
from bench.trials import experiments
from harness.experiment.data import source_of
from harness.measure.speed.timing import interleave
from harness.measure.step import instrument
from harness.records.statistics import Ratio, ratio_to_baseline
from harness.trial.assemble import assemble


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """A model under `ac=full` with its state put back, beside `ac=full` alone.

    Fields:
        modules: in the blocks, each of which has attributes to look at.
        ratio: CPU time of a step.
        cost_s: median of what a step takes longer, CPU time in seconds.
        saved_bytes, alone_bytes: live after forward, with and without.
    """

    model: str
    blocks: int
    modules: int
    ratio: Ratio
    cost_s: float
    saved_bytes: int
    alone_bytes: int


def main(words: Sequence[str]) -> int:
    """Measure, print, write."""
    made = parser(__doc__, "rewind", "instrumentation")
    made.add_argument("--models", nargs="+", default=["gpt_nano", "llama_nano", "vit_nano", "unet"])
    made.add_argument("--pairs", type=int, default=30)
    arguments = made.parse_args(words)
    torch.set_num_threads(1)
    rows = [_cost(model, arguments.pairs) for model in arguments.models]
    publish(
        table_of(
            rows,
            {
                "model": "model",
                "blocks": "blocks",
                "modules": "modules",
                "step, with / without": lambda row: f"{row.ratio.median:.3f}",
                "95 % interval": lambda row: f"{row.ratio.low:.3f} to {row.ratio.high:.3f}",
                "more ms a step": lambda row: f"{1e3 * row.cost_s:.2f}",
                "more bytes after forward": lambda row: f"{row.saved_bytes - row.alone_bytes:,}",
            },
            title="ac=full ac.rewind=true beside ac=full, CPU time, A B B A",
        ),
        arguments.out,
        protocol={"pairs": arguments.pairs, "warmup": WARMUP},
        results=[asdict(row) for row in rows],
    )
    return 0


def _cost(model: str, pairs: int) -> Cost:
    common = [f"model={model}", "ac=full", "data=synthetic", "mesh.device=cpu"]
    rewound, alone = experiments([[*common, "ac.rewind=true"], common])
    source = source_of(alone.model, alone.data, sequence_length=alone.sequence_length)
    batch = source.batch(step=0, batch_size=alone.batch_size, seed=alone.seed)
    samples = interleave(
        harness_step(rewound, batch),
        harness_step(alone, batch),
        warmup=WARMUP,
        pairs=pairs,
        clock=process_time_s,
    )
    saved: list[int] = []
    blocks: list[nn.Module] = []
    for experiment in (rewound, alone):
        trainee = assemble(experiment, torch.device("cpu"), None, batch)
        for _ in range(2):  # the first copies everything
            found = instrument(trainee, batch).memory.saved_bytes
        saved.append(found)
        blocks = list(trainee.blocks.values())
    return Cost(
        model=model,
        blocks=len(blocks),
        modules=sum(len(list(block.modules())) for block in blocks),
        ratio=ratio_to_baseline(samples.variant_s, samples.twin_s),
        cost_s=median(with_s - alone_s for with_s, alone_s in zip(*astuple(samples), strict=True)),
        saved_bytes=saved[0],
        alone_bytes=saved[1],
    )
