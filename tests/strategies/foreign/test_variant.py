"""Variants of libraries: a missing one is named."""

from __future__ import annotations

from unittest import mock

import pytest

from strategies import StrategyError, ac_variants
from strategies.foreign import variant


@pytest.mark.parametrize(
    ("library", "extra"),
    [("transformers", "hf"), ("accelerate", "accelerate"), ("trl", "trl"), ("torchtitan", "torchtitan")],
)
def test_a_missing_library_is_named(library: str, extra: str) -> None:
    with (
        mock.patch.object(variant, "find_spec", return_value=None),
        pytest.raises(StrategyError) as error,
    ):
        ac_variants[library]()
    assert str(error.value) == f"ac: {library} is not installed: pip install 'acbench[{extra}]'"
