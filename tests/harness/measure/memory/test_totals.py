"""Live storages: exact bytes of small steps, by definition."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from harness.measure.step import StepReport, instrument
from harness.models.base import Batch
from harness.records.measured import SavedTensor
from strategies.estimate.host import host_allocation
from tests.harness.measure.metered import REGIONS, Metered, tokens, transformer, warmed

RNG_STATE_BYTES = 5056
SCALAR_BYTES = 8
SAVED_OF_LOSS = 4 * 2 * 16 * 64 + 4  # log-probabilities of (B, S, V) and the weight of the mean, in fp32
INPUTS_OF_BLOCKS = 2 * 4 * 2 * 16 * 32
NUMBERS_IN_BLOCKS = 2 * SCALAR_BYTES  # `* 0.5`, once a block: autograd saves it, and offers it to no hook


class Line(nn.Module):
    """y = f(x), one operation and nothing else, on x of shape (4, 8)."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


def step_of(function: Callable[[Tensor], Tensor]) -> StepReport:
    model = Line(function)
    batch = Batch(inputs=(torch.ones(4, 8),), targets=None)
    return instrument(warmed(Metered(model, torch.optim.SGD(model.parameters(), lr=0.1)), batch), batch)


@pytest.mark.parametrize(
    ("function", "saved_bytes"),
    [
        pytest.param(lambda x: x + x, 0, id="a sum saves nothing"),
        pytest.param(lambda x: x.exp() + 0.0, 128, id="exp saves its result"),
        pytest.param(lambda x: x.sin(), 128, id="sin saves its operand"),
        pytest.param(lambda x: x.sin() + x.cos(), 128, id="an operand saved twice counts once"),
        pytest.param(lambda x: x.view(8, 4).t().sin(), 128, id="a view saves the storage under it"),
        pytest.param(lambda x: x.exp(), 0, id="a returned tensor is no saved one"),
        pytest.param(
            lambda x: x * 2.0, SCALAR_BYTES, id="a number saved by a product is a tensor of 8 bytes"
        ),
        pytest.param(lambda x: x + 2.0, 0, id="a number in a sum is gone with the operator"),
        pytest.param(lambda x: x.sin().detach() + x, 0, id="what nobody holds is gone"),
    ],
)
def test_saved_bytes(function: Callable[[Tensor], Tensor], saved_bytes: int) -> None:
    assert step_of(function).memory.saved_bytes == saved_bytes


@pytest.mark.parametrize(
    ("region", "saved_bytes"),
    [
        pytest.param(
            "full",
            INPUTS_OF_BLOCKS + SAVED_OF_LOSS + 4096 + 2 * RNG_STATE_BYTES + NUMBERS_IN_BLOCKS,
            id="full keeps block inputs, the head's input, RNG states",
        ),
        pytest.param(
            "without RNG state",
            INPUTS_OF_BLOCKS + SAVED_OF_LOSS + 4096 + NUMBERS_IN_BLOCKS,
            id="no RNG state is kept where none is asked for",
        ),
        pytest.param(
            "reentrant",
            INPUTS_OF_BLOCKS + SAVED_OF_LOSS + 4096 + 2 * RNG_STATE_BYTES,
            id="reentrant records no graph and keeps no number",
        ),
    ],
)
def test_saved_bytes_of_regions(region: str, saved_bytes: int) -> None:
    assert instrument(transformer(region), tokens()).memory.saved_bytes == saved_bytes


@pytest.mark.parametrize("region", REGIONS)
def test_standing_bytes(region: str) -> None:
    trainee = transformer(region)
    memory = instrument(trainee, tokens()).memory
    parameter_bytes = sum(p.nbytes for p in trainee.model.parameters())
    steps = 4 * len(list(trainee.model.parameters()))  # AdamW counts its steps per parameter
    assert (
        memory.parameter_bytes,
        memory.gradient_bytes,
        memory.optimizer_bytes,
        memory.host_peak_bytes,
    ) == (
        parameter_bytes,
        parameter_bytes,
        2 * parameter_bytes + steps,
        0,
    )


def test_saved_storages_are_named_largest_first() -> None:
    memory = instrument(transformer("full"), tokens()).memory
    assert memory.largest_saved[:3] == (
        SavedTensor(
            bytes=8192, op="aten._log_softmax.default", module="(loss)", shape=(32, 64), dtype="float32"
        ),
        SavedTensor(bytes=5056, op="torch.get_rng_state", module="(model)", shape=(5056,), dtype="uint8"),
        SavedTensor(bytes=5056, op="torch.get_rng_state", module="(model)", shape=(5056,), dtype="uint8"),
    )
    assert memory.saved_by_module == {
        "(loss)": 8196,
        "(model)": 10112,
        "embedding": 4096,
        "layers.0": 4104,
        "layers.1": 4104,
    }
    highest = max(memory.timeline, key=lambda moment: moment.bytes)
    assert (highest.bytes, highest.phase, highest.module) == (
        memory.peak_bytes,
        memory.peak_phase,
        memory.peak_module,
    )
    assert list(dict.fromkeys(moment.phase for moment in memory.timeline)) == [
        "forward",
        "backward",
        "optimizer",
    ]


@pytest.mark.parametrize("region", REGIONS)
def test_what_lives_at_the_peak_sums_to_it(region: str) -> None:
    memory = instrument(transformer(region), tokens()).memory
    assert sum(memory.peak_parts.values()) == memory.peak_bytes
    standing = ("parameters", "optimizer", "inputs")
    assert [memory.peak_parts[part] for part in standing] == [
        memory.parameter_bytes,
        memory.optimizer_bytes,
        2 * 16 * 8 * 2,
    ]
    assert memory.peak_parts["gradients"] < memory.gradient_bytes  # not all are there yet
    assert memory.peak_parts["saved"] <= memory.saved_bytes


@pytest.mark.parametrize(
    ("region", "phase", "module"),
    [
        pytest.param("none", "backward", "layers.1.down", id="no region: the first large gradient"),
        pytest.param("full", "backward", "layers.0", id="full: backward of the last block to be recomputed"),
    ],
)
def test_where_the_peak_is(region: str, phase: str, module: str) -> None:
    memory = instrument(transformer(region), tokens()).memory
    assert (memory.peak_phase, memory.peak_module) == (phase, module)


def test_gradients_of_parameters_are_no_activations() -> None:
    memory = step_of(lambda x: x.sin()).memory
    product, result, loss, ones, gradient = 128, 128, 4, 4, 128
    # at backward of sin: its operand, cosine, incoming and outgoing gradient; outputs are dropped before
    assert memory.gradient_bytes == 32
    assert memory.activation_peak_bytes == max(product + result + loss, product + loss + ones + 2 * gradient)


class Offloaded(nn.Module):
    """A line whose saved tensors wait in what is declared host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        def pack(saved: Tensor) -> Tensor:
            with host_allocation():
                return saved.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, Tensor.clone):
            return (x * self.weight).sin()


def test_host_copies_are_counted_apart() -> None:
    model = Offloaded()
    batch = Batch(inputs=(torch.ones(4, 8),), targets=None)
    trainee = warmed(Metered(model, torch.optim.SGD(model.parameters(), lr=0.1)), batch)
    report = instrument(trainee, batch)
    # x for the product, the product for sin
    assert (report.memory.saved_bytes, report.memory.host_peak_bytes) == (0, 256)
    assert report.live.peak_bytes > report.memory.peak_bytes


@pytest.mark.parametrize("region", ["none", "full", "selective"])
def test_fake_tensors_have_the_same_report(region: str) -> None:
    targets = tokens().targets
    assert targets is not None
    real = instrument(transformer(region), tokens())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = transformer(region).model
        fake = Metered(model)
        batch = Batch(inputs=(mode.from_tensor(tokens().inputs[0]),), targets=mode.from_tensor(targets))
        report = instrument(warmed(fake, batch), batch)
    assert asdict(report.memory) == asdict(real.memory)
    assert asdict(report.work) == asdict(real.work)


def test_meta_tensors_have_the_bytes_of_real_ones() -> None:
    def memory(device: str) -> dict[str, int]:
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to(device)
        batch = Batch(inputs=(torch.ones(4, 8, device=device),), targets=None)
        trainee = Metered(model, torch.optim.SGD(model.parameters(), lr=0.1))
        report = instrument(warmed(trainee, batch), batch).memory
        return {
            "saved": report.saved_bytes,
            "peak": report.peak_bytes,
            "activations": report.activation_peak_bytes,
        }

    assert memory("meta") == memory("cpu")


def test_a_resized_storage_counts_with_its_size() -> None:
    class Resizing(nn.Module):
        """Fills a storage before its use and empties it after, as FSDP does with parameters."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.hidden = [torch.ones(1024)]
            self.hidden[0].untyped_storage().resize_(0)

        def forward(self, x: Tensor) -> Tensor:
            storage = self.hidden[0].untyped_storage()
            storage.resize_(4096)
            y = x * self.weight
            storage.resize_(0)
            return y.sin()

    model = Resizing()
    batch = Batch(inputs=(torch.ones(4, 8),), targets=None)
    trainee = warmed(Metered(model, torch.optim.SGD(model.parameters(), lr=0.1)), batch)
    resized, plain = instrument(trainee, batch), step_of(torch.sin)
    before = plain.memory.parameter_bytes + 128  # and the batch
    assert resized.memory.peak_bytes == before + 4096 + 128
    assert resized.memory.saved_bytes == plain.memory.saved_bytes
    assert resized.memory.peak_parts["unsharded_parameters"] == 4096


def test_the_meters_leave_nothing_behind() -> None:
    def visible() -> list[object]:
        return [
            torch.get_rng_state,
            torch.cuda.get_rng_state,
            torch.UntypedStorage.resize_,
            functional.scaled_dot_product_attention,
            nn.Linear.forward,
            vars(torch.UntypedStorage).get("resize_"),
            gc.isenabled(),
        ]

    trainee, before = transformer("full", dropout=0.1), visible()
    rates = [group["lr"] for group in trainee.optimizer.param_groups]
    weights = [p.detach().clone() for p in trainee.model.parameters()]
    random = torch.get_rng_state()
    instrument(trainee, tokens())
    assert visible() == before
    assert [group["lr"] for group in trainee.optimizer.param_groups] == rates
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(p, w) for p, w in zip(trainee.model.parameters(), weights, strict=True))


def test_a_failing_step_leaves_nothing_behind() -> None:
    forward, resize = nn.Linear.forward, vars(torch.UntypedStorage).get("resize_")
    trainee = transformer()
    with pytest.raises(IndexError, match="index out of range in self"):
        instrument(
            trainee, Batch(inputs=(torch.full((2, 16), 64),), targets=torch.zeros(2, 16, dtype=torch.int64))
        )
    assert (nn.Linear.forward, vars(torch.UntypedStorage).get("resize_")) == (forward, resize)
    assert trainee.optimizer.param_groups[0]["lr"] == 1e-3


def _checkpointing_itself(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a `forward` that checkpoints where nobody has wrapped it, as layers of `transformers` do."""

    @functools.wraps(forward)
    def checkpointing(self: nn.Module, x: Tensor) -> Tensor:
        if type(self).forward is not checkpointing:
            return forward(self, x)
        outputs: Tensor = checkpoint(functools.partial(forward, self), x, use_reentrant=False)
        return outputs

    return checkpointing


class CheckpointsItself(nn.Module):
    """A block that looks at its own `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    @_checkpointing_itself
    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x).sin()
        return outputs


def test_a_forward_that_looks_at_itself_runs_as_it_does_unwatched() -> None:
    model = nn.Sequential(CheckpointsItself(), nn.Linear(8, 1))
    batch = Batch(inputs=(torch.ones(4, 8, requires_grad=True),), targets=None)
    report = instrument(Metered(model, torch.optim.SGD(model.parameters(), lr=0.1)), batch)
    assert report.work.recomputed_ops["aten.addmm.default"] == 1
    assert CheckpointsItself.forward.__closure__[1].cell_contents.__name__ == "forward"  # type: ignore[index]


def test_a_forward_on_the_instance_is_a_call_of_its_block() -> None:
    block, head = nn.Linear(8, 8), nn.Linear(8, 1)
    model = nn.Sequential(block, head)
    forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    block.forward = forward  # type: ignore[method-assign]
    trainee = Metered(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = Batch(inputs=(torch.ones(4, 8, requires_grad=True),), targets=None)
    trainee.blocks = {"0": block, "1": head}
    report = instrument(trainee, batch)
    assert report.work.calls == {"0": 1, "1": 1}
    assert block.forward is forward
