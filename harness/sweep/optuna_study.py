"""A study of optuna with two objectives; imported where a search is asked for.

Source: Ozaki et al. 2022, multiobjective tree-structured Parzen estimator; `optuna.samplers.TPESampler`.
"""

from __future__ import annotations

from collections.abc import Sequence

import optuna
from optuna.trial import Trial, TrialState

from harness.sweep.search import Costs, Proposal

_SEED = 0
"""So that the same command proposes the same points."""


class OptunaStudy:
    """Proposes points by what earlier ones cost; the first third at random.

    Args:
        count: number of points that will be told.
    """

    def __init__(self, count: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=_SEED, n_startup_trials=max(1, count // 3))
        self._study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)

    def ask(self) -> Proposal:
        """Return the next proposal."""
        return _OptunaProposal(self._study.ask())

    def tell(self, proposal: Proposal, costs: Costs | None) -> None:
        """Learn what a proposal costs; `None` where it has no costs."""
        assert isinstance(proposal, _OptunaProposal), "it was asked of this study"
        if costs is None:
            self._study.tell(proposal.trial, state=TrialState.FAIL)
        else:
            self._study.tell(proposal.trial, costs)


class _OptunaProposal:
    def __init__(self, trial: Trial) -> None:
        self.trial = trial

    def number(self, name: str, values: Sequence[float]) -> int:
        return int(self.trial.suggest_int(name, 0, len(values) - 1))

    def word(self, name: str, values: Sequence[str]) -> int:
        return list(values).index(str(self.trial.suggest_categorical(name, list(values))))
