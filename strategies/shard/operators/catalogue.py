"""The table of operators: what describes each of them, and how a command line gives its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

from strategies.shard.candidates.operation import Operation
from strategies.shard.operators.convolution_and_embedding import conv2d, embedding
from strategies.shard.operators.matrix_products import addmm, bmm, linear, matmul
from strategies.shard.operators.norms import batch_norm, layer_norm
from strategies.shard.operators.pointwise import elementwise, softmax, sum_
from strategies.shard.operators.views import getitem, permute, split, transpose, view

ArgumentKind: TypeAlias = Literal["sizes", "several sizes", "number", "index", "present", "absent"]
"""A tuple of integers, several of them, an integer, an index, or a switch that means True or False."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a description, as a command line gives it.

    Fields:
        flag: name on the command line, `--input`.
        metavar: placeholder for its value; empty for switches.
        default: its value without the flag; `None` where the flag is required.
    """

    flag: str
    kind: ArgumentKind
    metavar: str
    help: str = "shape"
    default: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorRow:
    """An operator of the table.

    Fields:
        describe: makes its description from sizes and options.
        summary: one line on what it computes.
        arguments: how a command line gives the arguments of `describe`, by their names.
        has_modes: whether ColossalAI has a set of candidates of its own for it.
    """

    describe: Callable[..., Operation]
    summary: str
    arguments: Mapping[str, Argument]
    has_modes: bool = True


def _operator(describe: Callable[..., Operation], summary: str, **arguments: Argument) -> OperatorRow:
    return OperatorRow(describe=describe, summary=summary, arguments=MappingProxyType(arguments))


def _follower(describe: Callable[..., Operation], summary: str, **arguments: Argument) -> OperatorRow:
    """Return an operator that takes the candidates of its producer in ColossalAI."""
    return replace(_operator(describe, summary, **arguments), has_modes=False)


_INPUT = Argument("--input", "sizes", "D0,D1")
_NO_BIAS = Argument("--no-bias", "absent", "", "without a bias")

OPERATORS: Mapping[str, OperatorRow] = {
    "linear": _operator(
        linear, "output = input x weight^T + bias",
        input_shape=Argument("--input", "sizes", "B,K", "shape, batch dimensions first"),
        out_features=Argument("--out", "number", "N", "output features"), bias=_NO_BIAS),
    "matmul": _operator(
        matmul, "output = input @ other, with or without batch dimensions",
        input_shape=Argument("--input", "sizes", "B,I,K"), other_shape=Argument("--other", "sizes", "K,J")),
    "bmm": _operator(
        bmm, "output = input @ other, a product of matrices a batch",
        input_shape=Argument("--input", "sizes", "B,I,K"), other_shape=Argument("--other", "sizes", "B,K,J")),
    "addmm": _operator(
        addmm, "output = input + mat1 @ mat2", input_shape=Argument("--input", "sizes", "N"),
        mat1_shape=Argument("--mat1", "sizes", "M,K"), mat2_shape=Argument("--mat2", "sizes", "K,N")),
    "conv2d": _operator(
        conv2d, "output = convolution of input with weight, + bias",
        input_shape=Argument("--input", "sizes", "B,CIN,H,W"),
        weight_shape=Argument("--weight", "sizes", "COUT,CIN,KH,KW"),
        stride=Argument("--stride", "number", "N", "stride of the kernel", 1),
        padding=Argument("--padding", "number", "N", "zeros on each side", 0),
        dilation=Argument("--dilation", "number", "N", "distance of the kernel's taps", 1),
        groups=Argument("--groups", "number", "N", "groups of channels", 1), bias=_NO_BIAS),
    "embedding": _operator(
        embedding, "output = the rows of weight that input asks for",
        input_shape=Argument("--input", "sizes", "B,S", "shape of the integers"),
        num_embeddings=Argument("--rows", "number", "V", "size of the vocabulary"),
        embedding_dim=Argument("--width", "number", "D", "width of a row")),
    "layer_norm": _operator(
        layer_norm, "output = input normalised over the last dimensions, x weight + bias",
        input_shape=Argument("--input", "sizes", "B,S,D"),
        normalized_shape=Argument("--normalized", "sizes", "D", "the last dimensions"), bias=_NO_BIAS),
    "batch_norm": _operator(
        batch_norm, "output = input normalised over all but the channels, x weight + bias",
        input_shape=Argument("--input", "sizes", "B,C,H,W")),
    "view": _follower(
        view, "the same elements in another shape", input_shape=_INPUT,
        shape=Argument("--shape", "sizes", "E0,E1", "the other shape; one size may be -1")),
    "permute": _follower(
        permute, "dimensions in another order", input_shape=_INPUT,
        dims=Argument("--dims", "sizes", "1,0", "the order")),
    "transpose": _follower(
        transpose, "two dimensions change places", input_shape=_INPUT,
        dim0=Argument("--dim0", "number", "N", "one dimension"),
        dim1=Argument("--dim1", "number", "N", "the other")),
    "split": _follower(
        split, "one dimension cut into pieces", input_shape=_INPUT,
        sizes=Argument("--sizes", "sizes", "N,M", "sizes of the pieces"),
        dim=Argument("--dim", "number", "N", "the dimension", 0)),
    "softmax": _follower(
        softmax, "exponentials that sum to one along a dimension", input_shape=_INPUT,
        dim=Argument("--dim", "number", "N", "the dimension", -1)),
    "sum": _follower(
        sum_, "sum over some dimensions", input_shape=_INPUT,
        dims=Argument("--dims", "sizes", "N,M", "the dimensions"),
        keepdim=Argument("--keepdim", "present", "", "keep them as 1")),
    "getitem": _follower(
        getitem, "input[index]", input_shape=_INPUT,
        index=Argument("--index", "index", "0,:4,...", "what stands between the brackets")),
    "elementwise": _follower(
        elementwise, "a function of single elements",
        shapes=Argument("--input", "several sizes", "D0,D1", "shape, once for each operand; they broadcast")),
}  # fmt: skip
