"""Hooks and side channels: of gradients, modules, state dicts, and lists that a loss reads."""
# ruff: noqa: PGH004
# ruff: noqa
# mypy: ignore-errors

import torch
import torch.nn as nn

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


class ClippedBlock(nn.Module):
    """Clips gradients on parameters and on an activation inside of the block."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.lin.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))

    def forward(self, x):
        h = self.lin(x)
        if h.requires_grad:
            h.register_hook(lambda g: g / g.norm().clamp(min=0.1))
        return x + torch.tanh(h)


def gradient_clipping_hooks():
    return Stack(ClippedBlock() for _ in range(3)), (torch.randn(4, D),), mean_square


def module_backward_hooks():
    model = Stack(nn.Sequential(nn.Linear(D, D), nn.Sigmoid()) for _ in range(3))
    for block in model.blocks:
        block[0].register_full_backward_hook(
            lambda m, gi, go: tuple(None if g is None else 2 * g for g in gi)
        )
        block.register_forward_hook(lambda m, args, out: out * 1.5)
    return model, (torch.randn(4, D),), mean_square


class Renamed(Stack):
    """Old files of weights call the blocks layers: hooks rename on the way out and in; extra state says which."""

    def __init__(self, blocks):
        super().__init__(blocks)
        self.register_buffer("shift", torch.ones(D))
        self._register_state_dict_hook(self.out)
        self.register_load_state_dict_pre_hook(self.back)

    @staticmethod
    def out(module, state, prefix, meta):
        for key in list(state):
            state[key.replace("blocks.", "layers.")] = state.pop(key)

    @staticmethod
    def back(module, state, prefix, *rest):
        for key in list(state):
            state[key.replace("layers.", "blocks.")] = state.pop(key)

    def get_extra_state(self):
        return {"format": 2}

    def set_extra_state(self, state):
        assert state["format"] == 2

    def forward(self, x):
        return super().forward(x) + self.shift


def state_dict_hooks():
    return Renamed(Plain() for _ in range(3)), (torch.randn(4, D),), mean_square


class Balanced(nn.Module):
    """A soft mixture that leaves its load-balancing loss in an attribute."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, 2)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        self.aux = p.mean(0).square().sum()
        return x + torch.tanh(sum(p[:, i, None] * e(x) for i, e in enumerate(self.experts)))


def auxiliary_loss_in_attribute():
    model = Stack(Balanced() for _ in range(3))
    return model, (torch.randn(4, D),), lambda y: y.square().mean() + 0.1 * sum(b.aux for b in model.blocks)


def features_cleared_by_loss():
    """Inner hooks collect features; the loss reads them and clears the list. Recomputation fills it again."""
    model = Stack(Plain() for _ in range(3))
    features = []
    for block in model.blocks:
        block.lin.register_forward_hook(lambda m, args, out: features.append(out))

    def loss(y):
        penalty = sum(f.abs().mean() for f in features)
        features.clear()
        return y.square().mean() + 0.1 * penalty

    return model, (torch.randn(4, D),), loss


def features_cleared_before_forward():
    """Right: the same collection, emptied when a forward begins."""
    model = Stack(Plain() for _ in range(3))
    features = {}
    for i, block in enumerate(model.blocks):
        block.lin.register_forward_hook(lambda m, args, out, i=i: features.__setitem__(i, out))
    model.register_forward_pre_hook(lambda m, args: features.clear())

    def loss(y):
        return y.square().mean() + 0.1 * sum(f.abs().mean() for f in features.values())

    return model, (torch.randn(4, D),), loss


class Surprise(nn.Module):
    """Scales by how often backward has passed: a backward hook counts, forward reads."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.lin.register_full_backward_hook(self.passed)
        self.passes = 0

    def passed(self, module, grad_in, grad_out):
        self.passes += 1

    def forward(self, x):
        return x + torch.tanh(self.lin(x)) / (1 + self.passes)


def backward_hook_steps_schedule():
    return Stack(Surprise() for _ in range(3)), (torch.randn(4, D),), mean_square


def legacy_weight_norm():
    """Right: a pre-hook computes the weight into an attribute before each forward."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        blocks = [nn.Sequential(nn.utils.weight_norm(nn.Linear(D, D)), nn.ReLU6()) for _ in range(3)]
    return Stack(blocks), (torch.randn(4, D),), mean_square
