"""FLOPs of operators as they run, against what their mathematics says by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.flop_counter import FlopCounterMode

from strategies.estimate.flops import flops_of, is_uncounted
from strategies.step.operator_mode import OperatorMode

B, S, D, H = 4, 8, 16, 12
"""Batch, sequence, width, hidden width."""


class _Flops(OperatorMode):
    """Adds up FLOPs, and notes operators whose FLOPs nobody counts."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.uncounted: set[str] = set()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        self.total += flops_of(func, args, kwargs, result)
        if is_uncounted(func, args):
            self.uncounted.add(str(func))
        return result


def _ones(*sizes: int) -> Tensor:
    return torch.ones(sizes, requires_grad=True)


def _solvable(batch: int = 2, size: int = 6) -> Tensor:
    return (torch.eye(size) * 4 + torch.ones(batch, size, size)).requires_grad_()


def _lstm(**options: Any) -> Tensor:
    outputs: Tensor = nn.LSTM(D, H, batch_first=True, **options)(_ones(B, S, D))[0]
    return outputs


def _gru() -> Tensor:
    outputs: Tensor = nn.GRU(D, H, batch_first=True)(_ones(B, S, D))[0]
    return outputs


def _packed() -> Tensor:
    outputs: Tensor = nn.LSTM(D, H)(pack_padded_sequence(_ones(S, B, D), [8, 7, 3, 2]))[0].data
    return outputs


def _experts() -> Tensor:
    ends = torch.tensor([16, 32], dtype=torch.int32)
    x, w = (_ones(*sizes).bfloat16() for sizes in ((32, D), (2, D, 8)))
    return torch._grouped_mm(x, w, offs=ends).float()


def _places(*sizes: int, mode: str = "bilinear") -> Tensor:
    places = torch.zeros(1, *sizes[2:], len(sizes) - 2, requires_grad=True)
    return functional.grid_sample(_ones(*sizes), places, mode=mode, align_corners=False)


_LU_6 = sum((6 - k - 1) * (1 + 2 * (6 - k - 1)) for k in range(6))
_CASES: dict[str, tuple[Callable[[], Tensor], int, int | None]] = {
    # operators, FLOPs of forward, and of backward
    "an LSTM's layer": (_lstm, B * S * 8 * H * (D + H), 2 * B * S * 8 * H * (D + H)),
    "two layers, both ways": (
        lambda: _lstm(num_layers=2, bidirectional=True),
        2 * B * S * 8 * H * ((D + H) + (2 * H + H)),
        4 * B * S * 8 * H * ((D + H) + (2 * H + H)),
    ),
    # nobody asks for the gradient of the first state
    "a GRU": (_gru, B * S * 6 * H * (D + H), 2 * B * S * 6 * H * (D + H) - B * 6 * H * H),
    "a packed LSTM": (_packed, 20 * 8 * H * (D + H), None),
    "Bilinear": (
        lambda: nn.Bilinear(D, H, 5, bias=False)(_ones(B, D), _ones(B, H)),
        2 * B * 5 * D * H + 2 * B * 5 * H,
        None,
    ),
    "a matrix by a vector": (lambda: _ones(H, D) @ _ones(D), 2 * H * D, 2 * H * D),
    "batches by a vector": (lambda: _ones(B, S, D) @ _ones(D), 2 * B * S * D, 2 * B * S * D),
    "a matrix by a vector, added": (
        lambda: torch.addmv(_ones(H), _ones(H, D), _ones(D)),
        2 * H * D,
        2 * H * D,
    ),
    "two vectors": (lambda: torch.dot(_ones(D), _ones(D)), 2 * D, 0),
    "two vectors, the first conjugate": (lambda: torch.vdot(_ones(D), _ones(D)), 2 * D, 0),
    "columns by rows, added": (lambda: torch.addr(_ones(H, D), _ones(H), _ones(D)), 2 * H * D, 4 * H * D),
    "columns by rows are elementwise": (lambda: torch.outer(_ones(H), _ones(D)), 0, 0),
    "batches, added up": (
        lambda: torch.addbmm(_ones(H, 3), _ones(B, H, D), _ones(B, D, 3)),
        2 * B * H * D * 3,
        4 * B * H * D * 3,
    ),
    "experts": (_experts, 2 * 32 * D * 8, 4 * 32 * D * 8),
    "bytes": (
        lambda: torch._int_mm(torch.ones(32, D, dtype=torch.int8), torch.ones(D, 8, dtype=torch.int8)),
        2 * 32 * D * 8,
        None,
    ),
    "distances": (lambda: torch.cdist(_ones(B, S, D), _ones(B, 3, D)), 3 * B * S * 3 * D, 6 * B * S * 3 * D),
    "distances by a product": (lambda: torch.cdist(_ones(30, D), _ones(30, D)), 2 * 30 * 30 * (D + 2), None),
    "distances of rows": (lambda: functional.pdist(_ones(S, D)), 3 * (S * (S - 1) // 2) * D, None),
    "a transform of real numbers": (lambda: torch.fft.rfft(_ones(B, D)).abs(), B * 5 * D * 4 // 2, None),
    "there and back": (lambda: torch.fft.irfft(torch.fft.rfft(_ones(B, D))), B * 5 * D * 4, None),
    "a transform of pictures": (
        lambda: torch.fft.fft2(_ones(B, 8, 16).to(torch.complex64)).abs(),
        B * 5 * 128 * 7,
        None,
    ),
    "a solution": (
        lambda: torch.linalg.solve(_solvable(), _ones(2, 6, 3)),
        2 * (_LU_6 + 2 * 36 * 3),
        2 * 2 * 36 * 3 + 2 * 2 * 36 * 3,
    ),
    "an inverse": (lambda: torch.linalg.inv(_solvable()), 2 * (_LU_6 + 2 * 6**3), 2 * 2 * 2 * 6**3),
    "a determinant": (lambda: torch.linalg.det(_solvable()), 2 * _LU_6, None),
    "a triangle": (
        lambda: torch.linalg.solve_triangular(_solvable().triu(), _ones(2, 6, 3), upper=True),
        2 * 36 * 3,
        None,
    ),
    "a square root": (lambda: torch.linalg.cholesky(_solvable()), 2 * (6 * 7 * 13 // 6), None),
    "Q and R": (
        lambda: torch.linalg.qr(_ones(9, 4))[1],
        (6 * 9 * 16 - 128) // 3 + (1728 - 1248 + 256) // 3,
        None,
    ),
    "places of pictures": (lambda: _places(1, 3, 8, 8), 8 * 3 * 64, 3 * 8 * 3 * 64),
    "places of volumes": (lambda: _places(1, 3, 4, 4, 4), 16 * 3 * 64, 4 * 16 * 3 * 64),
    "places, the nearest": (lambda: _places(1, 3, 8, 8, mode="nearest"), 0, 0),
    "places, cubic": (lambda: _places(1, 3, 8, 8, mode="bicubic"), 32 * 3 * 64, None),
    "a sparse matrix": (
        lambda: torch.sparse.mm(torch.eye(D).to_sparse(), _ones(D, H)),
        2 * D * H,
        2 * D * H,
    ),
    "a compressed matrix": (lambda: torch.eye(D).to_sparse_csr() @ _ones(D, H), 2 * D * H, None),
    "a sparse matrix by a vector": (lambda: torch.eye(D).to_sparse() @ _ones(D), 2 * D, None),
    "one dimension, steps first": (
        lambda: torch.conv_tbc(_ones(9, 2, 4), _ones(3, 4, 5), torch.zeros(5)),
        2 * 7 * 2 * 5 * 3 * 4,
        None,
    ),
    "resizing moves bytes": (lambda: functional.interpolate(_ones(1, 3, 8, 8), scale_factor=2), 0, 0),
}


@pytest.mark.parametrize(("body", "forward", "backward"), _CASES.values(), ids=_CASES.keys())
@pytest.mark.filterwarnings("ignore:Sparse")
def test_flops_are_those_by_hand(body: Callable[[], Tensor], forward: int, backward: int | None) -> None:
    with _Flops() as counted:
        outputs = body()
    assert (counted.total, counted.uncounted) == (forward, set())
    if backward is not None:
        with _Flops() as counted:
            outputs.sum().backward()
        assert (counted.total, counted.uncounted) == (backward, set())


def test_flops_are_torchs_where_it_has_a_formula() -> None:
    model = nn.Sequential(
        nn.Conv1d(4, 8, 3, padding=1), nn.Linear(D, D), nn.TransformerEncoderLayer(D, 4, 32, 0.0)
    )
    with FlopCounterMode(display=False) as expected, _Flops() as counted:
        model(_ones(2, 4, D)).sum().backward()
    assert counted.total >= expected.get_total_flops() > 0
    assert not counted.uncounted


@pytest.mark.parametrize(("name", "products"), [("_cudnn_rnn", 1), ("_cudnn_rnn_backward", 2)])
def test_recurrent_layers_of_cudnn_count_their_weights(name: str, products: int) -> None:
    """Its operator runs on GPUs alone; what it is given is what `_cudnn_rnn` documents."""
    func = getattr(torch.ops.aten, name).default
    weights = [torch.ones(4 * H, D), torch.ones(4 * H, H), torch.ones(4 * H), torch.ones(4 * H)]
    given = {"input": torch.ones(S, B, D), "weight": weights, "output_mask": [True] * 4}
    names = [argument.name for argument in func._schema.arguments]
    args = tuple(given.get(each) for each in names)
    assert flops_of(func, args, {}, None) == products * B * S * 8 * H * (D + H)


_UNCOUNTED: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "singular values": (lambda: torch.linalg.svd(_ones(4, 4)), {"aten._linalg_svd.default"}),
    "eigenvalues": (lambda: torch.linalg.eigvalsh(_solvable()), {"aten._linalg_eigh.default"}),
    "an exponential": (lambda: torch.linalg.matrix_exp(_ones(4, 4)), {"aten.linalg_matrix_exp.default"}),
    "two sparse matrices": (
        lambda: torch.sparse.mm(torch.eye(4).to_sparse(), torch.eye(4).to_sparse()),
        {"aten._sparse_sparse_matmul.default"},
    ),
    "norms, softmax, sums, copies": (
        lambda: functional.layer_norm(_ones(B, D).softmax(-1).cumsum(0), [D]).sort().values.flip(0).norm(),
        set(),
    ),
    "embeddings and scatters": (
        lambda: functional.embedding(torch.arange(4), _ones(8, D)).index_add(
            0, torch.arange(4), torch.ones(4, D)
        ),
        set(),
    ),
    "pools and pads": (
        lambda: functional.pad(functional.max_pool2d(_ones(1, 2, 8, 8), 2), (1, 1)).topk(2),
        set(),
    ),
    "a gate of a cell": (lambda: torch.lu_unpack(*torch.linalg.lu_factor(_solvable())), set()),
}


@pytest.mark.parametrize(("body", "names"), _UNCOUNTED.values(), ids=_UNCOUNTED.keys())
def test_what_multiplies_without_formula_is_named(body: Callable[[], Any], names: set[str]) -> None:
    with warnings.catch_warnings(action="ignore"), _Flops() as counted:
        body()
    assert counted.uncounted == names


def test_operators_of_others_are_uncounted() -> None:
    with torch.library._scoped_library("acbench_test_flops", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        with _Flops() as counted:
            torch.ops.acbench_test_flops.twice(torch.ones(3))
    assert counted.uncounted == {"acbench_test_flops.twice.default"}
