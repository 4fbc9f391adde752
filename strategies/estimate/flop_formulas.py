"""Formulas of FLOPs that torch's registry lacks: recurrent layers, products, factorisations, transforms.

A multiplication and an addition are two FLOPs. Each formula takes the operands of a call by the names of the
operator's schema, and its result. Products are exact. Factorisations count what LAPACK's working note 41
counts; transforms the 5 n log2(n) that their literature counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

Operands: TypeAlias = Mapping[str, Any]
Formula: TypeAlias = Callable[[Operands, Any], int]

_GRID_TAPS = MappingProxyType({(4, 0): 4, (4, 2): 16, (5, 0): 8})
"""Values that `grid_sample` weighs at a place, by dimensions of the input and mode; the nearest is copied."""

_DISTANCE_FLOPS = 3
"""Of one coordinate of a pair: a difference, its power, a sum."""


def sparse_flops(left: Any, right: Any) -> int | None:
    """Return the FLOPs of a product with a sparse matrix: each of its elements meets a row of the other.

    Returns:
        `None` where neither is sparse, or both are: what two sparse ones cost depends on their data.
    """
    are_sparse = [isinstance(each, Tensor) and each.layout is not torch.strided for each in (left, right)]
    if are_sparse.count(True) != 1:
        return None
    sparse, dense, across = (left, right, -1) if are_sparse[0] else (right, left, 0)
    columns = dense.shape[across] if dense.dim() > 1 else 1
    return 2 * _stored_elements(sparse) * int(columns)


def _elements(tensor: Tensor) -> int:
    return tensor.numel()


def _stored_elements(sparse: Tensor) -> int:
    values = sparse._values() if sparse.layout is torch.sparse_coo else sparse.values()  # noqa: SLF001 (uncoalesced too)
    return values.numel()


def _by_width(matrix: str) -> Formula:
    """Return the formula of a product that sums over the last dimension of an operand."""
    return lambda given, result: 2 * _elements(result) * int(given[matrix].shape[-1])


def _twice_elements(operand: str) -> Formula:
    return lambda given, _: 2 * _elements(given[operand])


def _outer_product(given: Operands, _: Any) -> int:
    return 2 * _elements(given["vec1"]) * _elements(given["vec2"])


def _summed_batches(given: Operands, _: Any) -> int:
    return 2 * _elements(given["batch1"]) * int(given["batch2"].shape[-1])


def _grouped_product(given: Operands, _: Any) -> int:
    """Return the FLOPs of groups of rows, of columns or of what is summed over: a row meets one matrix."""
    left, right = given["self"], given["mat2"]
    groups = int(left.shape[0]) if left.dim() == right.dim() == 3 else 1  # noqa: PLR2004 (matrices in a batch)
    return 2 * groups * int(left.shape[-2]) * int(left.shape[-1]) * int(right.shape[-1])


def _convolution(given: Operands, result: Any) -> int:
    """Return 2 FLOPs for each element of the result and of the window of a filter."""
    return 2 * _elements(result) * int(prod(given["weight"].shape[1:]))


def _transposed_convolution(given: Operands, _: Any) -> int:
    """Return 2 FLOPs for each element of the input and of the window of a filter."""
    return 2 * _elements(given["self"]) * int(prod(given["weight"].shape[1:]))


def _convolution_of_steps(given: Operands, result: Any) -> int:
    """Return the FLOPs of `conv_tbc`: (T, B, C) with a weight of (K, C, C')."""
    return 2 * _elements(result) * int(prod(given["weight"].shape[:2]))


def _recurrent(products: int, weights: Callable[[Operands], Sequence[Tensor]]) -> Formula:
    """Return the formula of recurrent layers: each token meets each weight in `products` products."""

    def flops(given: Operands, _: Any) -> int:
        matrices = (each for each in weights(given) if each.dim() > 1)
        return 2 * products * _tokens(given) * sum(each.numel() for each in matrices)

    return flops


def _recurrent_backward(given: Operands, result: Any) -> int:
    """Return the FLOPs of gradients of inputs and states, and of weights where they are asked for."""
    products = 1 + bool(given["output_mask"][3])
    return _recurrent(products, _listed_weights)(given, result)


def _tokens(given: Operands) -> int:
    return prod(given["input"].shape[:-1])


def _listed_weights(given: Operands) -> Sequence[Tensor]:
    weights: Sequence[Tensor] = given["weight"]
    return weights


def _weights_of_a_layer(given: Operands) -> Sequence[Tensor]:
    return given["weight0"], given["weight1"]


def _weights_of_a_layer_backward(given: Operands) -> Sequence[Tensor]:
    return given["weight1"], given["weight2"]


def _trilinear(given: Operands, _: Any) -> int:
    """Return the FLOPs of two products, as torch makes them: the third factor joins that of the others.

    Before it does, that is summed over what the third has not.
    """
    factors = [_expanded(given[f"i{each}"], given[f"expand{each}"]) for each in (1, 2, 3)]
    first, second, third = factors
    both = [max(sizes) for sizes in zip(first, second, strict=True)]
    lacking = set(given["expand3"]) & set(given["sumdim"])
    left = [1 if dim in lacking else size for dim, size in enumerate(both)]
    return 2 * prod(both) + 2 * prod(max(sizes) for sizes in zip(left, third, strict=True))


def _expanded(factor: Tensor, dims: Sequence[int]) -> list[int]:
    sizes = [int(size) for size in factor.shape]
    for dim in dims:
        sizes.insert(dim, 1)
    return sizes


def _distances(given: Operands, _: Any) -> int:
    """Return the FLOPs of distances between rows of `x1` (…, P, M) and `x2` (…, R, M)."""
    one, other = given["x1"], given["x2"]
    batch: int = prod(torch.broadcast_shapes(one.shape[:-2], other.shape[:-2]))
    return _DISTANCE_FLOPS * batch * int(one.shape[-2]) * int(other.shape[-2]) * int(one.shape[-1])


def _distances_by_product(given: Operands, result: Any) -> int:
    """Return the FLOPs of one product of rows, each with its squared norm and a one."""
    return 2 * _elements(result) * (int(given["x1"].shape[-1]) + 2)


def _own_distances(given: Operands, _: Any) -> int:
    rows, width = given["self"].shape
    return _DISTANCE_FLOPS * (int(rows) * (int(rows) - 1) // 2) * int(width)


def _fourier(complex_share: float, sizes: str) -> Formula:
    """Return the formula of Fourier transforms: 5 n log2(n) each, half of it where one side is real.

    Args:
        complex_share: 1 for complex numbers on both sides, 0.5 otherwise.
        sizes: `self` or `result`: the side that has all n numbers.
    """

    def flops(given: Operands, result: Any) -> int:
        whole = result if sizes == "result" else given["self"]
        points = prod(int(whole.shape[dim]) for dim in given["dim"])
        each = 5 * complex_share * points * math.log2(points) if points else 0.0
        return round(each) * (_elements(whole) // max(points, 1))

    return flops


def _batch(matrix: Tensor) -> int:
    return prod(matrix.shape[:-2])


def _eliminations(rows: int, columns: int) -> int:
    """Return the FLOPs of an LU factorisation: a pivot divides the rows below, and updates what is left."""
    pivots = range(min(rows, columns))
    return sum((rows - pivot - 1) * (1 + 2 * (columns - pivot - 1)) for pivot in pivots)


def _lu(matrix: str) -> Formula:
    return lambda given, _: _batch(given[matrix]) * _eliminations(*map(int, given[matrix].shape[-2:]))


def _solution(given: Operands, result: Any) -> int:
    """Return the FLOPs of an LU factorisation, and of two triangular solves a right-hand side."""
    return _lu("A")(given, result) + 2 * int(given["A"].shape[-1]) * _elements(result[0])


def _cholesky(matrix: str) -> Formula:
    def flops(given: Operands, _: Any) -> int:
        size = int(given[matrix].shape[-1])
        return _batch(given[matrix]) * (size * (size + 1) * (2 * size + 1) // 6)

    return flops


def _cholesky_inverse(given: Operands, _: Any) -> int:
    size = int(given["self"].shape[-1])
    return _batch(given["self"]) * ((4 * size**3 + 3 * size**2 + 5 * size) // 6)


def _triangular(solves: int, solution: Callable[[Any], Tensor] = lambda result: result) -> Formula:
    """Return the formula of triangular solves: n² FLOPs each a right-hand side, of n numbers."""
    return lambda _, result: solves * int(solution(result).shape[-2]) * solution(result).numel()


def _first(result: Any) -> Tensor:
    tensor: Tensor = result[0]
    return tensor


def _reflections(given: Operands, matrix: str = "self") -> int:
    """Return the leading terms of Householder's factorisation of (m, n): 2 m n² - 2 n³ / 3 for m >= n."""
    large, small = sorted(map(int, given[matrix].shape[-2:]), reverse=True)
    return _batch(given[matrix]) * ((6 * large * small**2 - 2 * small**3) // 3)


def _orthogonal(rows: int, columns: int, reflectors: int) -> int:
    """Return the FLOPs of Q of (m, n) from k reflectors: 4 m n k - 2 (m + n) k² + 4 k³ / 3."""
    return (12 * rows * columns * reflectors - 6 * (rows + columns) * reflectors**2 + 4 * reflectors**3) // 3


def _qr(given: Operands, result: Any) -> int:
    made, (rows, columns) = result[0], map(int, given["A"].shape[-2:])
    wide = int(made.shape[-1]) if made.numel() else 0  # no Q is asked for
    q_flops = _orthogonal(rows, wide, min(rows, columns)) if wide else 0
    return _reflections(given, "A") + _batch(given["A"]) * q_flops


def _householder_product(given: Operands, _: Any) -> int:
    rows, columns = map(int, given["input"].shape[-2:])
    return _batch(given["input"]) * _orthogonal(rows, columns, int(given["tau"].shape[-1]))


def _samples(given: Operands, result: Any) -> int:
    """Return the FLOPs of `grid_sample`: each element of the result weighs the values around its place."""
    return 2 * _taps(given) * _elements(result)


def _samples_backward(given: Operands, _: Any) -> int:
    """Return the FLOPs of gradients: of the input, and of each coordinate of a place, a product a value."""
    to_input, to_grid = given.get("output_mask", (True, True))
    gradients = int(to_input) + int(to_grid) * (int(given["input"].dim()) - 2)
    return 2 * _taps(given) * _elements(given["grad_output"]) * gradients


def _taps(given: Operands) -> int:
    return _GRID_TAPS.get((given["input"].dim(), given["interpolation_mode"]), 0)


def _sampled_product(given: Operands, _: Any) -> int:
    return 2 * _stored_elements(given["self"]) * int(given["mat1"].shape[-1])


def _attention(given: Operands, _: Any) -> int:
    """Return those of Q·Kᵀ and P·V. Shapes: query (B, H, S, D), key (B, Hkv, T, D), value (B, Hkv, T, Dv)."""
    scores, scores_of_values = _scores(given)
    return scores + scores_of_values


def _attention_backward(given: Operands, _: Any) -> int:
    """Return those of scores, dQ and dK over D, dP and dV over Dv, as torch counts the kernels of CUDA."""
    scores, scores_of_values = _scores(given)
    return 3 * scores + 2 * scores_of_values


def _scores(given: Operands) -> tuple[int, int]:
    query, key, value = given["query"], given["key"], given["value"]
    rows = 2 * prod(query.shape[:-1]) * key.shape[-2]
    return rows * query.shape[-1], rows * value.shape[-1]


FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {
        # products
        "mv": _twice_elements("self"),
        "addmv": _twice_elements("mat"),
        "dot": _twice_elements("self"),
        "vdot": _twice_elements("self"),
        "addr": _outer_product,
        "addbmm": _summed_batches,
        "linear": _by_width("input"),
        "mkldnn_linear": _by_width("self"),
        "_addmm_activation": _by_width("mat1"),
        "_int_mm": _by_width("self"),
        "_scaled_mm_v2": _by_width("self"),
        "_weight_int8pack_mm": _by_width("self"),
        "_weight_int4pack_mm": _by_width("self"),
        "_weight_int4pack_mm_for_cpu": _by_width("self"),
        "_mixed_dtypes_linear": _by_width("input"),
        "_dyn_quant_matmul_4bit": _by_width("inp"),
        "_grouped_mm": _grouped_product,
        "_scaled_grouped_mm": _grouped_product,
        "_scaled_grouped_mm_v2": _grouped_product,
        "_trilinear": _trilinear,
        "sparse_sampled_addmm": _sampled_product,
        # attention
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "_scaled_dot_product_fused_attention_overrideable": _attention,
        "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
        "_scaled_dot_product_attention_math_for_mps": _attention,
        # convolutions other than `convolution`
        "mkldnn_convolution": _convolution,
        "cudnn_convolution_relu": _convolution,
        "cudnn_convolution_add_relu": _convolution,
        "_conv_depthwise2d": _convolution,
        "conv_depthwise3d": _convolution,
        "slow_conv3d_forward": _convolution,
        "slow_conv_dilated2d": _convolution,
        "slow_conv_dilated3d": _convolution,
        "cudnn_convolution_transpose": _transposed_convolution,
        "slow_conv_transpose2d": _transposed_convolution,
        "slow_conv_transpose3d": _transposed_convolution,
        "conv_tbc": _convolution_of_steps,
        # recurrent layers
        "mkldnn_rnn_layer": _recurrent(1, _weights_of_a_layer),
        "mkldnn_rnn_layer_backward": _recurrent(2, _weights_of_a_layer_backward),
        "_cudnn_rnn": _recurrent(1, _listed_weights),
        "_cudnn_rnn_backward": _recurrent_backward,
        "miopen_rnn": _recurrent(1, _listed_weights),
        "miopen_rnn_backward": _recurrent_backward,
        # distances, transforms, places
        "_cdist_forward": _distances,
        "_cdist_backward": _distances,
        "_euclidean_dist": _distances_by_product,
        "_pdist_forward": _own_distances,
        "_pdist_backward": _own_distances,
        "_fft_c2c": _fourier(1.0, "self"),
        "_fft_r2c": _fourier(0.5, "self"),
        "_fft_c2r": _fourier(0.5, "result"),
        "grid_sampler_2d": _samples,
        "grid_sampler_3d": _samples,
        "grid_sampler_2d_backward": _samples_backward,
        "grid_sampler_3d_backward": _samples_backward,
        # factorisations and solves
        "linalg_lu": _lu("A"),
        "linalg_lu_factor_ex": _lu("A"),
        "_linalg_det": _lu("A"),
        "_linalg_slogdet": _lu("A"),
        "_linalg_solve_ex": _solution,
        "linalg_inv_ex": _solution,
        "linalg_lu_solve": _triangular(2),
        "linalg_cholesky_ex": _cholesky("self"),
        "cholesky": _cholesky("self"),
        "cholesky_inverse": _cholesky_inverse,
        "cholesky_solve": _triangular(2),
        "_cholesky_solve_helper": _triangular(2),
        "linalg_solve_triangular": _triangular(1),
        "triangular_solve": _triangular(1, _first),
        "geqrf": lambda given, _: _reflections(given),
        "linalg_qr": _qr,
        "linalg_householder_product": _householder_product,
    }
)
"""Formulas by the names of torch's operators, without their overloads."""
