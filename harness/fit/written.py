"""Files of the options: `apply_<variant>.py`, each with `apply(model) -> model`."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from harness.errors import ConfigError
from harness.experiment.experiment import name_of
from harness.fit.options import Option
from harness.records import files
from strategies.ac.budget import Budget
from strategies.ac.file import File
from strategies.written.loaded_file import apply_of

_OURS = '''"""{title}: activation checkpointing of {label}.

    from {name} import apply
    model = apply(model)        # before FSDP or DDP wraps it

It needs acbench while it trains.{about_plan}
"""

import sys
from pathlib import Path

from torch import nn

from strategies import ac_variants


def apply(model: nn.Module) -> nn.Module:
    """Return the model with the strategy on it."""
    {plan}return ac_variants[{variant!r}]({options}).apply(model)


if __name__ == "__main__":
    sys.stderr.write({said!r})
    sys.exit(2)
'''
_ABOUT_PLAN = " The plan beside it is for steps of this size."
_PLAN = 'plan = Path(__file__).with_name("{plan}")\n    '


def text_of(option: Option, label: str, blocks: list[str], command: str | None = None) -> str | None:
    """Return the file of an option; `None` where it has none.

    Args:
        option: torch alone says it, or a strategy of acbench on the plain model.
        label: what the reader calls the model.
        blocks: FQNs of all blocks.
        command: the `acbench` command that measures the plain step, if one does.
    """
    if option.write is not None:
        return option.write(blocks)
    ac, is_chunked = option.experiment.ac, name_of(option.experiment.chunk) != "none"
    if is_chunked or name_of(ac) == "none":
        return None
    options = {
        each.name: getattr(ac, each.name) for each in fields(ac) if getattr(ac, each.name) != each.default
    }
    written = [f"{name}={value!r}" for name, value in options.items() if name != "plan_file"]
    has_plan = option.plan is not None
    proof = "acbench.assert_neutral" if command is None else f"{command} {shlex.join(option.overrides)}"
    return _OURS.format(
        title=option.title,
        label=label,
        name=f"apply_{option.variant}",
        about_plan=_ABOUT_PLAN if has_plan else "",
        plan=_PLAN.format(plan=_plan_name(option)) if has_plan else "",
        variant=name_of(ac),
        said=f"this file has no --check; {proof} proves it\n",
        options=", ".join([*written, *(["plan_file=str(plan)"] if has_plan else [])]),
    )


def write_file(option: Option, text: str, folder: Path) -> Path:
    """Write the file of an option, and its plan next to it; return the path.

    Raises:
        ConfigError: the folder cannot be written.
    """
    file = folder / f"apply_{option.variant}.py"
    try:
        files.make_folder(folder)
        if option.plan is not None:
            files.write_atomically(folder / _plan_name(option), option.plan, mode=files.SHARED)
        files.write_atomically(file, text, mode=files.SHARED)
    except OSError as error:
        raise ConfigError("--out", f"{folder} cannot be written: {error.strerror or error}") from error
    return file


def with_files(
    options: list[Option], label: str, blocks: list[str], folder: Path, command: str | None
) -> list[Option]:
    """Write a file for each option that has one, and return the options with their paths.

    What was seen to differ has none.

    Args:
        options, folder: what is written where.
        label, blocks, command: as of `text_of`.

    Raises:
        ConfigError: the folder cannot be written.
    """
    found = []
    for option in options:
        text = None if option.verdict == "differs" else text_of(option, label, blocks, command)
        path = None if text is None else write_file(option, text, folder)
        found.append(option if path is None else _at(option, path))
    return found


def _at(option: Option, file: Path) -> Option:
    """Return an option that is in `file`, its plan beside it; the file that was traced may be gone."""
    ac, overrides = option.experiment.ac, option.overrides
    if isinstance(ac, File):
        ac, overrides = File(path=str(file)), ("ac=file", f"ac.path={file}")
    elif isinstance(ac, Budget) and option.plan is not None:
        ac = ac.with_plan(file.with_name(_plan_name(option)))
    return replace(option, file=str(file), overrides=overrides, experiment=replace(option.experiment, ac=ac))


def applied(option: Option, label: str, blocks: list[str], model: nn.Module) -> nn.Module:
    """Return a model as the file of an option changes it.

    Raises:
        StrategyError: the model is another one.
        ValueError: the option has no file.
    """
    text = text_of(option, label, blocks)
    if text is None:
        raise ValueError(f"{option.variant} has no file")
    with TemporaryDirectory() as folder:
        file = write_file(option, text, Path(folder))
        changed: Any = apply_of(str(file), file.name)(model)
    result: nn.Module = model if changed is None else changed
    return result


def _plan_name(option: Option) -> str:
    return f"plan_{option.variant}.json"
