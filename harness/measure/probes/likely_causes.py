"""Known defects of activation checkpointing that a difference looks like, and what to do about each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.measure.probes.changed_since import StateChange
from harness.measure.probes.recomputed_values import Divergence, RecomputedValues
from harness.records.parity_result import PARTS, Parity
from harness.records.probed import Finding

_DRAWING = ("bernoulli", "dropout", "rand", "normal", "uniform", "multinomial", "exponential")
_BETWEEN = "between"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The facts that are known of a difference.

    Fields:
        part, name, expected, actual, step: those of the first difference.
        probe: the probe that saw it: `parity` or `between`.
        differing: for each part that differs anywhere, the name of its first difference.
        recomputed_ops: operators that ran again.
        divergence: the first recomputed value that forward did not make.
        lost, gained: parameters that get a gradient from one of the two models only.
        changed: state that is another one when backward begins than when forward read it.
        unpacked: what hooks of saved tensors gave back otherwise than they got it.
        functions: autograd functions of its own that the variant's graph has and the plain model's has not.
        has_save_list: a region keeps what operators of a list give.
        is_of_calls: with another region around the same modules, or one that is not reentrant, it is neutral.
    """

    part: str
    name: str
    probe: str
    differing: dict[str, str]
    recomputed_ops: Collection[str]
    divergence: Divergence | None
    lost: tuple[str, ...] = ()
    gained: tuple[str, ...] = ()
    changed: tuple[StateChange, ...] = ()
    forward_ops: Collection[str] = ()
    unpacked: str = ""
    functions: tuple[str, ...] = ()
    is_compiled: bool = False
    has_save_list: bool = False
    is_of_calls: bool = False
    expected: str = ""
    actual: str = ""
    step: int = 0

    @property
    def has_raised(self) -> bool:
        """True if a pass of one of the two models raised."""
        return self.name in ("(forward)", "(backward)", "(update)")

    def has_run(self, *words: str) -> bool:
        """Say whether an operator with one of `words` in its name ran again."""
        return any(word in operator for operator in self.recomputed_ops for word in words)

    def has_changed(self, *kinds: str) -> bool:
        """Say whether state of one of `kinds` changed after it was read."""
        return any(change.kind in kinds for change in self.changed)

    def reads_anew(self, *kinds: str) -> bool:
        """Say whether a recomputation leaves forward where state of one of `kinds` has changed."""
        return self.divergence is not None and self.has_changed(*kinds)

    def keeps(self, word: str) -> bool:
        """Say whether a save list is in use where `word` names the first operator that differs."""
        return self.has_save_list and self.divergence is not None and word in self.divergence.operator

    def draws(self) -> bool:
        """Say whether the first recomputed value that differs is a random one."""
        return self.divergence is not None and any(word in self.divergence.operator for word in _DRAWING)

    @property
    def recomputes(self) -> bool:
        """True if anything ran again; of compiled code nobody knows."""
        return bool(self.recomputed_ops) or self.is_compiled

    def changes(self, part: str, *words: str) -> bool:
        """Say whether a recomputation changes a part: one runs, and the part differs.

        Args:
            words: one of these is in the name of what differs first; none stands for any name.
        """
        name = self.differing.get(part) if self.recomputes else None
        return name is not None and (not words or any(word in name for word in words))


@dataclass(frozen=True, kw_only=True, slots=True)
class LikelyCause:
    """A known defect.

    Fields:
        numbers: its entries in the gallery; several where they look alike, none where it has none.
        fits: says whether evidence looks like it.
        advice: what to change in the model or around it; nobody can try that but its author.
        option: what to ask of the checkpoint instead, which can be tried.
        needs_option: it happens only where the option changes something, such as a reentrant region.
    """

    numbers: tuple[int, ...]
    title: str
    fits: Callable[[Evidence], bool]
    advice: str = ""
    option: str = ""
    needs_option: bool = False

    def __str__(self) -> str:
        where = f"gallery {' or '.join(map(str, self.numbers))}: " if self.numbers else ""
        return f"looks like {where}{self.title}"

    @property
    def untried(self) -> str:
        """Return the cause with what may help, as a guess."""
        guesses = ", or ".join(each for each in (self.option, self.advice) if each)
        return f"{self}; perhaps this helps, which was not tried: {guesses}"


CAUSES = (
    LikelyCause(
        numbers=(),
        title="backward of a custom function asks for ctx.saved_tensors twice, and a region that is not "
        "reentrant answers once",
        advice="read ctx.saved_tensors once, into names",
        fits=lambda seen: "already unpacked once" in seen.actual,
    ),
    LikelyCause(
        numbers=(),
        title="the graph is walked more than once, and a region with a save list allows it once",
        advice="leave the save list out",
        fits=lambda seen: "backward an extra time" in seen.actual,
    ),
    LikelyCause(
        numbers=(45,),
        title="forward changes an argument, and the recomputation finds it changed",
        advice="change a copy of it inside of the region, or take out before it what the region reads",
        fits=lambda seen: (
            seen.has_changed("argument") and (seen.part == "recomputation" or seen.divergence is not None)
        ),
    ),
    LikelyCause(
        numbers=(53, 54),
        title="something keeps what a region makes or is given after the step is done",
        advice="let go of it after backward",
        fits=lambda seen: seen.part == "leak",
    ),
    LikelyCause(
        numbers=(),
        title="another set of outputs, such as no cache, which transformers turns off where it checkpoints",
        advice="make the plain model return the same: config.use_cache = False",
        fits=lambda seen: seen.part == "outputs" and "Structure" in seen.expected,
    ),
    LikelyCause(
        numbers=(35, 50),
        title="forward itself computes something else, perhaps under no_grad, or without an argument",
        option="use_reentrant=False",
        advice="pass *args and **kwargs through",
        fits=lambda seen: (
            seen.part == "outputs"
            and seen.probe == "parity"
            and seen.is_of_calls
            and not (seen.is_compiled or seen.has_raised or seen.step)
        ),
    ),
    LikelyCause(
        numbers=(22,),
        title="a host copy that is no copy (save_on_cpu of tensors on the CPU) hides a change in place",
        advice="change a copy, x.clone()",
        fits=lambda seen: seen.part == "hides_error" and not seen.recomputed_ops,
    ),
    LikelyCause(
        numbers=(8, 43, 66),
        title="micro-batches in flight share state that hides an error of autograd",
        advice="keep such state per call, or pass it as an argument",
        fits=lambda seen: seen.part == "hides_error" and seen.probe == _BETWEEN,
    ),
    LikelyCause(
        numbers=(23,),
        title="a tensor that backward needs is written before it, which checkpointing hides",
        advice="write it after backward, or read a copy, buffer.clone()",
        fits=lambda seen: seen.part == "hides_error" and seen.has_changed("buffer", "attribute"),
    ),
    LikelyCause(
        numbers=(24,),
        title="weights are changed between forward and backward, which checkpointing hides",
        advice="change weights after backward only",
        fits=lambda seen: seen.part == "hides_error" and seen.has_changed("weight"),
    ),
    LikelyCause(
        numbers=(21,),
        title="a tensor that autograd keeps is changed in place, which checkpointing hides",
        advice="change a copy, x.clone()",
        fits=lambda seen: seen.part == "hides_error",
    ),
    LikelyCause(
        numbers=(8, 43, 66),
        title="micro-batches in flight share state: the recomputation of one reads what another has left",
        advice="keep such state per call, or pass it as an argument",
        fits=lambda seen: seen.probe == _BETWEEN and bool(seen.recomputed_ops) and not seen.has_raised,
    ),
    LikelyCause(
        numbers=(18, 19, 48),
        title="a reentrant region trains nothing: no input requires a gradient, or its output is no tensor",
        option="use_reentrant=False",
        needs_option=True,
        advice="enable_input_require_grads()",
        fits=lambda seen: bool(seen.lost) and not seen.recomputed_ops,
    ),
    LikelyCause(
        numbers=(20, 51, 52),
        title="a region loses gradients of what it does not see: a keyword, a detached input, weights",
        option="use_reentrant=False",
        advice="pass tensors by position",
        fits=lambda seen: bool(seen.lost) and not seen.gained and seen.divergence is None,
    ),
    LikelyCause(
        numbers=(42,),
        title="a copy of a tied weight gets a part of its gradient",
        advice="wrap the block itself, not a copy",
        fits=lambda seen: bool(seen.gained) and not seen.lost and seen.divergence is None,
    ),
    LikelyCause(
        numbers=(6, 36),
        title="the recomputation takes another branch, whose parameters get the gradient",
        advice="choose the branch outside of the region, and pass the choice as an argument",
        fits=lambda seen: (
            bool(seen.lost or seen.gained) and seen.recomputes and not seen.changes("rng_state")
        ),
    ),
    LikelyCause(
        numbers=(3, 9, 59),
        title="numbers of Python's or NumPy's generator are drawn anew in the recomputation",
        advice="draw with torch's generator, or outside of the region",
        fits=lambda seen: seen.changes("rng_state", "python", "numpy"),
    ),
    LikelyCause(
        numbers=(1,),
        title="rrelu as the last operator of a region saves its noise before it is drawn",
        option="early_stop=False",
        advice="leave it out of the region",
        fits=lambda seen: (
            any("rrelu" in operator for operator in seen.forward_ops) and not seen.has_run("rrelu")
        ),
    ),
    LikelyCause(
        numbers=(26,),
        title="the compiler recomputes dropout with other numbers",
        advice="leave activation_memory_budget at 1, or use fallback_random",
        fits=lambda seen: seen.is_compiled and seen.changes("rng_state") and seen.changes("gradients"),
    ),
    LikelyCause(
        numbers=(25,),
        title="the compiler recomputes from a tensor that the graph has changed",
        advice="read a clone, or change it outside of what is compiled",
        fits=lambda seen: seen.is_compiled and seen.has_changed("buffer", "attribute", "input"),
    ),
    LikelyCause(
        numbers=(11, 27, 60, 61),
        title="random numbers such as dropout are drawn anew in the recomputation",
        option="preserve_rng_state=True",
        fits=lambda seen: seen.changes("rng_state") and seen.changes("gradients"),
    ),
    LikelyCause(
        numbers=(28,),
        title="the recomputation draws random numbers, and the next step draws others",
        option="preserve_rng_state=True",
        fits=lambda seen: seen.changes("rng_state"),
    ),
    LikelyCause(
        numbers=(56, 57),
        title="a hook of a weight runs for parts of its gradient: each reentrant region has its own backward",
        option="use_reentrant=False",
        needs_option=True,
        fits=lambda seen: seen.has_changed("gradient hook") and seen.changes("gradients"),
    ),
    LikelyCause(
        numbers=(49,),
        title="what a region leaves in an attribute has no graph where its forward is reentrant",
        option="use_reentrant=False",
        needs_option=True,
        advice="return it from the region",
        fits=lambda seen: (
            seen.part == "gradients" and seen.has_changed("attribute") and seen.divergence is None
        ),
    ),
    LikelyCause(
        numbers=(10,),
        title="the recomputation leaves state otherwise than forward, and the next step reads it",
        option="early_stop=False",
        advice="change nothing on the module in a region",
        fits=lambda seen: seen.part == "state" and seen.changes("gradients"),
    ),
    LikelyCause(
        numbers=(4,),
        title="the region draws from a generator of its own, which is not put back",
        option="rewind=True",
        advice="draw from the default generator",
        fits=lambda seen: seen.draws(),
    ),
    LikelyCause(
        numbers=(2,),
        title="spectral_norm iterates once more in the recomputation",
        option="rewind=True",
        advice="leave it out of the region",
        fits=lambda seen: seen.changes("buffers", "parametrizations", "_u", "_v") and seen.has_run("mv"),
    ),
    LikelyCause(
        numbers=(12,),
        title="batch statistics are updated twice",
        option="rewind=True",
        advice="freeze them",
        fits=lambda seen: seen.changes("buffers", "running_", "num_batches_tracked"),
    ),
    LikelyCause(
        numbers=(17,),
        title="a scale of delayed quantisation is updated in forward, so the recomputation has another",
        option="rewind=True",
        advice="move the update out of the region",
        fits=lambda seen: seen.changes("buffers", "amax", "scale") and seen.changes("gradients"),
    ),
    LikelyCause(
        numbers=(13,),
        title="a buffer that routes is updated in forward, so the recomputation routes otherwise",
        option="rewind=True",
        advice="move the update out of the region",
        fits=lambda seen: (
            seen.has_run("topk")
            and (seen.changes("buffers") or seen.changes("state"))
            and seen.changes("gradients")
        ),
    ),
    LikelyCause(
        numbers=(37, 39, 64),
        title="a buffer that a region reads is updated in forward, so the recomputation reads another",
        option="rewind=True",
        advice="move the update out of the region",
        fits=lambda seen: seen.changes("buffers") and seen.changes("gradients"),
    ),
    LikelyCause(
        numbers=(14,),
        title="a buffer that counts is updated once more by the recomputation",
        option="rewind=True",
        advice="move the update out of the region",
        fits=lambda seen: seen.changes("buffers"),
    ),
    LikelyCause(
        numbers=(15,),
        title="a container grows once more in the recomputation",
        option="rewind=True",
        advice="move the update out of the region",
        fits=lambda seen: seen.changes("state", "length of "),
    ),
    LikelyCause(
        numbers=(16, 36, 38),
        title="an attribute that a region reads is changed in forward, so the recomputation reads another",
        option="rewind=True",
        advice="move the update out of the region",
        fits=lambda seen: seen.changes("state") and seen.changes("gradients"),
    ),
    LikelyCause(
        numbers=(32,),
        title="a counter or another attribute is changed once more by the recomputation",
        option="rewind=True",
        advice="move the update out of the region",
        fits=lambda seen: seen.changes("state"),
    ),
    LikelyCause(
        numbers=(58,),
        title="a module is in another mode when backward recomputes",
        advice="put the mode back before forward returns",
        fits=lambda seen: seen.reads_anew("mode"),
    ),
    LikelyCause(
        numbers=(6,),
        title="the recomputation reads a choice that was put back, such as the active adapter",
        advice="choose inside of the region, or put it back after backward",
        fits=lambda seen: seen.reads_anew("word"),
    ),
    LikelyCause(
        numbers=(16, 38, 62),
        title="the recomputation reads an attribute that has changed since",
        option="rewind=True",
        advice="pass it as an argument of the region",
        fits=lambda seen: seen.reads_anew("attribute", "hook"),
    ),
    LikelyCause(
        numbers=(40,),
        title="the recomputation takes the next value of an iterator",
        advice="take it before the region and pass it",
        fits=lambda seen: seen.reads_anew("iterator"),
    ),
    LikelyCause(
        numbers=(7,),
        title="the recomputation reads other weights, such as those that functional_call has put back",
        advice="swap inside of the region, with the weights as its inputs",
        fits=lambda seen: seen.reads_anew("weight"),
    ),
    LikelyCause(
        numbers=(5,),
        title="the recomputation reads a context variable after its context has ended",
        advice="read it before the region and pass it, or set it with context_fn",
        fits=lambda seen: seen.reads_anew("context"),
    ),
    LikelyCause(
        numbers=(41,),
        title="the recomputation reads a global switch that has changed since",
        advice="pass it as an argument of the region, or set it with context_fn",
        fits=lambda seen: seen.reads_anew("global"),
    ),
    LikelyCause(
        numbers=(44, 45),
        title="an argument that the region holds is changed in place before it recomputes",
        advice="pass tensors by position, or make a new one for each block",
        fits=lambda seen: seen.reads_anew("input"),
    ),
    LikelyCause(
        numbers=(34,),
        title="the recomputation runs without the autocast of forward",
        advice="enter autocast in the recomputation, or use torch.utils.checkpoint",
        fits=lambda seen: seen.reads_anew("autocast"),
    ),
    LikelyCause(
        numbers=(55,),
        title="what a save list keeps is changed in place, and changed again",
        advice="change out of place, and leave allow_cache_entry_mutation off",
        fits=lambda seen: seen.keeps("_."),
    ),
    LikelyCause(
        numbers=(67,),
        title="what a save list of torch keeps is changed in place through a view with a counter of its own",
        advice="change out of place, or use ac=selective_op, which computes it again",
        fits=lambda seen: seen.keeps("unsafe_"),
    ),
    LikelyCause(
        numbers=(5, 6, 7, 16, 41),
        title="the recomputation reads what has changed since: a context variable, a flag, swapped weights",
        advice="pass it, or a copy of it, as an argument of the region",
        fits=lambda seen: seen.divergence is not None,
    ),
    LikelyCause(
        numbers=(46, 47),
        title="what is saved for backward is not what comes back",
        advice="keep one copy for each tensor, of its dtype, until backward has read it",
        fits=lambda seen: "other values" in seen.unpacked and not seen.recomputed_ops,
    ),
    LikelyCause(
        numbers=(),
        title="what is saved for backward comes back with other strides, so kernels add in another order",
        advice="keep the strides: clone(memory_format=torch.preserve_format)",
        fits=lambda seen: "other strides" in seen.unpacked and not seen.recomputed_ops,
    ),
    LikelyCause(
        numbers=(),
        title="the variant computes by an autograd function of its own, whose backward gives other gradients",
        advice="compare it with torch.autograd.gradcheck, with another gradient for each output",
        fits=lambda seen: seen.part == "gradients" and bool(seen.functions) and not seen.recomputed_ops,
    ),
    LikelyCause(
        numbers=(68,),
        title="what ran again is right, and backward reads other values, such as an output that is "
        "freed and made again without what was written into it",
        advice="discard no output that is written in place, or use ac=modules ac.discard",
        fits=lambda seen: (
            seen.part == "gradients"
            and seen.is_of_calls
            and bool(seen.recomputed_ops)
            and seen.differing.keys().isdisjoint(("buffers", "state", "rng_state"))
            and not (
                seen.lost
                or seen.gained
                or seen.changed
                or seen.unpacked
                or seen.is_compiled
                or seen.has_raised
            )
        ),
    ),
)
"""The first that fits counts."""


_UNMATCHED = LikelyCause(
    numbers=(31,),
    title="a save list names operators that the model does not run",
    advice="name those that it runs: a layer with a bias runs addmm, not mm",
    fits=lambda seen: seen.part == "inert",
)
_UNAPPLIED = LikelyCause(
    numbers=(29, 30, 31, 65),
    title="checkpointing never took place: a flag that nothing reads, a copy, hooks that see nothing",
    advice="check what the variant changes of the model that is called",
    fits=lambda seen: seen.part == "inert",
)
_OUTWEIGHED = LikelyCause(
    numbers=(),
    title="regions that keep as much as their modules do: inputs, random states, what is named",
    advice="checkpoint larger parts, or modules that hold more inside than they are given",
    fits=lambda seen: seen.part == "inert",
)


IN_EVAL_MODE = LikelyCause(
    numbers=(33, 63),
    title="the model is in eval mode, in which the variant does nothing",
    advice="call train()",
    fits=lambda seen: seen.part == "inert",
)
"""A model that is given in this mode, and a variant that does something in the other."""


def cause_of_inert(reason: str) -> LikelyCause:
    """Return what a variant that does nothing, or frees nothing, looks like.

    Args:
        reason: why it counts as having done nothing.
    """
    if reason.startswith("frees nothing"):
        return _OUTWEIGHED
    return _UNMATCHED if "ever fired" in reason else _UNAPPLIED


def evidence_of(
    finding: Finding | Mapping[str, Any] | None,
    parity: Parity | None,
    values: RecomputedValues | None,
    **known: Any,
) -> Evidence | None:
    """Return what is known of the first difference; `None` where nothing differs.

    Args:
        finding: what a probe found, or the first difference; `None` for that of `parity`.
        parity: the two models side by side.
    """
    first = _first(finding, parity)
    if first is None:
        return None
    parts = {} if parity is None else {part: getattr(parity, part) for part in PARTS}
    return Evidence(
        part=first["part"],
        name=first["name"],
        expected=str(first["expected"]),
        actual=str(first["actual"]),
        step=first.get("step", 0),
        probe=first["probe"],
        differing={
            part: each.first_difference.name
            for part, each in parts.items()
            if each.first_difference is not None
        },
        recomputed_ops=() if values is None else values.operators,
        divergence=None if values is None else values.first,
        forward_ops=() if values is None else values.forward_operators,
        **known,
    )


def _first(finding: Finding | Mapping[str, Any] | None, parity: Parity | None) -> Mapping[str, Any] | None:
    if isinstance(finding, Finding):
        return finding.first
    if finding is None and parity is not None and parity.first is not None:
        return {"probe": "parity", **asdict(parity.first)}
    return finding


def likely_cause(seen: Evidence, applied: Collection[str] | None = None) -> LikelyCause | None:
    """Return what a difference looks like; `None` where nothing known does.

    Args:
        applied: options that were tried and changed something; `None` where nobody tried.
    """
    return next(
        (
            cause
            for cause in CAUSES
            if cause.fits(seen) and (applied is None or not cause.needs_option or cause.option in applied)
        ),
        None,
    )
