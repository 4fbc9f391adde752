"""Arguments that Hydra is given for a command, and its errors in words for the person who typed it."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from harness.command_line.unknown_option import CHOICE_KEYS, suggestion, unknown_option
from harness.errors import ConfigError

_FULL_ERROR = "HYDRA_FULL_ERROR"
_SWEEP_FLAGS = ("-m", "--multirun")
_GROUPS_WITHOUT_DEFAULT = ("hardware", "sweep")
_OPTION_OF_A_MAPPING = re.compile(r"(model\.(kwargs|overrides)|ac\.kwargs|hardware\.flops_per_s)\.\w+=")
_AMBIGUOUS = re.compile(r"Ambiguous value for argument '(.*?)'")
_OPTION_OF_A_GROUP = re.compile(r"(?!hydra\.)[a-z]\w*\.[\w.]+=")


FLAGS = (
    "-m", "--multirun", "--dry-run", "--json", "--trace", "--help", "--hydra-help", "--version", "--cfg",
    "--info",
)  # fmt: skip
"""Flags of a command that people type; Hydra has some more."""


def refuse_mistyped(words: Sequence[str]) -> None:
    """Refuse what is neither a flag nor an option, in the words of this program and not of Hydra's grammar.

    Raises:
        ConfigError: naming the word, and what it may have been meant for.
    """
    for word in words:
        if word.startswith("--") and word.partition("=")[0] not in FLAGS:
            close = difflib.get_close_matches(word.replace("_", "-"), FLAGS, n=1)
            if close:
                raise ConfigError(word, f"is no flag; did you mean {close[0]}?")
        elif (
            re.fullmatch(r"[\w./:-]+", word)
            and not word.startswith(("-", "~"))
            and not _is_value(words, word)
        ):
            meant = "--help" if word == "help" else "group=choice, group.option=value or name=value"
            raise ConfigError(repr(word), f"is no option; write {meant}")


def _is_value(words: Sequence[str], word: str) -> bool:
    """Say whether a word is the value of the flag before it, such as `job` of `--cfg job`."""
    place = words.index(word)
    return place > 0 and words[place - 1].startswith("-") and words[place - 1] not in _SWEEP_FLAGS


def words_for_hydra(words: Sequence[str], *, is_plan: bool = False) -> list[str]:
    """Return the words of a command as Hydra can take them.

    The flag of a sweep goes to the front: behind an override Hydra would not know the overrides after it.
    In a sweep, an option of a group (`ac.early_stop=false`) is added where it is missing: Hydra first applies
    it to the default choice of that group, which may not have it, and so may a choice of the sweep, whose
    points `materialise` then refuses without ending the command. An option of a mapping, such as an argument
    of a user's factory, is added always.

    Args:
        is_plan: whether the command predicts; where it names hardware, a glob means `ac=budget` too, which
            then asks for what is usable.
    """
    added = _OPTION_OF_A_GROUP if any(word in _SWEEP_FLAGS for word in words) else _OPTION_OF_A_MAPPING
    flag = ["--multirun"] if added is _OPTION_OF_A_GROUP else []
    others = [word for word in words if word not in _SWEEP_FLAGS]
    if is_plan and any(word.startswith("hardware=") for word in words):
        others.append("hydra.sweeper.means_too=[budget]")
    return [*flag, *(f"++{word}" if added.match(word) else word for word in others)]


@contextmanager
def hydra_told(words: Sequence[str]) -> Iterator[None]:
    """Let Hydra find `words` on the command line, and raise errors rather than print them and exit with 1."""
    argv, full_error = sys.argv, os.environ.get(_FULL_ERROR)
    sys.argv = [argv[0], *words]
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = full_error


def explained(error: Exception) -> str:
    """Return one message: what is wrong, where, and what would be right."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return f"{group}: unknown option {option!r}; {suggestion(option, list(error.options or ()))}"
    cause = error.__cause__
    if isinstance(error, ConfigCompositionException) and isinstance(
        cause, ConfigAttributeError | ConfigKeyError
    ):
        return _unknown_option(cause)
    ambiguous = _AMBIGUOUS.search(f"{error} {cause or ''}")
    if ambiguous is not None:
        return f"{ambiguous[1]}: several values are a sweep; add -m"
    if isinstance(error, ConfigCompositionException) and cause is not None:
        return f"{str(error).strip()}: {str(cause).strip().splitlines()[0]}"
    return str(error).strip()


def _unknown_option(error: OmegaConfBaseException) -> str:
    """Return the message about an override of an option that its group, or the program, does not have."""
    group, _, _ = str(error.full_key).rpartition(".")
    node = error.parent_node
    values = {str(key): value for key, value in node.items()} if isinstance(node, DictConfig) else {}
    options = [key for key in values if key not in (CHOICE_KEYS if group else ("hydra",))]
    if not group:
        options = list({*options, *_GROUPS_WITHOUT_DEFAULT})
    return str(unknown_option(str(error.full_key), options, chosen=values.get("name") if group else None))
