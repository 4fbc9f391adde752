"""The answers of policies of torch's selective checkpointing in a step.

A policy is asked about every operator of a forward. Torch takes whatever it does not know as a wish to run
the operator again, and a policy whose operators never run keeps nothing: neither raises.

Source: torch/utils/checkpoint.py, `_CachingTorchDispatchMode`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, _CachingTorchDispatchMode

from strategies.estimate.patched import replaced, wrapped

_MOST_OF_AN_ANSWER = 60  # characters


@contextmanager
def answers_heard() -> Iterator[Counter[str]]:
    """Count what policies answer inside the scope, as `MeasuredWork.policy_answers` has it."""
    answers: Counter[str] = Counter()

    def heard(policy: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        answer = policy(*args, **kwargs)
        if isinstance(answer, bool):  # as torch takes it
            word = (CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE).name
        else:
            word = answer.name if isinstance(answer, CheckpointPolicy) else repr(answer)[:_MOST_OF_AN_ANSWER]
        answers[word] += 1
        return answer

    def dispatched(original: Callable[..., Any], mode: Any, /, *args: Any, **kwargs: Any) -> Any:
        with replaced(mode, "policy_fn", partial(heard, mode.policy_fn)):
            return original(mode, *args, **kwargs)

    with wrapped(_CachingTorchDispatchMode, "__torch_dispatch__", dispatched):
        yield answers
