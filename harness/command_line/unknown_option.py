"""The error about an option that nobody knows, with what may have been meant."""

from __future__ import annotations

import difflib

from harness.errors import ConfigError

CHOICE_KEYS = ("name", "family")
"""Keys by which a group says what was chosen; they are no options of the choice."""


class UnknownOptionError(ConfigError):
    """An option that the choice of its group, or the program, does not have."""


def suggestion(wrong: str, options: list[str]) -> str:
    """Return `did you mean 'x'? ` and the options, for the end of a message."""
    if not options:
        return "there are no options"
    close = difflib.get_close_matches(wrong, options, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}options: {', '.join(sorted(options))}"


def unknown_option(where: str, options: list[str], chosen: str | None = None) -> UnknownOptionError:
    """Return the error about the option `where`.

    Args:
        chosen: what was chosen for the group of the option, where that decides which options it has.
    """
    group, _, name = where.rpartition(".")
    if chosen is None:
        return UnknownOptionError(where, f"unknown option; {suggestion(name, options)}")
    asked = [option for option in options if option not in CHOICE_KEYS]
    return UnknownOptionError(where, f"{group}={chosen} has no such option; {suggestion(name, asked)}")
