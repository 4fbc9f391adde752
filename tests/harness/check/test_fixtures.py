"""The fixture gives the check, and writes what it finds into the report of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.check import NotNeutral
from harness.check.fixtures import assert_neutral_fixture
from tests.harness.check.small_models import Stack, batch, checkpointed

assert assert_neutral_fixture  # pytest finds it here


def test_the_fixture_checks_and_reports(assert_neutral: Callable[..., Any], request: Any) -> None:
    assert_neutral(Stack, batch(), checkpointed(), steps=1)
    assert dict(request.node.user_properties)["acbench_verdict"] == "neutral"
    with pytest.raises(NotNeutral):
        assert_neutral(Stack, batch(), checkpointed(preserve_rng_state=False), steps=1)
