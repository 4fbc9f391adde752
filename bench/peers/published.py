"""Numbers that others have published, next to what is counted here, to the byte or the FLOP.

Each row counts in their setting, on tensors without memory or, where it is small, by a real step. Every byte
of ours has a name: the parts are arithmetic of the setting, and their sum has to be what was counted. Where
theirs is arithmetic too, the difference is a part. Where it is the reading of a tool, the remark says what it
has more.

    python -m bench.peers --part published [--only C1 C2 C6 C10 C11 C15]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench.output import parser, publish
from bench.peers.head_loss import ByHand, HeadLoss
from bench.peers.split_backward import Block, Stage, is_made, recorder_of, step, variants
from bench.table import table_of
from strategies.chunk.planning.chunk_plan import ChunkPlanner
from strategies.step.ledger import Ledger

_BF16, _FP32, _INT64 = 2, 4, 8
_WIDTH = 1024  # of Qwen3-0.6B


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One number of others, and ours.

    Fields:
        row: its name on the list of published numbers.
        source: where it was published.
        setting: sizes.
        quantity: what is counted, with its unit.
        theirs: as published.
        theirs_number: the same where it is exact; `None` where it is a reading, a time or a limit.
        ours: counted here.
        parts: what ours consists of, by name, from the sizes alone.
        remark: what the difference is.
    """

    row: str
    source: str
    setting: str
    quantity: str
    theirs: str
    theirs_number: int | None = None
    ours: int
    parts: Mapping[str, int]
    remark: str = ""

    @property
    def is_explained(self) -> bool:
        """Say whether the parts sum up to what was counted."""
        return sum(self.parts.values()) == self.ours


def split_backward() -> Iterator[Published]:
    """Yield C1: what zero bubble recomputes of a Llama block, by torch's checkpoint and by ours."""
    found = {}
    for way, is_split in (
        ("none", False),
        ("full, torch", False),
        ("full, torch", True),
        ("full, hold", True),
    ):
        torch.manual_seed(0)
        stage = Stage([Block(64, 0.0) for _ in range(4)])
        x = torch.randn(2, 32, 64)
        found[way, is_split] = step(way, variants()[way], stage, x, is_split=is_split)[0].flops
    backward = found["none", False]
    again = found["full, torch", False] - backward
    groups = len([*Block(64, 0.0).parameters()])
    for way, forwards in (("full, torch", 1 + groups), ("full, hold", 1)):
        yield Published(
            row="C1",
            source="torchtitan#773",
            setting="four Llama blocks, 64 wide, backward in two parts",
            quantity=f"FLOPs of backward, {way}",
            theirs="13 for 128 tokens/s with full AC and zero bubble",
            ours=found[way, True],
            parts={"backward": backward, f"{forwards} x forward": forwards * again},
            remark=f"torch recomputes once for the input and once for each of {groups} parameters",
        )


def offloaded_inputs() -> Iterator[Published]:
    """Yield C2: the inputs of layers, which offloading moves to the host."""
    layers, tokens = 8, 8192
    alive, parts = _of_qwen3(layers, tokens, "layers")
    yield Published(
        row="C2",
        source="transformers#48444",
        setting="Qwen3 without head, 8 layers, 1,024 wide, 8,192 tokens, bf16",
        quantity="bytes alive after forward, layers checkpointed",
        theirs="offloading inputs of layers frees 128.0 of 194.1 MB",
        theirs_number=layers * tokens * _WIDTH * _BF16,
        ours=alive,
        parts=parts,
        remark="theirs is the first part, and the rest of theirs includes weights",
    )


def wrapped_children() -> Iterator[Published]:
    """Yield C6: what is saved where children of layers are checkpointed in place of layers."""
    for what in ("children", "layers"):
        is_theirs = what == "children"
        alive, parts = _of_qwen3(28, 131_072, what)
        yield Published(
            row="C6",
            source="accelerate#4172",
            setting="Qwen3-0.6B without head, 131,072 tokens, bf16",
            quantity=f"bytes alive after forward, {what} checkpointed",
            theirs="29 of 40.8 GB between children of layers" if is_theirs else "nothing between children",
            ours=alive,
            parts=parts,
            remark="theirs is read to two digits: four inputs of 28 layers are 28 GiB" if is_theirs else "",
        )


def _of_qwen3(layers: int, tokens: int, what: str) -> tuple[int, dict[str, int]]:
    """Return the bytes alive after forward of Qwen3, and what they are.

    Args:
        layers, tokens: sizes.
        what: `layers` or `children` of layers are checkpointed.
    """
    head_dim, inputs = 128, 4 if what == "children" else 1
    config = transformers.Qwen3Config(
        hidden_size=_WIDTH,
        num_hidden_layers=layers,
        intermediate_size=3 * _WIDTH,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=head_dim,
        vocab_size=_WIDTH,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    stream = tokens * _WIDTH * _BF16
    return alive_bytes(partial(_qwen3, config, what), tokens), {
        f"inputs of layers, {inputs} each": layers * inputs * stream,
        "last layer and output": 2 * stream,
        "final norm, in fp32": tokens * _WIDTH * _FP32 + tokens * _FP32,
        "rotations": 2 * tokens * head_dim * _BF16,
        "position ids": tokens * _INT64,
    }


def chunked_loss() -> Iterator[Published]:
    """Yield C10: head and loss of Llama-8B at 16k tokens, whole and in eight parts, and as planned."""
    tokens, width, vocabulary, parts = 16_384, 4096, 128_256, 8
    logits, hidden, head = (
        each * _FP32 for each in (tokens * vocabulary, tokens * width, width * vocabulary)
    )
    with torch.device("meta"):
        model = HeadLoss(width, vocabulary)
        given = torch.empty(1, tokens, width), torch.zeros(1, tokens, dtype=torch.long)
    planner = ChunkPlanner.of(model, given, training=True)
    plan = planner.plan(planner.unchunked_peak_bytes // parts)
    counted = {
        "whole": (HeadLoss, {"logits, their logarithms, a gradient": 3 * logits}),
        f"in {parts} parts": (
            ByHand,
            {
                "four tensors of a part's logits": 4 * logits // parts,
                "gradients of head and input": hidden + head,
            },
        ),
    }
    for way, (made, named) in counted.items():
        make = partial(made, width, vocabulary)
        yield Published(
            row="C10",
            source="ALST, arXiv:2506.13996",
            setting="head and loss, 16,384 x 4,096 x 128,256, fp32",
            quantity=f"peak of what is made, {way}",
            theirs="tiled loss saves more than 14 GiB",
            ours=peak_bytes(make, (1, tokens, width), (1, tokens), dtype=torch.float32),
            parts={**named, "loss and its gradient": 2 * _FP32},
            remark=f"chunk=budget needs {plan.predicted_peak_bytes:,} without the gradient of the head",
        )


def tiled_mlp() -> Iterator[Published]:
    """Yield C11: an MLP in four tiles of tokens, which costs bytes where there are few tokens."""
    width, inner, tiles = 4096, 12_288, 4
    weight = width * inner * _BF16
    theirs = {8192: "2,080 to 1,840 MB, 12 % less", 2048: "19 % more"}
    for tokens, published in theirs.items():
        whole, cut = tokens * inner * _BF16, tokens // tiles * inner * _BF16
        stream = tokens * width * _BF16
        values, gradients = (5, 3) if tokens > width else (2, 3)  # the peak is in the products or at the end
        for way, parts in (
            ("whole", {"values of the MLP": values * whole, "gradients of weights": gradients * weight}),
            (
                f"in {tiles} tiles",
                {"values of a tile": 5 * cut, "gradients of weights, two of a tile": 5 * weight},
            ),
        ):
            count = 1 if way == "whole" else tiles
            yield Published(
                row="C11",
                source="ms-swift#7090",
                setting=f"MLP 4,096 x 12,288, bf16, {tokens:,} tokens",
                quantity=f"peak of what is made, {way}",
                theirs=published,
                ours=peak_bytes(partial(_TiledMLP, width, inner, count), (1, tokens, width)),
                parts={**parts, "output and gradient of the input": 2 * stream},
                remark="theirs has weights and FSDP2's copies too; each tile makes gradients of weights",
            )


def layer_bytes() -> Iterator[Published]:
    """Yield C15: bytes that a layer saves, as Korthikanti et al. count them."""
    s, b, h, a = 64, 2, 128, 4
    stream, scores = s * b * h, a * s * s * b
    for way, formula in (("none", 34 * stream + 5 * scores), ("selective", 34 * stream)):
        one, two = (
            alive_bytes(partial(_layers, count, h, a, recomputes=way == "selective"), (s, b, h))
            for count in (1, 2)
        )
        yield Published(
            row="C15",
            source="Korthikanti et al. 2022, table 2",
            setting=f"a layer, s={s} b={b} h={h} a={a}, bf16 with dropout",
            quantity=f"bytes saved, recomputation: {way}",
            theirs="sbh(34 + 5as/h)" if way == "none" else "34sbh",
            theirs_number=formula,
            ours=two - one,
            parts={"formula": formula, "means and deviations of two norms": 4 * s * b * _BF16},
            remark="theirs leaves statistics of norms out",
        )


ROWS: Mapping[str, Callable[[], Iterator[Published]]] = {
    "C1": split_backward,
    "C2": offloaded_inputs,
    "C6": wrapped_children,
    "C10": chunked_loss,
    "C11": tiled_mlp,
    "C15": layer_bytes,
}


class _TiledMLP(nn.Module):
    """A gated MLP, checkpointed for each tile of the sequence where there are several."""

    def __init__(self, width: int, inner: int, tiles: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)
        self.tiles = tiles

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP of `x`, (B, S, D)."""
        if self.tiles == 1:
            return self._tile(x)
        return torch.cat(
            [checkpoint(self._tile, part, use_reentrant=False) for part in x.chunk(self.tiles, 1)], 1
        )

    def _tile(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return outputs


class _Layer(nn.Module):
    """A layer as Korthikanti et al. count it: dropout keeps a mask of one byte, attention is written out."""

    def __init__(self, width: int, heads: int, *, recomputes: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.recomputes = heads, recomputes

    def forward(self, x: Tensor) -> Tensor:
        """Return attention and MLP of `x`."""
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        if self.recomputes:
            mixed = checkpoint(self._core, q, k, v, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self._core(q, k, v)
        x = x + _dropped(self.proj(mixed))
        outputs: Tensor = x + _dropped(self.down(functional.gelu(self.up(self.norms[1](x)))))
        return outputs

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention of heads, each (S, B * H, D / H)."""
        s, b, width = q.shape
        q, k, v = (each.reshape(s, b * self.heads, width // self.heads).transpose(0, 1) for each in (q, k, v))
        scores = _dropped(torch.bmm(q, k.transpose(1, 2)).softmax(-1))
        return torch.bmm(scores, v).transpose(0, 1).reshape(s, b, width)


def _dropped(x: Tensor) -> Tensor:
    outputs: Tensor = torch.native_dropout(x, 0.1, True)[0]
    return outputs


def _layers(count: int, width: int, heads: int, *, recomputes: bool) -> nn.Module:
    return nn.Sequential(*(_Layer(width, heads, recomputes=recomputes) for _ in range(count)))


_NO_MASK = {"full_attention": None}
"""Without memory nobody can see that a mask is causal alone, and one of tokens x tokens would be made."""


class _Hidden(nn.Module):
    """A model of transformers without head, of token ids."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return hidden states."""
        outputs: Tensor = self.model(input_ids=tokens, attention_mask=_NO_MASK).last_hidden_state
        return outputs


def _qwen3(config: Any, what: str) -> nn.Module:
    """Return Qwen3 with a checkpoint around each layer, or around each child of each."""
    model = transformers.Qwen3Model(config)
    for layer in model.layers:
        for each in [*layer.children()] if what == "children" else [layer]:
            each.forward = partial(checkpoint, each.forward, use_reentrant=False)
    return _Hidden(model)


def alive_bytes(make: Callable[[], nn.Module], shape: int | tuple[int, ...]) -> int:
    """Return the bytes that are alive when forward has returned, without parameters and input.

    Args:
        make: returns the model.
        shape: of the input; a number is one of tokens.
    """
    with _recorded(make, [shape], torch.bfloat16) as (ledger, _):
        return ledger.total(is_made)


def peak_bytes(
    make: Callable[[], nn.Module], *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
) -> int:
    """Return the most bytes of what forward and backward make, gradients included.

    Args:
        make: returns the model.
        shapes: of its inputs; the second one is that of labels.
        dtype: of parameters and input.
    """
    with _recorded(make, shapes, dtype) as (ledger, outputs):
        outputs.backward(torch.empty_like(outputs))
        del outputs
    return ledger.peak(is_made).nbytes


@contextmanager
def _recorded(
    make: Callable[[], nn.Module], shapes: Sequence[int | tuple[int, ...]], dtype: torch.dtype
) -> Iterator[tuple[Ledger, Tensor]]:
    """Give the ledger of a forward without memory, and its outputs; arguments are those of `peak_bytes`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode():
            model, given = make(), _input(shapes[0])
            given += [torch.zeros(each, dtype=torch.long) for each in shapes[1:]]
            with recorder_of([*model.parameters(), *model.buffers(), *given]) as recorder:
                yield recorder.ledger, model(*given)
    finally:
        torch.set_default_dtype(before)


def _input(shape: int | tuple[int, ...]) -> list[Tensor]:
    if isinstance(shape, int):
        return [torch.zeros(1, shape, dtype=torch.long)]
    return [torch.empty(shape, requires_grad=True)]


def main(words: Sequence[str]) -> int:
    """Count, print the table, write the JSON; return 1 where a byte or FLOP of ours has no name."""
    arguments = parser(__doc__, "published", "peers")
    arguments.add_argument("--only", nargs="+", choices=ROWS, default=[*ROWS])
    chosen = arguments.parse_args(words)
    torch.set_num_threads(1)
    found = [each for name in chosen.only for each in ROWS[name]()]
    table = table_of(
        found,
        {
            "row": "row",
            "quantity": "quantity",
            "theirs": "theirs",
            "ours": "ours:,",
            "parts": lambda each: ", ".join(f"{name} {number:,}" for name, number in each.parts.items()),
            "explained": "is_explained",
        },
    )
    publish(table, chosen.out, protocol={"rows": chosen.only}, results=found)
    return int(not all(each.is_explained for each in found))
