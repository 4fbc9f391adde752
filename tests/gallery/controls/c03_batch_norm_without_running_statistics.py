"""Batch norm that keeps no running statistics."""

from __future__ import annotations

from torch import nn

from tests.gallery.facts import Control
from tests.gallery.parts import WIDTH, Blocks, checkpointed, linear, rows

FACTS = Control(like=12, why="Nothing on the module changes in forward.")


def make() -> nn.Module:
    return Blocks(nn.Sequential(linear(), nn.BatchNorm1d(WIDTH, track_running_stats=False), nn.Tanh()))


batch = rows()
variant = checkpointed
