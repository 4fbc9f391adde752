"""The check in the words of unittest."""

from __future__ import annotations

import unittest

from harness.check.neutrality_assertions import NeutralityAssertions
from tests.harness.check.small_models import Stack, batch, checkpointed


class TestMixin(NeutralityAssertions, unittest.TestCase):
    def test_passes_what_is_neutral(self) -> None:
        found = self.assertNeutral(Stack, batch(), checkpointed(), steps=1)
        self.assertEqual(found.verdict, "neutral")  # noqa: PT009 (unittest's own)

    def test_fails_as_an_assertion(self) -> None:
        with self.assertRaises(AssertionError):  # noqa: PT027 (unittest's own)
            self.assertNeutral(Stack, batch(), checkpointed(preserve_rng_state=False), steps=1)
