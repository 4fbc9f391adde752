"""`torch.distributed._tools`: `sac_milp` says which share of each block to discard; operators save the rest.

torch has the solver and no wrapper that carries its answer out. Here each block saves the operators that
`get_optimal_checkpointing_policy_per_module` names, by torch's selective checkpointing. The estimators of
seconds need CUDA, so operators cost the seconds of the machine model that predictions here use.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP, SACEstimator
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from bench.peers.libraries import imported
from bench.peers.workload import CannotRunError, Peer, Workload, blocks_of
from harness.models.base import Batch
from harness.predict.without_data import as_with_values
from harness.trial.assemble import Assembled, assemble
from strategies.estimate.flops import called, flops_of
from strategies.estimate.operator_cost import bytes_of, machine_for
from strategies.tracing.fakes import Fakes
from strategies.tracing.following import as_with_data

SHARES = (0.4, 0.6)
"""Budgets, of the peak that its own tracker finds."""

_MILLISECONDS = 1e3
_LEAST_MS = 1e-6
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """What torch's estimators say of a model.

    Fields:
        graph: tree of modules with bytes, cost and trade-off curves.
        stats: operators of each module, by FQN.
        peak_bytes: of the step, without activation checkpointing.
    """

    graph: Any
    stats: Mapping[str, Any]
    peak_bytes: int


def peers() -> Iterator[Peer]:
    """Yield a peer for each budget."""
    for share in SHARES:
        yield Peer(name="torch sac_milp", setting=f"{share:g}", change=partial(_apply, share=share))


def _apply(workload: Workload, trainee: Assembled, share: float) -> None:
    imported("pulp")
    solver = imported("torch.distributed._tools.sac_ilp")
    found = _estimates(workload)
    root = found.graph.nodes[0]["fqn"]
    units = {f"{root}.{fqn}": fqn for fqn in trainee.blocks}
    discarded, _, peak = solver.sac_milp(
        found.graph, memory_budget=share * found.peak_bytes / _GIB, ac_units=list(units)
    )
    if peak < 0:
        raise CannotRunError("its solver finds no solution")
    for fqn, discard in discarded.items():
        saved = solver.get_optimal_checkpointing_policy_per_module(
            found.stats[fqn], max(0.0, min(1.0, 1 - discard))
        )
        block = blocks_of(trainee)[units[fqn]]
        wrapped = checkpoint_wrapper(block, context_fn=partial(_contexts, tuple(saved)))
        trainee.model.set_submodule(units[fqn], wrapped)


def _contexts(saved: tuple[int, ...]) -> Any:
    counts = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator in OPS_TO_ALWAYS_SKIP:
            return CheckpointPolicy.PREFER_RECOMPUTE
        number = counts[context.is_recompute]
        counts[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if saved[number] else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@cache
def _estimates(workload: Workload) -> Estimates:
    """Return the estimates for a workload, on fake tensors."""
    logging.getLogger("torch.distributed._tools.sac_ilp").setLevel(logging.ERROR)
    device = torch.device("cpu")
    fakes = Fakes(allow_non_fake_inputs=True)
    batch = workload.batch(0).changed(fakes.from_tensor)
    with as_with_data(), as_with_values(), fakes:
        trainee = assemble(workload.plain, device, None, batch)
        memory = MemTracker()
        memory.track_external(trainee.model, trainee.optimizer)
        with memory:
            for step in range(2):
                _train(trainee, batch)
                if step == 0:
                    memory.reset_mod_stats()
        runtime = RuntimeEstimator()
        runtime("operator-level-cost-model")
        runtime._estimate = _costed  # noqa: SLF001 (its own estimates need CUDA)
        with runtime:
            _train(trainee, batch)
        sac = SACEstimator()
        sac("operator-level-cost-model")
        sac._estimate_runtime = _costed  # noqa: SLF001
        with sac:
            _train(trainee, batch)
        info: Any = aggregate_stats(trainee.model, memory, runtime, sac, device)
    # a module that is called twice, such as a dropout that a block shares, is refused as a surprise
    info["mod_order"].update({name: list(dict.fromkeys(order)) for name, order in info["mod_order"].items()})
    graph = parse_module_info(info)
    peak = memory.get_tracker_snapshot("peak")[device]["Total"]
    return Estimates(graph=graph, stats=sac.sac_mod_stats, peak_bytes=peak)


def _train(trainee: Assembled, batch: Batch) -> None:
    trainee.backward(trainee.forward(batch)[1])
    trainee.update()
    trainee.zero_grad()


def _costed(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """Return what an operator returns, and the milliseconds that our machine model gives it.

    None is free: pulp 3 has no value for an unknown that no equation names.
    """
    given = kwargs or {}
    result = func(*args, **given)
    target, operands = called(func, args)
    seconds = machine_for(torch.device("cpu")).operator_s(
        flops_of(target, operands, given, result), bytes_of((args, given)) + bytes_of(result)
    )
    return result, _MILLISECONDS * seconds + _LEAST_MS
