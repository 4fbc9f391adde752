"""Dtypes, transforms and operators that are not everyday."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.gallery.parts import (
    WIDTH,
    Chain,
    Example,
    Layer,
    example,
    linear,
    mean_square,
    three,
)


class HalfBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = linear().to(torch.bfloat16)

    def forward(self, x: Any) -> Any:
        return x + self.linear(self.norm(x).bfloat16()).float()


def bf16_blocks_in_fp32_model() -> Any:
    """Blocks compute in bfloat16 inside of an fp32 model; the same kernels run again on the same values."""
    return three(HalfBlock, torch.randn(3, WIDTH))


class Fourier(nn.Module):
    """A Fourier neural operator's layer, with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2, 4, dtype=torch.cfloat) / 2)
        self.skip = nn.Conv1d(2, 2, 1)

    def forward(self, x: Any) -> Any:
        modes = torch.fft.rfft(x)[..., :4]
        y = torch.fft.irfft(torch.einsum("bim,iom->bom", modes, self.weight), n=x.shape[-1])
        return functional.gelu(y + self.skip(x))


def complex_fourier_layers() -> Example:
    """Complex weights, FFTs and einsum in a Fourier neural operator."""
    return three(Fourier, torch.randn(2, 2, 16))


class Determinant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.orbitals = nn.Linear(3, 16)
        self.mix = nn.Linear(3, 3)

    def forward(self, state: Any) -> Any:
        r, logdet = state
        m = self.orbitals(r).view(-1, 4, 4)
        return r + torch.tanh(self.mix(r)), logdet + torch.linalg.slogdet(m + 3 * torch.eye(4))[1]


def float64_wavefunction() -> Any:
    """A model in double precision with log-determinants, whose blocks take and return one tuple."""
    torch.set_default_dtype(torch.float64)
    try:
        model = Chain(*(Determinant() for _ in range(3)))
        return model, ((torch.randn(5, 3), torch.zeros(5)),), lambda y: y[1].mean() + y[0].square().mean()
    finally:
        torch.set_default_dtype(torch.float32)


class AutocastModel(Chain):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(linear(), nn.Softplus()) for _ in range(3)))

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks:
                x = block(x)
        return x.float()


def autocast_around_blocks() -> Example:
    """Autocast is entered in the model's forward, around its blocks; checkpointing remembers it for
    recomputation."""
    return example(AutocastModel(), torch.randn(3, WIDTH))


class Round(torch.autograd.Function):
    """Straight-through rounding that keeps Python values on ctx."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any) -> Any:
        ctx.save_for_backward(x)
        ctx.bound = 2.0 / scale
        return torch.round(x * scale) / scale

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < ctx.bound), None


class Quantised(Layer):
    """A custom autograd.Function with saved tensors and Python values on ctx, straight-through in
    backward."""

    def forward(self, x: Any) -> Any:
        return functional.linear(Round.apply(x, 16), Round.apply(self.linear.weight, 64), self.linear.bias)


class InplaceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
        )

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        y += x
        return y.relu_()


def inplace_conv_channels_last() -> Example:
    """Legal in-place activations and sums, in channels-last layout, which copies have to keep."""
    x = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
    model: Any = Chain(*(InplaceBlock() for _ in range(3)))
    return example(model.to(memory_format=torch.channels_last), x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, bidirectional=True, batch_first=True, proj_size=4)

    def forward(self, packed: Any) -> Any:
        return self.lstm(packed)[0]


class Packed(Chain):
    def __init__(self) -> None:
        super().__init__(*(Recurrent() for _ in range(3)))

    def forward(self, x: Any, lengths: Any) -> Any:  # type: ignore[override]  # it takes more
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        for block in self.blocks:
            packed = block(packed)
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]


def lstm_on_packed_sequences() -> Example:
    """Bidirectional LSTMs with projections pass PackedSequences from block to block."""
    return Packed(), (torch.randn(3, 5, WIDTH), torch.tensor([3, 5, 2])), mean_square


class Scan(nn.Module):
    """A diagonal state space layer, as a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.randn(WIDTH))
        self.inp, self.out = linear(), linear()

    def forward(self, x: Any) -> Any:
        a, u, h, ys = torch.sigmoid(self.decay), self.inp(x), torch.zeros(x.shape[0], WIDTH), []
        for t in range(x.shape[1]):
            h = a * h + u[:, t]
            ys.append(h)
        return x + self.out(torch.stack(ys, 1)) * torch.cumsum(a, 0)


def state_space_scan() -> Example:
    """A recurrence as a Python loop over time with a state made anew in each forward."""
    return three(Scan, torch.randn(2, 6, WIDTH))


class NumpyBlock(Layer):
    """Positions come from NumPy in each forward; a no-grad detour picks an index there too."""

    def forward(self, x: Any) -> Any:
        angles = np.outer(np.arange(x.shape[1]), 1 / 10 ** (np.arange(WIDTH) / WIDTH))
        pivot = int(np.argmax(x.detach().numpy().sum((0, 2))))
        return self.linear(x + torch.from_numpy(np.sin(angles)).to(x)) + x[:, pivot : pivot + 1]


def numpy_in_forward() -> Example:
    """NumPy makes constants and picks an index from detached values in forward; both are functions of the
    input."""
    return three(NumpyBlock, torch.randn(2, 5, WIDTH))


def weight_norm_and_orthogonal() -> Example:
    """Parametrized weights are computed anew from the same parameters in recomputation."""

    def block() -> Any:
        return nn.Sequential(
            parametrizations.weight_norm(linear()),
            nn.Tanh(),
            parametrizations.orthogonal(linear()),
        )

    return three(block, torch.randn(3, WIDTH))


class Symmetric(nn.Module):
    def forward(self, w: Any) -> Any:
        return w.triu() + w.triu(1).T


class Cached(nn.Module):
    """Parametrized weights are computed once a forward, with torch's own cache."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(3):
            lin = linear()
            parametrize.register_parametrization(lin, "weight", Symmetric())
            self.blocks.append(lin)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            with parametrize.cached():
                x = torch.tanh(block(x) + block(x * 2))
        return x


def parametrization_cache() -> Example:
    """torch's own cache of parametrized weights is filled by the model around two calls of a block, and is
    empty again when backward recomputes."""
    return example(Cached(), torch.randn(3, WIDTH))


class Ensemble(nn.Module):
    """Four members' weights in one tensor; vmap over them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 3)
        self.b = nn.Parameter(torch.zeros(4, WIDTH))

    def forward(self, x: Any) -> Any:
        return torch.func.vmap(lambda w, b, v: torch.tanh(v @ w + b))(self.w, self.b, x)


def vmap_ensemble() -> Example:
    """torch.func.vmap over the members of an ensemble, inside of the blocks."""
    return three(Ensemble, torch.randn(4, 3, WIDTH))


class Hyper(nn.Module):
    """functional_call runs a linear with weights that another one made from the input; one of its own
    weights has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(WIDTH, WIDTH * WIDTH)
        self.inner = linear()

    def forward(self, x: Any) -> Any:
        weight = self.make(x.mean(0)).view(WIDTH, WIDTH)
        return torch.func.functional_call(self.inner, {"weight": weight}, (x,))


class OwnCheckpoint(nn.Module):
    """The author already uses torch's checkpoint inside of the blocks, with dropout: regions nest."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = linear(), nn.Sequential(linear(), nn.Dropout(0.2), nn.GELU())

    def forward(self, x: Any) -> Any:
        return x + checkpoint(self.mlp, torch.relu(self.attn(x)), use_reentrant=False)


class OldCheckpoint(nn.Module):
    """The same with the older reentrant checkpoint, inside of blocks whose region is not."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(linear(), nn.Dropout(0.2), nn.SELU())

    def forward(self, x: Any) -> Any:
        return x + checkpoint(self.mlp, x, use_reentrant=True) if x.requires_grad else x + self.mlp(x)


class CountFlops(Layer):
    """Blocks run under a TorchDispatchMode of their own, a counter of FLOPs, that changes nothing."""

    def forward(self, x: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            y = torch.tanh(self.linear(x))
        assert counter.get_total_flops() >= 0
        return x + y


class Compressed(Layer):
    """The blocks have saved-tensor hooks of their own, which compress to half precision in both models
    alike."""

    def forward(self, x: Any) -> Any:
        h = self.linear(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
            return h.tanh()


class Metric(torch.Tensor):
    """A tensor that knows its unit, by __torch_function__."""

    unit: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Metric):
            result.unit = next((a.unit for a in args if hasattr(a, "unit")), "m")
        return result


class UnitModel(Chain):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(linear(), nn.Hardswish()) for _ in range(3)))

    def forward(self, x: Any) -> Any:
        x = x.as_subclass(Metric)
        x = self.run(x)
        assert x.unit == "m"
        return x.as_subclass(torch.Tensor)


def tensor_subclass_through_blocks() -> Example:
    """A tensor subclass with an attribute goes through the blocks by __torch_function__."""
    return example(UnitModel(), torch.randn(3, WIDTH))


class Ragged(Chain):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(linear(), nn.ReLU()) for _ in range(3)))

    def forward(self, x: Any, keep: Any) -> Any:  # type: ignore[override]  # it takes more
        for block in self.blocks:
            y = torch.zeros_like(x)
            y[keep] = block(x[keep])  # only real tokens, a new number of rows in each call
            x, keep = x + y, keep & (y.sum(-1) > -1)
        return x


def masked_rows_only() -> Example:
    """Boolean indices choose the rows of each call, so that shapes depend on data; the data is the same in
    recomputation."""
    return Ragged(), (torch.randn(3, 5, WIDTH), torch.rand(3, 5) > 0.3), mean_square


class Nested(Chain):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(linear(), nn.SiLU()) for _ in range(3)))

    def forward(self, a: Any, b: Any, c: Any) -> Any:  # type: ignore[override]  # it takes more
        x = torch.nested.nested_tensor([a, b, c], layout=torch.jagged)
        x = self.run(x)
        return torch.cat([part.mean(0) for part in x.unbind()])


def jagged_nested_tensors() -> Example:
    """Blocks compute on jagged nested tensors, elementwise and with a linear."""
    return Nested(), tuple(torch.randn(n, WIDTH) for n in (2, 5, 3)), mean_square


class SparseTable(nn.Module):
    """Sparse gradients, made dense by a hook because AdamW refuses them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(13, WIDTH, sparse=True, mode="sum")
        self.table.weight.register_post_accumulate_grad_hook(self.densify)
        self.blocks = nn.ModuleList(linear() for _ in range(3))

    @staticmethod
    def densify(weight: Any) -> None:
        weight.grad = weight.grad.to_dense()

    def forward(self, ids: Any, offsets: Any) -> Any:
        x = self.table(ids, offsets)
        for block in self.blocks:
            x = x + torch.sin(block(x))
        return x


def sparse_embedding_made_dense() -> Example:
    """Sparse gradients of an embedding outside of the blocks, which a hook makes dense for AdamW."""
    return SparseTable(), (torch.randint(0, 13, (9,)), torch.tensor([0, 2, 6])), mean_square


class Alibi(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Any) -> Any:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(4))
        return x + y.transpose(1, 2).flatten(2)


def fused_attention() -> Example:
    """Fused causal attention, whose output and log-sum-exp a policy may save."""
    return three(Alibi, torch.randn(2, 6, WIDTH))


class Penalised(Chain):
    """A critic with a gradient penalty: the loss differentiates the model once more."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(linear(), nn.Softplus()) for _ in range(3)))

    def forward(self, x: Any) -> Any:
        x = x.detach().requires_grad_()
        y = x
        for block in self.blocks:
            y = block(y)
        return x, y.sum(-1)


def gradient_penalty() -> Example:
    """The loss differentiates the model once more with create_graph; non-reentrant regions recompute for
    both passes."""

    def loss(out: Any) -> Any:
        x, y = out
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.mean() + (g.norm(dim=-1) - 1).square().mean()

    return Penalised(), (torch.randn(3, WIDTH),), loss


def loss_with_one_element() -> Example:
    """The loss has shape (1,), which backward takes as it takes a scalar."""
    return (
        Chain(*(nn.Sequential(linear(), nn.Mish()) for _ in range(3))),
        (torch.randn(3, WIDTH),),
        lambda y: y.square().mean().reshape(1),
    )


class FrozenNorm(Layer):
    """Batch statistics that the factory froze with `eval()`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).eval().requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.norm(x))


class Gru(nn.Module):
    """A GRU over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        outputs: Tensor = self.cell(x)[0]
        return outputs


class Attending(nn.Module):
    """Torch's own encoder layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        outputs: Tensor = self.layer(x[None])[0]
        return outputs


class Halting(Layer):
    """Repeats itself until its outputs are small: a loop that depends on data."""

    def forward(self, x: Tensor) -> Any:
        for _ in range(5):
            x = super().forward(x) * 0.7
            if float(x.detach().abs().max()) < 0.3:
                break
        return x


class Standardised(Layer):
    def forward(self, x: Any) -> Any:
        weight = self.linear.weight
        weight = (weight - weight.mean(1, keepdim=True)) / weight.std(1, keepdim=True)
        return x + functional.linear(x, weight).tanh()


class Causal(Layer):
    def change(self, h: Any) -> Any:
        mask = torch.ones(len(h), len(h)).tril().bool()
        return (h @ h.T).masked_fill(~mask, -1e9).softmax(-1) @ h


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        gate, value = self.up(x).chunk(2, -1)
        return x + self.down(functional.silu(gate) * value.relu())


class Sorted(Layer):
    def change(self, h: Any) -> Any:
        order = h[:, 0].argsort()
        kept = h[order][: int((h[:, 0] > 0).sum()) + 1]
        return h + kept.mean(0)


class Scattered(Layer):
    def change(self, h: Any) -> Any:
        index = torch.arange(len(h)) % 2
        return torch.zeros(2, WIDTH).index_add_(0, index, h)[index]
