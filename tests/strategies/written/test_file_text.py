"""Written files: what they compute in every setting, what they say, and how they prove themselves."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from strategies.written.file_text import BlockRules, offloading_file, recomputing_file, rules_file
from strategies.written.heavy_operators import rules_for
from strategies.written.loaded_file import apply_of
from tests.covering import matrix
from tests.strategies.toys import Stack, differences, toy, train_step
from tests.strategies.written.written_toys import TOKENS, loaded, operators_of, rules_of

EQUAL = "37 tensors are equal in all bits on cpu"
OTHER_PARAMETERS = (
    "apply_ac: a Block has other parameters in backward than in forward; "
    "run backward with these, and before an optimizer's step"
)
BLOCKS = [f"layers.{number}" for number in range(3)]
_operators = cache(lambda: operators_of(toy()))
FILES: dict[str, Callable[[], str]] = {
    "full": lambda: recomputing_file(BLOCKS, title="Full."),
    "the first two": lambda: recomputing_file(BLOCKS[:2], title="The first two."),
    "offload": lambda: offloading_file(BLOCKS, title="Offload."),
    "rules that keep all": lambda: rules_file(rules_for(_operators(), math.inf), title="All."),
    "rules that keep some": lambda: rules_file(rules_for(_operators(), 9000), title="Some."),
    "rules that keep nothing": lambda: rules_file(rules_for(_operators(), 0), title="Nothing."),
}
each_file = pytest.mark.parametrize("text", FILES.values(), ids=FILES)


def applied(tmp_path: Path, text: str, model: nn.Module) -> nn.Module:
    path = tmp_path / "apply_ac.py"
    path.write_text(text, encoding="utf-8")
    changed: nn.Module = apply_of(str(path), "path")(model)
    return changed


def _evaluates_first(model: nn.Module) -> Any:
    model.eval()
    model(TOKENS).sum().backward()
    return train_step(model.train())


def _in_bfloat16(model: nn.Module) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return train_step(model)


def _evaluates_within_autocast(model: nn.Module) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return _evaluates_first(model)


def _with_products(model: nn.Module) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        return train_step(model)


def _twice(model: nn.Module) -> Any:
    train_step(model)
    return train_step(model)


def _as_pickled(model: nn.Module) -> Any:
    return train_step(pickle.loads(pickle.dumps(model)))


SETTINGS: dict[str, Callable[[nn.Module], Any]] = {
    "twice": _twice,
    "after evaluation with gradients": _evaluates_first,
    "bf16 autocast": _in_bfloat16,
    "evaluation and training in one autocast": _evaluates_within_autocast,
    "attention as products": _with_products,
    "a deep copy": lambda model: train_step(copy.deepcopy(model)),
    "through pickle": _as_pickled,
}


@pytest.mark.parametrize(
    ("file", "setting", "name"),
    matrix([*product(FILES, SETTINGS, ["biased", "no_dropout", "keyword_inputs"])]),
)
def test_a_step_is_that_of_the_plain_model_bit_for_bit(
    tmp_path: Path, file: str, setting: str, name: str
) -> None:
    train = SETTINGS[setting]
    assert differences(train(toy(name)), train(applied(tmp_path, FILES[file](), toy(name)))) == []


@each_file
def test_two_backwards_of_one_forward(tmp_path: Path, text: Callable[[], str]) -> None:
    gradients: list[list[Tensor | None]] = []
    for model in (toy(), applied(tmp_path, text(), toy())):
        torch.manual_seed(0)
        loss = model(TOKENS).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([each.grad for each in model.parameters()])
    assert all(map(torch.equal, *gradients))


def gradients_of_others(model: nn.Module) -> Sequence[Tensor]:
    """Return the gradients of doubled parameters that `functional_call` gives the model."""
    others = {name: (2 * each).detach().requires_grad_() for name, each in model.named_parameters()}
    torch.manual_seed(0)
    loss = torch.func.functional_call(model, others, (TOKENS,)).square().sum()
    return torch.autograd.grad(loss, [*others.values()])


@each_file
def test_a_backward_after_a_functional_call_is_right_or_refused(
    tmp_path: Path, text: Callable[[], str]
) -> None:
    model = applied(tmp_path, text(), toy())
    if text is FILES["offload"]:
        assert all(map(torch.equal, gradients_of_others(toy()), gradients_of_others(model)))
        return
    with pytest.raises(RuntimeError) as refused:
        gradients_of_others(model)
    assert str(refused.value) == OTHER_PARAMETERS


def test_what_is_offloaded_and_written_to_is_refused(tmp_path: Path) -> None:
    model = applied(tmp_path, FILES["offload"](), toy())
    loss = model(TOKENS).square().sum()
    with torch.no_grad():
        next(each for each in model.get_submodule("layers.1").parameters() if each.dim() > 1).mul_(2.0)
    with pytest.raises(
        RuntimeError, match=r"apply_ac: a tensor of \[.*\] that backward needs was written to"
    ):
        loss.backward()


def test_a_backward_after_an_optimizer_step_is_refused(tmp_path: Path) -> None:
    model = applied(tmp_path, FILES["full"](), toy())
    optimizer = torch.optim.SGD([bias for name, bias in model.named_parameters() if name.endswith("bias")])
    early, late = (model(TOKENS).square().sum() for _ in range(2))
    early.backward()
    optimizer.step()
    with pytest.raises(RuntimeError) as refused:
        late.backward()
    assert str(refused.value) == OTHER_PARAMETERS


class Reads(nn.Module):
    """A linear with what it reads besides, of which one tensor is read by nobody."""

    table: Tensor
    unread: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.attribute, self.listed = torch.zeros(4), [torch.zeros(4)]
        self.cyclic: list[Any] = [{"deep": [torch.zeros(4)], "numbers": range(9)}]
        self.cyclic.append(self.cyclic)
        for name in ("table", "unread", "count"):
            self.register_buffer(name, torch.zeros(4))

    def forward(self, x: Tensor, given: tuple[Tensor, ...]) -> Tensor:
        """Return gelu(linear(x) + what it reads), and count."""
        self.count.add_(1)
        read = self.table + self.attribute + self.listed[0] + self.cyclic[0]["deep"][0] + given[0]
        return nn.functional.gelu(self.linear(x) + read)


class CallsReads(nn.Module):
    """One of them, and what it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.given = nn.ModuleList([Reads()]), (torch.zeros(4),)

    def forward(self, x: Tensor) -> Tensor:
        """Return what it returns."""
        called: Tensor = self.layers[0](x, self.given)
        return called


READ: dict[str, tuple[bool, Callable[[Any, Any], Tensor]]] = {
    "a buffer": (True, lambda block, _: block.table),
    "an attribute": (True, lambda block, _: block.attribute),
    "a list": (True, lambda block, _: block.listed[0]),
    "a list in a list that holds itself": (True, lambda block, _: block.cyclic[0]["deep"][0]),
    "a tuple of the arguments": (True, lambda _, model: model.given[0]),
    "a buffer that is not read": (False, lambda block, _: block.unread),
    "what forward writes to": (False, lambda block, _: block.count),
}
AGAIN = {
    "full": lambda: recomputing_file(["layers.0"], title="T."),
    "rules": lambda: rules_file({"layers.0": BlockRules(keep=("linear:linear",))}, title="T."),
}


@pytest.mark.parametrize("text", AGAIN.values(), ids=AGAIN)
@pytest.mark.parametrize(("is_read", "tensor"), READ.values(), ids=READ)
def test_what_is_written_to_before_backward_is_refused_where_it_is_read(
    *, is_read: bool, tensor: Callable[[Any, Any], Tensor], text: Callable[[], str]
) -> None:
    gradients: list[list[Tensor | None]] = []
    for change in (lambda each: each, loaded(text())["apply"]):
        model = change(CallsReads())
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        loss = model(x).square().sum()
        tensor(model.get_submodule("layers.0"), model).add_(1.0)
        if is_read and gradients:
            with pytest.raises(RuntimeError) as refused:
                loss.backward()
            assert str(refused.value) == (
                "apply_ac: a Reads reads in backward what was written to since forward; "
                "write to it after backward, or to a copy"
            )
            return
        loss.backward()
        gradients.append([x.grad, *(each.grad for each in model.parameters())])
    assert all(map(torch.equal, *gradients))


def test_a_forward_of_another_thread_in_between_changes_no_names() -> None:
    """Hooks of a forward stand on the modules, where that of another thread meets them, too."""
    gradients, outputs = [], list[Tensor]()

    def run_another(model: nn.Module, *_: object) -> None:
        if not outputs:
            outputs.append(torch.zeros(()))
            thread = Thread(target=lambda: outputs.append(model(TOKENS)))
            thread.start()
            thread.join()

    for change in (lambda each: each, loaded(rules_file(rules_for(_operators(), 9000), title="T."))["apply"]):
        model = change(toy())
        model.eval()
        model.get_submodule("layers.1.up").register_forward_pre_hook(partial(run_another, model))
        (model(TOKENS).square().sum() + outputs[1].sum()).backward()
        gradients.append([each.grad for each in model.parameters()])
        outputs.clear()
    assert all(map(torch.equal, *gradients))


class AddsParameter(nn.Linear):
    """A linear that makes its scale at the first call."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled product."""
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(()))
        return super().forward(x) * self.scale


def test_a_block_may_make_parameters_in_forward() -> None:
    plain = nn.Sequential(AddsParameter(4, 4))
    model = loaded(recomputing_file(["0"], title="T."))["apply"](copy.deepcopy(plain))
    for each in (plain, model):
        each(torch.ones(2, 4)).square().sum().backward()
    assert all(map(torch.equal, *([p.grad for p in each.parameters()] for each in (plain, model))))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_a_copy_is_checkpointed_by_itself(tmp_path: Path, duplicate: Any) -> None:
    model = applied(tmp_path, FILES["rules that keep some"](), toy())
    twin = duplicate(model)
    train_step(twin)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [vars(block)["forward"].args[0] is block for block in twin.layers] == [True, True, True]


def test_a_shared_block_is_one(tmp_path: Path) -> None:
    model = applied(tmp_path, FILES["full"](), toy("shared_block"))
    assert differences(train_step(toy("shared_block")), train_step(model)) == []


def test_a_second_application_is_refused() -> None:
    apply = loaded(FILES["full"]())["apply"]
    model = apply(toy())
    with pytest.raises(
        ValueError,
        match=r"^apply_ac: 'layers\.0' has a forward of its own already; apply one file, and once$",
    ):
        apply(model)


def test_a_file_for_another_model_leaves_this_one_as_it_is() -> None:
    rules = {**rules_of(toy()), "decoder.0": BlockRules()}
    model = toy()
    with pytest.raises(ValueError, match=r"^apply_ac was written for another") as error:
        loaded(rules_file(rules, title="Other."))["apply"](model)
    assert str(error.value) == (
        "apply_ac was written for another model than this Toy: "
        "1 of 4 blocks are missing, 'decoder.0' is the first"
    )
    assert not [block for block in model.layers if "forward" in vars(block)]


def test_what_rules_do_not_name_is_said_once() -> None:
    model = loaded(FILES["rules that keep all"]())["apply"](toy())
    model.layers[1].up = nn.Sequential(model.layers[1].up)
    with torch.no_grad():
        model(TOKENS)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train_step(model)
        train_step(model)
    assert [str(each.message) for each in said] == [
        "apply_ac: 1 rules named nothing, so bytes are not as planned: layers.1 up:linear",
        "apply_ac: 1 operators have no rule, so bytes are not as planned: layers.1 up.0:linear",
    ]


class WritesInPlace(nn.Module):
    def __init__(self, write: Callable[[Tensor], Tensor], *, bias: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=bias), nn.Linear(8, 8)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.write(self.first(x))).sin()  # type: ignore[no-any-return]


def doubled_in_parts(x: Tensor) -> Tensor:
    x.unsafe_chunk(2, -1)[0].mul_(2)
    return x


WRITES: dict[str, Callable[[], nn.Module]] = {
    "with its counter": lambda: WritesInPlace(torch.relu_),
    "through a view with a counter of its own": lambda: WritesInPlace(lambda x: x.mul_(3), bias=False),
    "through an unsafe part": lambda: WritesInPlace(doubled_in_parts),
}


@pytest.mark.parametrize("block", WRITES.values(), ids=WRITES)
def test_a_kept_result_that_is_written_in_place_raises(block: Callable[[], nn.Module]) -> None:
    rules = {"layers.0": BlockRules(keep=("first:linear",), again=("second:linear",))}
    model = loaded(rules_file(rules, title="Wrong."))["apply"](Stack(block()))
    loss = model(torch.randn(2, 3, 8)).sum()
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    assert str(error.value) == (
        "apply_ac: layers.0 first:linear was written to in place afterwards; remove this rule"
    )
    keep = rules_of(Stack(block()), sample=(torch.randn(2, 3, 8),))
    assert keep == {"layers.0": BlockRules(keep=("second:linear",), again=("first:linear",))}


def test_another_kernel_in_backward_raises() -> None:
    model = loaded(FILES["rules that keep all"]())["apply"](toy("no_dropout"))
    with sdpa_kernel(SDPBackend.MATH):
        loss = model(TOKENS).sum()
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    assert str(error.value) == (
        "apply_ac: layers.2 :attention was aten.bmm.default in forward, "
        "and is aten._scaled_dot_product_flash_attention_for_cpu.default in backward"
    )


def test_blocks_with_rules_stay_eager_in_a_compiled_model(tmp_path: Path) -> None:
    model = applied(tmp_path, FILES["rules that keep all"](), toy())
    compiled = torch.compile(model, backend="eager")
    assert differences(train_step(toy()), train_step(model, compiled)) == []


def test_names_of_blocks_are_listed_briefly() -> None:
    names = [*(f"a.{n}" for n in range(12)), "b.x", *(f"c.{n}" for n in range(3, 7)), "d.0", "d.1", "e.01"]
    text = recomputing_file(names, title="Many.")
    assert loaded(text)["BLOCKS"] == names
    numbers = '*(f"a.{n}" for n in range(12)), "b.x", *(f"c.{n}" for n in range(3, 7)), "d.0", "d.1", "e.01"'
    assert f"BLOCKS = [{numbers}]\n" in text


def test_equal_blocks_share_a_row() -> None:
    text = rules_file(rules_of(toy(), 12000), title="Some.")
    assert [names for names, *_ in loaded(text)["RULES"]] == [["layers.0", "layers.1"], ["layers.2"]]


@pytest.mark.parametrize(
    ("text", "factory", "options", "status", "said"),
    [
        pytest.param(
            FILES["rules that keep all"],
            "tests.strategies.toys:toy",
            [],
            None,
            f"apply_ac holds: {EQUAL}, 183,236 -> 108,740 bytes wait for backward",
            id="rules",
        ),
        pytest.param(
            FILES["full"],
            "tests.strategies.toys:toy",
            ["name=no_dropout", "--autocast"],
            None,
            f"apply_ac holds: {EQUAL}, 72,036 -> 9,060 bytes wait for backward",
            id="full, with an argument of the factory, under autocast",
        ),
        pytest.param(
            FILES["offload"],
            "tests.strategies.toys:toy",
            [],
            1,
            "apply_ac does not hold: 183,236 bytes wait for backward, and 183,236 without it",
            id="what saves nothing",
        ),
        pytest.param(
            FILES["full"],
            "tests.strategies.toys:toy",
            ["name=module_dict"],
            1,
            "apply_ac does not hold: ValueError: apply_ac was written for another model than this Toy: "
            "3 of 3 blocks are missing, 'layers.0' is the first",
            id="another model",
        ),
        pytest.param(
            FILES["full"],
            "tests.strategies.toys:toy",
            ["width=3"],
            1,
            "apply_ac does not hold: TypeError: toy() got an unexpected keyword argument 'width'",
            id="an argument that the factory does not take",
        ),
        pytest.param(
            lambda: FILES["full"]().replace("result = body(block", "result = 1.01 * body(block"),
            "tests.strategies.toys:toy",
            [],
            1,
            "apply_ac does not hold: loss differs, as 33 of 37 do",
            id="what differs",
        ),
    ],
)
def test_the_proof(
    capsys: pytest.CaptureFixture[str],
    text: Callable[[], str],
    factory: str,
    options: list[str],
    status: int | None,
    said: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        loaded(text())["main"]("--check", factory, *options)
    assert (capsys.readouterr().out, ended.value.code) == (f"{said}\n", status)


def test_a_torch_for_an_accelerator_that_is_not_there_proves_on_the_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def accelerator(*, check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", accelerator)
    with pytest.raises(SystemExit) as ended:
        loaded(FILES["full"]())["main"]("--check", "tests.strategies.toys:toy")
    assert ended.value.code is None
    assert "equal in all bits on cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [(), ("--chek", "m:f"), ("--check", "m:f", "--steps"), ("--check", "m:f", "n")]
)
def test_unknown_arguments_are_refused(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        loaded(recomputing_file(["layers.0"], title="A title."))["main"](*words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python apply_ac.py --check module:function ")
