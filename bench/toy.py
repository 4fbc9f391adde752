"""torchtitan's toy through our variants and our meters, against its published table.

Three bias-free matmuls (gate 512 to 512, wq 512 to 512, output 512 to 1024) on a (512, 512) input that
requires grad, summed inside the block. Backward FLOPs are in units of 2 * 512**3, one square product; saved
memory is in MiB, the size of one square activation. Both are exact. The state of the CPU's generator, which
every recomputing region keeps and a CUDA meter does not see, stands in a column of its own.

    python -m bench.toy

Source: https://github.com/pytorch/torchtitan, tests/unit_tests/test_activation_checkpoint.py, whose rows are
`none`, `full` and the preset with early stop off; the others follow from the same definitions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from bench.output import parser, publish
from bench.table import table_of
from bench.trials import experiments
from harness.experiment.experiment import Experiment
from harness.measure.step import instrument
from harness.trial.assemble import assemble

UNIT_FLOPS = 2 * 512**3
UNIT_BYTES = 512 * 512 * 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyStep:
    """One variant of the toy.

    Fields:
        backward, saved_mib: measured, in the units of the table; fractions would show.
        expected_backward, expected_saved_mib: by the table.
        rng_state_bytes: saved beside that: the state of the generator.
    """

    variant: str
    early_stop: bool | None
    backward: float
    expected_backward: int
    saved_mib: float
    expected_saved_mib: int
    rng_state_bytes: int

    @property
    def is_exact(self) -> bool:
        """Whether both numbers are the expected ones."""
        return (self.backward, self.saved_mib) == (self.expected_backward, self.expected_saved_mib)


class Block(nn.Module):
    """Three matmuls in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(512, 512, bias=False)
        self.wq = nn.Linear(512, 512, bias=False)
        self.output = nn.Linear(512, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a scalar; the input has shape (512, 512)."""
        outputs: Tensor = self.output(self.wq(self.gate(x)))
        return outputs.sum()


class Toy(nn.Module):
    """One block under `layers`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        """Return the scalar of the block."""
        outputs: Tensor = self.layers[0](x)
        return outputs


def toy() -> tuple[nn.Module, tuple[Tensor], Callable[[Tensor], Tensor]]:
    """Return the model, its input and its loss, for `model=python`."""
    return Toy(), (torch.randn(512, 512, requires_grad=True),), lambda outputs: outputs


# label, overrides, early stop (None where the variant has none), backward units, saved MiB
_TORCHTITAN = ("ac=selective_op", "ac.save_ops=torchtitan")
_ALL_MATMULS = ("ac=selective_op", "ac.save_ops=[matmul]")
_EVERY_THIRD = (*_ALL_MATMULS, "ac.matmul_recompute_every=3")
CASES: tuple[tuple[str, tuple[str, ...], bool | None, int, int], ...] = (
    ("none", ("ac=none",), None, 8, 2),
    ("selective_op torchtitan", _TORCHTITAN, False, 9, 3),
    ("selective_op torchtitan", _TORCHTITAN, True, 9, 3),
    ("selective_op all matmuls", _ALL_MATMULS, False, 8, 4),
    ("selective_op all matmuls", _ALL_MATMULS, True, 8, 4),
    ("selective_op every third recomputed", _EVERY_THIRD, False, 10, 2),
    ("selective_op every third recomputed", _EVERY_THIRD, True, 8, 2),
    ("selective_layer", ("ac=selective_layer", "ac.ac_freq=1"), False, 12, 0),
    ("selective_layer", ("ac=selective_layer", "ac.ac_freq=1"), True, 10, 0),
    ("full", ("ac=full",), False, 12, 0),
    ("full", ("ac=full",), True, 10, 0),
    ("offload", ("ac=offload",), None, 8, 0),
)


def main() -> int:
    """Measure, print, write; return 1 if a number is not the expected one."""
    arguments = parser(__doc__, "toy").parse_args()
    points = experiments(_overrides(changes, early_stop) for _, changes, early_stop, _, _ in CASES)
    rows = [_measure(experiment, *case) for experiment, case in zip(points, CASES, strict=True)]
    protocol = {"model": "bench.toy:toy", "unit_flops": UNIT_FLOPS, "unit_bytes": UNIT_BYTES, "dtype": "fp32"}
    results = [asdict(row) | {"exact": row.is_exact} for row in rows]
    publish(_table(rows), arguments.out, protocol=protocol, results=results)
    return int(not all(row.is_exact for row in rows))


def _overrides(changes: tuple[str, ...], early_stop: bool | None) -> list[str]:
    stop = [] if early_stop is None else [f"ac.early_stop={early_stop}"]
    return ["model=python", "model.factory=bench.toy:toy", "model.layers_fqn=layers", *changes, *stop]


def _measure(
    experiment: Experiment, label: str, _: Any, early_stop: bool | None, flops: int, mib: int
) -> ToyStep:
    batch = experiment.model.fixed_batch()
    assert batch is not None, "the factory brings its input"
    trainee = assemble(experiment, torch.device("cpu"), None, batch)
    report = instrument(trainee, batch)
    saved = report.memory.largest_saved  # fewer than it may list
    rng_state_bytes = sum(storage.bytes for storage in saved if storage.op == "torch.get_rng_state")
    return ToyStep(
        variant=label,
        early_stop=early_stop,
        backward=report.work.backward_flops / UNIT_FLOPS,
        expected_backward=flops,
        saved_mib=(report.memory.saved_bytes - rng_state_bytes) / UNIT_BYTES,
        expected_saved_mib=mib,
        rng_state_bytes=rng_state_bytes,
    )


def _table(rows: list[ToyStep]) -> Table:
    return table_of(
        rows,
        {
            "variant": "variant",
            "early stop": lambda row: {None: "-", True: "on", False: "off"}[row.early_stop],
            "backward": "backward:g",
            "backward, expected": "expected_backward:g",
            "saved": "saved_mib:g",
            "saved, expected": "expected_saved_mib:g",
            "RNG state, bytes": "rng_state_bytes:,",
            "": lambda row: "exact" if row.is_exact else "DIFFERS",
        },
        title="torchtitan's toy: backward FLOPs in units of 2 * 512**3, saved memory in MiB",
    )


if __name__ == "__main__":
    sys.exit(main())
