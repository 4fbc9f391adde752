"""Random changes of programs: what people do to a model, its inputs and torch between two calls."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_leaves

from strategies.regions.blocks import plain_class
from tests.matrix.stale.programs import B, Block, D, S

_MODES: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@dataclass(kw_only=True, slots=True)
class Session:
    """A model between two calls, and how it is called next.

    Fields:
        model: the model, below what wraps it.
        call: what is called.
        aliases: both inputs are one tensor.
        rows, length: shape of the inputs, without their features.
        options: keyword arguments.
        wants_inputs: inputs require gradients.
        layout: how inputs lie in memory.
        mode: grad mode, by name.
        autocasts: run under autocast in bf16.
        scale: factor of all parameters in `functional_call`; `None` for a plain call. Blocks that checkpoint
            themselves are called plainly.
        bound: share of the largest value by which a buffer may differ so far.
    """

    model: Any
    call: Any
    aliases: bool = False
    rows: int = B
    length: int = S
    options: dict[str, Any] = field(default_factory=dict)
    wants_inputs: bool = False
    layout: str = "dense"
    mode: str = "grad"
    autocasts: bool = False
    scale: float | None = None
    bound: float = 0.0

    def results(self) -> dict[str, Any]:
        """Return what one call gives and leaves behind, by name."""
        x, y = self._inputs()
        self.model.zero_grad()
        torch.manual_seed(7)
        with ExitStack() as stack:
            stack.enter_context(_MODES[self.mode]())
            if self.autocasts:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            outputs = self._called(x, y)
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        wanting = [leaf for leaf in leaves if leaf.requires_grad]
        if wanting:
            torch.stack([leaf.double().square().mean() for leaf in wanting]).sum().backward()  # type: ignore[no-untyped-call]
        found: dict[str, Any] = {"outputs": outputs, "input gradients": (x.grad, y.grad)}
        found |= {f"{name}.grad": whole(each.grad) for name, each in self.model.named_parameters()}
        return found | {name: each.clone() for name, each in self.model.named_buffers()}

    def _called(self, x: Tensor, y: Tensor) -> Any:
        # a checkpoint of a block would recompute with the weights that `functional_call` has put back
        if self.scale is None or any(getattr(each, "checkpoints", False) for each in self.model.layers):
            return self.call(x, y, **self.options)
        parameters = {name: each * self.scale for name, each in self.model.named_parameters()}
        return functional_call(self.model, parameters, (x, y), self.options)

    def _inputs(self) -> tuple[Tensor, Tensor]:
        dtype = self.model.head.weight.dtype
        both = torch.randn(2, self.rows, self.length, D, generator=torch.Generator().manual_seed(3)).to(dtype)
        if self.layout == "strided":
            both = both.transpose(1, 2).contiguous().transpose(1, 2)
        x, y = both[0], both[1]
        if self.layout == "apart" or self.wants_inputs:
            x, y = x.clone(), y.clone()
        if self.wants_inputs:
            x, y = x.requires_grad_(), y.requires_grad_()
        return (x, x) if self.aliases else (x, y)


def whole(tensor: Any) -> Any:
    """Return the whole of a tensor that may be a rank's shard."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


Change: TypeAlias = Callable[[Session, random.Random], None]


def _linears(session: Session) -> list[tuple[nn.Module, str, nn.Linear]]:
    return [
        (parent, name, child)
        for _, parent in session.model.named_modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and type(parent).__name__ != "_LowRank"
    ]


def _linear(session: Session, rng: random.Random) -> tuple[nn.Module, str, Any]:
    return rng.choice(_linears(session))


def _block(session: Session, rng: random.Random) -> Any:
    return rng.choice(list(session.model.layers))


def _vary(session: Session, rng: random.Random) -> None:
    rng.choice([*session.model.layers, session.model]).vary(rng)


def _vary_results(session: Session, rng: random.Random) -> None:
    Block.vary(_block(session, rng), rng)


def _vary_class(session: Session, rng: random.Random) -> None:
    """Give one block another class, whose attributes are others."""
    block = _block(session, rng)
    plain = type(block)
    block.__class__ = type(plain.__name__, (plain,), {"slope": 2.0, "__module__": plain.__module__})


def _alias(session: Session, rng: random.Random) -> None:
    session.aliases = not session.aliases
    session.layout = rng.choice(["dense", "apart"])


def _shape(session: Session, rng: random.Random) -> None:
    session.rows, session.length = rng.choice([(1, S), (3, S), (B, S + 2)])


def _inputs_with_gradients(session: Session, _: random.Random) -> None:
    session.wants_inputs = not session.wants_inputs


def _strides(session: Session, _: random.Random) -> None:
    session.layout = "dense" if session.layout == "strided" else "strided"


def _keyword(session: Session, rng: random.Random) -> None:
    session.options = {"scale": rng.choice([0.5, 2.0])}


def _hook(session: Session, rng: random.Random) -> None:
    _, _, linear = _linear(session, rng)
    kinds: list[Callable[[], Any]] = [
        lambda: linear.register_forward_hook(lambda _module, _args, outputs: outputs * 2.0),
        lambda: linear.register_forward_pre_hook(lambda _module, args: (args[0] * 2.0,)),
        lambda: linear.register_full_backward_hook(lambda _module, given, _got: (given[0] * 2.0,)),
    ]
    rng.choice(kinds)()


def _hook_block(session: Session, rng: random.Random) -> None:
    def doubled(_module: Any, _args: Any, outputs: Any) -> Any:
        return outputs * 2.0 if isinstance(outputs, Tensor) else outputs

    def paired(_module: Any, _args: Any, outputs: Any) -> Any:
        return (outputs, outputs) if isinstance(outputs, Tensor) else outputs

    _block(session, rng).register_forward_hook(rng.choice([doubled, paired]))


def _hook_and_remove(session: Session, rng: random.Random) -> None:
    _, _, linear = _linear(session, rng)
    linear.register_forward_hook(lambda *_: None).remove()


def _patch_forward(session: Session, rng: random.Random) -> None:
    module = rng.choice([_linear(session, rng)[2], _block(session, rng)])
    plain = module.forward
    factor = rng.choice([1.0, 2.0])

    def patched(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain(x * factor, *args, **kwargs)

    module.forward = patched


def _patch_method(session: Session, rng: random.Random) -> None:
    _block(session, rng).between = rng.choice([functional.silu, torch.tanh])


class _LowRank(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.into = nn.Linear(linear.in_features, 2, dtype=linear.weight.dtype)
        self.out = nn.Linear(2, linear.out_features, dtype=linear.weight.dtype)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (as torch's linear has it)
        outputs: Tensor = self.linear(input) + self.out(self.into(input))
        return outputs


def _low_rank(session: Session, rng: random.Random) -> None:
    parent, name, linear = _linear(session, rng)
    torch.manual_seed(11)
    parent.add_module(name, _LowRank(linear))


def _swap_linear(session: Session, rng: random.Random) -> None:
    parent, name, linear = _linear(session, rng)
    torch.manual_seed(11)
    other = nn.Linear(linear.in_features, linear.out_features, linear.bias is None, dtype=linear.weight.dtype)
    parent.add_module(name, other)


def _subclass(session: Session, rng: random.Random) -> None:
    _, _, linear = _linear(session, rng)
    base: Any = rng.choice([nn.Linear, type(linear)])  # an engine may have given it another class

    class Twice(base):  # type: ignore[misc]
        def forward(self, input: Tensor) -> Any:  # noqa: A002
            return 2.0 * super().forward(input)

    if plain_class(linear) is nn.Linear:
        linear.__class__ = Twice


def _reorder(session: Session, _: random.Random) -> None:
    layers = list(session.model.layers)
    session.model.layers = nn.ModuleList(reversed(layers))


def _mode(session: Session, rng: random.Random) -> None:
    module = rng.choice([session.model, _block(session, rng), *_block(session, rng).children()])
    module.train(not module.training)


def _grad_mode(session: Session, rng: random.Random) -> None:
    session.mode = rng.choice([mode for mode in ("grad", "no_grad", "inference") if mode != session.mode])


def _autocast(session: Session, _: random.Random) -> None:
    session.autocasts = not session.autocasts


def _freeze(session: Session, rng: random.Random) -> None:
    module = rng.choice([session.model, _block(session, rng), _linear(session, rng)[2]])
    first = next(module.parameters())
    module.requires_grad_(not first.requires_grad)


def _dtype(session: Session, _: random.Random) -> None:
    is_double = session.model.head.weight.dtype is torch.float64
    session.model.to(torch.float32 if is_double else torch.float64)


def _new_parameter(session: Session, rng: random.Random) -> None:
    _, _, linear = _linear(session, rng)
    linear.weight = nn.Parameter(linear.weight.detach() * 2.0)


def _average(session: Session, _: random.Random) -> None:
    with torch.no_grad():
        for each in session.model.parameters():
            each.lerp_(torch.ones_like(each), 0.1)


def _load(session: Session, rng: random.Random) -> None:
    state = {name: each.detach() * 0.5 for name, each in session.model.state_dict().items()}
    session.model.load_state_dict(state, assign=rng.random() < 0.5)


def _copy(session: Session, _: random.Random) -> None:
    session.model = session.call = copy.deepcopy(session.model)


def _functional(session: Session, _: random.Random) -> None:
    session.scale = 1.5 if session.scale is None else None


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight


def _parametrise(session: Session, rng: random.Random) -> None:
    _, _, linear = _linear(session, rng)
    if rng.random() < 0.5:
        parametrize.register_parametrization(linear, "weight", _Doubled())
    else:
        parametrizations.weight_norm(linear)


def _weight_norm(session: Session, rng: random.Random) -> None:
    _, _, linear = _linear(session, rng)
    if not isinstance(linear.weight, nn.Parameter):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(linear)
    linear.weight_g = nn.Parameter(2.0 * whole(linear.weight_g.detach()))


@cache
def mesh_of(world: dist.ProcessGroup) -> DeviceMesh:
    """Return the mesh of all ranks, `tensor`, each of which is alone with its data, `data`."""
    return init_device_mesh("cpu", (1, world.size()), mesh_dim_names=("data", "tensor"))


def _fsdp(session: Session, _: random.Random) -> None:
    assert dist.group.WORLD is not None
    mesh = mesh_of(dist.group.WORLD)["data"]
    for block in session.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(session.model, mesh=mesh)


def _ddp(session: Session, _: random.Random) -> None:
    if any(isinstance(each, DTensor) for each in session.model.parameters()):
        return  # torch says that it takes no shards
    if not any(each.requires_grad for each in session.model.parameters()):
        return  # torch refuses that, and shards would not hear of it
    assert dist.group.WORLD is not None
    alone = mesh_of(dist.group.WORLD)["data"].get_group()
    session.call = DistributedDataParallel(session.model, find_unused_parameters=True, process_group=alone)


def _nothing(_session: Session, _: random.Random) -> None:
    """Call it again."""


CHANGES: dict[str, Change] = {
    "nothing": _nothing,
    "what the idiom asks": _vary,
    "what blocks return": _vary_results,
    "class of a block": _vary_class,
    "one tensor in two places": _alias,
    "shape": _shape,
    "inputs with gradients": _inputs_with_gradients,
    "layout of inputs": _strides,
    "keyword": _keyword,
    "hook": _hook,
    "hook of a block": _hook_block,
    "hook and its removal": _hook_and_remove,
    "patched forward": _patch_forward,
    "patched method": _patch_method,
    "low rank": _low_rank,
    "another linear": _swap_linear,
    "subclass": _subclass,
    "order of blocks": _reorder,
    "train and eval": _mode,
    "grad mode": _grad_mode,
    "autocast": _autocast,
    "requires_grad": _freeze,
    "dtype": _dtype,
    "new parameter": _new_parameter,
    "average of weights": _average,
    "loaded state": _load,
    "deepcopy": _copy,
    "functional_call": _functional,
    "parametrisation": _parametrise,
    "weight norm by hooks": _weight_norm,
    "FSDP2 on one rank": _fsdp,
    "DDP on one rank": _ddp,
}
"""Changes by name; each does the same to two models that are alike."""


def some(rng: random.Random, count: int) -> Iterator[str]:
    """Yield names of changes, the idioms' own ones more often than each other one."""
    names = [*CHANGES, *["what the idiom asks"] * 4]
    for _ in range(count):
        yield rng.choice(names)
