"""State that is another one when backward recomputes: modes, globals, arguments, aliases."""
# ruff: noqa: PGH004
# ruff: noqa
# mypy: ignore-errors

import contextlib

import torch
import torch.nn as nn
import torch.nn.functional as F

D = 8


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        return x + torch.tanh(self.lin(x))


class Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def mean_square(y):
    return y.square().mean()


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.temperature = 1.0

    def forward(self, x):
        return x * (self.lin(x) / self.temperature).softmax(-1)


class TemperedModel(nn.Module):
    """Sets a temperature for the time of its forward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Plain(), Tempered(), Plain()])

    @contextlib.contextmanager
    def temperature(self, value):
        self.blocks[1].temperature = value
        try:
            yield
        finally:
            self.blocks[1].temperature = 1.0

    def forward(self, x):
        with self.temperature(3.0):
            for block in self.blocks:
                x = block(x)
        return x


def attribute_set_for_forward_only():
    return TemperedModel(), (torch.randn(4, D),), mean_square


SETTINGS = {"low_precision": False}


@contextlib.contextmanager
def low_precision():
    SETTINGS["low_precision"] = True
    try:
        yield
    finally:
        SETTINGS["low_precision"] = False


class GlobalReader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        h = self.lin(x)
        if SETTINGS["low_precision"]:
            with torch.no_grad():
                error = (h * 8).round() / 8 - h
            h = h + error
        return x + torch.tanh(h)


class GlobalModel(Stack):
    def forward(self, x):
        with low_precision():
            return super().forward(x)


def global_setting_for_forward_only():
    return GlobalModel([Plain(), GlobalReader(), Plain(), Plain()]), (torch.randn(4, D),), mean_square


class DefaultDtypeModel(Stack):
    """Constants of the blocks are to be made in double precision."""

    def forward(self, x):
        torch.set_default_dtype(torch.float64)
        try:
            return super().forward(x)
        finally:
            torch.set_default_dtype(torch.float32)


class Frequencies(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        wave = torch.exp(torch.linspace(0, 9, D)).sin().to(x.dtype)
        return x + torch.tanh(self.lin(x * wave))


def default_dtype_for_forward_only():
    return DefaultDtypeModel([Plain(), Frequencies(), Plain()]), (torch.randn(4, D),), mean_square


class Slope(nn.Module):
    """A leaky activation that is steeper in training."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        return x + torch.tanh(F.leaky_relu(self.lin(x), 0.3 if self.training else 0.01))


class TrainsInForward(Stack):
    def forward(self, x):
        self.train()
        return super().forward(x)


def loss_leaves_eval_mode():
    model = TrainsInForward([Plain(), Slope(), Plain()])

    def loss(y):
        model.eval()  # for the accuracy below; train() comes back in the next forward
        accuracy = (y.detach() > 0).float().mean()
        return y.square().mean() + 0 * accuracy

    return model, (torch.randn(4, D),), loss


class PhaseBlock(nn.Module):
    def __init__(self, phase):
        super().__init__()
        self.phase = phase
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        bias = 0.5 if self.phase["name"] == "forward" else 0.0
        return x + torch.tanh(self.lin(x) + bias)


class PhaseModel(nn.Module):
    """A gradient hook at the head tells a profiler that backward has begun."""

    def __init__(self):
        super().__init__()
        self.phase = {"name": "forward"}
        self.blocks = nn.ModuleList([Plain(), Plain(), PhaseBlock(self.phase)])

    def forward(self, x):
        self.phase["name"] = "forward"
        for block in self.blocks:
            x = block(x)
        x.register_hook(self.backward_begins)
        return x

    def backward_begins(self, grad):
        self.phase["name"] = "backward"


def gradient_hook_changes_phase():
    return PhaseModel(), (torch.randn(4, D),), mean_square


class NoisyWeights(Stack):
    """Variational weights: noise is added for forward and taken away at its end."""

    def forward(self, x):
        clean = [p.detach().clone() for p in self.blocks.parameters()]
        with torch.no_grad():
            for p in self.blocks.parameters():
                p.data = p.data + 0.1 * torch.randn_like(p)
        x = super().forward(x)
        for p, c in zip(self.blocks.parameters(), clean):
            p.data = c
        return x


def weight_noise_taken_away():
    return NoisyWeights(Plain() for _ in range(3)), (torch.randn(4, D),), mean_square


class FromBank(nn.Module):
    def __init__(self, bank):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.bank = [bank]

    def forward(self, x):
        return x + torch.tanh(self.lin(x + self.bank[0].mean(0)))


class Moco(nn.Module):
    """A queue of features that the model fills once its blocks have read it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.randn(8, D))
        self.blocks = nn.ModuleList([Plain(), Plain(), FromBank(self.queue)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        self.queue[: x.shape[0]] = x.detach()
        return x


def feature_queue_filled_after_blocks():
    return Moco(), (torch.randn(4, D),), mean_square


class DenseBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, features):
        y = torch.tanh(self.lin(sum(features)))
        features.append(y)
        return y


class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(D, D)
        self.blocks = nn.ModuleList(DenseBlock() for _ in range(3))

    def forward(self, x):
        features = [self.stem(x)]
        for block in self.blocks:
            y = block(features)
        return y


def list_argument_grows():
    return DenseNet(), (torch.randn(4, D),), mean_square


class Positioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.depth = nn.Embedding(8, D)
        self.lin = nn.Linear(D, D)

    def forward(self, x, info):
        y = x + torch.tanh(self.lin(x + self.depth(torch.tensor(info["layer"]))))
        info["layer"] += 1
        return y


class PositionedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Positioned() for _ in range(3))

    def forward(self, x):
        info = {"layer": 0}
        for block in self.blocks:
            x = block(x, info)
        return x


def dict_argument_counts_layers():
    return PositionedModel(), (torch.randn(4, D),), mean_square


class InplaceResidual(nn.Module):
    """Shifts its input in place before anything saves it: legal, and plain torch is right."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.full((D,), 0.3))
        self.lin = nn.Linear(D, D, dtype=torch.bfloat16)

    def forward(self, x):
        x += self.shift
        return x + torch.tanh(self.lin(x.bfloat16())).float()


def input_changed_in_place():
    return Stack([Plain(), InplaceResidual(), Plain()]), (torch.randn(4, D),), mean_square


class InDict(nn.Module):
    """Takes a dict and gives a new one; one of them shifts the tensor that it finds there, in place."""

    def __init__(self, shift):
        super().__init__()
        self.shift = nn.Parameter(torch.full((D,), 0.3)) if shift else None
        self.lin = nn.Linear(D, D)

    def forward(self, batch):
        hidden = batch["hidden"]
        if self.shift is not None:
            hidden += self.shift
        return {**batch, "hidden": hidden + torch.tanh(self.lin(hidden))}


class DictStack(Stack):
    def forward(self, x):
        return super().forward({"hidden": x * 1.0})["hidden"]


def tensor_in_dict_changed_in_place():
    return DictStack([InDict(False), InDict(True), InDict(False)]), (torch.randn(4, D),), mean_square


class ClampsSaved(nn.Module):
    """Clamps an activation that autograd has saved, behind its back."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.gate = nn.Parameter(torch.ones(D))

    def forward(self, x):
        h = self.lin(x)
        y = h * self.gate
        h.data.clamp_(-0.1, 0.1)  # "the gradient of the gate shall see clamped values"
        return x + y


def saved_activation_changed_by_data():
    return Stack([Plain(), ClampsSaved(), Plain()]), (torch.randn(4, D),), mean_square


class ScaledMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.T, (x.T @ grad) * getattr(x, "scale", 1.0)


class Loaded(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, D) / 3)

    def forward(self, x):
        x = torch.tanh(x)
        x.scale = 0.5  # travels with the tensor, as in many quantisation libraries
        return ScaledMatmul.apply(x, self.w)


def attribute_on_saved_tensor():
    return Stack([Plain(), Loaded(), Plain()]), (torch.randn(4, D),), mean_square


class LeafMode(nn.Module):
    """Right: asks whether gradients are recorded, which recomputation answers alike."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        if torch.is_grad_enabled() and self.training:
            return x + torch.tanh(self.lin(x).mul_(2))
        return x + torch.tanh(self.lin(x).half()).float()


def reads_grad_mode():
    return Stack(LeafMode() for _ in range(3)), (torch.randn(4, D),), mean_square


class AddsPositions(Stack):
    """Right: the model changes a block's output in place, before the next block reads it."""

    def __init__(self, blocks):
        super().__init__(blocks)
        self.position = nn.Parameter(torch.randn(D))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x += self.position
        return x


def output_changed_in_place_by_model():
    return AddsPositions(Plain() for _ in range(3)), (torch.randn(4, D),), mean_square
