"""Peers from other packages, torchtitan, xformers and ckptplan, where they are installed, and the compiler.

They are no dependency of acbench: `pip install --no-deps --target FOLDER` keeps them apart, and
`PYTHONPATH=FOLDER` shows them to a run. One that is missing is a row that says so.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from bench.peers.blockwise import Schedule, Scheduled, run_by
from bench.peers.rotor import sizes_of_blocks
from bench.peers.workload import CannotRunError, Peer, Workload, blocks_of
from harness.trial.assemble import Assembled

_CKPTPLAN_SAVINGS = (0.5, 0.8)
_SOLVERS = ("dp", "greedy", "ilp", "dp_knapsack_sliding_hirschberg")
_BUDGETS = (0.1, 0.3, 0.5)
_COMPARED = 0.3
"""The budget at which all solvers are asked."""


def peers() -> Iterator[Peer]:
    """Yield what these packages offer; xformers and trainstream run on no CPU."""
    yield Peer(name="torchtitan full", change=partial(_torchtitan, is_full=True))
    yield Peer(
        name="torchtitan selective op",
        setting="with attention of the CPU",
        change=partial(_torchtitan, is_full=False),
    )
    reason = "measures operators by CUDA's allocator"
    xformers = partial(_without_cpu, name="xformers.checkpoint", reason=reason)
    yield Peer(name="xformers optimal", change=xformers)
    for saving in _CKPTPLAN_SAVINGS:
        yield Peer(name="ckptplan", setting=f"saves {saving:g}", change=partial(_ckptplan, saving=saving))
    yield Peer(name="trainstream", change=partial(_without_cpu, name="trainstream", reason="needs a GPU"))


def of_compiler() -> Iterator[Peer]:
    """Yield torch's partitioner of a compiled block or model: no budget, budgets, and all solvers at one."""
    for scope in ("blocks", "model"):
        compiled = ("compile=aot_eager", f"compile_scope={scope}")
        where = "a block" if scope == "blocks" else "the model"
        yield Peer(name=f"compiler, {where}", setting="no budget", overrides=compiled)
        asked = dict.fromkeys([(each, "dp") for each in _BUDGETS] + [(_COMPARED, each) for each in _SOLVERS])
        for budget, solver in asked:
            yield Peer(
                name=f"compiler, {where}",
                setting=f"{budget:g} {solver}",
                overrides=(*compiled, "ac=compiler_budget", f"ac.budget={budget}", f"ac.solver={solver}"),
            )


def imported(name: str) -> Any:
    """Return a module of another package.

    Raises:
        CannotRunError: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise CannotRunError(f"not installed: {error}") from error
    except (ImportError, RuntimeError, OSError) as error:  # what packages raise where there is no GPU
        raise CannotRunError(str(error).partition(",")[0]) from error


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    names = ("torchtitan", "xformers", "ckptplan", "trainstream", "pulp", "torchtune")
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _torchtitan(_: Workload, trainee: Assembled, *, is_full: bool) -> None:
    titan = imported("torchtitan.distributed.activation_checkpoint")
    if is_full:
        titan.FullAC(titan.FullAC.Config()).apply(trainee.model)
        return

    def get_save_ops(self: Any) -> set[Any]:
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 (its name)
        return {*titan.SelectiveAC.get_save_ops(self), attention}

    with_attention: Any = type("WithAttention", (titan.SelectiveAC,), {"get_save_ops": get_save_ops})
    with_attention(titan.SelectiveAC.Config()).apply(trainee.model)


def _without_cpu(_: Workload, __: Assembled, *, name: str, reason: str) -> None:
    imported(name)
    raise CannotRunError(reason)


def _ckptplan(workload: Workload, trainee: Assembled, saving: float) -> None:
    """Plan by ckptplan on bytes that are given to it: it measures none on a CPU."""
    ckptplan = imported("ckptplan")
    blocks = blocks_of(trainee)
    declared = ckptplan.declare_blocks(trainee.model, list(blocks.items()))
    profiles = ckptplan.profile_blocks(
        declared, _first_inputs(workload, trainee), device="cpu", num_warmup=1, num_trials=3
    )
    measured = [
        dataclasses.replace(
            profile,
            timing_only=False,
            activation_bytes_estimate=sizes.saved_bytes,
            activation_bytes_method="isolated_forward_delta",
        )
        for profile, sizes in zip(profiles, sizes_of_blocks(workload), strict=True)
    ]
    try:
        plan = ckptplan.plan_checkpoints(
            measured, declared, target_kind="activation_saving_fraction", target_value=saving
        )
    except ckptplan.errors.InfeasibleTargetError as error:
        raise CannotRunError(f"refuses: {error}") from error
    schedule: Schedule = tuple(
        (number,) if decision.checkpointed else number for number, decision in enumerate(plan.decisions)
    )
    run_by(workload, trainee, partial(Scheduled, schedule=schedule))


def _first_inputs(workload: Workload, trainee: Assembled) -> tuple[Any, ...]:
    """Return the positional inputs of the first block.

    Raises:
        CannotRunError: blocks take more than what the block before returns.
    """
    found: list[tuple[Any, ...]] = []
    first = next(iter(blocks_of(trainee).values()))
    handle = first.register_forward_pre_hook(lambda _, args: found.append(args))
    with torch.no_grad():
        trainee.forward(workload.batch(0))
    handle.remove()
    if len(found[0]) > 1:
        raise CannotRunError("refuses blocks that take more than what the block before returns")
    return found[0][:1]
