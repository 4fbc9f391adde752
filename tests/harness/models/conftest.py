"""Specifications as the shipped configuration gives them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from harness.models import Batch, ModelSpec, families

CONF = Path(__file__).parents[3] / "conf" / "model"

MakeSpec = Callable[..., ModelSpec]


@pytest.fixture
def make_spec() -> MakeSpec:
    """Return `make_spec("gpt_nano", dropout=0.1)`: the YAML with some fields changed."""

    def make(option: str, **changes: Any) -> ModelSpec:
        config = OmegaConf.merge(OmegaConf.load(CONF / f"{option}.yaml"), changes)
        values = OmegaConf.to_container(config, resolve=True)
        assert isinstance(values, dict)
        family = families()[values.pop("family")]
        return family(**{str(name): value for name, value in values.items()})

    return make


@pytest.fixture
def batch() -> Batch:
    """Return two sequences of 16 byte tokens."""
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
    return Batch(inputs=(tokens[:, :-1],), targets=tokens[:, 1:])
