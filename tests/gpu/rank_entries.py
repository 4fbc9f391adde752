"""What ranks of these tests run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from harness.assemble import Assembled, build
from harness.difference import PARTS, Parity, describe_difference
from harness.experiment import Experiment
from harness.measure.parity import Snapshot, compare_steps, steps
from harness.parallel import device_mesh_of, shard_fsdp1, shard_fsdp2
from harness.ranks import RankContext
from strategies.blocks import children_of

COUNT = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """An experiment of one rank that is sharded all the same."""

    experiment: Experiment
    fsdp: str
