"""Proofs: before a program stands in for a forward, both run, and all that they do is compared.

A recording does not see everything that a forward does: a hook on a tensor, a checkpoint of its own, an
object that others share. What a program leaves out of that shows in outputs, in gradients, or in the state
that is left behind. So both run on the same values: the inputs of the call, or those of the plan. Afterwards
the state of the module and of all generators of random numbers is put back.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from strategies import generators
from strategies.base import StrategyError, Tolerance
from strategies.chunk.tolerance import REDUCED_TOLERANCE, TOLERANCE
from strategies.estimate.closeness import drawn_like, furthest, have_one_kind
from strategies.estimate.liveness import key_of
from strategies.estimate.operator_cost import tensors_of
from strategies.estimate.outer_state import all_places_of
from strategies.regions.blocks import plain_class
from strategies.regions.rewind import noted_state
from strategies.tracing.guard import is_of_fsdp
from strategies.tracing.module_state import BOOKKEEPING, HOOKS, ByIdentity, frozen, is_capture, makes_weight
from strategies.tracing.recorder import OutputIndex
from strategies.tracing.scope_graph import ScopeGraph
from strategies.tracing.shadow import mapped_once
from strategies.tracing.without_data import words_of

_SAMPLES = 2
"""Samples of a proof: the fewest that are a batch. More would only repeat what these show."""

_HALF = frozenset({torch.float16, torch.bfloat16})
_LEFT_OUT = BOOKKEEPING | {"_parameters", "_modules", "_buffers", "_compiled_call_impl"}
_OURS = "_acbench_"  # attributes that strategies set begin so

Run: TypeAlias = Callable[..., Any]
"""Takes args and kwargs of a forward."""


class UnprovenError(StrategyError):
    """A program does not do what its forward does."""


_REMEDY = (
    "take out of forward what no operator shows (a hook, a checkpoint, state that others share), or use "
    "chunk=none"
)


@dataclass(slots=True)
class Proofs:
    """Proofs of programs; they hold nothing of a model, so that models that are alike share them.

    Fields:
        known: digests of programs that do what they stand for.
    """

    known: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A program that shall stand in for the forward of a module.

    Fields:
        tolerance: how far numbers may be apart.
        given: positions of the tensors among the inputs that the program may overwrite.
    """

    module: nn.Module
    fqn: str
    graph: ScopeGraph
    plain: Run
    program: Run
    tolerance: Tolerance
    given: frozenset[int]

    def prove(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Run both on copies of the inputs, and put back the state that the module had before.

        What the forward itself raises is raised, and leaves the state as the forward does.

        Raises:
            StrategyError: they differ; it names module, operator and figure.
        """
        put_back = noted_state(self.module)
        with without_hooks(self.module, but=self.module):
            try:
                expected = self._ran(self.plain, args, kwargs)
            except torch.OutOfMemoryError as error:
                put_back()
                raise UnprovenError(
                    "chunk",
                    f"{self._place} cannot be proven: as it is, its forward takes more memory than there is; "
                    "plan with a smaller sample, as a plan holds for other lengths too",
                ) from error
            state = _state_of(self.module)
            put_back()
            try:
                actual = self._ran_as_program(args, kwargs)
                left = _state_of(self.module)
                put_back()
                self._compare(expected, actual)
                different = list(_differing(state, left, self.tolerance))
                if different:
                    self._compare_state(different, args, kwargs)
            finally:
                put_back()

    def _ran(self, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Ran:
        copied, named, leaves = copied_inputs(args, kwargs)
        outputs = run(*copied, **named)
        tensors = {f"input {at}": leaf for at, leaf in leaves.items()}
        tensors |= {**dict(self.module.named_parameters()), **dict(self._read_tensors())}
        wanted = {name: each for name, each in tensors.items() if each.requires_grad}
        found, structure = tree_flatten(outputs)
        gradients = _gradients(found, list(wanted.values()))
        return _Ran(
            structure=structure,
            leaves=[each.detach() if isinstance(each, Tensor) else each for each in found],
            flags=[each.requires_grad for each in found if isinstance(each, Tensor)],
            gradients={
                name: each if each is None or each.layout is torch.strided else each.to_dense()
                for name, each in zip(wanted, gradients, strict=True)
            },
            inputs={at: leaf.detach() for at, leaf in leaves.items() if at not in self.given},
        )

    def _ran_as_program(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Ran:
        try:
            return self._ran(self.program, args, kwargs)
        except StrategyError:
            raise
        except Exception as error:  # whatever it is, the forward has not raised it
            said = words_of(error)
            raise self._refusal(f"it raises {said}", "use chunk=none, and report it") from error

    def _read_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for node in self.graph.graph.find_nodes(op="get_attr"):
            owner, _, name = str(node.target).rpartition(".")
            try:
                found = getattr(self.module.get_submodule(owner), name)
            except AttributeError:
                continue  # a constant of the graph, or below a wrapper
            if isinstance(found, Tensor):
                yield str(node.target), found

    def _compare(self, expected: _Ran, actual: _Ran) -> None:
        """Refuse what is not within the tolerance: outputs, then gradients, then what inputs hold."""
        if expected.structure != actual.structure or not have_one_kind(expected.leaves, actual.leaves):
            raise self._refusal("it returns another structure, shape or dtype")
        if expected.flags != actual.flags:
            raise self._refusal("other ones of its results have gradients")
        outputs = {
            self._maker(at): pair
            for at, pair in enumerate(zip(expected.leaves, actual.leaves, strict=True))
            if isinstance(pair[0], Tensor)
        }
        gradients: dict[str, tuple[Tensor, Tensor]] = {}
        for name, one in expected.gradients.items():
            other = actual.gradients.get(name)
            if one is not None or other is not None:
                none = torch.zeros_like(one if other is None else other)  # type: ignore[arg-type]
                pair = none if one is None else one, none if other is None else other
                gradients[f"the gradient of {self._reader(name)}"] = pair
        inputs = {
            f"what is left in input {at}": (each, actual.inputs[at]) for at, each in expected.inputs.items()
        }
        for pairs in (outputs, gradients, inputs):
            found = furthest(pairs, self.tolerance)
            if found is not None:
                name, off = found
                bound = self.tolerance.relative
                raise self._refusal(f"{name} is {off:.1e} off, where {bound:g} of the largest is allowed")

    def _compare_state(
        self, different: Iterable[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse a difference in the state, unless a forward makes it in its first call alone."""
        self._ran(self.plain, args, kwargs)
        first = _state_of(self.module)
        self._ran(self.plain, args, kwargs)
        again = set(_differing(first, _state_of(self.module), self.tolerance))
        name = next((name for name in different if name in again), None)
        if name is not None:
            raise self._refusal(f"{name} stands elsewhere afterwards")

    def _maker(self, at: int) -> str:
        """Return what a leaf of the outputs is made by, for a message."""
        output = self.graph.outputs[at]
        nodes: Any = next(node for node in reversed(self.graph.graph.nodes) if node.op == "output").args[0]
        which = f"result {at}"
        return f"{which}, of {_called(nodes[output.index])}," if isinstance(output, OutputIndex) else which

    def _reader(self, name: str) -> str:
        """Return a tensor with the operator that reads it first, for a message."""
        is_input = name.startswith("input ")
        nodes = self.graph.graph.find_nodes(op="placeholder" if is_input else "get_attr", sort=True)
        named = dict(enumerate(nodes)) if is_input else {each.target: each for each in nodes}
        node = named.get(int(name.removeprefix("input ")) if is_input else name)
        user = None if node is None else next(iter(node.users), None)
        said = name if is_input else repr(name)
        return said if user is None else f"{said}, which {_called(user)} reads,"

    @property
    def _place(self) -> str:
        name = plain_class(self.module).__name__
        return f"{self.fqn!r} ({name})" if self.fqn else f"the model ({name})"

    def _refusal(self, problem: str, remedy: str = _REMEDY) -> StrategyError:
        said = f"{self._place} does not do as a program what its forward does: {problem}; {remedy}"
        return UnprovenError("chunk", said)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ran:
    """The results of a run.

    Fields:
        flags: whether each tensor among them has gradients.
        gradients: gradient of each input, parameter and tensor that the graph reads, by name.
        inputs: tensors among the inputs by position, as they are afterwards.
    """

    structure: Any
    leaves: list[Any]
    flags: list[bool]
    gradients: dict[str, Tensor | None]
    inputs: dict[int, Tensor]


def first_samples(inputs: Any) -> Any:
    """Return the first samples of inputs, by the first dimension of the first one: enough for a proof."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors or tensors[0].size(0) <= _SAMPLES:
        return inputs
    size = tensors[0].size(0)
    cut = {id(each): each.narrow(0, 0, _SAMPLES) for each in tensors if each.size(0) == size}
    return tree_map_only(Tensor, lambda each: cut.get(id(each), each), inputs)


def has_values(module: nn.Module, tensors: Iterable[Tensor]) -> bool:
    """Say if a module and its inputs have values to prove a program with, and no unit of FSDP is inside.

    To call a unit would change the gradients that it holds.
    """
    units = (FSDPModule, FullyShardedDataParallel)
    if any(isinstance(each, units) for each in module.modules() if each is not module):
        return False
    every = (*tensors, *module.parameters(), *module.buffers())
    return not any(map(_is_without_values, every))


def tolerance_of(graphs: Iterable[ScopeGraph]) -> Tolerance:
    """Return how far what computes as `graphs` do may be apart: further with something in half precision."""
    tensors = (each for scope in graphs for node in scope.graph.nodes for each in tensors_of(node))
    return REDUCED_TOLERANCE if any(each.dtype in _HALF for each in tensors) else TOLERANCE


@contextmanager
def without_hooks(module: nn.Module, *, but: nn.Module | None) -> Iterator[None]:
    """Call no hooks of a module and those inside, except for `but`: a proof is no step of the user's.

    Hooks that make a weight stay: the weight that the last call has left belongs to a graph that is freed.
    """
    with ExitStack() as stack:
        for part in module.modules():
            for name in HOOKS if part is not but else ():
                hooks = vars(part)[name]
                stays = {key: hook for key, hook in hooks.items() if _stays(hook)}
                if len(stays) < len(hooks):
                    stack.enter_context(mock.patch.dict(vars(part), {name: OrderedDict(stays)}))
        yield


def _stays(hook: Any) -> bool:
    return is_of_fsdp(hook) or is_capture(hook) or makes_weight(hook)


def copied_inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, Tensor]]:
    """Return inputs on memory of their own, laid out as before, and by position who gets gradients."""
    memories: dict[Hashable, Tensor] = {}
    tensors = [id(leaf) for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    leaves: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        leaf = _on_a_copy(tensor, memories).requires_grad_(tensor.requires_grad)
        leaves[tensors.index(id(tensor))] = leaf
        is_dense = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
        is_written = tensor.requires_grad and not tensor.is_leaf and is_dense
        return leaf.clone() if is_written else leaf  # autograd lets nobody write to a leaf

    copied, named = mapped_once(copy, (args, dict(kwargs)))
    return copied, named, leaves


def digest(*parts: object) -> str:
    """Return what is equal for values of equal content: objects count by their type and what they hold."""
    return hashlib.sha256(repr(_content(parts)).encode()).hexdigest()


def _content(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_content, value))
    if not isinstance(value, ByIdentity):
        return value
    held = value.value
    if isinstance(held, FunctionType):
        code = held.__code__
        return code.co_filename, code.co_firstlineno, held.__qualname__
    if isinstance(held, torch.Generator):
        return generators.comparable(held.get_state())
    cls = plain_class(held) if isinstance(held, nn.Module) else held if isinstance(held, type) else type(held)
    return cls.__module__, cls.__qualname__


def _is_without_values(tensor: Tensor) -> bool:
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # noqa: SLF001 (no public way)
    return isinstance(tensor, FakeTensor | DTensor) or tensor.is_meta or is_wrapped


def _on_a_copy(tensor: Tensor, memories: dict[Hashable, Tensor]) -> Tensor:
    plain = tensor.detach()
    with torch.no_grad():
        if plain.layout is not torch.strided or plain.is_nested or plain.is_conj() or plain.is_neg():
            return plain.clone()
        key = key_of(plain), plain.dtype
        if key not in memories:
            elements = plain.untyped_storage().nbytes() // plain.element_size()
            memories[key] = plain.as_strided((elements,), (1,), 0).clone()
        return memories[key].as_strided(plain.shape, plain.stride(), plain.storage_offset())


def _gradients(leaves: Iterable[Any], wanted: Sequence[Tensor]) -> list[Tensor | None]:
    results = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not results or not wanted:
        return [None] * len(wanted)
    given = [drawn_like(each, number) for number, each in enumerate(results)]
    try:
        # retained for the second try; nobody holds it any longer than this function
        return list(torch.autograd.grad(results, wanted, given, retain_graph=True, allow_unused=True))
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
    return _accumulated(results, wanted, given)


def _accumulated(
    results: Sequence[Tensor], wanted: Sequence[Tensor], given: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return gradients as `backward` adds them up: the older checkpoint runs in nothing else."""
    before = [(each, each.grad, each._post_accumulate_grad_hooks) for each in wanted if each.is_leaf]  # noqa: SLF001 (no public way)
    try:
        for each, _, _ in before:
            each.grad = each._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # noqa: SLF001 (as above)
        torch.autograd.backward(results, given)
        return [each.grad if each.is_leaf else None for each in wanted]
    finally:
        for each, gradient, hooks in before:
            each.grad, each._post_accumulate_grad_hooks = gradient, hooks  # noqa: SLF001 (as above)


def _state_of(module: nn.Module) -> dict[str, object]:
    """Return what a forward may change besides its results, by what a message calls it."""
    torchs, (python, numpy) = generators.of_torch(), (generators.PYTHON, generators.NUMPY)
    found: dict[str, object] = {
        "the random number generator of torch": [generators.comparable(each.read()) for each in torchs],
        "the random number generator of Python": python.read(),
        "the random number generator of NumPy": generators.comparable(numpy.read()),
    }
    for fqn, part in module.named_modules():
        held = {name: value for name, value in vars(part).items() if name not in _LEFT_OUT}
        for name, value in {**held, **part._buffers}.items():  # noqa: SLF001 (both, by attribute)
            if not name.startswith(_OURS):
                at = repr(f"{fqn}.{name}".lstrip("."))
                found[at] = value.detach().clone() if isinstance(value, Tensor) else digest(frozen(value))
    for place in all_places_of(module):
        value, at = place.get(), repr(str(place))
        if not isinstance(value, Tensor):  # places of two functions may have one name
            found[at] = digest(found.get(at), frozen(value))
    return found


def _differing(state: Mapping[str, object], other: Mapping[str, object], allowed: Tolerance) -> Iterator[str]:
    for name in dict.fromkeys((*state, *other)):
        one, two = state.get(name), other.get(name)
        if isinstance(one, Tensor) and isinstance(two, Tensor):
            if furthest({name: (one, two)}, allowed) is not None:
                yield name
        elif type(one) is not type(two) or one != two:
            yield name


def _called(node: fx.Node) -> str:
    module = node.meta.get("module")
    return f"{node.target} of {module!r}" if module else str(node.target)
