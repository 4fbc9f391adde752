"""The power iteration of spectral norm runs twice."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import WIDTH, Blocks, checkpointed, rows


def make() -> nn.Module:
    return Blocks(nn.Sequential(spectral_norm(nn.Linear(WIDTH, 64)), nn.Tanh(), nn.Linear(64, WIDTH)))


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("gradients", "buffers"), gradients=0.0092),
    names=("blocks",),
    why="spectral_norm updates its vectors in each forward, so recomputation divides by another norm.",
    fix="Compute the normalised weight once, outside of the region, or put its vectors back.",
)
