from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.trial.elsewhere import Elsewhere, ElsewhereError

_TOKENS = Elsewhere.like(torch.zeros(2, 8, dtype=torch.int64), "the tokens")
_WEIGHT = Elsewhere.like(torch.zeros(16, 4), "the weight")
_EMBEDDED = functional.embedding(_TOKENS, _WEIGHT)

FOLLOWING = [
    # what is computed | its shape | its dtype
    pytest.param(lambda: _EMBEDDED, (2, 8, 4), torch.float32, id="an embedding"),
    pytest.param(lambda: _EMBEDDED + torch.ones(4), (2, 8, 4), torch.float32, id="a sum with values"),
    pytest.param(lambda: torch.ones(4).add(_EMBEDDED), (2, 8, 4), torch.float32, id="a sum of values"),
    pytest.param(lambda: torch.cat([torch.ones(2, 1, 4), _EMBEDDED], 1), (2, 9, 4), torch.float32, id="cat"),
    pytest.param(lambda: _EMBEDDED[:, :-1].mT, (2, 4, 7), torch.float32, id="a view"),
    pytest.param(lambda: _EMBEDDED.to("cpu", torch.bfloat16), (2, 8, 4), torch.bfloat16, id="a cast"),
    pytest.param(lambda: nn.Dropout(0.5)(_EMBEDDED), (2, 8, 4), torch.float32, id="dropout"),
    pytest.param(lambda: _TOKENS.ne(3), (2, 8), torch.bool, id="a mask of values"),
]


@pytest.mark.parametrize(("compute", "shape", "dtype"), FOLLOWING)
def test_what_follows_has_a_shape_and_no_values(
    compute: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    before = torch.get_rng_state()
    found = compute()
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(found, Elsewhere)
    assert (found.shape, found.dtype, found.device) == (shape, dtype, torch.device("cpu"))


def test_shapes_are_known() -> None:
    assert (_EMBEDDED.size(1), _EMBEDDED.dim(), len(_EMBEDDED), _EMBEDDED.numel()) == (8, 3, 2, 64)
    assert (_EMBEDDED.is_cuda, _EMBEDDED.requires_grad, _TOKENS.is_floating_point()) == (False, False, False)
    positions = torch.arange(_TOKENS.shape[1], device=_TOKENS.device)
    assert positions.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("made", "value"),
    [(torch.ones_like(_TOKENS), 1), (_EMBEDDED.new_zeros(3), 0), (torch.full_like(_EMBEDDED, 2), 2)],
)
def test_what_takes_the_shape_alone_has_values(made: Tensor, value: int) -> None:
    assert not isinstance(made, Elsewhere)
    assert made.unique().tolist() == [value]


REFUSED = [
    pytest.param(lambda: bool(_EMBEDDED.sum() > 0), "__bool__ needs values of the tokens", id="a decision"),
    pytest.param(_WEIGHT.tolist, "tolist needs values of the weight", id="numbers"),
    pytest.param(lambda: _EMBEDDED.sum().item(), "item needs values of the tokens", id="a number"),
    pytest.param(partial(torch.zeros(16, 4).copy_, _WEIGHT), "copy_ writes what follows from the weight",
                 id="a copy to values"),
    pytest.param(lambda: torch.zeros(16, 4).__setitem__(0, _WEIGHT[0]),
                 "__setitem__ writes what follows from the weight", id="an assignment to values"),
    pytest.param(lambda: torch.add(_WEIGHT, 1, out=torch.zeros(16, 4)),
                 "add writes what follows from the weight", id="an output with values"),
]  # fmt: skip


@pytest.mark.parametrize(("compute", "message"), REFUSED)
def test_values_are_not_known(compute: Callable[[], Any], message: str) -> None:
    with pytest.raises(ElsewhereError) as refusal:
        compute()
    assert str(refusal.value) == message
