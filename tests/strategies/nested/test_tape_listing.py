"""What `show=regions` prints: the tree of regions and the code that they become."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from strategies.ac.nested import Nested
from tests.strategies.nested.chain import LABELS, Chain

GOLDEN = Path(__file__).parents[2] / "golden" / "nested_seed.txt"


def test_the_seed_is_shown_as_it_always_was() -> None:
    with torch.device("meta"):
        model, x = Chain(), torch.empty(4, 4)
    assert f"{Nested(labels=LABELS).view('regions', model, (x,))}\n" == GOLDEN.read_text(encoding="utf-8")


def test_blocks_of_a_sequence_and_a_region_in_a_region() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, device="meta") for _ in range(4)))
    shown = Nested(labels={"1": 0, "2": [0, 1]}).view("regions", model, (torch.empty(2, 8, device="meta"),))
    assert shown == (
        "0\n"
        "region 0\n"
        "    1\n"
        "    region 0_1\n"
        "        2\n"
        "3\n"
        "\n"
        "# forward of the model\n"
        "def forward(self, input):\n"
        "    def checkpoint_0(self, _0):\n"
        "        def checkpoint_0_1(self, _1):\n"
        "            _2 = self[2](_1)  # float32 (2, 8)\n"
        "            return _2\n"
        "\n"
        "        _1 = self[1](_0)  # float32 (2, 8)\n"
        "        _2 = torch.utils.checkpoint.checkpoint(self.checkpoint_0_1, _1, use_reentrant=False)"
        "  # float32 (2, 8)\n"
        "        return _2\n"
        "\n"
        "    _0 = self[0](input)  # float32 (2, 8)\n"
        "    _2 = torch.utils.checkpoint.checkpoint(self.checkpoint_0, _0, use_reentrant=False)"
        "  # float32 (2, 8)\n"
        "    _3 = self[3](_2)  # float32 (2, 8)\n"
        "    return (_3,)"
    )
