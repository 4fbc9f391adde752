"""Models that cannot be measured, in plain torch or under the variant: a clear message is what a user needs."""
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


class Strict(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        if x.dim() != 4:
            raise ValueError(f"images have four dimensions, these have {x.dim()}")
        return self.lin(x)


def raises_in_forward():
    return Stack([Plain(), Strict(), Plain()]), (torch.randn(4, D),), mean_square


def loss_per_row():
    return Stack(Plain() for _ in range(3)), (torch.randn(4, D),), lambda y: y.square().mean(-1)


def loss_with_logs():
    def loss(y):
        value = y.square().mean()
        return value, {"rms": value.sqrt().item()}

    return Stack(Plain() for _ in range(3)), (torch.randn(4, D),), loss


def loss_as_python_number():
    return Stack(Plain() for _ in range(3)), (torch.randn(4, D),), lambda y: y.square().mean().item()


class PlainList(nn.Module):
    """The blocks are in a Python list, so nothing knows them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(D, D)
        self.blocks = [Plain() for _ in range(3)]

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def blocks_in_python_list():
    return PlainList(), (torch.randn(4, D),), mean_square


def inputs_not_in_a_tuple():
    return Stack(Plain() for _ in range(3)), torch.randn(4, D), mean_square


class SparseTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(13, D, sparse=True)
        self.blocks = nn.ModuleList(Plain() for _ in range(3))

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def sparse_gradients_for_adamw():
    return SparseTable(), (torch.randint(0, 13, (2, 5)),), mean_square


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2 * D, D)

    def forward(self, x, skips):
        return torch.tanh(self.lin(torch.cat([x, skips.pop()], -1)))


class Hourglass(nn.Module):
    """Blocks pop their skip connections: recomputation finds the list empty."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(Plain() for _ in range(3))
        self.blocks = nn.ModuleList(Up() for _ in range(3))

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block in self.blocks:
            x = block(x, skips)
        return x


def blocks_pop_their_skips():
    return Hourglass(), (torch.randn(4, D),), mean_square


class Memoised(nn.Module):
    """Remembers its projection by the identity of its input: recomputation computes less than forward did."""

    def __init__(self):
        super().__init__()
        self.key, self.out = nn.Linear(D, D), nn.Linear(D, D)
        self.last = None, None

    def forward(self, x):
        if self.last[0] is not x:
            self.last = x, torch.sigmoid(self.key(x))
        return self.out(torch.relu(x) * self.last[1])


def memo_by_identity_of_input():
    return Stack([Plain(), Memoised(), Plain()]), (torch.randn(4, D),), mean_square


class Energy(nn.Module):
    """Forces by torch.func.grad in the block."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        return x - 0.1 * torch.func.grad(lambda v: torch.tanh(self.lin(v)).square().sum())(x)


def functional_gradient_in_block():
    return Stack(Energy() for _ in range(3)), (torch.randn(4, D),), mean_square


class Pulses(nn.Module):
    """Uses Python's own number of a tensor as data."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        keep = x.detach().abs().mean(-1) > self.threshold
        self.threshold = float(x.detach().abs().mean())
        return self.lin(x[keep])

    threshold = 0.0


class Pruned(nn.Module):
    """The rows that a block keeps depend on a threshold that its last call left: other shapes in recomputation."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Plain(), Pulses(), Plain()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def threshold_of_last_call_changes_shapes():
    return Pruned(), (torch.randn(9, D),), mean_square


class Scripted(nn.Module):
    """TorchScript's own autograd does not get on with saved-tensor hooks."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x: torch.Tensor, flip: bool = False) -> torch.Tensor:
        if flip:
            x = x.flip(0)
        return x + torch.tanh(self.lin(x))


def scripted_blocks():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Stack(torch.jit.script(Scripted()) for _ in range(3)), (torch.randn(3, D),), mean_square
