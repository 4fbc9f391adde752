"""The command line: `acbench [overrides]` is one trial, `acbench -m ...` a sweep, `acbench-plan` predicts."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.command_line.hydra_words import explained, hydra_told, refuse_mistyped, words_for_hydra
from harness.command_line.judged import plans_at_peaks
from harness.command_line.plan_help import PLAN_HELP
from harness.command_line.registered import offer_registered
from harness.command_line.schema import (
    Search,
    Settings,
    as_refused,
    experiment_fields,
    hardware_of,
    launcher_of,
    materialise,
    searched_here,
    settings,
    swept_variants,
    to_yaml,
    with_blocks,
    within_usable,
    without_idle_options,
    words_of_found,
)
from harness.command_line.unknown_option import UnknownOptionError
from harness.errors import ConfigError, MissingPackageError, UnplannedError
from harness.experiment.experiment import Experiment
from harness.launchers.base import Launcher
from harness.launchers.local import Local
from harness.launchers.run_task import PRELOAD
from harness.launchers.task import Point
from harness.predict.hardware import Hardware
from harness.ranks.agent import Agent, sigterm_exits
from harness.ranks.assistant import AssistantEndedError
from harness.ranks.forkserver import ForkServerError
from harness.records.fields import encode
from harness.records.record import Record
from harness.records.store import Store, trial_id
from harness.report.content.plan_table import LEGEND as PLAN_LEGEND
from harness.report.content.plan_table import PlannedPoint, plan_sheet
from harness.report.content.terminal_table import print_sheet, print_table
from harness.report.facts.labels import point_label, point_labels
from harness.sweep import predictions
from harness.sweep.checks import Elsewhere
from harness.sweep.dry_run import outline, state_of
from harness.sweep.launch import Result, Run, exit_code, run_sweep
from harness.sweep.plan import finished_before
from harness.sweep.planned import exit_code as exit_code_of_plan
from harness.sweep.planned import planned, without_predicted_oom
from harness.sweep.planning_log import planning_shown, told
from harness.sweep.search import front, searched
from harness.trial.preflight import Preflight
from strategies import StrategyError
from strategies.last_words import last_words

_HERE = Path(__file__).parents[1]
_CONF = next(folder for folder in (_HERE / "conf", _HERE.parent / "conf") if folder.is_dir())
_REFUSED = 2
_ANSWERS = f"{predictions.__name__}:{predictions.answers.__name__}"
_HOPELESS = (UnknownOptionError, MissingPackageError)
"""Refusals that are no result where all points have them: a typo, or an extra that is not installed."""

_VERSION, _DRY_RUN, _JSON, _TRACE, _HELP = "--version", "--dry-run", "--json", "--trace", "--help"


@dataclass(kw_only=True, slots=True)
class _Command:
    """The state of one command, kept for `main` because Hydra does not return what a sweep returned.

    Fields:
        act: what is done with points: they run, are listed, or are predicted.
        is_json: whether predictions are printed as JSON.
        is_traced: whether predicted steps are kept with their records.
        single: configuration of the one trial; `None` for a sweep.
        hydra: Hydra's own part of that configuration.
        result: outcome of the trials; `None` where nothing had to run.
        has_defect: whether a defect of ours kept a point from being planned.
        status: exit status of a command that ran nothing.
        told: blocks of models that were found and said.
    """

    program: str = "acbench"
    act: Literal["run", "list", "predict"] = "run"
    is_json: bool = False
    is_traced: bool = False
    is_composed: bool = False
    single: DictConfig | None = None
    hydra: HydraConf | None = None
    run: Run = field(default_factory=Run)
    result: Result | None = None
    has_defect: bool = False
    status: int = 0
    told: set[str] = field(default_factory=set)


_command: ContextVar[_Command] = ContextVar("_command")


def main() -> None:
    """Run `acbench`; exit 0, 1 or 2 as the command-line contract says."""
    words = sys.argv[1:]
    act: Literal["run", "list"] = "list" if _DRY_RUN in words else "run"
    _execute(_Command(act=act), [word for word in words if word != _DRY_RUN])


def plan() -> None:
    """Run `acbench-plan`; exit 0 where all points fit, 1 where some do not, 2 where it is refused."""
    words = sys.argv[1:]
    command = _Command(
        program="acbench-plan", act="predict", is_json=_JSON in words, is_traced=_TRACE in words
    )
    _execute(command, [word for word in words if word not in (_JSON, _TRACE)])


def _execute(command: _Command, words: Sequence[str]) -> None:
    """Compose the points that `words` describe, do with them what the command is for, and leave."""
    if _VERSION in words:
        sys.stdout.write(f"{command.program} {version('acbench')}\n")
        return
    if command.act == "predict" and _HELP in words:
        sys.stdout.write(PLAN_HELP)
        return
    token = _command.set(command)
    try:
        refuse_mistyped(words)
        offer_registered(words)
        with sigterm_exits(), planning_shown():
            with hydra_told(words_for_hydra(words, is_plan=command.act == "predict")):
                _hydra_main()
            if command.single is not None:
                assert command.hydra is not None
                _run_single(command.single, command.hydra)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if command.is_composed and not isinstance(error, ConfigError | StrategyError):
            raise  # no refusal but a defect; Hydra itself refuses some overrides with a plain ValueError
        sys.stderr.write(f"{command.program}: {explained(error)}\n")
        sys.exit(_REFUSED)
    except ForkServerError as error:
        sys.stderr.write(f"{command.program}: {error}; the same command tries again\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("acbench: interrupted; finished trials are kept, the same command continues\n")
        sys.exit(1)
    finally:
        _command.reset(token)
        _hasten_exit()
    if command.result is not None:
        command.status = max(_report(command.result, command.run), int(command.has_defect))
    if command.status:
        sys.exit(command.status)


def _hasten_exit() -> None:
    """Spare this process its last collections of garbage, which would go through all of torch.

    Not where torch has loaded triton: its bindings list on stderr what these collections have not freed.
    """
    if "triton._C.libtriton" not in sys.modules:
        gc.freeze()


def point(
    fields: Mapping[str, Any],
    hardware: Hardware | None,
    launcher: Launcher | None,
    preflight: Preflight,
    *,
    swept: Mapping[str, set[str]] | None = None,
    search: Search = searched_here,
) -> Point:
    """Return the point that `fields` describe; a refusal is kept in it, because other points can run.

    Args:
        fields: what `experiment_fields` returned.
        hardware: what the time of its step is predicted for; `None` predicts none.
        launcher: launcher of the command; it refuses a mesh that it cannot run. `None`: nothing runs, so any
            mesh will do, and `ac=budget` without a number asks for what is usable of the hardware.
        preflight: checks of the command, which look at the model.
        swept: variants of the sweep that the point is of, which then ignores the options of others; `None` is
            no sweep.
        search: looks for the blocks of a model.
    """
    if swept is not None:
        fields = without_idle_options(fields, swept)
    if launcher is None:
        fields = within_usable(fields, hardware)
    experiment: Experiment | None = None
    refusal: ValueError | None = None
    named = fields  # with the blocks that were found, also where the point is refused
    try:
        named = with_blocks(fields, search)
        experiment = materialise(named, search)
        _tell(words_of_found(fields, search))
        if launcher is not None:
            launcher.check(experiment.mesh)
        preflight.check(experiment)
    except (ConfigError, StrategyError) as error:
        refusal = error
    except Exception as error:
        is_served = not isinstance(error, ForkServerError) or isinstance(error, AssistantEndedError)
        if swept is None or not is_served:
            raise
        words = last_words(error)
        sys.stderr.write(words.traceback)
        problem = f"a defect here kept this point from being planned: {words.kind}: {words.message}"
        refusal = UnplannedError("acbench", f"{problem}; report it with the traceback on stderr")
    resolved: dict[str, Any] = encode(as_refused(named)) if experiment is None else experiment.to_dict()
    return Point(
        trial_id=trial_id(resolved),
        resolved=resolved,
        experiment=experiment if refusal is None else None,
        refusal=refusal,
        is_sound=experiment is not None,
        yaml=to_yaml(resolved),
        hardware=hardware,
    )


def _tell(found: str | None) -> None:
    """Say on stderr which blocks were found, once a command."""
    command = _command.get(None)
    if found is not None and command is not None and found not in command.told:
        command.told.add(found)
        sys.stderr.write(f"{command.program}: {found}\n")


@hydra.main(version_base="1.3", config_path=str(_CONF), config_name="config")
def _hydra_main(config: DictConfig | dict[str, Any]) -> list[tuple[str, Record | None]]:
    """Take the composed configuration of one trial, or run a whole sweep where the launcher hands it over.

    One trial runs after Hydra has returned, which would print its own lines about a refusal.
    """
    command = _command.get()
    command.is_composed = True
    if isinstance(config, DictConfig):
        command.single, command.hydra = config, HydraConfig.get()
        return []
    with Agent(PRELOAD) as agent:
        return _run_sweep(config["points"], launcher_of(config["launcher"]), agent)


def _run_sweep(
    configs: Sequence[DictConfig], launcher: Launcher, agent: Agent
) -> list[tuple[str, Record | None]]:
    """Run or show the points of a sweep.

    Args:
        configs: one a point, in order; they share their settings.
        launcher: chosen by `hydra/launcher`.
        agent: agent that runs the trials of this process.

    Returns:
        trial_id and record of each point, in order; `None` where it has no record.

    Raises:
        ConfigError: no point knows a swept option, or points have different settings.
    """
    chosen = _common_settings(configs)
    elsewhere = _elsewhere(chosen, agent)
    preflight = _preflight(chosen, launcher, elsewhere)
    here = None if _command.get().act == "predict" else launcher
    read = [(experiment_fields(each), hardware_of(each)) for each in told(configs, "reading", "points")]
    swept = swept_variants(fields for fields, _ in read)
    points = [
        point(*each, here, preflight, swept=swept, search=elsewhere.blocks)
        for each in told(read, "checking", "points")
    ]
    if not launcher.uses_agent:
        agent.close()
    hopeless = [each.refusal for each in points if isinstance(each.refusal, _HOPELESS)]
    if hopeless and len(hopeless) == len(points):
        raise hopeless[0]
    if _command.get().act == "run":
        _require_a_sound_point(points)
    _act([(each, each.hardware) for each in points], chosen, launcher, agent)
    if chosen.run.judge:
        _judge(list(zip(configs, points, strict=True)), chosen, launcher)
    result = _command.get().result
    found = {} if result is None else {record.trial_id: record for record in result.records}
    return [(each.trial_id, found.get(each.trial_id)) for each in points]


def _judge(points: Sequence[tuple[DictConfig, Point]], chosen: Settings, launcher: Launcher) -> None:
    command = _command.get()
    result = command.result
    if result is None or result.is_stopped:
        return
    budget = OmegaConf.load(_CONF / "ac" / "budget.yaml")
    assert isinstance(budget, DictConfig), "it is a group of options"
    records = {record.trial_id: record for record in result.records}
    trials = [(config, each.trial_id, point_label(each.resolved)) for config, each in points]
    judges = list(plans_at_peaks(trials, records, budget, _tell))
    with Agent(PRELOAD) as agent:  # that of the points has ended with them
        elsewhere = _elsewhere(chosen, agent)
        preflight = _preflight(chosen, launcher, elsewhere)
        plans = []
        for label, config in judges:
            fields, hardware = experiment_fields(config), hardware_of(config)
            plan = point(fields, hardware, launcher, preflight, search=elsewhere.blocks)
            if plan.refusal is None:
                plans.append((plan, hardware))
            else:
                _tell(f"judge: no plan next to {label}: {plan.refusal}")
        if not plans:
            _tell("judge: no plan to run; ac=none and ac=budget have none next to them")
            return
        _run(plans, chosen, launcher, agent)
    assert command.result is not None, "it has run"
    command.result = result.followed_by(command.result)


def _require_a_sound_point(points: Sequence[Point]) -> None:
    """Refuse a sweep whose points are no experiments, all for one reason, as a single one is refused.

    Raises:
        ConfigError: it is no experiment.
        StrategyError: the same, by a strategy.
    """
    refusals = {str(each.refusal): each.refusal for each in points}
    (refusal, *others) = refusals.values()
    if refusal is not None and not others and not any(each.is_sound for each in points):
        raise refusal


def _run_single(config: DictConfig, hydra_config: HydraConf) -> None:
    """Run one trial, here: launchers are for sweeps.

    Raises:
        ConfigError: a preset of points or another launcher was chosen, or the trial is refused.
        StrategyError: the trial is refused by a strategy.
    """
    preset, launcher = (hydra_config.runtime.choices.get(group) for group in ("sweep", "hydra/launcher"))
    if preset is not None:
        raise ConfigError("sweep", f"{preset} is a set of points; run it with acbench -m sweep={preset}")
    if launcher != "local":
        raise ConfigError("hydra/launcher", f"{launcher} launches sweeps; use acbench -m, or leave it out")
    chosen, here = settings(config), Local()
    with Agent(PRELOAD) as agent:
        anywhere = _command.get().act == "predict"
        elsewhere = _elsewhere(chosen, agent)
        preflight = _preflight(chosen, here, elsewhere)
        fields, hardware = experiment_fields(config), hardware_of(config)
        only = point(fields, hardware, None if anywhere else here, preflight, search=elsewhere.blocks)
        if only.refusal is not None:
            raise only.refusal
        _act([(only, hardware)], chosen, here, agent)


def _act(
    points: Sequence[tuple[Point, Hardware | None]], chosen: Settings, launcher: Launcher, agent: Agent
) -> None:
    """Do with the points of a command what it is for.

    Raises:
        ConfigError: an option that the command cannot follow.
        StrategyError: a strategy has nothing of what it shall show.
    """
    act, alone = _command.get().act, [each for each, _ in points]
    if chosen.solve is not None and act != "predict":
        raise ConfigError("solve", "is for acbench-plan; use that command, or leave it out")
    if chosen.solve is not None and any(hardware is None for _, hardware in points):
        raise ConfigError("solve", "needs a memory to fit; name one, such as hardware=h100")
    _check_search(points, chosen)
    if chosen.show is not None:
        _show(alone, chosen.show, _elsewhere(chosen, agent))
    elif act == "list":
        store = Store(Path(chosen.run.outputs_dir) / chosen.run.name)
        is_done = finished_before(store, launcher, rerun=chosen.run.rerun)
        sys.stdout.write(f"{outline(alone, store, is_done)}\n")
    elif act == "predict":
        _predict(points, chosen, launcher, agent)
    else:
        _run(points, chosen, launcher, agent)


def _check_search(points: Sequence[tuple[Point, Hardware | None]], chosen: Settings) -> None:
    """Refuse a search where there is nothing to choose among.

    Raises:
        ConfigError: another command, one point, or a value that is solved for.
    """
    if chosen.search is None:
        return
    if _command.get().act != "predict":
        raise ConfigError("search", "is for acbench-plan; use that command, or leave it out")
    if len(points) == 1:
        problem = "chooses among the points of a sweep, and this is one"
        raise ConfigError("search", f"{problem}; use acbench-plan -m with lists of values")
    if chosen.solve is not None:
        raise ConfigError("search", "predicts points as they are; leave out solve, or search")


def _elsewhere(chosen: Settings, agent: Agent) -> Elsewhere:
    """Return what builds models for a command: where torch is imported, next to the agent.

    A command that runs no trial starts no other process but for the user's code.
    """
    is_alone = chosen.show is not None or _command.get().act == "list"
    return Elsewhere(agent.call, is_for_users_code=is_alone)


def _preflight(chosen: Settings, launcher: Launcher, elsewhere: Elsewhere) -> Preflight:
    """Return the checks of a command.

    The model of a point that has a finished record is not built to check it.
    """
    built, made = elsewhere.refusal, elsewhere.made
    if chosen.show is not None:
        return Preflight(built=built, made=made, shown=chosen.show)
    run = chosen.run
    is_done = finished_before(Store(Path(run.outputs_dir) / run.name), launcher, rerun=run.rerun)
    if _command.get().act == "predict":
        return Preflight(
            lambda _: True, built, made, reads_data=False
        )  # a prediction builds the model anyway
    return Preflight(is_done, built, made)


def _common_settings(configs: Sequence[DictConfig]) -> Settings:
    """Return the settings of a sweep, which its points share.

    Raises:
        ConfigError: a setting was swept; the first such is named.
    """
    distinct = list(dict.fromkeys(settings(config) for config in told(configs, "comparing", "points")))
    if len(distinct) > 1:
        values = [asdict(each.run) | {"tracker": each.tracker.name} for each in distinct]
        name = next((name for name in values[0] if len({each[name] for each in values}) > 1), "tracker")
        raise ConfigError(name, "belongs to the whole sweep and cannot be swept; give it one value")
    return distinct[0]


def _show(points: Sequence[Point], what: str, elsewhere: Elsewhere) -> None:
    """Print what the strategies of each point have to show, and run nothing.

    Raises:
        ConfigError: a point is refused, or none of its strategies has that to show.
        StrategyError: the same, found by a strategy.
    """
    for each in points:
        if each.experiment is None:
            assert each.refusal is not None
            raise each.refusal
        if len(points) > 1:
            sys.stdout.write(f"# {each.trial_id}\n")
        sys.stdout.write(f"{elsewhere.view(each.experiment, what)}\n")


def _predict(
    points: Sequence[tuple[Point, Hardware | None]], chosen: Settings, launcher: Launcher, agent: Agent
) -> None:
    """Print what is predicted of the points, and keep their steps where that is asked for.

    Raises:
        ConfigError: steps are to be kept where trials have run.
    """
    command, store = _command.get(), Store(Path(chosen.run.outputs_dir) / chosen.run.name)
    is_done = finished_before(store, launcher, rerun=chosen.run.rerun)
    if command.is_traced:
        _require_unmeasured(store)
    predicted = partial(
        planned,
        field=chosen.solve,
        state=lambda each: state_of(each, store, is_done),
        ask=partial(agent.call, _ANSWERS),
        kept_in=store.root.resolve() if command.is_traced else None,
    )
    if chosen.search is None:
        rows = predicted(points)
    else:
        rows = searched(points, chosen.search, lambda point: predicted([point])[0])
        sys.stderr.write(f"{command.program}: {_found(rows, len(points))}\n")
    if command.is_traced:
        for row in rows:
            if row.record.status == "predicted":
                store.write(replace(row.record, outlook=row.outlook))
        sys.stderr.write(f"{command.program}: steps are kept in {store.root}\n")
    if command.is_json:
        sys.stdout.write(json.dumps([row.to_dict() for row in rows], indent=1) + "\n")
    else:
        content = plan_sheet(rows)
        print_sheet(content, PLAN_LEGEND)
    command.status = exit_code_of_plan(rows)


def _found(rows: Sequence[PlannedPoint], count: int) -> str:
    """Return the sentence about a search: how much was predicted, and what nothing undercuts."""
    best, costs = (
        front(rows),
        "bytes and FLOPs" if rows[0].outlook.hardware is None else "bytes and step time",
    )
    names = "; ".join(point_labels([row.shown for row in best])) or "none"
    return f"predicted {len(rows)} of {count} points; on the front of {costs}: {names}"


def _require_unmeasured(store: Store) -> None:
    """Refuse a folder with records of trials that ran: a prediction takes the place of no measurement.

    Raises:
        ConfigError: the sweep has such a record, or its folder cannot be written.
    """
    store.require_writable()
    if any(record.status != "predicted" for record in store.scan().records):
        problem = (
            f"{str(store.root)!r} has records of trials that ran, and predictions would stand among them"
        )
        raise ConfigError("name", f"{problem}; choose another name for --trace")


def _run(
    points: Sequence[tuple[Point, Hardware | None]], chosen: Settings, launcher: Launcher, agent: Agent
) -> None:
    """Run the points and keep the result for `_execute`, which reports it."""
    command, to_run = _command.get(), [each for each, _ in points]
    command.run = chosen.run
    command.has_defect |= any(isinstance(each.refusal, UnplannedError) for each in to_run)
    if chosen.run.skip_predicted_oom:
        hardware = dict.fromkeys(repr(each) for _, each in points)
        if len(hardware) > 1:
            raise ConfigError("hardware", "belongs to the whole sweep and cannot be swept; give it one value")
        store = Store(Path(chosen.run.outputs_dir) / chosen.run.name)
        is_done = finished_before(store, launcher, rerun=chosen.run.rerun)
        to_run = without_predicted_oom(to_run, points[0][1], is_done, partial(agent.call, _ANSWERS))
    command.result = run_sweep(to_run, chosen.run, chosen.tracker, launcher, agent)


def _report(result: Result, run: Run) -> int:
    """Print the table of what there is, and say what there is not; return the exit status."""
    root = Path(run.outputs_dir) / run.name
    distinct = {record.trial_id: record for record in result.records}
    if distinct:
        print_table(list(distinct.values()), root=root)
    if result.missing:
        sys.stderr.write(f"acbench: {result.missing} without a record yet; the same command continues\n")
    sys.stderr.write(f"records: {root}\n")
    return exit_code(result, strict=run.strict)
