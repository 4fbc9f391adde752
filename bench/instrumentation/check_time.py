"""CPU seconds of a whole check and of a quick one, for 12 blocks of width 512.

python -m bench.instrumentation --part check_time
python -m bench.instrumentation --part check_time --only quick
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from bench.output import parser, publish
from bench.table import table_of
from harness.check import assert_neutral
from harness.models.gpt import GPTSpec
from strategies.ac.full import Full

_KINDS = ("quick", "whole")
_TOKENS = 2, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckTime:
    """What one check cost.

    Fields:
        kind: `quick` or `whole`.
        cpu_s: CPU seconds of this process, on one thread, without the import of torch.
    """

    kind: str
    cpu_s: float


def main(words: Sequence[str]) -> int:
    """Print the table and write the JSON file."""
    options = parser(__doc__, "check_time", "instrumentation")
    options.add_argument("--only", choices=_KINDS, nargs="+", default=_KINDS, help="kinds of checks")
    chosen = options.parse_args(words)
    torch.set_num_threads(1)
    results = [_timed(kind) for kind in chosen.only]
    table = table_of(results, {"check": "kind", "CPU s": "cpu_s:.1f"}, title="A GPT of 12 blocks, width 512")
    protocol = {"blocks": 12, "width": 512, "tokens": _TOKENS, "threads": 1, "variant": "ac=full"}
    publish(table, chosen.out, protocol=protocol, results=[asdict(each) for each in results])
    return 0


def _timed(kind: str) -> CheckTime:
    tokens = torch.arange(_TOKENS[0] * _TOKENS[1]).reshape(_TOKENS) % 256
    started = time.process_time()
    assert_neutral(_make, (tokens,), Full(layers_fqn="layers"), quick=kind == "quick")
    return CheckTime(kind=kind, cpu_s=time.process_time() - started)


def _make() -> nn.Module:
    return GPTSpec(
        name="gpt",
        layers_fqn="layers",
        vocab_size=256,
        dropout=0.0,
        n_layers=12,
        width=512,
        n_heads=8,
        hidden_width=2048,
        max_positions=64,
    ).build()
