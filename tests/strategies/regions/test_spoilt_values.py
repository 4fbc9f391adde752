"""Spoilt values: which operators hand them on, and what backward gets in their place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strategies.regions.spoilt_values import Past, SpoiltValues


def filled_by_a_kernel(like: Tensor, *read: Tensor) -> Tensor:
    """Return memory that is filled without an operator, as kernels of others fill it."""
    made = torch.empty_like(like)
    made.numpy()[:] = sum(each.numpy() for each in read)
    return made


def _written(into: Tensor, value: Tensor) -> Tensor:
    into.copy_(value)
    return into


def _of_size(spoilt: Tensor, clean: Tensor) -> Tensor:
    return clean + 1 if spoilt.shape == clean.shape else clean


def _of_number(spoilt: Tensor, clean: Tensor) -> Tensor:
    return clean + 1 if spoilt.sum().item() > 0 else clean * 2


def _normalised(spoilt: Tensor, clean: Tensor, *, training: bool) -> Tensor:
    weight = torch.ones(3)
    batch = clean.expand(2, 3)
    return functional.batch_norm(batch, spoilt, torch.ones(3), weight, weight, training=training)


FOLLOWS: dict[str, tuple[bool, Callable[[Tensor, Tensor], Tensor]]] = {
    "itself": (True, lambda spoilt, _: spoilt),
    "a view": (True, lambda spoilt, _: spoilt.view(1, 3)[0]),
    "a sum": (True, lambda spoilt, clean: clean + spoilt),
    "a sum of a sum": (True, lambda spoilt, clean: (clean + spoilt) * clean),
    "what it is written into": (True, lambda spoilt, _: _written(torch.zeros(3), spoilt)),
    "what runs after its number was read": (True, _of_number),
    "what a kernel may have filled": (True, lambda spoilt, clean: filled_by_a_kernel(clean, spoilt)),
    "a sum with that": (True, lambda spoilt, clean: filled_by_a_kernel(clean, spoilt) + clean),
    "a batch norm in evaluation": (True, lambda *each: _normalised(*each, training=False)),
    "another": (False, lambda _, clean: clean + 1),
    "what runs after its size was read": (False, _of_size),
    "memory that an operator fills": (False, lambda _, clean: _written(torch.empty(3), clean)),
    "a batch norm in training": (False, lambda *each: _normalised(*each, training=True)),
}


@pytest.mark.parametrize(("follows", "function"), FOLLOWS.values(), ids=FOLLOWS)
def test_what_follows_from_a_tensor(*, follows: bool, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    spoilt, clean = torch.ones(3), torch.ones(3)
    values = SpoiltValues([Past(spoilt, "it")])
    with values:
        result = function(spoilt, clean)
        given = values.given(result)
    assert (given is result) is not follows


def test_what_is_put_back_spoils_but_what_is_kept_of_it() -> None:
    table = torch.ones(3)
    values = SpoiltValues([Past(table, "it", is_put_back=True)])
    with values:
        total = table + 1
    assert values.given(total) is total
    assert values.given(table) is not table


def test_others_are_added() -> None:
    one, other = torch.ones(3), torch.ones(3)
    values = SpoiltValues([Past(one, "it")])
    values.add([Past(other, "the other")])
    with pytest.raises(RuntimeError, match=r"operation: the other$"):
        values.given(other).sum()


def test_a_spoilt_value_has_the_form_of_what_it_stands_for_and_raises_where_it_is_used() -> None:
    saved = torch.ones(4, 3, dtype=torch.bfloat16).t()
    given = SpoiltValues([Past(saved, "'bias' is at version 1")]).given(saved).detach()
    assert (given.shape, given.stride(), given.dtype, given.device) == (
        saved.shape,
        saved.stride(),
        saved.dtype,
        saved.device,
    )
    words = r"^one of the variables needed .* modified by an inplace operation: 'bias' is at version 1$"
    with pytest.raises(RuntimeError, match=words):
        given * 2


def test_a_sparse_value_is_refused_at_once() -> None:
    saved = torch.eye(2).to_sparse()
    values = SpoiltValues([Past(saved, "it")])
    with pytest.raises(RuntimeError, match="modified by an inplace operation: it"):
        values.given(saved)


def test_what_autograd_saves_in_the_scope_is_spoilt() -> None:
    bias, x = torch.ones(3), torch.ones(3, requires_grad=True)
    with SpoiltValues([Past(bias, "it")]).watching():
        needed, not_needed = (x + bias).sin().sum(), (x + bias).sum()
    not_needed.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation: it"):
        needed.backward()
