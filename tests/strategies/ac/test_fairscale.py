"""fairscale: what it costs once `switch_on` has called it, and what is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("fairscale", reason="fairscale is not installed: pip install 'acbench[fairscale]'")

from strategies.ac.fairscale import Fairscale
from strategies.ac.full import Full
from tests.strategies.foreign.models import BLOCKS, assert_costs_the_same, llama, refusal

LIKE_OURS = Full(**BLOCKS, early_stop=False)


def test_it_costs_what_the_same_of_ours_costs() -> None:
    assert_costs_the_same(Fairscale(**BLOCKS), LIKE_OURS)


def test_a_model_without_these_blocks_is_refused() -> None:
    assert refusal("fairscale", llama(), layers_fqn="layers") == (
        "ac.layers_fqn: 'layers' is not a module of LlamaForCausalLM; containers are: model.layers"
    )
