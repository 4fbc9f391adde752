"""Refusals before any rank starts: first those that need no model, then those that a model shows."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn

import torch

from harness.errors import ConfigError, LateError
from harness.experiment.data import DataSpec, Synthetic, Text
from harness.experiment.experiment import Experiment, Recipe, name_of
from harness.experiment.protocol import Protocol
from harness.experiment.training import Training
from harness.models.base import Batch, LanguageModelSpec, ModelSpec
from harness.models.python import Made, PythonSpec
from harness.trial.models_error import overflow, raised_by_model
from harness.trial.plan_files import plan_of_rank
from strategies import Strategy, StrategyError, ac_variants, chunk_variants, generators, shard_variants
from strategies.regions import block_search

Refusal = ConfigError | StrategyError | None


def built_refusal(check: str, deadline_s: float, model: ModelSpec, *others: Any) -> Refusal:
    """Return why a check of `harness.trial.without_memory` or of this module refuses a model; `None` if not.

    Args:
        deadline_s: seconds that the user's factory may take.
        model: first argument of the check.
    """
    own = _CHECKS.get(check)
    found = own or getattr(importlib.import_module("harness.trial.without_memory"), check)
    return _refusal(found, deadline_s, model, *others)


def users_code(parts: Iterable[Any]) -> tuple[str, str] | None:
    """Return the option that names code of the user's, and its value in words; `None` where none of it runs.

    Args:
        parts: arguments of a check; its models, strategies and experiments are looked at.
    """
    named: list[tuple[str, str]] = []
    for part in parts:
        for each in (part.model, part.ac) if isinstance(part, Experiment) else (part,):
            if isinstance(each, ModelSpec) and each.runs_user_code():
                named.append(("model.factory", repr(getattr(each, "factory", each.name))))
            elif isinstance(each, Strategy) and each.runs_user_code():
                option = "factory" if hasattr(each, "factory") else "path"
                named.append((f"ac.{option}", repr(getattr(each, option))))
    words = " or ".join(dict.fromkeys(value for _, value in named))
    return (named[-1][0], words) if named else None


def made_by_user(deadline_s: float, model: PythonSpec) -> Made | Refusal:
    """Return what a model of the user's shows, which runs the factory; or why it is refused."""
    found: list[Made] = []
    refusal = _refusal(lambda each: found.append(each.made()), deadline_s, model)
    return found[0] if refusal is None else refusal


def blocks_of(deadline_s: float, model: ModelSpec) -> block_search.FoundBlocks | Refusal:
    """Return the blocks of a model, `None` where it has none; or why it is refused."""
    found: list[block_search.FoundBlocks | None] = []

    def search(model: ModelSpec) -> None:
        with generators.restored(), torch.device("meta"):
            found.append(block_search.search_blocks(model.build()))

    refusal = _refusal(search, deadline_s, model)
    return found[0] if refusal is None else refusal


class Preflight:
    """The checks of one command; what its experiments share is checked once.

    Args:
        is_done: whether an experiment has been measured; then its model need not be built to check it.
        built: calls `built_refusal`, here or in a process that has imported torch.
        made: calls `made_by_user`, likewise.
        reads_data: whether `data` must be there; a plan needs none.
        shown: the view that the command shows; `None` shows none.
    """

    def __init__(
        self,
        is_done: Callable[[Experiment], bool] = lambda _experiment: False,
        built: Callable[..., Refusal] = built_refusal,
        made: Callable[..., Made | Refusal] = made_by_user,
        *,
        reads_data: bool = True,
        shown: str | None = None,
    ) -> None:
        self._is_done = is_done
        self._shown = shown
        self._reads_data = reads_data
        self._built = built
        self._made = made
        self._refusals: dict[tuple[str, str], Refusal] = {}

    def check(self, experiment: Experiment) -> None:
        """Refuse what cannot run here.

        The model is built on the meta device and each strategy applied to it, so that a missing FQN or an
        operator that does not exist is found without a rank, a byte or a second of compute. A user's factory
        runs where models are built, each time for no longer than the trial may take.

        Raises:
            ConfigError: the mesh does not fit the model or the data; an option has no effect; the user's
                factory fails or does not return; the model raises when it is called without memory.
            StrategyError: the variant does not fit the model.
        """
        _check_view(experiment, self._shown)
        _check_call_site(experiment)
        _check_compiler(experiment)
        model, mesh, tokens = experiment.model, experiment.mesh, experiment.sequence_length
        deadline_s = experiment.protocol.deadline_s
        # of a user's model by name: they run its factory, where `built` answers
        check_shape, check_inputs, check_tokens = (
            _CHECKS if isinstance(model, PythonSpec) else _CHECKS.values()
        )
        self._once(deadline_s, check_shape, model, tokens, mesh.tp)
        if mesh.pp > 1:
            self._once(deadline_s, _check_stages, model, mesh.stages)
        parts = mesh.dp, experiment.microbatches
        self._once(deadline_s, check_inputs, model, experiment.data, tokens, experiment.batch_size, parts)
        if self._reads_data:
            self._once(deadline_s, check_tokens, model, experiment.data, tokens)
        if isinstance(model, PythonSpec):
            self._learn(deadline_s, model)
        if self._is_done(experiment):
            return
        is_call_site = experiment.wrap_order == "call_site"
        batch = experiment.samples_per_forward, tokens
        # a given plan of a pipeline is in as many files as it has ranks: the check of stages reads them
        is_of_stages = mesh.pp > 1 and experiment.ac.step_planner is not None
        whole_ac = ac_variants["none"]() if is_of_stages else plan_of_rank(experiment.ac, mesh, 0)
        variant = whole_ac, is_call_site, Training.of(experiment), batch
        self._once(deadline_s, "check_variant", model, *variant)
        if mesh.pp > 1:
            acs = tuple(experiment.at_stage(index).ac for index in range(mesh.stages))
            self._once(deadline_s, "check_stages", model, acs, mesh, batch)
        if mesh.ep > 1:
            self._once(deadline_s, "check_dispatch", model)
        if mesh.tp > 1:
            self._once(deadline_s, "check_tensor_parallel_plan", model, mesh.tp, batch)
        if experiment.is_sharded:
            usual = replace(experiment.plain(), wrap_order="inside_fsdp", protocol=Protocol(), seed=0)
            self._once(deadline_s, "check_sharding", model, usual)
        if name_of(experiment.chunk) != "none":
            usual = replace(experiment, shard=shard_variants["none"](), protocol=Protocol(), seed=0)
            self._once(deadline_s, "check_chunk", model, usual)

    def _once(
        self, deadline_s: float, check: Callable[..., None] | str, model: ModelSpec, *others: Any
    ) -> None:
        """Raise what a check refuses; one that builds the model is given by its name."""
        key = str(check), repr((deadline_s, model, others))
        if key not in self._refusals:
            of = deadline_s, model, *others
            self._refusals[key] = self._built(check, *of) if isinstance(check, str) else _refusal(check, *of)
        refusal = self._refusals[key]
        if refusal is not None:
            raise refusal

    def _learn(self, deadline_s: float, model: PythonSpec) -> None:
        """Tell this process, which runs no factory, what the user's model shows."""
        key = "made", repr((deadline_s, model))
        if key not in self._refusals:
            found = self._made(deadline_s, model)
            self._refusals[key] = None if isinstance(found, Made) else found
            if isinstance(found, Made):
                model.know(found)
        refusal = self._refusals[key]
        if refusal is not None:
            raise refusal


def _refusal(check: Callable[..., None], deadline_s: float, model: ModelSpec, *others: Any) -> Refusal:
    """Return why a check refuses a model, `None` where it does not."""
    try:
        with _deadline((model, *others), deadline_s):
            check(model, *others)
    except (ConfigError, StrategyError) as error:
        return error
    except Exception as error:
        if (refusal := overflow(error)) is not None:
            return refusal
        raised = raised_by_model(error)
        if raised is None:
            raise  # a defect of ours
        return ConfigError("model", f"raises when it is called on the meta device, to plan it: {raised}")
    return None


def _check_shape(model: ModelSpec, sequence_length: int, tp: int) -> None:
    model.check(sequence_length=sequence_length, tp=tp)


def _check_stages(model: ModelSpec, stages: int) -> None:
    model.check_stages(stages)


def _check_inputs(
    model: ModelSpec, data: DataSpec, sequence_length: int, batch_size: int, parts: tuple[int, int]
) -> None:
    """Refuse what says how data is read that the model does not read, and batches that cannot be cut.

    Args:
        parts: data-parallel ranks, and micro-batches of each.
    """
    dp, microbatches = parts
    fixed = model.fixed_batch(device="meta")
    if fixed is not None:
        _check_fixed_batch(data, sequence_length, batch_size, dp * microbatches)
        if model.splits_fixed_batch():
            _check_shares(fixed, dp, microbatches)
        elif microbatches > 1:
            raise ConfigError(
                "microbatches",
                f"must be 1 for an example that nobody may cut, got {microbatches}; use "
                "model.split_example=true where a row of every tensor is a sample, or let the factory give a "
                "function of the batch size",
            )
    elif not (isinstance(model, LanguageModelSpec) and model.reads_tokens()):
        _check_own_samples(model.name, data, sequence_length)


def _check_tokens(model: ModelSpec, data: DataSpec, sequence_length: int) -> None:
    if isinstance(model, LanguageModelSpec) and model.reads_tokens():
        data.source(vocab_size=model.vocab_size, sequence_length=sequence_length)


_CHECKS: Mapping[str, Callable[..., None]] = {
    "check_shape": _check_shape,
    "check_inputs": _check_inputs,
    "check_tokens": _check_tokens,
}
"""Checks that build no model of ours; for one of the user's they run the factory."""


@contextmanager
def _deadline(parts: tuple[Any, ...], seconds: float) -> Iterator[None]:
    """Refuse code of the user's that does not return; only the main thread can have an alarm."""
    of_user = users_code(parts)
    if of_user is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_number: int, _frame: FrameType | None) -> NoReturn:
        raise LateError

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except LateError as error:
        option, words = of_user
        raise ConfigError(option, f"{words} did not return within {seconds:g} s") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _check_fixed_batch(data: DataSpec, sequence_length: int, batch_size: int, parts: int) -> None:
    """Refuse what says how a batch is drawn where the model's own factory brings it.

    Args:
        parts: what a batch is cut into, over all ranks.
    """
    usual = Recipe()
    asked = {"sequence_length": (sequence_length, usual.sequence_length)}
    if usual.batch_size % parts == 0:  # else mesh and micro-batches ask for another one
        asked["batch_size"] = batch_size, usual.batch_size
    for option, (value, default) in asked.items():
        if value != default:
            problem = "has no effect, the factory brings its own inputs"
            raise ConfigError(option, f"{problem}; leave it at {default}")
    if data != Text():
        problem = "has no effect, the factory brings its own inputs"
        raise ConfigError("data", f"{problem}; leave it at text, without a path")


def _check_shares(example: Batch, dp: int, microbatches: int) -> None:
    """Refuse an example whose rows the data-parallel ranks, and their micro-batches, cannot share."""
    count = example.row_count()
    if count % dp:
        problem = f"the example has {count} rows, which {dp} data-parallel ranks do not divide"
        raise ConfigError("model.split_example", f"{problem}; give another example, or leave it at false")
    if count // dp % microbatches:
        problem = f"must divide the {count // dp} rows of the example that a rank has, got {microbatches}"
        raise ConfigError("microbatches", f"{problem}; give another example, or use 1")


def _check_own_samples(name: str, data: DataSpec, sequence_length: int) -> None:
    """Refuse what says how tokens are read where the model draws samples of its own."""
    usual = Recipe().sequence_length
    if sequence_length != usual:
        problem = f"has no effect, {name!r} draws samples of its own size; leave it at {usual}"
        raise ConfigError("sequence_length", problem)
    if data not in {Synthetic(), Text()}:
        raise ConfigError("data", f"has no effect, {name!r} draws its own samples; use synthetic")


def _check_compiler(experiment: Experiment) -> None:
    compiler = os.environ.get("CXX") or "g++"
    if experiment.compile == "inductor" and shutil.which(compiler) is None:
        raise ConfigError(
            "compile",
            f"inductor builds its kernels with a C++ compiler, and {compiler!r} is not there; install it, "
            "name another one in CXX, or use compile=aot_eager",
        )


def _check_call_site(experiment: Experiment) -> None:
    """Refuse a choice of blocks where the model as a whole is the region."""
    if experiment.wrap_order != "call_site":
        return
    usual = {"module_classes": (), "layers_fqn": experiment.model.layers_fqn}
    for option, default in usual.items():
        if getattr(experiment.ac, option, default) != default:
            raise ConfigError(f"ac.{option}", "has no effect: call_site makes the whole model one region")


def _check_view(experiment: Experiment, what: str | None) -> None:
    if what is not None:
        owner_of_view(experiment, what)


def owner_of_view(experiment: Experiment, what: str) -> Strategy:
    """Return the strategy of `experiment` that has a view.

    Raises:
        ConfigError: none of them has it.
    """
    shown = {view: each for each in (experiment.ac, experiment.chunk) for view in each.views}
    if what not in shown:
        groups = ("ac", "chunk", "shard")
        chosen = ", ".join(f"{group}={name_of(getattr(experiment, group))}" for group in groups)
        raise ConfigError("show", f"{chosen} have no view {what!r}; {_views(sorted(shown))}")
    return shown[what]


def _views(views: list[str]) -> str:
    if views:
        return f"views: {', '.join(views)}"
    owners: dict[str, list[str]] = {}
    for group, variants in (("ac", ac_variants), ("chunk", chunk_variants)):
        for name, variant in variants.items():
            for view in variant.views:
                owners.setdefault(view, []).append(f"{group}={name}")
    known = (f"{view} of {', '.join(names)}" for view, names in sorted(owners.items()))
    return f"they have none; views are {'; '.join(known)}"
