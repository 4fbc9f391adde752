"""What is followed without data asks shapes, and keeps off paths that nobody sees into."""

from __future__ import annotations

import torch

from strategies.tracing.fakes import Fakes
from strategies.tracing.following import as_with_data


def test_values_that_follow_from_shapes_are_known() -> None:
    with Fakes(allow_non_fake_inputs=True), as_with_data():
        places = torch.arange(4)
        assert bool((places.diff() == 1).all())
        assert places.max().item() == 3


def test_fused_encoders_are_off_meanwhile() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    with as_with_data():
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled() is before


def test_truncated_normal_numbers_need_no_data() -> None:
    with Fakes(allow_non_fake_inputs=True), as_with_data():
        made = torch.nn.init.trunc_normal_(torch.empty(3, 4), std=0.02)
    assert made.shape == (3, 4)
    with as_with_data():
        drawn = torch.nn.init.trunc_normal_(torch.full((3, 4), 9.0), a=-1.0, b=1.0)
    assert drawn.abs().max() <= 1.0
