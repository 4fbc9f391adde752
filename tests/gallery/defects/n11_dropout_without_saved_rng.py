"""Dropout is drawn anew, because the RNG state is not saved."""

from __future__ import annotations

from functools import partial

from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, checkpointed, linear, rows


def make() -> nn.Module:
    return Blocks(*(nn.Sequential(linear(), nn.Dropout(0.5), nn.Tanh()) for _ in range(2)))


CASE = Case(
    make=make,
    batch=rows(),
    variant=partial(checkpointed, preserve_rng_state=False),
    verdict="differs",
    evidence=Evidence(parts=("gradients", "rng_state"), gradients=1.3),
    names=("blocks",),
    link="https://github.com/allenai/OLMo-core/pull/828",
    why="preserve_rng_state=False: recomputation draws other masks than forward.",
    fix="Use preserve_rng_state=True wherever a region draws.",
)
