"""What each rank of the sharded tests runs: every variant in every order, against the plain model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from harness.measure.gloo.wait import settled_collectives
from strategies import RunnableStep, StrategyError, ac_variants, eager_variants
from strategies.ac.budget import Budget
from strategies.ac.modules import Modules
from strategies.budget.eager.block_tape import BlockTape, Fates
from strategies.budget.plan import BlockPlan, Plan, Value
from strategies.regions.host_copies import HostLedger
from strategies.regions.torch_facts import parameter_groups
from tests.strategies.toys import Block, Step, Toy, differences, toy, train_step

WORLD_SIZE = 2
ENABLED = tuple(name for name in eager_variants if name not in {"none", "budget"})
"""Of a sharded model a trial makes the plan."""
_SHARES = {"budget": 0.8, "budget of one rank": 0.79, "budget of a product": 0.79}
"""Of the plain peak, where a plan runs nearly all of a block again that it can."""

ORDERS = ("inside", "outside", "in_place", "call_site")
REFUSED = {("call_site", "selective_layer"), ("call_site", "nested"), ("in_place", "nested")}
MESHES = (
    "ddp",
    "fsdp2",
    "fsdp2_no_reshard",
    "fsdp1",
    "fsdp1_flat",
    "fsdp1_no_shard",
    "tp",
    "tp_dtensor_activations",
)


def cases() -> Iterator[tuple[str, str, str]]:
    """Yield (mesh, order, variant) where the variant does not refuse them."""
    for mesh in MESHES:
        for order in ORDERS:
            for variant in ENABLED:
                is_flattened = mesh.startswith("fsdp1") and order == "outside"
                if (order, variant) not in REFUSED and not (is_flattened and variant == "nested"):
                    yield mesh, order, variant


def compare(_rank: int, mesh: str, order: str, variant: str) -> list[str]:
    """Return what differs between a variant and the plain model on this rank, in words."""
    return differences(_step(mesh, "inside", "none")[0], _step(mesh, order, variant)[0])


def offloaded_bytes(_rank: int, mesh: str, order: str) -> int:
    """Return the bytes that this rank moves under offload."""
    return _step(mesh, order, "offload")[1]


def plan_of_one_rank(variant: str, folder: Path) -> str:
    """Return the plan that `unit_inside` takes for `budget of one rank` or `budget of a product`."""
    file = folder / "plan.json"
    Budget(layers_fqn="layers", fraction=_SHARES[variant]).write_plan(_step_of(toy()), file)
    if variant == "budget of a product":
        made = Plan.load(file)
        replace(made, blocks=tuple(map(_making_one_product, made.blocks))).save(file)
    return file.read_text("utf-8")


def unit_inside(_rank: int, variant: str, plan: str) -> tuple[list[str], bool]:
    """Return what differs where a block's operators run again whose weights are of a unit inside of it.

    Args:
        variant: `modules`; `modules and results` of blocks that return two; `budget` with a plan of this
            step; `budget of one rank`, with that of a model without units; or `budget of a product`, with
            one of these that makes nothing again but what `up` gives.
        plan: what `plan_of_one_rank` returned, where there is one.

    Returns:
        The differences in three steps and the units that have their weights after one; and whether a linear
        runs again, each of which is a unit.
    """
    make = _with_results_aside if variant == "modules and results" else toy
    plain, planned = _with_units(make()), make()
    with TemporaryDirectory() as folder:
        if variant in {"modules", "modules and results"}:
            Modules(layers_fqn="layers", discard=("up",)).apply(planned)
            runs_again = True
        else:
            file = Path(folder, "plan.json")
            file.write_text(plan, "utf-8")
            if variant == "budget":
                step = _step_of(_with_units(toy()))
                Budget(layers_fqn="layers", fraction=_SHARES[variant]).write_plan(step, file)
            Budget(layers_fqn="layers", plan_file=str(file)).apply(planned)
            runs_again = any(map(_products_again, Plan.load(file).blocks))
        found = _differences_in_training(plain, _with_units(planned))
    return found, runs_again


def _differences_in_training(plain: nn.Module, planned: nn.Module) -> list[str]:
    """Return what differs in three steps with updates, and which units have their weights after one."""
    models, found = (plain, planned), []
    updates = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for _ in range(3):
        steps = [train_step(model) for model in models]
        for step in steps:
            for name, gradient in step.gradients.items():
                step.gradients[name] = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        found += differences(*steps)
        for model, update in zip(models, updates, strict=True):
            found += [f"unsharded: {name}" for name, each in model.named_modules() if _is_unsharded(each)]
            update.step()
    return found


def _is_unsharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule) and any(each.is_unsharded for each in parameter_groups(module))


def _products_again(block: BlockPlan) -> list[Value]:
    return [each for each in (*block.recompute, *block.again) if each.name == "aten.addmm.default"]


def _making_one_product(block: BlockPlan) -> BlockPlan:
    """Return a plan that keeps what `block` makes again, but for the result of its last product."""
    again = _products_again(block)[-1:]
    kept = {*block.keep, *block.recompute, *block.again}.difference(again)
    return replace(block, keep=tuple(sorted(kept)), recompute=tuple(again), again=())


class _Aside(Block):
    """A block that returns what it computes first as a second result, whose gradient comes last."""

    def forward(self, inputs: Tensor, *, shift: Tensor | None = None) -> Any:
        aside = self.norm(inputs).square().mean()
        return super().forward(inputs, shift=shift), aside


def _with_results_aside() -> Toy:
    """Return a toy of such blocks, whose second results scale its logits."""
    model = toy()
    for block in model.layers:
        block.__class__ = _Aside
    model.__class__ = _AsideToy
    return model


class _AsideToy(Toy):
    """A toy of blocks that return two."""

    def forward(self, tokens: Tensor) -> Tensor:
        x_BSD = self.embedding(tokens)
        scale = x_BSD.new_ones(())
        for block in self.layers:
            x_BSD, aside = block(x_BSD)
            scale = scale + aside
        logits: Tensor = self.head(x_BSD) * scale
        return logits


def _with_units(model: Toy) -> nn.Module:
    for block in model.layers:
        for linear in (block.qkv, block.out, block.up, block.down):
            fully_shard(linear)
    return _fsdp2(model, reshard_after_forward=True)


def _step_of(model: nn.Module) -> RunnableStep:
    train_step(model)
    held = (*model.parameters(), *model.buffers())
    return RunnableStep(
        run=partial(train_step, model),
        model=model,
        device=torch.device("cpu"),
        standing=tuple(each.to_local() if isinstance(each, DTensor) else each for each in held),
    )


def first_call(_rank: int, mesh: str) -> str:
    """Return why a budget does not plan at the first call of a sharded model; nothing where it does."""
    model = _SHARD[mesh](toy())
    Budget(layers_fqn="layers", fraction=0.9).apply(model)
    try:
        train_step(model)
    except StrategyError as error:
        return str(error)
    return ""


def tape_of_a_collective(_rank: int) -> bool:
    """Return whether a kept result of a collective is settled while the tape of its block stands."""
    plan = BlockPlan(fqn="body", keep=(Value(0, 0, "_c10d_functional.all_reduce.default"),))
    ledger = HostLedger()
    with mock.patch("harness.measure.gloo.wait._POLLS", 1000), settled_collectives():
        tape, x = BlockTape(Fates.of(plan), ledger, None), torch.ones(4)
        group: Any = dist.group.WORLD
        with tape:
            all_reduce(x, "sum", group) * 1
        tape.close()
    return True


def refusal(_rank: int) -> str:
    """Return why FSDP1 units take no reentrant regions inside."""
    model = _fsdp1(toy(), ShardingStrategy.FULL_SHARD, use_orig_params=True)
    try:
        ac_variants["full"](module_classes=("Block",), use_reentrant=True).apply(model)  # type: ignore[call-arg]
    except StrategyError as error:
        return str(error)
    return "not refused"


@cache
def _step(mesh: str, order: str, variant: str) -> tuple[Step, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 warns about NO_SHARD and about the CPU
        return _two_steps(mesh, order, variant)


def _two_steps(mesh: str, order: str, variant: str) -> tuple[Step, int]:
    model: nn.Module = toy()
    fields = {"module_classes": ("Block",)} if order == "in_place" else {"layers_fqn": "layers"}
    strategy = ac_variants[variant](**fields if variant != "none" else {})  # type: ignore[arg-type]
    if order == "inside":
        strategy.apply(model)
    model = _SHARD[mesh](model)  # type: ignore[arg-type]
    if order in {"outside", "in_place"}:
        strategy.apply(model)
    call = strategy.call_site(model) if order == "call_site" else None
    for _ in range(2):
        step = train_step(model, call)
    for name, gradient in step.gradients.items():
        step.gradients[name] = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    observation = call.observe() if call is not None else strategy.observe(model)
    return step, observation.offloaded_bytes


def _ddp(model: Toy) -> nn.Module:
    return DistributedDataParallel(model)


def _fsdp2(model: Toy, *, reshard_after_forward: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for block in model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh)
    return model


def _fsdp1(model: Toy, strategy: ShardingStrategy, *, use_orig_params: bool) -> nn.Module:
    def shard(module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            module,
            device_id=torch.device("cpu"),
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
        )

    for index, block in enumerate(model.layers):
        model.layers[index] = shard(block)
    return shard(model)


def _tensor_parallel(model: Toy, *, use_local_output: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for block in model.layers:
        plan = {"up": ColwiseParallel(use_local_output=use_local_output), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


_SHARD: dict[str, Callable[[Toy], nn.Module]] = {
    "ddp": _ddp,
    "fsdp2": lambda model: _fsdp2(model, reshard_after_forward=True),
    "fsdp2_no_reshard": lambda model: _fsdp2(model, reshard_after_forward=False),
    "fsdp1": lambda model: _fsdp1(model, ShardingStrategy.FULL_SHARD, use_orig_params=True),
    "fsdp1_flat": lambda model: _fsdp1(model, ShardingStrategy.FULL_SHARD, use_orig_params=False),
    "fsdp1_no_shard": lambda model: _fsdp1(model, ShardingStrategy.NO_SHARD, use_orig_params=True),
    "tp": lambda model: _tensor_parallel(model, use_local_output=True),
    "tp_dtensor_activations": lambda model: _tensor_parallel(model, use_local_output=False),
}
