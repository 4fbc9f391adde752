"""Batch norm that keeps no running statistics."""

from __future__ import annotations

from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import WIDTH, Blocks, checkpointed, linear, rows


def make() -> nn.Module:
    return Blocks(nn.Sequential(linear(), nn.BatchNorm1d(WIDTH, track_running_stats=False), nn.Tanh()))


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=12,
    why="Nothing on the module changes in forward.",
)
