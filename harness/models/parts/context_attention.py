"""Attention of ranks that hold parts of a sequence each: every query sees the keys of all parts.

Shapes: B batch, S tokens of a part, H query heads, G key-value heads, K head width; P ranks.

Communication is by functional collectives, which dispatch modes see: save lists can keep what they give, and
recomputation that repeats them is counted.

Source: Jacobs et al. 2023, arXiv:2309.14509 (Ulysses); Liu et al. 2023, arXiv:2310.01889 (ring); Grattafiori
et al. 2024, arXiv:2407.21783, section 3.3.2 (gather).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from harness.models.parts.attention import SelfAttention
from harness.models.parts.exchange import Exchanged, all_to_all
from harness.models.parts.torch_context import attention_by_torch

_aten = torch.ops.aten
_functional = torch.ops._c10d_functional  # noqa: SLF001 (torch has no public functional collectives)
Operands: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Queries of shape (B, H, S, K), keys and values of shape (B, G, S, K)."""


class Ring(NamedTuple):
    """The ranks that hold the parts of a sequence, in order.

    Fields:
        size: their number P.
        rank: the part of this rank.
        devices: the ranks as a mesh of one dimension, which torch's own method asks for.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    devices: DeviceMesh | None = None


class Weighing(NamedTuple):
    """The way in which a query weighs keys, as `scaled_dot_product_attention` is told.

    Fields:
        dropout_p: probability that a weight is dropped.
        is_causal: whether a query sees no later key.
        scale: factor of the scores; `None` for one over the root of K.
        padding: tokens at the end of the last part that stand for none, and that no query sees.
    """

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    padding: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextAttention:
    """Stands for `scaled_dot_product_attention` where each rank has a part of the queries, keys and values.

    Fields:
        method: one of `METHODS`.
        padding: as of `Weighing`.
    """

    method: str
    ring: Ring
    padding: int = 0

    def __call__(
        self,
        q_BHSK: Tensor,
        k_BGSK: Tensor,
        v_BGSK: Tensor,
        *,
        dropout_p: float,
        is_causal: bool,
        scale: float | None = None,
        **_: bool,
    ) -> Tensor:
        """Return the output of this rank's queries, of shape (B, H, S, K)."""
        weighing = Weighing(dropout_p, is_causal, scale, self.padding)
        output: Tensor = METHODS[self.method](self.ring, (q_BHSK, k_BGSK, v_BGSK), weighing)
        return output


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedParts:
    """Tokens of which each rank computes its part; the last part is padded with zeros.

    Fields:
        length: tokens of a part.
        padding: tokens of the last part that stand for none.
    """

    ring: Ring
    length: int
    padding: int

    def own(self, x_BTD: Tensor) -> Tensor:
        """Return this rank's part of all tokens, of shape (B, S, D)."""
        padded = functional.pad(x_BTD, (0, 0, 0, self.padding))
        return padded[:, self.ring.rank * self.length :][:, : self.length]

    def first(self, x_BSD: Tensor) -> Tensor:
        """Return the first token of all, which rank 0 has, of shape (B, D)."""
        firsts: Tensor = _Gathered.apply(x_BSD[:, :1], self.ring, 1)
        return firsts[:, 0]


def attend_over(model: nn.Module, method: str, ring: Ring, *, padding: int = 0) -> None:
    """Let every attention of ours in a model go over the parts that the ranks of a ring hold."""
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.attend = ContextAttention(method=method, ring=ring, padding=padding)


def _gather(ring: Ring, operands: Operands, weighing: Weighing) -> Tensor:
    """Gather all keys and values; backward scatters the sums of their gradients."""
    q_BHSK, *others = operands
    k, v = (_without_padding(_Gathered.apply(part, ring, 2), weighing) for part in others)
    mask = None
    if weighing.is_causal:
        length = q_BHSK.size(2)
        places = torch.arange(ring.size * length, device=q_BHSK.device)
        mask = places[ring.rank * length :][:length, None] >= places[: k.size(2)]
    return functional.scaled_dot_product_attention(
        q_BHSK, k, v, attn_mask=mask, dropout_p=weighing.dropout_p, scale=weighing.scale, enable_gqa=True
    )


def _ulysses(ring: Ring, operands: Operands, weighing: Weighing) -> Tensor:
    """Exchange parts of the sequence for parts of the heads, and the output back."""
    q, k, v = (_exchanged(ring, part, cut=1, joined=2) for part in operands)
    output = functional.scaled_dot_product_attention(
        q,
        _without_padding(k, weighing),
        _without_padding(v, weighing),
        dropout_p=weighing.dropout_p,
        is_causal=weighing.is_causal,
        scale=weighing.scale,
        enable_gqa=True,
    )
    return _exchanged(ring, output, cut=2, joined=1)


def _pass_on(ring: Ring, operands: Operands, weighing: Weighing) -> Tensor:
    """Pass keys and values on from rank to rank; under a causal mask, parts that come later are skipped."""
    output: Tensor = _RingAttention.apply(*operands, ring, weighing)
    return output


def _by_torch(ring: Ring, operands: Operands, weighing: Weighing) -> Tensor:
    """Let torch pass keys and values on; its backward knows the random numbers of the last piece alone."""
    assert ring.devices is not None, "it is made for a trial"
    assert not weighing.dropout_p, "an experiment refuses it"
    return attention_by_torch(ring.devices, *operands, is_causal=weighing.is_causal, scale=weighing.scale)


def _without_padding(whole: Tensor, weighing: Weighing) -> Tensor:
    """Return all keys or values without those that stand for no token."""
    return whole[:, :, : whole.size(2) - weighing.padding] if weighing.padding else whole


METHODS: Mapping[str, Callable[[Ring, Operands, Weighing], Tensor]] = {
    "gather": _gather,
    "ring": _pass_on,
    "ulysses": _ulysses,
    "torch": _by_torch,
}
"""Ways in which queries meet the keys of other ranks."""


class _Gathered(torch.autograd.Function):
    """All parts of a dimension; each rank gets the sum of the gradients of its own."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ring: Ring, dim: int) -> Tensor:
        ctx.ring, ctx.dim = ring, dim
        rows = _functional.all_gather_into_tensor(part.contiguous(), ring.size, ring.group.group_name)
        return torch.cat(_functional.wait_tensor(rows).chunk(ring.size), dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]  # torch has any
        size, name = ctx.ring.size, ctx.ring.group.group_name
        rows = torch.cat(gradient.chunk(size, ctx.dim))
        own: Tensor = _functional.wait_tensor(_functional.reduce_scatter_tensor(rows, "sum", size, name))
        return own, None, None


def _exchanged(ring: Ring, tensor: Tensor, *, cut: int, joined: int) -> Tensor:
    """Give each rank its part along one dimension; return all of the other one."""
    rows, ones = torch.stack(tensor.chunk(ring.size, cut)), [1] * ring.size
    return torch.cat(list(Exchanged.apply(rows, ring.group, ones, ones).unbind()), joined)


def _passed_on(ring: Ring, tensor: Tensor) -> Tensor:
    """Give `tensor` to the next rank, and return that of the one before."""
    rows = tensor.size(0)
    given = [rows * (rank == (ring.rank + 1) % ring.size) for rank in range(ring.size)]
    taken = [rows * (rank == (ring.rank - 1) % ring.size) for rank in range(ring.size)]
    return all_to_all(ring.group, tensor, taken, given)


class _RingAttention(torch.autograd.Function):
    """Attention piece by piece; saved are this rank's own operands, its output and log-sum-exp, and dropout.

    Backward passes keys and values on once more, and their gradients with them until they are home again.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd takes operands by position)
        ctx: Any,
        q_BHSK: Tensor,
        k_BGSK: Tensor,
        v_BGSK: Tensor,
        ring: Ring,
        weighing: Weighing,
    ) -> Tensor:
        kv = torch.stack((k_BGSK, v_BGSK))
        output = lse_BHS = None
        dropped = []
        for turn in range(ring.size):
            if turn:
                kv = _passed_on(ring, kv)
            source = (ring.rank - turn) % ring.size
            if weighing.is_causal and source > ring.rank:
                continue
            piece = _piece(q_BHSK, kv, ring, source, weighing)
            part, part_lse, kept = piece.forward(weighing.dropout_p)
            dropped.append(kept)
            part = part.to(part_lse.dtype)
            if output is None or lse_BHS is None:
                output, lse_BHS = part, part_lse
                continue
            total = torch.logaddexp(lse_BHS, part_lse)
            output = output * (lse_BHS - total).exp()[..., None] + part * (part_lse - total).exp()[..., None]
            lse_BHS = total
        assert output is not None, "a rank's own part comes first"
        output = output.to(q_BHSK.dtype)
        ctx.ring, ctx.weighing = ring, weighing
        ctx.save_for_backward(q_BHSK, k_BGSK, v_BGSK, output, lse_BHS, *dropped)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # as above
        q_BHSK, k_BGSK, v_BGSK, output, lse_BHS, *dropped = ctx.saved_tensors
        ring, weighing, gradient = ctx.ring, ctx.weighing, gradient.contiguous()
        kv = torch.stack((k_BGSK, v_BGSK))
        of_q = torch.zeros_like(q_BHSK, dtype=lse_BHS.dtype)
        of_kv = torch.zeros_like(kv, dtype=lse_BHS.dtype)
        kept = iter(dropped)
        for turn in range(ring.size):
            if turn:
                kv, of_kv = _passed_on(ring, kv), _passed_on(ring, of_kv)
            source = (ring.rank - turn) % ring.size
            if weighing.is_causal and source > ring.rank:
                continue
            piece = _piece(q_BHSK, kv, ring, source, weighing)
            q, k, v = piece.backward(gradient, output, lse_BHS, next(kept))
            of_q += q
            # heads that share keys add up
            of_kv[:, :, :, : k.size(2)] += torch.stack((k, v)).unflatten(2, (kv.size(2), -1)).sum(3)
        of_k, of_v = _passed_on(ring, of_kv).to(kv.dtype).unbind()
        return of_q.to(q_BHSK.dtype), of_k, of_v, None, None


def _piece(q_BHSK: Tensor, kv: Tensor, ring: Ring, source: int, weighing: Weighing) -> _Piece:
    """Return this rank's queries with the keys and values of rank `source`, once for each query head."""
    if weighing.padding and source == ring.size - 1:
        kv = kv[:, :, :, : kv.size(3) - weighing.padding]
    k, v = kv.repeat_interleave(q_BHSK.size(1) // kv.size(2), dim=2).unbind()
    is_causal = weighing.is_causal and source == ring.rank
    return _Piece(q_BHSK, k, v, is_causal, weighing.scale or q_BHSK.size(-1) ** -0.5)


class _Piece(NamedTuple):
    """Queries of one rank with keys and values of one rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    is_causal: bool
    scale: float

    def forward(self, dropout_p: float) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return output, log-sum-exp of shape (B, H, S), and factors of weights where some are dropped."""
        if self._has_kernel and not dropout_p:
            output, lse_BHS = _aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001 (its name)
                *self[:3], 0.0, self.is_causal, scale=self.scale
            )
            return output, lse_BHS, None
        scores = self._scores()
        lse_BHS = scores.logsumexp(-1)
        weights = (scores - lse_BHS[..., None]).exp()
        factors = functional.dropout(torch.ones_like(weights), dropout_p) if dropout_p else None
        weights = weights if factors is None else weights * factors
        return weights.to(self.v.dtype) @ self.v, lse_BHS, factors

    def backward(
        self, gradient: Tensor, output: Tensor, lse_BHS: Tensor, factors: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the three; output and log-sum-exp are those of all pieces."""
        if self._has_kernel and factors is None:
            found: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(  # noqa: SLF001 (its name)
                gradient, *self[:3], output, lse_BHS, 0.0, self.is_causal, scale=self.scale
            )
            return found
        weights = (self._scores() - lse_BHS[..., None]).exp()
        of_weights = (gradient @ self.v.mT).to(weights.dtype)
        kept = weights
        if factors is not None:
            kept, of_weights = weights * factors, of_weights * factors
        mean = (gradient * output).sum(-1, keepdim=True, dtype=weights.dtype)
        of_scores = (weights * (of_weights - mean) * self.scale).to(self.q.dtype)
        of_v = kept.to(gradient.dtype).mT @ gradient
        return of_scores @ self.k, of_scores.mT @ self.q, of_v

    @property
    def _has_kernel(self) -> bool:
        return self.q.device.type == "cpu"

    def _scores(self) -> Tensor:
        """Return scaled scores in float32 or float64, those of later keys minus infinity."""
        scores = self.q @ self.k.mT * self.scale
        scores = scores.float() if scores.dtype.itemsize < 4 else scores  # noqa: PLR2004 (bytes of a float32)
        if not self.is_causal:
            return scores
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(later, float("-inf"))
