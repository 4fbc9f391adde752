"""The operators that the show command knows: their options, and their candidates."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from strategies.shard.candidates.candidate import Candidate
from strategies.shard.operators import (
    addmm,
    batch_norm,
    bmm,
    conv2d,
    elementwise,
    embedding,
    getitem,
    layer_norm,
    linear,
    matmul,
    permute,
    softmax,
    split,
    transpose,
    view,
)
from strategies.shard.operators import sum as sum_
from strategies.shard.show.options import Option, index, sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """An operator on the command line.

    Fields:
        summary: one line of help.
        options: those that only this operator has.
        candidates: its candidates for parsed options.
        has_modes: whether the peer has a set of its own, so that there is a `--mode`.
    """

    summary: str
    options: tuple[Option, ...]
    candidates: Callable[[Namespace], tuple[Candidate, ...]]
    has_modes: bool = False


def _shape(flag: str, metavar: str, help_: str = "shape") -> Option:
    return Option(flag=flag, help=help_, metavar=metavar, type=sizes)


def _number(flag: str, metavar: str, help_: str, default: int | None = None) -> Option:
    return Option(flag=flag, help=help_, metavar=metavar, default=default)


_INPUT = _shape("--input", "D0,D1")
_NO_BIAS = Option(flag="--no-bias", help="without a bias")

OPERATORS: Mapping[str, Shown] = {
    "linear": Shown(
        summary="output = input x weight^T + bias",
        options=(
            _shape("--input", "B,K", "shape, batch dimensions first"),
            _number("--out", "N", "output features"),
            _NO_BIAS,
        ),
        candidates=lambda given: linear.candidates(
            given.input, given.out, given.mesh, given.mode, bias=not given.no_bias
        ),
        has_modes=True,
    ),
    "matmul": Shown(
        summary="output = input @ other, with or without batch dimensions",
        options=(_shape("--input", "B,I,K"), _shape("--other", "K,J")),
        candidates=lambda given: matmul.candidates(given.input, given.other, given.mesh, given.mode),
        has_modes=True,
    ),
    "bmm": Shown(
        summary="output = input @ other, a product of matrices a batch",
        options=(_shape("--input", "B,I,K"), _shape("--other", "B,K,J")),
        candidates=lambda given: bmm.candidates(given.input, given.other, given.mesh, given.mode),
        has_modes=True,
    ),
    "addmm": Shown(
        summary="output = input + mat1 @ mat2",
        options=(_shape("--input", "N"), _shape("--mat1", "M,K"), _shape("--mat2", "K,N")),
        candidates=lambda given: addmm.candidates(
            given.input, given.mat1, given.mat2, given.mesh, given.mode
        ),
        has_modes=True,
    ),
    "conv2d": Shown(
        summary="output = convolution of input with weight, + bias",
        options=(
            _shape("--input", "B,CIN,H,W"),
            _shape("--weight", "COUT,CIN,KH,KW"),
            _number("--stride", "N", "of the kernel", 1),
            _number("--padding", "N", "zeros on each side", 0),
            _number("--dilation", "N", "of the kernel", 1),
            _number("--groups", "N", "of channels", 1),
            _NO_BIAS,
        ),
        candidates=lambda given: conv2d.candidates(
            given.input,
            given.weight,
            given.mesh,
            given.mode,
            bias=not given.no_bias,
            stride=given.stride,
            padding=given.padding,
            dilation=given.dilation,
            groups=given.groups,
        ),
        has_modes=True,
    ),
    "embedding": Shown(
        summary="output = the rows of weight that input asks for",
        options=(
            _shape("--input", "B,S", "shape of the integers"),
            _number("--rows", "V", "size of the vocabulary"),
            _number("--width", "D", "of a row"),
        ),
        candidates=lambda given: embedding.candidates(
            given.input, given.rows, given.width, given.mesh, given.mode
        ),
        has_modes=True,
    ),
    "layer_norm": Shown(
        summary="output = input normalised over the last dimensions, x weight + bias",
        options=(_shape("--input", "B,S,D"), _shape("--normalized", "D", "the last dimensions"), _NO_BIAS),
        candidates=lambda given: layer_norm.candidates(
            given.input, given.normalized, given.mesh, given.mode, bias=not given.no_bias
        ),
        has_modes=True,
    ),
    "batch_norm": Shown(
        summary="output = input normalised over all but the channels, x weight + bias",
        options=(_shape("--input", "B,C,H,W"),),
        candidates=lambda given: batch_norm.candidates(given.input, given.mesh, given.mode),
        has_modes=True,
    ),
    "view": Shown(
        summary="the same elements in another shape",
        options=(_INPUT, _shape("--shape", "E0,E1", "the other shape; one size may be -1")),
        candidates=lambda given: view.candidates(given.input, given.shape, given.mesh),
    ),
    "permute": Shown(
        summary="dimensions in another order",
        options=(_INPUT, _shape("--dims", "1,0", "the order")),
        candidates=lambda given: permute.candidates(given.input, given.dims, given.mesh),
    ),
    "transpose": Shown(
        summary="two dimensions change places",
        options=(_INPUT, _number("--dim0", "N", "one"), _number("--dim1", "N", "the other")),
        candidates=lambda given: transpose.candidates(given.input, given.dim0, given.dim1, given.mesh),
    ),
    "split": Shown(
        summary="one dimension cut into pieces",
        options=(
            _INPUT,
            _shape("--sizes", "N,M", "of the pieces"),
            _number("--dim", "N", "the dimension", 0),
        ),
        candidates=lambda given: split.candidates(given.input, given.sizes, given.mesh, dim=given.dim),
    ),
    "softmax": Shown(
        summary="exponentials that sum to one along a dimension",
        options=(_INPUT, _number("--dim", "N", "the dimension", -1)),
        candidates=lambda given: softmax.candidates(given.input, given.dim, given.mesh),
    ),
    "sum": Shown(
        summary="over some dimensions",
        options=(
            _INPUT,
            _shape("--dims", "N,M", "the dimensions"),
            Option(flag="--keepdim", help="keep them as 1"),
        ),
        candidates=lambda given: sum_.candidates(given.input, given.dims, given.mesh, keepdim=given.keepdim),
    ),
    "getitem": Shown(
        summary="input[index]",
        options=(
            _INPUT,
            Option(flag="--index", help="what stands between the brackets", metavar="0,:4,...", type=index),
        ),
        candidates=lambda given: getitem.candidates(given.input, given.index, given.mesh),
    ),
    "elementwise": Shown(
        summary="a function of single elements",
        options=(
            Option(
                flag="--input",
                help="shape, once for each operand; they broadcast",
                metavar="D0,D1",
                type=sizes,
                is_repeated=True,
            ),
        ),
        # which function is all the same to placements and communication
        candidates=lambda given: elementwise.candidates(given.input, given.mesh, function=torch.add),
    ),
}
