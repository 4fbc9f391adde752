"""A remedy is printed after it was tried, and a cause that nobody tried is called a guess."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.check import NotNeutral, assert_neutral
from harness.check.not_neutral import Neutrality
from strategies.ac.full import Full
from tests.harness.check.small_models import (
    WIDTH,
    Block,
    Counting,
    Stack,
    batch,
    checkpointed,
    saving,
    stack_of,
    tied,
)


class Cache:
    """What blocks append to, as a cache of keys and values."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}


class Caching(nn.Module):
    """Appends to a cache that it is given, and reads all of it."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.linear = place, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        """Return a tensor of the shape of `x`, (B, D)."""
        own = self.linear(x)
        before = cache.kept.get(self.place)
        cache.kept[self.place] = own if before is None else torch.cat([before, own])
        outputs: Tensor = x + cache.kept[self.place].tanh().sum(0)
        return outputs


class Consuming(nn.Module):
    """Takes the last item of a list that the next block goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        """Return a tensor of the shape of `x`, (B, D)."""
        outputs: Tensor = self.linear(x).tanh() * skips.pop().sin()
        return outputs


class Given(nn.Module):
    """Two blocks that are given the same thing."""

    def __init__(self, blocks: list[nn.Module], thing: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers, self.thing = nn.ModuleList(blocks), thing

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of shape (B, D)."""
        thing = self.thing(x)
        for layer in self.layers:
            x = layer(x, thing)
        return x


def _cached() -> nn.Module:
    return Given([Caching(0), Caching(1)], lambda _: Cache())


def _consumed() -> nn.Module:
    return Given([Consuming(), Consuming()], lambda x: [x, 2 * x])


class Twice(torch.autograd.Function):
    """Reads what it has saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the square."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient of the square."""
        assert len(ctx.saved_tensors) == 1
        result: Tensor = 2 * ctx.saved_tensors[0] * gradient
        return result


class Reading(Block):
    """Runs a function that reads what it has saved twice."""

    def between(self, h: Tensor) -> Tensor:
        """Return what `down` reads."""
        result: Tensor = Twice.apply(h)  # type: ignore[no-untyped-call]
        return result


class Drawing(Block):
    """Draws from a generator of its own, which nobody puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def between(self, h: Tensor) -> Tensor:
        """Return what `down` reads."""
        return h.sin() * torch.rand(h.shape, generator=self.generator)


class Alone(nn.Module):
    """Two blocks in no container."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Drawing(), Drawing()

    @property
    def layers(self) -> list[nn.Module]:
        """The blocks."""
        return [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of shape (B, D)."""
        outputs: Tensor = self.second(self.first(x))
        return outputs


def _found(
    make: Callable[[], nn.Module], variant: Any, *, requires_grad: bool = False, **options: Any
) -> Neutrality:
    with pytest.raises(NotNeutral) as caught:
        assert_neutral(make, batch(requires_grad=requires_grad), variant, steps=1, **options)
    return caught.value.found


HELPS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any], str]] = {
    "random state": (Stack, checkpointed(preserve_rng_state=False), {}, "preserve_rng_state=True"),
    "random state, of ours": (
        *(Stack, Full(layers_fqn="layers", preserve_rng_state=False), {}, "preserve_rng_state=True"),
    ),
    "the newer implementation": (Stack, checkpointed(use_reentrant=True), {}, "use_reentrant=False"),
    "state that is put back, of ours": (*(stack_of(Counting), Full(layers_fqn="layers"), {}, "rewind=True"),),
    "state that is put back, instead of torch's": (
        stack_of(Counting),
        checkpointed(),
        {},
        "strategies.ac.full.Full(layers_fqn='layers', rewind=True) in its place",
    ),
    "a cache that is copied": (_cached, checkpointed(), {}, "a copy of the arguments inside of the region"),
    "an operator that is saved": (
        Alone,
        checkpointed(),
        {},
        "context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.rand.generator])",
    ),
    "the older implementation": (
        *(stack_of(Reading), checkpointed(), {"requires_grad": True}, "use_reentrant=True"),
    ),
    "autocast that keeps no casts": (
        tied,
        saving(torch.ops.aten.addmm.default),
        {"autocast": torch.bfloat16},
        "torch.autocast(…, cache_enabled=False)",
    ),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("case", HELPS)
def test_says_what_was_tried_and_helps(case: str) -> None:
    make, variant, options, words = HELPS[case]
    found = _found(make, variant, **options)
    assert (found.remedy, found.perhaps) == (f"with {words} it is neutral", "")
    assert "none of these helps" not in str(found)
    assert f"remedy: with {words} it is neutral" in str(found)


def test_numbers_of_the_gallery_are_links() -> None:
    found = _found(Stack, checkpointed(preserve_rng_state=False))
    assert "\n  gallery: docs/gallery/README.md#n11 #n27 #n60 #n61\n" in str(found)


class Plain(nn.Module):
    """One linear layer, of which a region keeps what it would free."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (B, D)."""
        outputs: Tensor = self.linear(x).tanh()
        return outputs


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_remedy_that_leaves_nothing_to_gain_is_told_so() -> None:
    found = _found(stack_of(Plain), checkpointed(use_reentrant=True))
    assert found.remedy == "with use_reentrant=False nothing differs, and it is inert"


class Unlisted(nn.Module):
    """Two blocks in no container, of which the second reads what the first has left."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Consuming(), Consuming()

    @property
    def layers(self) -> list[nn.Module]:
        """The blocks."""
        return [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of shape (B, D)."""
        skips = [x, 2 * x]
        outputs: Tensor = self.second(self.first(x, skips), skips)
        return outputs


def test_says_what_was_tried_in_vain() -> None:
    found = _found(Unlisted, checkpointed())
    assert found.remedy == ""
    assert found.in_vain[:2] == ("early_stop=False", "a copy of the arguments inside of the region")
    assert "none of these helps: early_stop=False; a copy of the arguments" in str(found)


def test_an_option_that_changes_no_call_is_not_said_to_be_tried() -> None:
    found = _found(Unlisted, checkpointed())
    assert not {"preserve_rng_state=True", "use_reentrant=False"} & set(found.in_vain)


@pytest.mark.parametrize(("make", "name"), [(_cached, "cache"), (_consumed, "skips")], ids=["cache", "list"])
def test_an_argument_that_forward_changes_is_named(make: Callable[[], nn.Module], name: str) -> None:
    found = _found(make, checkpointed())
    assert f"argument {name!r} of layers.0" in found.changed
    assert found.cause == (
        "looks like gallery 45: forward changes an argument, and the recomputation finds it changed"
    )


def test_a_model_in_eval_mode_is_said_in_words() -> None:
    def make() -> nn.Module:
        return Stack().eval()

    def variant(model: Stack) -> None:
        if model.training:
            checkpointed()(model)

    found = _found(make, variant)
    assert found.verdict == "inert"
    assert found.cause == (
        "looks like gallery 33 or 63: the model is in eval mode, in which the variant does nothing"
    )
    assert found.remedy == "with make().train() it is neutral"


def test_hooks_that_mix_up_tensors_are_told_from_hooks_that_change_strides() -> None:
    def hooked(unpack: Callable[[Tensor], Tensor]) -> Callable[[Stack], None]:
        def variant(model: Stack) -> None:
            inner = model.forward

            def forward(x: Tensor) -> Tensor:
                with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), unpack):
                    return inner(x)

            model.forward = forward  # type: ignore[method-assign]

        return variant

    found = _found(Stack, hooked(lambda tensor: tensor * 2))
    assert found.cause == "looks like gallery 46 or 47: what is saved for backward is not what comes back"


class Switched(Stack):
    """Checkpoints its blocks itself where it is told to."""

    is_on = False

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of shape (B, 3)."""
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_on else layer(x)
        outputs: Tensor = self.head(x)
        return outputs


def test_a_model_that_is_checkpointed_twice_is_told_so() -> None:
    def twice(model: Switched) -> None:
        model.is_on = True
        checkpointed()(model)

    found = assert_neutral(Switched, batch(), twice, steps=1)
    assert found.notes[0] == (
        "'layers.0', 'layers.1': checkpointed twice, one region directly in another; leave one of the two out"
    )
    assert f"note: {found.notes[0]}" in str(found)


def test_a_plain_model_that_checkpoints_itself_is_told_so() -> None:
    def make() -> nn.Module:
        model = Switched()
        model.is_on = True
        return model

    with pytest.raises(NotNeutral) as caught:
        assert_neutral(make, batch(), Full(layers_fqn="layers"), steps=1)
    found = caught.value.found
    assert (found.verdict, found.cause) == ("inert", "the plain model checkpoints itself already")
    assert found.notes[0].startswith("the plain model checkpoints itself already: it computes ")
    assert "checkpointed twice" in found.notes[1]


def test_what_no_region_makes_is_not_blamed_on_a_reentrant_one() -> None:
    def detaching(model: Stack) -> None:
        inner = model.layers[1].forward
        model.layers[1].forward = lambda x: inner(x.detach())

    found = _found(Stack, detaching)
    assert found.lost[:1] == ("layers.0.up.weight",)
    assert found.cause.startswith("looks like gallery 20 or 51 or 52: a region loses gradients")
    assert "layers_fqn='layers'" in found.remedy


class Decaying(Block):
    """Makes a weight smaller in each forward, past autograd's counters."""

    def between(self, h: Tensor) -> Tensor:
        """Return what `down` reads."""
        self.down.weight.data.mul_(0.99)
        return h.tanh()


def test_no_save_list_is_blamed_where_there_is_none() -> None:
    found = _found(stack_of(Decaying), Full(layers_fqn="layers"))
    assert found.recomputation is not None
    assert found.recomputation.operator == "aten.mul_.Tensor"
    assert "save list" not in found.cause


def test_no_argument_is_blamed_where_nothing_mends_other_outputs() -> None:
    def louder(model: nn.Module) -> None:
        model.register_forward_hook(lambda _module, _inputs, outputs: outputs * 2)

    found = _found(Unlisted, louder)
    assert ((found.first or {})["part"], found.cause) == ("outputs", "")


class Rescaling(Block):
    """Changes in place what backward reads: one call at a time trains, two in flight raise."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def between(self, h: Tensor) -> Tensor:
        """Return what `down` reads."""
        self.scale.mul_(1.5)
        return (h * self.scale).tanh()


def test_what_mends_the_steps_and_fails_another_probe_is_said_so() -> None:
    found = _found(stack_of(Rescaling), Full(layers_fqn="layers"))
    assert (found.first or {})["probe"] == "parity"
    assert (
        "rewind=True, with which what differed does not, but with micro-batches in flight, the plain model's "
        "backward raises and the variant's does not, which hides an error: RuntimeError"
    ) in str(found)
