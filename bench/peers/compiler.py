"""torch's partitioner under `activation_memory_budget`: of each compiled block, or of a compiled model."""

from __future__ import annotations

from collections.abc import Iterator

from bench.peers.peer import Peer

_SOLVERS = ("dp", "greedy", "ilp", "dp_knapsack_sliding_hirschberg")
_BUDGETS = (0.1, 0.3, 0.5)
_COMPARED = 0.3
"""The budget at which all solvers are asked."""


def peers() -> Iterator[Peer]:
    """Yield the compiler without a budget, then budgets with one solver, then all solvers at one budget."""
    for scope in ("blocks", "model"):
        compiled = ("compile=aot_eager", f"compile_scope={scope}")
        where = "a block" if scope == "blocks" else "the model"
        yield Peer(name=f"compiler, {where}", setting="no budget", overrides=compiled)
        asked = dict.fromkeys([(each, "dp") for each in _BUDGETS] + [(_COMPARED, each) for each in _SOLVERS])
        for budget, solver in asked:
            yield Peer(
                name=f"compiler, {where}",
                setting=f"{budget:g} {solver}",
                overrides=(
                    *compiled,
                    "ac=compiler_budget",
                    f"ac.budget={budget}",
                    f"ac.solver={solver}",
                ),
            )
