"""torchtitan's toy: its table of backward FLOPs and saved memory, ours beside it.

Source: https://github.com/pytorch/torchtitan, tests/unit_tests/test_activation_checkpoint.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.toy import Toy
from strategies import ac_variants
from tests.strategies.meters import measure

UNIT_FLOPS = 2 * 512**3
MIB = 2**20


# variant, fields, backward FLOPs in units of 2 * 512**3, saved MiB
CASES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "none keeps two products": ("none", {}, 8, 2),
    "full recomputes all four": ("full", {"early_stop": False}, 12, 0),
    "full stops before the last product": ("full", {}, 10, 0),
    "the preset recomputes every second": (
        "selective_op",
        {"save_ops": "torchtitan", "early_stop": False},
        9,
        3,
    ),
    "the preset needs the second, so it stops there": ("selective_op", {"save_ops": "torchtitan"}, 9, 3),
    "all matmuls saved, none recomputed": (
        "selective_op",
        {"save_ops": ["matmul"], "early_stop": False},
        8,
        4,
    ),
    "every third recomputed is never needed": (
        "selective_op",
        {"save_ops": ["matmul"], "matmul_recompute_every": 3},
        8,
        2,
    ),
    "every third recomputed to the end": (
        "selective_op",
        {"save_ops": ["matmul"], "matmul_recompute_every": 3, "early_stop": False},
        10,
        2,
    ),
    "offload keeps all on the host": ("offload", {}, 8, 0),
}


@pytest.mark.parametrize(("variant", "changes", "flops", "saved_mib"), CASES.values(), ids=CASES)
def test_backward_flops_and_saved_bytes(
    variant: str, changes: dict[str, Any], flops: int, saved_mib: int
) -> None:
    model = Toy()
    fields = {} if variant == "none" else {"layers_fqn": "layers"} | changes
    ac_variants[variant](**fields).apply(model)
    measured = measure(model, torch.randn(512, 512, requires_grad=True))
    assert measured.forward_flops == 4 * UNIT_FLOPS
    assert measured.backward_flops == flops * UNIT_FLOPS
    assert measured.saved_bytes == saved_mib * MIB
