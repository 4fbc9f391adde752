"""Right models with dtypes, transforms and operators that are not everyday."""
# ruff: noqa: PGH004
# ruff: noqa
# mypy: ignore-errors

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

D = 8


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


class HalfBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.lin = nn.Linear(D, D).to(torch.bfloat16)

    def forward(self, x):
        return x + self.lin(self.norm(x).bfloat16()).float()


def bf16_blocks_in_fp32_model():
    return Stack(HalfBlock() for _ in range(3)), (torch.randn(3, D),), mean_square


class Fourier(nn.Module):
    """A Fourier neural operator's layer, with complex weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2, 4, dtype=torch.cfloat) / 2)
        self.skip = nn.Conv1d(2, 2, 1)

    def forward(self, x):
        modes = torch.fft.rfft(x)[..., :4]
        y = torch.fft.irfft(torch.einsum("bim,iom->bom", modes, self.weight), n=x.shape[-1])
        return F.gelu(y + self.skip(x))


def complex_fourier_layers():
    return Stack(Fourier() for _ in range(3)), (torch.randn(2, 2, 16),), mean_square


class Determinant(nn.Module):
    def __init__(self):
        super().__init__()
        self.orbitals = nn.Linear(3, 16)
        self.mix = nn.Linear(3, 3)

    def forward(self, state):
        r, logdet = state
        m = self.orbitals(r).view(-1, 4, 4)
        return r + torch.tanh(self.mix(r)), logdet + torch.linalg.slogdet(m + 3 * torch.eye(4))[1]


def float64_wavefunction():
    torch.set_default_dtype(torch.float64)
    try:
        model = Stack(Determinant() for _ in range(3))
        return model, ((torch.randn(5, 3), torch.zeros(5)),), lambda y: y[1].mean() + y[0].square().mean()
    finally:
        torch.set_default_dtype(torch.float32)


class AutocastModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Softplus()) for _ in range(3))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks:
                x = block(x)
        return x.float()


def autocast_around_blocks():
    return AutocastModel(), (torch.randn(3, D),), mean_square


class Round(torch.autograd.Function):
    """Straight-through rounding that keeps Python values on ctx."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.bound = 2.0 / scale
        return torch.round(x * scale) / scale

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < ctx.bound), None


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        return F.linear(Round.apply(x, 16), Round.apply(self.lin.weight, 64), self.lin.bias)


def straight_through_quantisation():
    return Stack(Quantised() for _ in range(3)), (torch.randn(3, D),), mean_square


class InplaceBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
        )

    def forward(self, x):
        y = self.body(x)
        y += x
        return y.relu_()


def inplace_conv_channels_last():
    x = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
    return Stack(InplaceBlock() for _ in range(3)).to(memory_format=torch.channels_last), (x,), mean_square


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(D, D, bidirectional=True, batch_first=True, proj_size=4)

    def forward(self, packed):
        out, (h, _) = self.lstm(packed)
        return out


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Recurrent() for _ in range(3))

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        for block in self.blocks:
            packed = block(packed)
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]


def lstm_on_packed_sequences():
    return Packed(), (torch.randn(3, 5, D), torch.tensor([3, 5, 2])), mean_square


class Scan(nn.Module):
    """A diagonal state space layer, as a loop over time."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.randn(D))
        self.inp, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        a, u, h, ys = torch.sigmoid(self.decay), self.inp(x), torch.zeros(x.shape[0], D), []
        for t in range(x.shape[1]):
            h = a * h + u[:, t]
            ys.append(h)
        return x + self.out(torch.stack(ys, 1)) * torch.cumsum(a, 0)


def state_space_scan():
    return Stack(Scan() for _ in range(3)), (torch.randn(2, 6, D),), mean_square


class NumpyBlock(nn.Module):
    """Positions come from NumPy in each forward; a no-grad detour picks an index there too."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        angles = np.outer(np.arange(x.shape[1]), 1 / 10 ** (np.arange(D) / D))
        pivot = int(np.argmax(x.detach().numpy().sum((0, 2))))
        return self.lin(x + torch.from_numpy(np.sin(angles)).to(x)) + x[:, pivot : pivot + 1]


def numpy_in_forward():
    return Stack(NumpyBlock() for _ in range(3)), (torch.randn(2, 5, D),), mean_square


def weight_norm_and_orthogonal():
    def block():
        return nn.Sequential(
            parametrizations.weight_norm(nn.Linear(D, D)),
            nn.Tanh(),
            parametrizations.orthogonal(nn.Linear(D, D)),
        )

    return Stack(block() for _ in range(3)), (torch.randn(3, D),), mean_square


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


class Cached(nn.Module):
    """Parametrized weights are computed once a forward, with torch's own cache."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(3):
            lin = nn.Linear(D, D)
            parametrize.register_parametrization(lin, "weight", Symmetric())
            self.blocks.append(lin)

    def forward(self, x):
        for block in self.blocks:
            with parametrize.cached():
                x = torch.tanh(block(x) + block(x * 2))
        return x


def parametrization_cache():
    return Cached(), (torch.randn(3, D),), mean_square


class Ensemble(nn.Module):
    """Four members' weights in one tensor; vmap over them."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, D, D) / 3)
        self.b = nn.Parameter(torch.zeros(4, D))

    def forward(self, x):
        return torch.func.vmap(lambda w, b, v: torch.tanh(v @ w + b))(self.w, self.b, x)


def vmap_ensemble():
    return Stack(Ensemble() for _ in range(3)), (torch.randn(4, 3, D),), mean_square


class Hyper(nn.Module):
    """A small network whose weights another one makes, by functional_call."""

    def __init__(self):
        super().__init__()
        self.make = nn.Linear(D, D * D)
        self.inner = nn.Linear(D, D)

    def forward(self, x):
        weight = self.make(x.mean(0)).view(D, D)
        return torch.func.functional_call(self.inner, {"weight": weight}, (x,))


def hypernetwork_functional_call():
    return Stack(Hyper() for _ in range(3)), (torch.randn(3, D),), mean_square


class OwnCheckpoint(nn.Module):
    """The author already checkpoints the expensive half."""

    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.Linear(D, D), nn.Sequential(nn.Linear(D, D), nn.Dropout(0.2), nn.GELU())

    def forward(self, x):
        return x + checkpoint(self.mlp, torch.relu(self.attn(x)), use_reentrant=False)


def user_checkpoints_inside():
    return Stack(OwnCheckpoint() for _ in range(3)), (torch.randn(3, D),), mean_square


class OldCheckpoint(nn.Module):
    """The same with the older, reentrant kind."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.2), nn.SELU())

    def forward(self, x):
        return x + checkpoint(self.mlp, x, use_reentrant=True) if x.requires_grad else x + self.mlp(x)


def user_checkpoints_reentrant_inside():
    return Stack(OldCheckpoint() for _ in range(3)), (torch.randn(3, D),), mean_square


class CountFlops(nn.Module):
    """Runs under a dispatch mode of its author's, which looks and changes nothing."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        with FlopCounterMode(display=False) as counter:
            y = torch.tanh(self.lin(x))
        assert counter.get_total_flops() >= 0
        return x + y


def dispatch_mode_inside():
    return Stack(CountFlops() for _ in range(3)), (torch.randn(3, D),), mean_square


class Compressed(nn.Module):
    """Saves the sign of its input in int8, by saved-tensor hooks of its own."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        h = self.lin(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
            return h.tanh()


def user_saved_tensor_hooks():
    return Stack(Compressed() for _ in range(3)), (torch.randn(3, D),), mean_square


class Metric(torch.Tensor):
    """A tensor that knows its unit, by __torch_function__."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Metric):
            result.unit = next((a.unit for a in args if hasattr(a, "unit")), "m")
        return result


class UnitModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Hardswish()) for _ in range(3))

    def forward(self, x):
        x = x.as_subclass(Metric)
        for block in self.blocks:
            x = block(x)
        assert x.unit == "m"
        return x.as_subclass(torch.Tensor)


def tensor_subclass_through_blocks():
    return UnitModel(), (torch.randn(3, D),), mean_square


class Ragged(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.ReLU()) for _ in range(3))

    def forward(self, x, keep):
        for block in self.blocks:
            y = torch.zeros_like(x)
            y[keep] = block(x[keep])  # only real tokens, a new number of rows in each call
            x, keep = x + y, keep & (y.sum(-1) > -1)
        return x


def masked_rows_only():
    return Ragged(), (torch.randn(3, 5, D), torch.rand(3, 5) > 0.3), mean_square


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.SiLU()) for _ in range(3))

    def forward(self, a, b, c):
        x = torch.nested.nested_tensor([a, b, c], layout=torch.jagged)
        for block in self.blocks:
            x = block(x)
        return torch.cat([part.mean(0) for part in x.unbind()])


def jagged_nested_tensors():
    return Nested(), tuple(torch.randn(n, D) for n in (2, 5, 3)), mean_square


class SparseTable(nn.Module):
    """Sparse gradients, made dense by a hook because AdamW refuses them."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(13, D, sparse=True, mode="sum")
        self.table.weight.register_post_accumulate_grad_hook(self.densify)
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    @staticmethod
    def densify(weight):
        weight.grad = weight.grad.to_dense()

    def forward(self, ids, offsets):
        x = self.table(ids, offsets)
        for block in self.blocks:
            x = x + torch.sin(block(x))
        return x


def sparse_embedding_made_dense():
    return SparseTable(), (torch.randint(0, 13, (9,)), torch.tensor([0, 2, 6])), mean_square


class Alibi(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(4))
        return x + y.transpose(1, 2).flatten(2)


def fused_attention():
    return Stack(Alibi() for _ in range(3)), (torch.randn(2, 6, D),), mean_square


class Penalised(nn.Module):
    """A critic with a gradient penalty: the loss differentiates the model once more."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Softplus()) for _ in range(3))

    def forward(self, x):
        x = x.detach().requires_grad_()
        y = x
        for block in self.blocks:
            y = block(y)
        return x, y.sum(-1)


def gradient_penalty():
    def loss(out):
        x, y = out
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.mean() + (g.norm(dim=-1) - 1).square().mean()

    return Penalised(), (torch.randn(3, D),), loss


def loss_with_one_element():
    """A loss of shape (1,): backward() takes it as it takes a scalar."""
    return (
        Stack(nn.Sequential(nn.Linear(D, D), nn.Mish()) for _ in range(3)),
        (torch.randn(3, D),),
        lambda y: y.square().mean().reshape(1),
    )
