"""The chain of comparisons of a trial: from its variant to the plain model, link by link.

    ac=full shard=megatron  --bit for bit-->  ac=none shard=megatron  --within rounding-->  ac=none shard=none
                                                              ac=none shard=none  --within rounding-->  dense

A compiled variant is compared with what is compiled alike, and that with the plain model uncompiled; from
there on nothing is compiled.

    ac=full compile=inductor  -->  ac=none compile=inductor  -->  ac=none compile=none

In half precision Inductor does not round what it computes again inside a kernel, where forward rounded what
it stored. What runs is then equal within rounding; a link of its own, in which Inductor rounds after every
operator, must be equal bit for bit.

What recomputes is compared with what is sharded alike, what is sharded with what the mesh alone shards, and
that, where ranks share tensors, with the dense model. A sharding does not depend on the precision, so it is
proven in fp32 whatever the trial computes in: rounding of half precision would hide a lost all-reduce. What
is equal within rounding only is trained with SGD for its proof.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.experiment.compilers import DRAWS_AS_EAGER, ROUNDS_AS_EAGER
from harness.experiment.experiment import Experiment, name_of
from harness.records.parity_result import Compared
from strategies import Tolerance, shard_variants

_STEPS = 2
"""Steps that prove a sharding: the second has gradients behind weights that begin as zeros."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Two experiments that must compute the same.

    Fields:
        tolerance: `None` where all bits must be equal.
        whole: compare gradients and parameters as wholes, which the two place differently.
        is_dense: each rank of `tp`, `cp`, `ep` and `pp` computes the whole baseline, on whole sequences,
            which no tensor parallel plan splits and no pipeline cuts; nothing is dropped out, because a
            shard, a part or a stage draws other random numbers than the whole.
        inductor: options of `torch._inductor.config` that are set for both.
    """

    variant: Experiment
    baseline: Experiment
    steps: int
    tolerance: Tolerance | None
    whole: bool
    is_dense: bool = False
    inductor: tuple[str, ...] = ()

    @property
    def compared(self) -> Compared:
        """The comparison as it stands in the record."""
        accepted = self.tolerance
        return Compared(
            variant=self._choices(self.variant),
            baseline="the dense model" if self.is_dense else self._choices(self.baseline),
            dtype=self.variant.dtype,
            optimizer=self.variant.optimizer,
            relative=None if accepted is None else accepted.relative,
            parameters=None if accepted is None else accepted.parameters,
            floor=None if accepted is None else accepted.floor,
        )

    def _choices(self, experiment: Experiment) -> str:
        groups = [f"{group}={name_of(getattr(experiment, group))}" for group in ("ac", "chunk", "shard")]
        if not self.variant.is_compiled:
            return " ".join(groups)
        options = [f"{name}=true" for name in self.inductor if experiment.compile == "inductor"]
        return " ".join([*groups, f"compile={experiment.compile}", *options])


def chain(experiment: Experiment) -> tuple[Link, ...]:
    """Return what is compared with what; the first link is the variant and its twin.

    The last one, where the mesh has `tp`, `cp`, `ep` or `pp`, is the same for all variants on it.
    """
    if not experiment.is_compiled:
        return (*_to_the_mesh(experiment), *_to_the_dense_model(experiment))
    eager = experiment.plain().uncompiled()
    return (
        *_to_the_eager(experiment),
        *(_to_the_mesh(eager) if eager.is_sharded else ()),
        *_to_the_dense_model(eager),
    )


def _to_the_eager(experiment: Experiment) -> tuple[Link, ...]:
    """Return the links that end at the plain model with nothing compiled."""
    plain, first = experiment.plain(), _to_the_twin(experiment)
    if experiment == plain:
        return (replace(first, inductor=DRAWS_AS_EAGER),)
    last = replace(_to_the_twin(plain), inductor=DRAWS_AS_EAGER, steps=_STEPS)
    return (first, *_rounded_alike(experiment, first), last)


def _rounded_alike(experiment: Experiment, first: Link) -> tuple[Link, ...]:
    """Return the link that is exact, where the first is not because its kernels leave out a rounding."""
    leaves_out = experiment.recomputes_in_kernels and experiment.is_reduced
    if not leaves_out or experiment.ac.tolerance is not None:
        return ()
    exact = replace(first, variant=experiment, baseline=experiment.twin(), tolerance=None)
    return (replace(exact, inductor=ROUNDS_AS_EAGER),)


def _to_the_mesh(experiment: Experiment) -> tuple[Link, ...]:
    """Return the links that end at the model as the mesh alone shards it."""
    first = _to_the_twin(experiment)
    if not experiment.is_sharded:
        return (first,)
    plain = experiment.plain()
    others = [(_in_full_precision(plain), experiment.shard.step_tolerance, _STEPS)]
    if plain != experiment and experiment.is_reduced:
        others.insert(0, (plain, plain.tolerance, 1))
    return first, *(
        Link(variant=each, baseline=each.twin(), steps=steps, tolerance=tolerance, whole=True)
        for each, tolerance, steps in others
    )


def _to_the_twin(experiment: Experiment) -> Link:
    link = Link(
        variant=experiment,
        baseline=experiment.twin(),
        steps=experiment.protocol.parity_steps,
        tolerance=experiment.tolerance,
        whole=not experiment.is_placed_as_twin,
    )
    # SGD moves parameters by gradients, AdamW by the sign of what is only rounding too
    return link if experiment.is_sharded or link.tolerance is None else _under_sgd(link)


def _to_the_dense_model(experiment: Experiment) -> tuple[Link, ...]:
    """Return the link to the model that nobody splits; none where each rank computes with a whole model.

    Stages alone change no order in which anything is added: a pipeline is equal to the whole bit for bit.
    """
    mesh = experiment.mesh
    if mesh.tp * mesh.cp * mesh.ep * mesh.pp == 1:
        return ()
    split = replace(_in_full_precision(experiment.plain()), shard=shard_variants["none"]())
    tolerance = None if mesh.world_size == mesh.pp else split.shard.step_tolerance
    return (
        Link(variant=split, baseline=split, steps=_STEPS, tolerance=tolerance, whole=True, is_dense=True),
    )


def _in_full_precision(plain: Experiment) -> Experiment:
    # what is made in full precision may hold numbers that fp32 cannot
    full = plain.dtype if plain.dtype == "own" and not plain.is_reduced else "fp32"
    return replace(plain, dtype=full, optimizer="sgd")


def _under_sgd(link: Link) -> Link:
    """Return a link whose steps do not make rounding larger."""
    return replace(
        link,
        variant=replace(link.variant, optimizer="sgd"),
        baseline=replace(link.baseline, optimizer="sgd"),
    )
