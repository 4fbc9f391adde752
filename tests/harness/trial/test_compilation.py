"""What a compiled model computes, and what the meters see of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from harness.measure.memory import allocator
from harness.measure.step import allocator_truth, instrument
from harness.models.base import Batch
from harness.trial.assemble import Assembled, assemble
from harness.trial.batches import batches
from harness.trial.compilation import Backends, compiling
from tests.harness.composing import experiment_of, refusal_of

# what torch's compilers do with their own things
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of", "ignore:`torch.jit")
_CPU = torch.device("cpu")
_MLP = (
    "model=mlp model.n_layers=2 model.width=16 model.hidden_width=32 model.dropout=0.1 data=synthetic "
    "sequence_length=8 batch_size=2"
)


class _Breaking(nn.Module):
    """A block that no compiler takes whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x.sin()


def breaking() -> tuple[nn.Module, tuple[Tensor], Callable[[Tensor], Tensor]]:
    model = nn.Sequential()
    model.add_module("blocks", nn.Sequential(_Breaking(), _Breaking()))
    return model, (torch.randn(2, 4),), torch.sum


@pytest.fixture(autouse=True)
def no_trace_of_a_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _trained(line: str) -> tuple[Assembled, Batch]:
    """Return a model that has taken two steps."""
    experiment = experiment_of(f"{_MLP} {line}" if "model=" not in line else line)
    batch = batches(experiment, _CPU, 0)
    trainee = assemble(experiment, _CPU, None, batch(0))
    for step in range(2):
        trainee.zero_grad()
        torch.manual_seed(step)
        trainee.backward(trainee.forward(batch(step))[1])
        trainee.update()
    return trainee, batch(2)


def _parameters(trainee: Assembled) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainee.model.parameters()]


@pytest.mark.parametrize(
    ("order", "early_stop"),
    [
        pytest.param("ac_first", "true", id="a compiler leaves out what backward does not need"),
        pytest.param("compile_first", "false", id="a region repeats the whole graph of forward"),
    ],
)
def test_ac_under_a_compiler_recomputes_what_it_does_without(order: str, early_stop: str) -> None:
    (eager, batch), (compiled, _) = (
        _trained(f"ac=full ac.early_stop={early_stop} compile={backend} compile_order={order}")
        for backend in ("none", "aot_eager")
    )
    for one, other in zip(_parameters(eager), _parameters(compiled), strict=True):
        assert torch.equal(one, other)
    expected, found = (instrument(trainee, batch) for trainee in (eager, compiled))
    assert found.work.compiled_graphs == 2
    assert found.work.recomputed_flops == expected.work.recomputed_flops > 0
    assert found.work.backward_flops == expected.work.backward_flops
    assert (
        found.work.recomputed_ops["aten.addmm.default"] == expected.work.recomputed_ops["aten.addmm.default"]
    )


def test_buffers_of_generated_kernels_are_those_of_the_allocator() -> None:
    allocator.install()
    # without trial builds for every instruction set of this CPU, and without processes that build
    cheap = {"cpp.vec_isa_ok": True, "compile_threads": 1}
    with torch._inductor.config.patch(cheap):
        trainee, batch = _trained("compile=inductor optimizer=sgd model.n_layers=1 model.dropout=0")
    report = instrument(trainee, batch)
    truth = allocator_truth(trainee, batch, report.live)
    assert any(saved.op == "inductor.empty_strided_cpu" for saved in report.memory.largest_saved)
    assert truth is not None
    assert truth.peak_requested_bytes == report.memory.peak_bytes


def test_a_graph_break_is_counted_and_named() -> None:
    user = "model=python model.layers_fqn=blocks model.factory=tests.harness.trial.test_compilation:breaking"
    trainee, _ = _trained(f"{user} compile=aot_eager")
    assert trainee.compiled is not None
    trainee.compiled.note_breaks()
    assert trainee.compiled.breaks == {"Call to `torch._dynamo.graph_break()`": 2}  # of either block


def test_nothing_of_a_compiler_stays_behind() -> None:
    limit = torch._dynamo.config.recompile_limit
    with compiling(experiment_of("compile=aot_eager")):
        assert torch._dynamo.config.recompile_limit > limit
    assert torch._dynamo.config.recompile_limit == limit


def test_models_of_one_experiment_share_their_backend() -> None:
    backends, one = Backends(), experiment_of("compile=aot_eager")
    assert backends.of(one) is backends.of(experiment_of("compile=aot_eager optimizer=sgd"))
    assert backends.of(one) is not backends.of(experiment_of("compile=aot_eager ac=full"))


def test_inductor_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert refusal_of("compile=inductor") == (
        "compile: inductor builds its kernels with a C++ compiler, and 'no-such-compiler' is not there; "
        "install it, name another one in CXX, or use compile=aot_eager"
    )
