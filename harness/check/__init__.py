"""Checks for anybody's own tests: is a model with activation checkpointing the model without it."""

from harness.check.neutrality import assert_neutral
from harness.check.not_neutral import NotNeutral

__all__ = ["NotNeutral", "assert_neutral"]
