"""acbench in a program or a notebook: what to switch on, what it costs, and that nothing else changes.

    import acbench

    answer = acbench.fit(make, batch, on="rtx4090")       # what to switch on, predicted
    table = acbench.compare(make, batch, ["none", "full", my_function])    # what variants do here, measured
    acbench.measure(make, batch, "full")                  # one of them
    acbench.assert_neutral(make, batch, variant)          # in a test

`make()` returns a fresh model, `batch` is a tuple of positional inputs or a dict of keyword inputs, and
`loss_fn` takes what the model returns and gives a scalar. The harness and the strategies live in `harness`
and `strategies`; these are their public names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acbench.comparing import Comparison, Row, compare, measure
    from acbench.fitting import Fit, fit
    from harness.check import NotNeutral, assert_neutral
    from harness.errors import ConfigError
    from strategies import StrategyError
    from strategies import ac_variants as strategies

_MODULES = {
    "acbench.comparing": ("Comparison", "Row", "compare", "measure"),
    "acbench.fitting": ("Fit", "fit"),
    "harness.check": ("NotNeutral", "assert_neutral"),
    "harness.errors": ("ConfigError",),
    "strategies": ("StrategyError", "ac_variants"),
}

__all__ = [
    "Comparison",
    "ConfigError",
    "Fit",
    "NotNeutral",
    "Row",
    "StrategyError",
    "assert_neutral",
    "compare",
    "fit",
    "measure",
    "strategies",
]


def __getattr__(name: str) -> Any:
    """Return a public name; its module is imported now, because `python -m acbench` answers without torch."""
    wanted = "ac_variants" if name == "strategies" else name
    for module, names in _MODULES.items():
        if name in __all__ and wanted in names:
            return getattr(import_module(module), wanted)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
