"""Variants of AC whose package is not installed here."""

from importlib.util import find_spec

from strategies import ac_variants

ABSENT = frozenset(
    name for name, variant in ac_variants.items() if find_spec(getattr(variant, "package", "torch")) is None
)
