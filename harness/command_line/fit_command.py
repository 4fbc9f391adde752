"""`acbench-fit`: what to switch on, on one screen or as JSON, with the files that do it."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence

from harness.command_line.fit_words import asked, in_words_of_fit
from harness.errors import ConfigError
from harness.fit.answer import answer
from harness.fit.progress import progress_shown
from harness.fit.screen import screen

_REFUSED, _NOTHING_FITS, _FITS = 2, 1, 0


def main() -> None:
    """Run `acbench-fit`; exit 0 where something fits, 1 where nothing does, 2 where it is refused."""
    status = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # what is left is to free the tensors of all traces one by one, where torch has ended a process
    os._exit(status)


def run(words: Sequence[str]) -> int:
    """Print the answer to a command on stdout and its progress on stderr; return the exit status."""
    try:
        question = asked(words)
        with progress_shown() as tell, in_words_of_fit(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a trial says of the model is no part of the answer
            found = answer(question.subject, is_proven=question.is_proven, tell=tell).written(question.out)
    except ConfigError as error:
        sys.stderr.write(f"acbench-fit: {error}\n")
        return _REFUSED
    shown = json.dumps(found.to_dict(), indent=1) if question.is_json else screen(found)
    sys.stdout.write(f"{shown}\n")
    return _NOTHING_FITS if found.use is None else _FITS
