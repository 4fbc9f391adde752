"""Right under checkpoints, although each looks like something that is wrong."""
# ruff: noqa: PGH004
# ruff: noqa
# mypy: ignore-errors

import contextvars
import dataclasses
import functools
import itertools
import random
import types

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.gallery.users.outsider.setups import WIDTH, Block, Net, Setup, checkpointed, reentrant

SETUPS = []


def right(*reads, variant=checkpointed, tolerated=()):
    def kept(make):
        SETUPS.append(Setup(make=make, variant=variant, verdict="neutral", reads=reads, tolerated=tolerated))
        return make

    return kept


class CountsInTheModel(Net):
    calls = 0

    def run(self, x):
        self.calls += 1
        return super().run(x)


@right()
def counter_for_the_log():
    return CountsInTheModel(Block(), Block())


class LogsNorms(Net):
    def __init__(self, *blocks):
        super().__init__(*blocks)
        self.metrics = {"norms": []}

    def run(self, x):
        x = super().run(x)
        self.metrics["norms"].append(float(x.detach().norm()))
        return x


@right()
def metrics_in_a_list():
    return LogsNorms(Block(), Block())


class Flagged(Block):
    def __init__(self):
        super().__init__()
        self.use_gelu = True

    def change(self, h):
        return F.gelu(h) if self.use_gelu else h


@right(tolerated=("use_gelu",))
def flag_that_never_changes():
    return Net(Block(), Flagged())


class SeenRows(Net):
    def __init__(self, *blocks):
        super().__init__(*blocks)
        self.register_buffer("seen", torch.zeros(()))

    def run(self, x):
        x = super().run(x)
        self.seen += len(x)
        return x


@right()
def buffer_updated_after_use():
    return SeenRows(Block(), Block())


class Masked(Block):
    def __init__(self):
        super().__init__()
        self.masks = {}

    def change(self, h):
        if len(h) not in self.masks:
            self.masks[len(h)] = torch.linspace(0, 1, len(h))[:, None]
        return h * self.masks[len(h)]


@right("masks")
def cache_keyed_by_shape():
    return Net(Block(), Masked())


STRENGTH = contextvars.ContextVar("strength", default=1.5)


class Strong(Block):
    def change(self, h):
        return h * STRENGTH.get()


@right("(?i)strength")
def context_variable_nobody_sets():
    return Net(Block(), Strong())


class Scaled(Block):
    def __init__(self, scale=0.5):
        super().__init__()
        self.scale = scale

    def change(self, h):
        return h * self.scale


@right("scale")
def number_attribute():
    return Net(Scaled(), Scaled(2.0))


@right("scale", variant=reentrant)
def number_attribute_reentrant():
    return Net(Scaled(), Scaled(2.0))


class DropPath(Block):
    def __init__(self):
        super().__init__()
        self.drop_prob = 0.3

    def change(self, h):
        if not self.training:
            return h
        keep = torch.rand(len(h), 1) > self.drop_prob
        return h * keep / (1 - self.drop_prob)


@right("drop_prob", tolerated=("training",))
def drop_path_with_rng_saved():
    return Net(Block(), DropPath())


class Adapted(Block):
    def __init__(self):
        super().__init__()
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("mine", "yours")})
        self.active = "mine"

    def change(self, h):
        return h + self.adapters[self.active](h)


@right("active")
def adapter_chosen_before_the_step():
    net = Net(Block(), Adapted())
    net.blocks[1].active = "yours"
    return net


class Averaged(Net):
    """The exponential mean of the head's weight, taken as its gradient is there."""

    def __init__(self, *blocks):
        super().__init__(*blocks)
        self.register_buffer("ema", self.head.weight.detach().clone())
        self.head.weight.register_post_accumulate_grad_hook(self.update)

    def update(self, weight):
        self.ema.lerp_(weight.detach(), 0.1)


@right()
def ema_in_a_gradient_hook():
    return Averaged(Block(), Block())


class Shuffled(Net):
    def __init__(self, *blocks):
        super().__init__(*blocks)
        self.order = random.Random(3).sample(range(len(blocks)), len(blocks))

    def run(self, x):
        for place in self.order:
            x = self.blocks[place](x)
        return x


@right()
def blocks_shuffled_at_construction():
    return Shuffled(Block(), Block(), Block())


class Careful(Block):
    def change(self, h):
        if h.is_cuda or h.dtype != self.lin.weight.dtype or h.device != self.lin.weight.device:
            return h.to(self.lin.weight)
        return h * 0.5


@right()
def device_and_dtype_are_asked():
    return Net(Block(), Careful())


class TrainsOtherwise(Block):
    def change(self, h):
        return h * 1.5 if self.training else h


@right("training|mode")
def branch_on_training():
    return Net(Block(), TrainsOtherwise())


class Lazy(Block):
    table = None

    def change(self, h):
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, h.shape[-1])
        return h * self.table


@right("table")
def table_made_in_the_first_call():
    return Net(Block(), Lazy())


class Rotary(Block):
    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(32.0), 1 / 100 ** (torch.arange(WIDTH) / WIDTH))
        self.register_buffer("cos_cached", angles.cos(), persistent=False)
        self.register_buffer("sin_cached", angles.sin(), persistent=False)

    def change(self, h):
        half = torch.cat((-h[:, WIDTH // 2 :], h[:, : WIDTH // 2]), -1)
        return h * self.cos_cached[: len(h)] + half * self.sin_cached[: len(h)]


@right("cos_cached", "sin_cached")
def rotary_cache():
    return Net(Rotary(), Rotary())


class Attends(Block):
    def forward(self, x, mask):
        return x + (self.lin(x) @ x.T + mask).softmax(-1) @ x


class MaskOnce(Net):
    mask = None

    def run(self, x):
        if self.mask is None:
            self.mask = torch.full((len(x), len(x)), -1e4).triu(1)
        for block in self.blocks:
            x = block(x, self.mask[: len(x), : len(x)])
        return x


@right()
def attention_mask_built_once():
    return MaskOnce(Attends(), Attends())


class Normed(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.0)
        self.norm.num_batches_tracked = None

    def change(self, h):
        return self.norm(h)


@right("eps", tolerated=("training",))
def running_statistics_without_momentum():
    return Net(Block(), Normed())


class ClipsGradients(Block):
    def __init__(self):
        super().__init__()
        self.clip = 1e-3

    def change(self, h):
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-self.clip, self.clip))
        return h


@right()
def gradient_hook_in_the_block():
    return Net(Block(), ClipsGradients())


class WeightNormed(Block):
    def __init__(self):
        super().__init__()
        self.lin = nn.utils.parametrizations.weight_norm(self.lin)


@right(tolerated=("dim",))
def weight_norm():
    return Net(Block(), WeightNormed())


@right()
def tied_linears():
    net = Net(Block(), Block())
    net.blocks[1].lin = net.blocks[0].lin
    return net


class Routed(Block):
    """A mixture of experts whose router adds noise that was drawn once."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 3)
        self.register_buffer("noise", torch.randn(4))

    def change(self, h):
        scores = (self.router(h) + self.noise).softmax(-1)
        weight, chosen = scores.max(-1)
        return torch.einsum("bi,bij->bj", h, self.experts[chosen]) * weight[:, None]


@right("noise")
def experts_with_fixed_noise():
    return Net(Block(), Routed())


class CountsInForwardOnly(Block):
    calls = 0

    def change(self, h):
        if torch._C._current_graph_task_id() == -1:
            self.calls += 1
        return h


@right()
def counter_that_knows_the_recomputation():
    return Net(Block(), CountsInForwardOnly())


@functools.lru_cache
def ramp(count):
    return torch.linspace(0.5, 1.5, count)


class Ramped(Block):
    def change(self, h):
        return h * ramp(h.shape[-1])


@right()
def table_in_an_lru_cache():
    return Net(Block(), Ramped())


class Augments(Net):
    def __init__(self, *blocks):
        super().__init__(*blocks)
        self.generator = torch.Generator().manual_seed(5)

    def run(self, x):
        return super().run(x + torch.randn(x.shape, generator=self.generator))


@right()
def generator_drawn_outside_of_the_blocks():
    return Augments(Block(), Block())


class FixedSlope(Block):
    SLOPE = 0.2

    def change(self, h):
        return F.leaky_relu(h, self.SLOPE)


@right("SLOPE")
def constant_of_the_class():
    return Net(Block(), FixedSlope())


SETTINGS = {"slope": 0.1}


class Settled(Block):
    def change(self, h):
        return F.leaky_relu(h, SETTINGS["slope"])


@right("SETTINGS|slope")
def settings_in_a_global():
    return Net(Block(), Settled())


class Activated(Block):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def change(self, h):
        return self.act(h)


@right("gain")
def gain_enclosed_by_an_activation():
    gain = 1.7
    return Net(Block(), Activated(lambda h: h * gain))


@right("act|negative_slope")
def slope_bound_by_a_partial():
    return Net(Block(), Activated(functools.partial(F.leaky_relu, negative_slope=0.2)))


@dataclasses.dataclass
class Config:
    damping: float = 0.4
    name: str = "small"
    width: int = WIDTH


class Configured(Block):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def change(self, h):
        return h * self.config.damping


@right("damping")
def number_of_a_config():
    config = Config()
    return Net(Configured(config), Configured(config))


@right("damping")
def number_of_a_namespace():
    config = types.SimpleNamespace(damping=0.4, name="small")
    return Net(Configured(config), Configured(config))


class Listed(Block):
    def __init__(self):
        super().__init__()
        self.alphas = [0.5, 1.5]

    def change(self, h):
        return h * self.alphas[0] + h.cos() * self.alphas[1]


@right("alphas")
def numbers_in_a_list():
    return Net(Block(), Listed())


@right("eps", r"\bp\b", tolerated=("training",))
def norm_and_dropout():
    return Net(Block(), nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)))


class Jittered(Block):
    def forward(self, x, gain):
        return x + (self.lin(x) * gain).sin()


class DrawsOutside(Net):
    def run(self, x):
        for block in self.blocks:
            x = block(x, random.uniform(0.5, 1.5))
        return x


@right()
def gain_drawn_outside_of_the_blocks():
    return DrawsOutside(Jittered(), Jittered())


class Skips(Net):
    use_skip, depth, every = True, 2, 1

    def run(self, x):
        y = super().run(x)
        return x + y if self.use_skip and self.depth % self.every == 0 else y


@right()
def flags_read_outside_of_the_blocks():
    return Skips(Block(), Block())


class OwnFlag(Net):
    """As transformers does it: the model reads a flag."""

    gradient_checkpointing = False

    def run(self, x):
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


def enabled(model):
    model.gradient_checkpointing = True


@right(variant=enabled)
def flag_of_the_model_for_checkpoints():
    return OwnFlag(Block(), Block())


def saves_matmuls(model):
    def policy(context, operator, *args, **keywords):
        saved = operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpointed(model, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))


@right("scale", variant=saves_matmuls)
def selective_policy():
    return Net(Scaled(), Scaled(2.0))


class Distils(Block):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def change(self, h):
        with torch.no_grad():
            target = self.teacher(h)
        return h * target.sigmoid()


@right()
def frozen_teacher_in_the_block():
    return Net(Block(), Distils())


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.module.reversal * gradient, None


class Adversarial(Block):
    reversal = 0.3

    def change(self, h):
        return Reversed.apply(h, self)


@right()
def backward_reads_a_number():
    return Net(Block(), Adversarial())


class Streams(Net):
    def __init__(self, *blocks):
        super().__init__(*blocks)
        self.names = itertools.cycle("abc")
        self.last = ""

    def run(self, x):
        self.last = next(self.names)
        return super().run(x)


@right()
def iterator_consumed_by_the_model():
    return Streams(Block(), Block())


class Cloning(Block):
    """The state it reads is copied into the arguments of the region."""

    def forward(self, x, shift):
        return x + (self.lin(x) + shift).sin()


class Shifts(Net):
    def __init__(self, *blocks):
        super().__init__(*blocks)
        self.register_buffer("shift", torch.zeros(WIDTH))

    def run(self, x):
        shift = self.shift.clone()
        for block in self.blocks:
            x = block(x, shift)
        self.shift += x.detach().mean(0)
        return x


@right()
def running_mean_goes_in_as_a_copy():
    return Shifts(Cloning(), Cloning())
