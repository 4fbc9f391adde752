"""The command line: `acbench [overrides]` is one trial, `acbench -m ...` a sweep."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from unittest import mock

import hydra
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from harness.agent import sigterm_exits
from harness.errors import ConfigError
from harness.launch import Point, exit_code, run_sweep
from harness.preflight import check
from harness.record import Record
from harness.report.table import print_table
from harness.schema import Settings, experiment_fields, materialise, settings, suggestion, to_yaml
from harness.store import trial_id
from strategies import StrategyError

_HERE = Path(__file__).parent
_CONF = next(folder for folder in (_HERE / "conf", _HERE.parent / "conf") if folder.is_dir())
_REFUSED = 2

_finished: ContextVar[list[tuple[Settings, list[Record]]]] = ContextVar("_finished")
"""Where the task leaves its records for `main`: Hydra does not return what a sweep returned."""


def main() -> None:
    """Run the command; exit 0, 1 or 2 as the command-line contract says."""
    finished: list[tuple[Settings, list[Record]]] = []
    token = _finished.set(finished)
    try:
        with _hydra_raises(), sigterm_exits():
            _hydra_main()
    except (HydraException, OmegaConfBaseException, ConfigError, StrategyError) as error:
        sys.stderr.write(f"acbench: {_explain(error)}\n")
        sys.exit(_REFUSED)
    except KeyboardInterrupt:
        sys.stderr.write("acbench: interrupted; finished trials are kept, the same command continues\n")
        sys.exit(1)
    finally:
        _finished.reset(token)
    records = [record for _, found in finished for record in found]
    if records:
        chosen = finished[0][0].run
        root = Path(chosen.outputs_dir) / chosen.name
        print_table(records, root=root)
        sys.stderr.write(f"records: {root}\n")
        sys.exit(exit_code(records, strict=chosen.strict))


def point(config: DictConfig) -> Point:
    """Return the point that `config` describes; a refusal is kept, because the rest of a sweep can run."""
    fields = experiment_fields(config)
    try:
        experiment = materialise(fields)
        check(experiment)
    except (ConfigError, StrategyError) as error:
        return Point(
            trial_id=trial_id(fields), resolved=fields, experiment=None, refusal=error, yaml=to_yaml(fields)
        )
    resolved = experiment.to_dict()
    return Point(
        trial_id=trial_id(resolved),
        resolved=resolved,
        experiment=experiment,
        refusal=None,
        yaml=to_yaml(resolved),
    )


@hydra.main(version_base="1.3", config_path=str(_CONF), config_name="config")
def _hydra_main(config: DictConfig | list[DictConfig]) -> list[Record]:
    """Run one point, or, when a launcher hands them over, all points of a sweep.

    Raises:
        ConfigError: the settings are wrong, or the only point is refused.
        StrategyError: the only point is refused.
    """
    configs = config if isinstance(config, list) else [config]
    chosen = settings(configs[0])
    points = [point(each) for each in configs]
    if isinstance(config, DictConfig) and points[0].refusal is not None:
        raise points[0].refusal
    found = run_sweep(points, chosen.run, chosen.tracker)
    _finished.get().append((chosen, found))
    return found


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Let Hydra raise in place of printing and exiting with 1."""
    with mock.patch.dict(os.environ, {"HYDRA_FULL_ERROR": "1"}):
        yield


def _explain(error: Exception) -> str:
    """Return one message: what is wrong, where, and what would be right."""
    cause = error.__cause__
    if isinstance(error, ConfigCompositionException) and isinstance(cause, ConfigAttributeError | ConfigKeyError):
        return _unknown_option(cause)
    return str(error).strip()


def _unknown_option(error: OmegaConfBaseException) -> str:
    full = str(error.full_key)
    node = error.parent_node
    options = [str(key) for key in node] if isinstance(node, DictConfig) else []
    return f"{full}: unknown option; {suggestion(full.rpartition('.')[2], options)}"
