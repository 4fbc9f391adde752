"""Variants of libraries: a missing one is named, and what one prints is no output of the command."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

from strategies import StrategyError, ac_variants
from strategies.foreign import variant
from tests.strategies.toys import toy


@pytest.mark.parametrize(
    ("library", "extra"),
    [
        ("transformers", "hf"),
        *((name, name) for name in ("accelerate", "trl", "torchtitan", "fairscale", "deepspeed")),
    ],
)
def test_a_missing_library_is_named(library: str, extra: str) -> None:
    with (
        mock.patch.object(variant, "find_spec", return_value=None),
        pytest.raises(StrategyError) as error,
    ):
        ac_variants[library]()
    assert str(error.value) == f"ac: {library} is not installed: pip install 'acbench[{extra}]'"


def test_what_a_library_prints_when_it_is_imported_is_no_output(capsys: pytest.CaptureFixture[str]) -> None:
    def imported(_name: str) -> SimpleNamespace:
        print("looking for an accelerator")  # noqa: T201 (as DeepSpeed does)
        return SimpleNamespace(switch_on=lambda _model, **_options: None)

    with (
        mock.patch.object(variant, "find_spec", return_value=object()),
        mock.patch.object(variant, "import_module", imported),
    ):
        ac_variants["deepspeed"](layers_fqn="layers").apply(toy())  # type: ignore[call-arg]
    assert capsys.readouterr() == ("", "looking for an accelerator\n")
