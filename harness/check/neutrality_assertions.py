"""`assert_neutral` for `unittest`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from harness.check.neutrality import assert_neutral
from harness.check.not_neutral import Neutrality


class NeutralityAssertions:
    """A mixin for a `unittest.TestCase`: `class TestMine(NeutralityAssertions, unittest.TestCase)`."""

    def assertNeutral(  # noqa: N802 (as unittest calls its assertions)
        self, make: Callable[[], nn.Module], batch: Any, variant: Any, **options: Any
    ) -> Neutrality:
        """Fail unless the model with `variant` trains as the model without it.

        Args:
            make, batch, variant, options: as of `assert_neutral`.

        Raises:
            NotNeutral, ConfigError, StrategyError: as of `assert_neutral`.
        """
        return assert_neutral(make, batch, variant, **options)
