"""`assert_neutral` passes what trains as the plain model does, and names what does not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from harness.check import NotNeutral, assert_neutral
from harness.check.given_batches import given_batches
from harness.check.workshop import Workshop
from harness.errors import ConfigError
from strategies import StrategyError
from strategies.ac.budget import Budget
from strategies.ac.full import Full
from strategies.ac.nested import Nested
from strategies.ac.none import NoCheckpoints
from strategies.ac.selective_op import SelectiveOp
from tests.harness.check.small_models import (
    WIDTH,
    Block,
    Counting,
    Growing,
    Stack,
    batch,
    checkpointed,
    leaking,
    saving,
    stack_of,
    tied,
)


class Logging(Block):
    """Appends to a list at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def between(self, h: Tensor) -> Tensor:
        self.seen.append(len(h))
        return h.tanh()


class Routing(Block):
    """Scales by a number of Python's generator, which the graph does not keep."""

    def between(self, h: Tensor) -> Tensor:
        return h.tanh() if random.random() < 0.5 else h.sin()


class InPlace(Block):
    """Changes in place what autograd keeps."""

    def between(self, h: Tensor) -> Tensor:
        kept = h.exp()
        kept.mul_(2)
        return kept.sin()


_CLOCK = itertools.count(1)
_GENERATOR = torch.Generator().manual_seed(1)


class Clocked(Block):
    """Is another function at each call in the process."""

    def between(self, h: Tensor) -> Tensor:
        return h * next(_CLOCK)


class Scheduled(Block):
    """Counts calls in its class, and reads the number."""

    calls = 0

    def between(self, h: Tensor) -> Tensor:
        type(self).calls += 1
        return h.sin() * torch.full_like(h, type(self).calls).sin()


class Cached(Block):
    """Makes a table on its first call, for all models of the class."""

    table: Tensor | None = None

    def between(self, h: Tensor) -> Tensor:
        if type(self).table is None:
            type(self).table = torch.ones(WIDTH)
            return h.sin()
        return h.sin() * 2


class Drawing(Block):
    """Draws from a generator of the Python module."""

    def between(self, h: Tensor) -> Tensor:
        return h.sin() * torch.rand(h.shape, generator=_GENERATOR)


class Dividing(Block):
    """Has no finite gradient."""

    def between(self, h: Tensor) -> Tensor:
        return h * torch.zeros(()) / torch.zeros(())


def _torchs(model: nn.Module) -> None:
    apply_activation_checkpointing(model, checkpoint_wrapper, lambda each: isinstance(each, Block))  # type: ignore[arg-type, return-value]


class Wrapper(nn.Module):
    """A wrapper as users write them, with a counter of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return what is inside returns, checkpointed."""
        self.count += 1
        outputs: Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return outputs


def _wrapped(model: Stack) -> nn.Module:
    for place, layer in enumerate(model.layers):
        model.layers[place] = Wrapper(layer)
    return model


def _hooked() -> nn.Module:
    model, calls = Stack(), 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    model.layers[0].up.register_forward_hook(count)  # type: ignore[union-attr, operator]
    return model


def _watched(model: Stack) -> None:
    checkpointed()(model)
    seen: list[int] = []
    model.layers[0].up.register_forward_hook(lambda *_: seen.append(1))  # type: ignore[union-attr, operator]


NEUTRAL: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a strategy": (Stack, Full(layers_fqn="layers")),
    "regions that nest": (Stack, Nested(layers_fqn="layers", levels=(2, 1))),
    "a save list": (Stack, SelectiveOp(layers_fqn="layers", save_ops=("matmul",))),
    "nothing promised": (Stack, NoCheckpoints()),
    "a function that changes the model in place": (Stack, checkpointed()),
    "torch's wrapper": (Stack, _torchs),
    "a wrapper with state of its own": (Stack, _wrapped),
    "a hook with state of its own": (Stack, _watched),
    "the whole model as one region": (Stack, Wrapper),
    "a list that rewinding puts back": (stack_of(Logging), Full(layers_fqn="layers", rewind=True)),
    "integers in, a function out": (
        lambda: nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
        lambda model: lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False),
    ),
}


@pytest.mark.parametrize("case", NEUTRAL)
def test_passes_a_neutral_variant(case: str) -> None:
    make, variant = NEUTRAL[case]
    inputs = (torch.arange(8).reshape(2, 4),) if case.startswith("integers") else batch()
    found = assert_neutral(make, inputs, variant, steps=2)
    assert (found.verdict, found.first) == ("neutral", None)


BUDGET = Budget(layers_fqn="layers", fraction=0.95)
PLANNING: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a batch and a smaller one": (stack_of(Growing), batch(256)),
    "three, of which the second is the largest": (Stack, [batch(64), batch(256), batch(128)]),
}


@pytest.mark.parametrize(("make", "given"), PLANNING.values(), ids=PLANNING)
def test_a_plan_is_made_for_the_largest_micro_batch(make: Callable[[], nn.Module], given: Any) -> None:
    found = assert_neutral(make, given, BUDGET, steps=1)
    assert (found.verdict, found.first) == ("neutral", None)


@pytest.mark.parametrize(("make", "given"), PLANNING.values(), ids=PLANNING)
def test_a_plan_of_the_first_call_is_for_one_in_flight(make: Callable[[], nn.Module], given: Any) -> None:
    with pytest.raises(NotNeutral, match="StrategyError: ac: 2 calls of the model would wait for backward"):
        assert_neutral(make, given, BUDGET.apply, steps=1)


def test_a_budget_that_no_plan_keeps_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"^ac.budget_gib: no plan keeps 10 bytes; the smallest"):
        assert_neutral(Stack, batch(), Budget(layers_fqn="layers", budget_gib=1e-8))


NOT_NEUTRAL: dict[str, tuple[Callable[[], nn.Module], Any, str, str, str]] = {
    "dropout drawn anew": (
        *(Stack, checkpointed(preserve_rng_state=False)),
        *("differs", "gradients", "layers.1.down.weight"),
    ),
    "a branch by Python's numbers": (
        *(stack_of(Routing), checkpointed()),
        *("differs", "gradients", "layers.0.down.weight"),
    ),
    "a list appended twice": (
        *(stack_of(Logging), checkpointed()),
        *("differs", "state", "length of layers.0.seen"),
    ),
    "a buffer counted twice": (
        *(stack_of(Counting), checkpointed()),
        *("differs", "buffers", "layers.0.calls"),
    ),
    "reentrant, and no input requires a gradient": (
        *(Stack, checkpointed(use_reentrant=True)),
        *("differs", "gradients", "layers.1.down.bias"),
    ),
    "an error that checkpointing hides": (
        *(stack_of(InPlace), checkpointed()),
        *("differs", "hides_error", "(backward)"),
    ),
    "a schedule that the class keeps": (
        *(stack_of(Scheduled), checkpointed()),
        *("differs", "gradients", "layers.1.down.weight"),
    ),
    "a table that the class fills": (
        *(stack_of(Cached), checkpointed()),
        *("differs", "gradients", "layers.0.down.weight"),
    ),
    "a number that a hook encloses": (
        *(_hooked, checkpointed()),
        *("differs", "state", "layers.0.up.forward hook 0.calls"),
    ),
    "a generator among globals": (
        *(stack_of(Drawing), checkpointed()),
        *("differs", "gradients", "layers.1.down.weight"),
    ),
    "nothing checkpointed": (Stack, lambda model: model, "inert", "", ""),
    "a model that does not repeat itself": (stack_of(Clocked), checkpointed(), "unverified", "", ""),
    "NaN on both sides": (stack_of(Dividing), checkpointed(), "unverified", "", ""),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("case", NOT_NEUTRAL)
def test_names_what_is_not_neutral(case: str) -> None:
    make, variant, word, part, name = NOT_NEUTRAL[case]
    with pytest.raises(NotNeutral) as caught:
        assert_neutral(make, batch(), variant, steps=2)
    first = caught.value.first
    assert (caught.value.verdict, first.get("part", ""), first.get("name", "")) == (word, part, name)


def test_all_gradients_zero_prove_nothing() -> None:
    with pytest.raises(NotNeutral, match="unverified: all gradients are zero") as caught:
        assert_neutral(Stack, batch(), checkpointed(), loss_fn=lambda outputs: outputs.sum() * 0)
    assert caught.value.verdict == "unverified"


def test_names_are_those_of_the_plain_model() -> None:
    def wrong(model: Stack) -> nn.Module:
        for place, layer in enumerate(model.layers):
            wrapper = checkpoint_wrapper(layer, preserve_rng_state=False)  # type: ignore[no-untyped-call]
            model.layers[place] = wrapper
        return model

    with pytest.raises(NotNeutral) as caught:
        assert_neutral(Stack, batch(requires_grad=True), wrong, steps=1)
    assert caught.value.first["name"] == "layers.1.down.weight"
    parity = caught.value.found.parity
    assert parity is not None
    assert parity.input_gradients.first_difference is not None
    assert parity.input_gradients.first_difference.name == "inputs[0]"


def test_micro_batches_are_one_step() -> None:
    found = assert_neutral(Stack, [batch(4), {"x": batch(2)[0]}], Full(layers_fqn="layers"), steps=2)
    assert found.verdict == "neutral"


def test_says_what_the_variant_saves_and_recomputes() -> None:
    found = assert_neutral(Stack, batch(), checkpointed(preserve_rng_state=True), steps=1)
    assert found.recomputed_modules == ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")
    assert found.recomputed_ops["aten.addmm.default"] == 2  # early stop
    assert found.plain_saved_bytes == 1024


ONE = Stack()
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one model for all calls": ({"make": lambda: ONE}, "make: returns the same model"),
    "no module": ({"make": lambda: 3}, "make: must return an nn.Module, got int"),
    "nothing to train": ({"make": nn.Identity}, "make: returns a model without parameters"),
    "a batch that does not fit": ({"batch": (torch.ones(2, 9),)}, "batch: the plain model's forward raises"),
    "a batch of another kind": ({"batch": 3}, "batch: must be a tuple of positional inputs, a dict"),
    "no micro-batch": ({"batch": []}, "batch: must be a tuple.*got an empty list"),
    "no step": ({"steps": 0}, "steps: must be at least 1, got 0"),
    "a loss that is no scalar": (
        {"loss_fn": lambda outputs: outputs},
        r"loss_fn: must return a real scalar tensor, got a \(4, 3\) torch.float32",
    ),
    "a loss without a gradient": (
        {"loss_fn": lambda outputs: outputs.detach().sum()},
        "loss_fn: the loss depends on no parameter",
    ),
    "outputs without a number": (
        {"make": lambda: _Wordy(WIDTH, 3)},
        "loss_fn: is needed: outputs are str",
    ),
    "a model instead of a factory": (
        {"make": ONE},
        r"make: must be a function that returns a fresh model, got an instance of Stack; pass the function",
    ),
    "a factory that is none": ({"make": 3}, "make: must be a function that returns a fresh model, got 3"),
    "a variant by name": (
        {"variant": "full"},
        r"a function that takes the model, got 'full'; pass Full\(layers_fqn=…\) of strategies.ac.full",
    ),
    "a name of no variant": ({"variant": "fll"}, "variant: must be a strategy, .* got 'fll'$"),
    "the class of a strategy": ({"variant": Full}, r"got the class Full; pass Full\(layers_fqn=…\)"),
    "a wrapped model as variant": (
        {"variant": ONE},
        "variant: must be a strategy, .* got an instance of Stack",
    ),
    "an array": ({"batch": np.ones((4, 8))}, "batch: must be a tuple.* got ndarray"),
    "a loader": ({"batch": iter([batch()])}, "batch: must be a tuple.* got list_iterator"),
    "a loss that is no function": (
        {"loss_fn": "mse"},
        "loss_fn: must be a function of the outputs, got 'mse'",
    ),
    "half a step": ({"steps": 1.5}, "steps: must be a whole number, got 1.5"),
    "autocast of a whole dtype": (
        {"autocast": torch.float32},
        "autocast: must be one of torch.bfloat16, torch.float16, got torch.float32",
    ),
    "autocast by a flag": ({"autocast": True}, "autocast: must be one of torch.bfloat16.* got True"),
    "a dtype by name": ({"dtype": "bf16"}, "dtype: must be one of torch.bfloat16.* got 'bf16'"),
    "a variant that is no model": ({"variant": lambda _model: 3}, "variant: must return the model to use"),
}


class _Wordy(nn.Linear):
    def forward(self, input: Tensor) -> Any:  # noqa: A002 (as nn.Linear calls it)
        return str(input)


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    changed, message = REFUSED[case]
    arguments: dict[str, Any] = {"make": Stack, "batch": batch(), "variant": checkpointed()}
    with pytest.raises(ValueError, match=message):
        assert_neutral(**arguments | changed)


def test_refuses_weights_that_no_seed_decides() -> None:
    values = iter(range(10))

    def make() -> nn.Module:
        model = Stack()
        nn.init.constant_(model.head.weight, next(values))
        return model

    with pytest.raises(ValueError, match=r"make: returns another model each time: 'head.weight' differs"):
        assert_neutral(make, batch(), checkpointed())


def test_leaves_classes_and_globals_as_they_were() -> None:
    before = _GENERATOR.get_state()
    for block in (Scheduled, Drawing):
        with pytest.raises(NotNeutral):
            assert_neutral(stack_of(block), batch(), checkpointed(), steps=1)
    assert torch.equal(_GENERATOR.get_state(), before)
    assert Scheduled.calls == 0


def test_leaves_the_generators_as_they_were() -> None:
    before = torch.get_rng_state(), random.getstate()
    assert_neutral(Stack, batch(), checkpointed(), steps=1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Evaluated(Block):
    """Keeps in forward what backward will read, in a buffer that an evaluation writes, too."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(()))

    def between(self, h: Tensor) -> Tensor:
        if not self.training:
            self.kept.fill_(3.0)
        return (h * self.kept.clone()).tanh()


PROBED: dict[str, tuple[Callable[[], nn.Module], Any, str, str]] = {
    "state shared by micro-batches": (stack_of(Growing), checkpointed(), "between", "gradients"),
    "state that an evaluation writes": (stack_of(Evaluated), checkpointed(), "between", "gradients"),
    "a region that keeps its inputs": (Stack, leaking, "leak", "leak"),
}


@pytest.mark.parametrize("case", PROBED)
def test_probes_find_what_steps_in_a_row_do_not(case: str) -> None:
    make, variant, probe, part = PROBED[case]
    with pytest.raises(NotNeutral) as caught:
        assert_neutral(make, batch(), variant, steps=2)
    first = caught.value.first
    assert (caught.value.verdict, first["probe"], first["part"]) == ("differs", probe, part)


class Tanh(Block):
    """Draws no random numbers, which would make micro-batches different."""

    def between(self, h: Tensor) -> Tensor:
        return h.tanh()


def _of_the_latest_input(model: nn.Module) -> None:
    """Recompute each block from the input that it was called with last."""
    for block in model.modules():
        if isinstance(block, Block):
            latest: dict[str, Tensor] = {}

            def run(again: Tensor, /, *, forward: Any, latest: dict[str, Tensor]) -> Tensor:
                return forward(again + (latest["h"] - again).detach())  # type: ignore[no-any-return]

            def forward(h: Tensor, *, own: Any = block.forward, latest: dict[str, Tensor] = latest) -> Tensor:
                latest["h"] = h.detach()
                return checkpoint(partial(run, forward=own, latest=latest), h, use_reentrant=False)  # type: ignore[no-any-return]

            block.forward = forward  # type: ignore[method-assign,assignment]


def test_one_sample_in_flight_is_followed_by_another() -> None:
    with pytest.raises(NotNeutral) as caught:
        assert_neutral(stack_of(Tanh), batch(1), _of_the_latest_input, steps=2)
    first = caught.value.first
    assert (caught.value.verdict, first["probe"], first["part"]) == ("differs", "between", "gradients")


def test_a_model_that_ignores_its_inputs_proves_nothing() -> None:
    class Deaf(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.ones_like(x))

    with pytest.raises(NotNeutral, match="unverified: neither outputs nor loss depend on the inputs"):
        assert_neutral(Deaf, batch(), checkpointed(), steps=1)


class Tempered(Block):
    """Reads a number that forward of a later block may change."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 0.5

    def between(self, h: Tensor) -> Tensor:
        return (h / self.temperature).tanh()


class Annealed(Stack):
    """Changes the number when all blocks have read it."""

    def __init__(self) -> None:
        super().__init__(Tempered)

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        for layer in self.layers:
            layer.temperature *= 0.5  # type: ignore[operator, assignment]
        return outputs


LATE: dict[str, tuple[Any, tuple[str, ...]]] = {
    "torch's checkpoint reads what has changed since": (
        checkpointed(),
        ("layers.0.temperature and 1 alike",),
    ),
    "state that is put back is not read late": (Full(layers_fqn="layers", rewind=True), ()),
}


class Normed(Block):
    """Has a weight that torch computes along a dimension, which its kernel trusts."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = weight_norm(nn.Linear(WIDTH, WIDTH))

    def between(self, h: Tensor) -> Tensor:
        outputs: Tensor = self.normed(h).tanh()
        return outputs


def test_no_dimension_of_a_module_of_torchs_own_is_changed() -> None:
    found = assert_neutral(stack_of(Normed), batch(), Full(layers_fqn="layers"), steps=1)
    assert (found.verdict, found.late_reads, found.notes) == ("neutral", (), ())


def test_answers_that_torch_takes_as_others_are_noted() -> None:
    contexts = partial(create_selective_checkpoint_contexts, lambda *_args, **_kwargs: "save")
    found = assert_neutral(stack_of(Block), batch(), checkpointed(context_fn=contexts), steps=1)
    assert found.verdict == "neutral"
    wrong, nothing = found.notes
    assert wrong.startswith("a policy answers 'save' for ")
    assert nothing.endswith("and keeps none of their results")


@pytest.mark.parametrize("case", LATE)
def test_a_neutral_variant_tells_what_its_recomputation_reads(case: str) -> None:
    variant, names = LATE[case]
    found = assert_neutral(stack_of(Tempered), batch(), variant, steps=1)
    assert (found.verdict, found.late_reads, found.notes) == ("neutral", names, ())


def test_names_which_of_what_has_changed_the_recomputation_reads() -> None:
    with pytest.raises(NotNeutral) as caught:
        assert_neutral(Annealed, batch(), checkpointed(), steps=1)
    names = ("layers.0.temperature", "layers.1.temperature")
    assert caught.value.found.read_late == names
    assert f"of this the recomputation reads: {', '.join(names)}" in str(caught.value)


def test_names_the_recomputed_value_the_cause_and_the_remedy() -> None:
    with pytest.raises(NotNeutral) as caught:
        assert_neutral(Stack, batch(), checkpointed(preserve_rng_state=False), steps=1)
    message = str(caught.value)
    assert "recomputation: aten.bernoulli_.float" in message
    assert "looks like gallery 11 or 27 or 60 or 61: random numbers such as dropout are drawn anew" in message
    assert "remedy: with preserve_rng_state=True it is neutral" in message


def test_names_the_parameters_without_gradient() -> None:
    region = checkpointed(use_reentrant=True)
    with pytest.warns(UserWarning, match="None of the inputs"), pytest.raises(NotNeutral) as caught:
        assert_neutral(Stack, batch(), region, steps=1)
    assert caught.value.found.lost[:2] == ("layers.0.up.weight", "layers.0.up.bias")
    assert "gradient without the variant only: layers.0.up.weight" in str(caught.value)


class TrainsOnly(Stack):
    """A model that cannot be evaluated."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.training
        return super().forward(x)


def test_a_model_that_cannot_be_evaluated_is_checked_without() -> None:
    assert assert_neutral(TrainsOnly, batch(), checkpointed(), steps=1).verdict == "neutral"


def test_a_variant_that_cannot_be_evaluated_differs() -> None:
    def variant(model: Stack) -> None:
        def refuse(_module: nn.Module, _inputs: object) -> None:
            if not model.training:
                raise ValueError("no evaluation")

        model.register_forward_pre_hook(refuse)
        checkpointed()(model)

    with pytest.raises(NotNeutral, match="no evaluation") as caught:
        assert_neutral(Stack, batch(), variant, steps=1)
    assert caught.value.first["probe"] == "between"


def test_a_tolerance_is_no_number() -> None:
    with pytest.raises(ConfigError, match=r"^tolerance: must be a strategies.Tolerance, got 0.1$"):
        assert_neutral(Stack, batch(), checkpointed(), tolerance=0.1)  # type: ignore[arg-type]


def test_a_check_within_inference_mode_is_refused() -> None:
    message = r"^make: the check is called within torch.inference_mode\(\), .* call it outside$"
    with torch.inference_mode(), pytest.raises(ConfigError, match=message):
        assert_neutral(Stack, batch(), checkpointed())


class Halved(Block):
    """Computes in half precision where training code asks for it."""

    def between(self, h: Tensor) -> Tensor:
        """Return what `down` reads, and refuse to be given anything else than asked for."""
        assert h.dtype is torch.bfloat16
        return h.tanh()


def test_autocast_is_around_forward_and_loss_alone() -> None:
    seen = []

    def variant(model: Stack) -> None:
        checkpointed()(model)
        for parameter in model.parameters():
            parameter.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))  # type: ignore[no-untyped-call]

    assert_neutral(stack_of(Halved), batch(), variant, quick=True, autocast=torch.bfloat16)
    assert set(seen) == {False}


def test_dtype_is_that_of_weights_and_inputs() -> None:
    found = assert_neutral(stack_of(Halved), batch(), checkpointed(), quick=True, dtype=torch.bfloat16)
    assert found.verdict == "neutral"


def test_a_check_within_autocast_is_refused() -> None:
    message = (
        r"^autocast: the check is called within torch.autocast\('cpu', torch.bfloat16\).*with autocast=torch"
    )
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ConfigError, match=message):
        assert_neutral(Stack, batch(), checkpointed())


def test_a_save_list_on_a_tied_weight_fails_under_autocast_as_in_training() -> None:
    with pytest.raises(NotNeutral, match="the variant's backward raises") as caught:
        assert_neutral(tied, batch(), saving(torch.ops.aten.addmm.default), autocast=torch.bfloat16)
    assert caught.value.verdict == "differs"


def test_quick_compares_one_step_and_asks_nothing_else() -> None:
    found = assert_neutral(Stack, batch(), checkpointed(), quick=True)
    assert (found.verdict, found.parity and found.parity.steps, found.saved_bytes) == ("neutral", 1, None)
    with pytest.raises(NotNeutral, match=r"gradient of 'layers.1.down.weight' differs first") as caught:
        assert_neutral(Stack, batch(), checkpointed(preserve_rng_state=False), quick=True)
    assert caught.value.verdict == "differs"


@pytest.mark.parametrize(("is_quick", "expected"), [(True, "SGD"), (False, "AdamW")])
def test_one_step_makes_no_optimizer_state(*, is_quick: bool, expected: str) -> None:
    batches = tuple(given_batches(batch()))
    workshop = Workshop(
        make=Stack, variant=checkpointed(), loss_fn=None, batches=batches, seed=0, is_quick=is_quick
    )
    workshop.check()
    assert type(workshop.subject(is_variant=False).optimizer).__name__ == expected


def test_quick_makes_two_models() -> None:
    made = []

    def make() -> nn.Module:
        made.append(Stack())
        return made[-1]

    assert_neutral(make, batch(), checkpointed(), quick=True)
    assert len(made) == 2


class Flagged(Block):
    """Switches a flag of torch on in training."""

    def between(self, h: Tensor) -> Tensor:
        """Return what `down` reads."""
        torch.use_deterministic_algorithms(True)
        return h.tanh()


def test_a_check_leaves_no_flag_behind_and_names_it() -> None:
    found = assert_neutral(stack_of(Flagged), batch(), checkpointed(), steps=1)
    assert not torch.are_deterministic_algorithms_enabled()
    assert found.left_behind == ("torch.use_deterministic_algorithms",)
    assert "left behind, and put back: torch.use_deterministic_algorithms" in str(found)


def test_a_check_that_is_refused_leaves_no_flag_behind() -> None:
    with pytest.raises(ConfigError, match="batch: the plain model's forward raises"):
        assert_neutral(stack_of(Flagged), (torch.ones(2, 9),), checkpointed())
    assert not torch.are_deterministic_algorithms_enabled()


class Patched(Stack):
    """A model whose class a variant patches."""


def test_a_class_that_a_variant_patches_is_its_own_and_is_put_back() -> None:
    forward = Patched.forward

    def variant(model: Patched) -> None:
        def other(self: Patched, x: Tensor) -> Any:
            return torch.utils.checkpoint.checkpoint(forward, self, x, use_reentrant=False)

        type(model).forward = other  # type: ignore[method-assign, assignment]

    found = assert_neutral(Patched, batch(), variant, steps=1)
    assert found.recomputed_ops
    assert Patched.forward is forward
    assert found.left_behind == (f"functions of {__name__}.Patched",)
