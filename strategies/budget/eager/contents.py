"""The parts of a tape of operators: contents of storages, and the operators that make them.

A content refers to the operator that makes it, and an operator to the contents that it reads, so that Python
itself counts readers: a content that no ticket and no waiting operator reads is gone, and its memory with it.
A content that is *fleeting* is dropped while others still read it. In each request another stands in for it,
which a copy of its maker fills, so that the maker, and what it reads, lives on. Between drops both have the
same memory; behind the last it is fleeting no more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from strategies.base import StrategyError
from strategies.estimate.liveness import key_of
from strategies.estimate.recomputing import recomputing
from strategies.estimate.tensors import dtype_name, tensors_in
from strategies.generators import Stash
from strategies.regions.saved_tensors import local_of
from strategies.regions.versions import Version
from strategies.step.memory_layout import MemoryLayout, copied
from strategies.step.needed import needed


class Content:
    """The content of a storage between two writes.

    Attributes:
        maker: operator that makes it and has not run again; `None` where there is none.
        memory: dense tensor on the storage; `None` until it is there.
        versions: states of tensors on the storage when forward ended; none of what is made again.
        on_host: brings the memory back from the host.
        fetch: copies the memory from where the latest content of the storage lies.
        is_past: forward has written to the storage since.
        is_fleeting: it is dropped after some requests that need it, and made again for the next.
        drops: numbers of requests after which it is dropped; none: after each.
        uses: how many requests have needed it, while it is fleeting.
        shares: the fleeting content that it stands in for, and gives the memory to.
        readings: how often operators that may run again read it in forward.
    """

    __slots__ = (
        "__weakref__",
        "drops",
        "fetch",
        "is_fleeting",
        "is_past",
        "maker",
        "memory",
        "on_host",
        "readings",
        "shares",
        "uses",
        "versions",
    )

    def __init__(self, maker: TapedOperator | None, memory: Tensor | None = None) -> None:
        self.maker = maker
        self.memory = memory
        self.versions: tuple[Version, ...] = ()
        self.on_host: Callable[[], Tensor] | None = None
        self.fetch: Callable[[], Tensor] | None = None
        self.is_past = False
        self.is_fleeting = False
        self.drops: tuple[int, ...] = ()
        self.uses = 0
        self.shares: Content | None = None
        self.readings = 0

    def drop_after(self, drops: tuple[int, ...] | None) -> None:
        """Be fleeting: dropped after requests of these numbers, or after each; `None`: not at all."""
        self.is_fleeting, self.drops = drops is not None, drops or ()

    def give_way(self, newer: Content) -> None:
        """Let `newer` be what forward goes on with: an operator writes to the storage.

        It is dropped as this one was. This one is dropped after each request: a copy of the operator writes
        to what stands in for it, which must not share its memory.
        """
        newer.is_fleeting, newer.drops = self.is_fleeting, self.drops
        self.is_past, self.drops = True, ()

    def for_request(self, stand_ins: dict[Content, Content]) -> Content:
        """Return what is read in a request: itself, or what stands in for it.

        Args:
            stand_ins: contents for this request alone, by those for which they stand in.
        """
        if self in stand_ins:
            return stand_ins[self]
        return stand_ins.setdefault(self, self._lent()) if self.is_fleeting else self

    def _lent(self) -> Content:
        """Return what stands in for it in the next request that needs it."""
        self.uses += 1
        found = Content(None, self.memory)
        if self.drops and self.uses not in self.drops:
            found.shares = self
        else:
            self.memory, self.versions = None, ()
        self.is_fleeting = not self.drops or self.uses < self.drops[-1]
        return found

    def is_at_hand(self) -> bool:
        """Say whether the memory is there, or waits on the host."""
        if self.fetch is not None:
            self.memory, self.fetch = self.fetch(), None
        return self.memory is not None or self.on_host is not None

    def on_device(self) -> Tensor:
        """Return the memory, which comes back from the host now where it waits there."""
        if self.on_host is not None:
            self.memory, self.on_host = self.on_host(), None
        assert self.memory is not None, "its maker has run"
        return self.memory

    def fill(self, memory: Tensor) -> None:
        """Take what the maker has made."""
        self.memory, self.maker = memory, None
        if self.shares is not None:
            self.shares.memory, self.shares = memory, None

    def refuse_change(self, reader: TapedOperator) -> None:
        """Refuse to let `reader` run where the storage was written to after forward.

        Raises:
            StrategyError: naming both.
        """
        for version in self.versions:
            if not version.is_past():
                continue
            what = "value on the host" if self.memory is None else _described(self.memory)
            problem = f"{reader.name} reads a {what} that was changed in place after forward"
            raise StrategyError(
                "ac.plan",
                f"{problem}, so that it cannot run again; change it after backward, or change a copy",
            )


class Reading:
    """An argument of an operator: a content, and where in it the tensor lies."""

    __slots__ = ("_layout", "_memory", "content")

    def __init__(self, content: Content, layout: MemoryLayout) -> None:
        self.content: Content | None = content
        self._layout = layout
        self._memory: Tensor | None = None

    def repeated(self, stand_ins: dict[Content, Content]) -> Reading:
        """Return the same argument of a copy of the operator."""
        assert self.content is not None, "its operator has not run"
        return Reading(self.content.for_request(stand_ins), self._layout)

    def let_go(self) -> None:
        """Hold the memory in place of the content, whose other readers hold it."""
        assert self.content is not None
        self._memory, self.content = self.content.on_device(), None

    def takes_copy(self, others: Iterable[Reading]) -> None:
        """Read a copy of the memory; so do those of `others` that read the same."""
        whole = self._memory
        copy = copied(self.memory)
        for each in others:
            if each._memory is whole:  # noqa: SLF001 (of its own class)
                each._memory = copy  # noqa: SLF001

    @property
    def memory(self) -> Tensor:
        """The memory that it holds."""
        assert self._memory is not None, "it has let go"
        return self._memory

    def tensor(self, copy: Tensor | None = None) -> Tensor:
        """Return the argument, maybe on a copy of its memory."""
        if copy is None:
            copy = self.memory if self.content is None else self.content.on_device()
        return self._layout.on(copy)


class TapedOperator:
    """An operator of a block's forward, which runs at most once more; copies of it run for what is fleeting.

    Attributes:
        number: ordinal among the operators of the forward.
        name: its name and overload.
        stash: puts back the random numbers that it drew.
        is_with_grad: gradients were on in forward: recurrent layers make more for backward then.
        is_collective: its results must be waited for.
        is_of_fleeting: one of its results, or of what it reads, is fleeting.
    """

    __slots__ = (
        "_args",
        "_function",
        "_kwargs",
        "_made",
        "_written",
        "is_collective",
        "is_of_fleeting",
        "is_with_grad",
        "name",
        "number",
        "stash",
    )

    def __init__(
        self, number: int, name: str, function: Any, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        self.number, self.name = number, name
        self._function, self._args, self._kwargs = function, args, kwargs
        self.stash: Stash | None = None
        self.is_with_grad = torch.is_grad_enabled()
        self.is_collective = self.is_of_fleeting = False
        self._made: list[tuple[int, weakref.ref[Content]]] = []
        self._written: list[tuple[Reading, weakref.ref[Content]]] = []

    def readings(self) -> list[Reading]:
        """Return what it reads."""
        found: list[Reading] = []
        _add_readings(self._args, found)
        if self._kwargs:
            _add_readings(self._kwargs.values(), found)
        return found

    def makes(self, result: int, content: Content) -> None:
        """Take note that its result of that number lies on a storage of its own."""
        self._made.append((result, weakref.ref(content)))
        self.is_of_fleeting |= content.is_fleeting

    @property
    def has_made(self) -> bool:
        """True if a result of it lies on a storage of its own."""
        return bool(self._made)

    def for_request(self, stand_ins: dict[Content, Content]) -> TapedOperator:
        """Return what runs in a request: the operator, or a copy where it makes what is fleeting.

        Args:
            stand_ins: contents for this request alone, by those for which they stand in.
        """
        parts: list[tuple[int | Reading, weakref.ref[Content]]] = [*self._made, *self._written]
        contents = [(part, content) for part, each in parts if (content := each()) is not None]
        if not any(content.is_fleeting or content in stand_ins for _, content in contents):
            for reading in self.readings():
                if reading.content is not None:
                    reading.content = reading.content.for_request(stand_ins)
            return self
        args, kwargs = (_repeated(each, stand_ins) for each in (self._args, self._kwargs))
        copy = TapedOperator(self.number, self.name, self._function, args, kwargs)
        copy.is_with_grad, copy.is_collective = self.is_with_grad, self.is_collective
        copy.stash = self.stash
        for part, reference in parts:
            made = self._wanted(reference(), stand_ins)
            if made is not None:
                made.maker = copy
            if isinstance(part, int) and made is not None:
                copy.makes(part, made)
            elif isinstance(part, Reading) and part.content is not None:  # wanted or not, it writes to that
                copy.writes(part.content.for_request(stand_ins), made or Content(copy))
        return copy

    def _wanted(self, content: Content | None, stand_ins: dict[Content, Content]) -> Content | None:
        """Return what a copy is to fill of one of its results, if anybody needs it in this request."""
        if content is None or (content.is_fleeting and content not in stand_ins):
            return None
        made = stand_ins.get(content, content)
        # what does not stand in for another, and has no maker, is there or waits on the host
        is_lacking = made.memory is None and made.maker is (self if made is content else None)
        return made if is_lacking else None

    def note_readings(self) -> None:
        """Take note that it may run again, and reads what it has read once more."""
        for reading in self.readings():
            if reading.content is not None:
                reading.content.readings += 1
                self.is_of_fleeting |= reading.content.is_fleeting

    def writes(self, older: Content | None, newer: Content) -> None:
        """Take note that it writes to what it reads."""
        reading = next(each for each in self.readings() if each.content is older)
        self._written.append((reading, weakref.ref(newer)))
        self.is_of_fleeting |= newer.is_fleeting

    def run(self) -> None:
        """Run again, and fill what it makes; what it alone has read is gone then."""
        readings = self.readings() if self._written else []
        shared = [(reading, weakref.ref(reading.content)) for reading, _ in self._written if reading.content]
        for reading in readings:
            reading.let_go()
        for reading, content in shared:
            if content() is not None:  # others read what it was
                reading.takes_copy(readings)
        args, kwargs = _given(self._args, Reading.tensor), _given(self._kwargs, Reading.tensor)
        self._args, self._kwargs = [], {}
        del readings, shared
        self._fill(self._call(args, kwargs))

    def rehearse(self, passing: frozenset[int]) -> Iterator[tuple[Content, Tensor]]:
        """Run again, and run once more later; yield what it has made, and what it has written.

        Args:
            passing: identities of contents that it may write to: nobody reads them afterwards.
        """
        older = [reading.content for reading, _ in self._written if reading.content]
        copies = {id(each): copied(each.on_device()) for each in older if id(each) not in passing}

        def tensor_of(reading: Reading) -> Tensor:
            return reading.tensor(copies.get(id(reading.content)))

        written = [
            (reference, copies.get(id(reading.content), reading.content.memory))
            for reading, reference in self._written
            if reading.content
        ]
        result = self._call(_given(self._args, tensor_of), _given(self._kwargs, tensor_of))
        results = list(tensors_in(result))
        made = [(reference, self._dense(results[number])) for number, reference in self._made]
        for reference, memory in (*made, *written):
            content = reference()
            if content is not None and content.maker is self and memory is not None:
                yield content, memory

    def _call(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run the operator.

        Random numbers are drawn from the state of forward, and the present one is put back.
        """
        if self.stash is None and self.is_with_grad:
            return self._function(*args, **kwargs)
        put_back = _nothing if self.stash is None else self.stash()
        try:
            with nullcontext() if self.is_with_grad else torch.no_grad():
                return self._function(*args, **kwargs)
        finally:
            put_back()

    def _fill(self, result: Any) -> None:
        """Give what a second run made, or wrote, to those of its results that still lack their content."""
        results = [result] if type(result) is Tensor else list(tensors_in(result))
        for number, reference in self._made:
            content = reference()
            if content is not None and content.maker is self:
                content.fill(self._dense(results[number]))
        for reading, reference in self._written:
            content = reference()
            if content is not None and content.maker is self:
                content.fill(reading.memory)
        self._made, self._written = [], []

    def _dense(self, result: Tensor) -> Tensor:
        if self.is_collective:
            result = torch.ops._c10d_functional.wait_tensor(result)  # noqa: SLF001 (its name)
        local = local_of(result)
        assert local is not None, "it had a storage in forward"
        return local


def compute(asked: list[Content]) -> Tensor:
    """Return the memory of a content, having run what it still needs, in the order of forward.

    Args:
        asked: the content, which nobody holds besides those that ask for it later.

    Raises:
        RuntimeError: something that is read was changed since forward.
    """
    content = asked.pop()
    if content.is_fleeting or not content.is_at_hand():
        waiting = needed_operators([content])
        if content.is_fleeting or any(each.is_of_fleeting for each in waiting.values()):
            content = _for_request(content, waiting)
        with recomputing(), below_autograd():
            for number in sorted(waiting):
                waiting.pop(number).run()
    return content.on_device()


@contextmanager
def below_autograd() -> Iterator[None]:
    """Run operators where a tape sees them, below autocast and autograd, and with gradients on."""
    had_grad = torch.is_grad_enabled()
    with torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 (no public way)
        torch._C._set_grad_enabled(True)  # noqa: SLF001 (a third of the time of its context)
        try:
            yield
        finally:
            torch._C._set_grad_enabled(had_grad)  # noqa: SLF001 (as above)


def needed_operators(
    contents: Iterable[Content],
    ends: frozenset[int] = frozenset(),
    refuse: Callable[[Content, TapedOperator], None] = lambda _content, _reader: None,
) -> dict[int, TapedOperator]:
    """Return the operators that contents follow from, by number, back to what is there and to `ends`.

    Args:
        contents: what is wanted.
        ends: identities of contents that will be there.
        refuse: refuses to read a content that is there; changed ones are refused in any case.

    Raises:
        StrategyError: one of them reads what was changed since.
    """
    found: dict[int, TapedOperator] = {}

    def missing(content: Content, reader: TapedOperator | None = None) -> Iterable[int]:
        if not content.is_at_hand():
            maker = content.maker
            assert maker is not None, "a content is there, or something makes it"
            found[maker.number] = maker
            return (maker.number,)
        if reader is not None:
            content.refuse_change(reader)
            refuse(content, reader)
        return ()

    def before(number: int) -> list[int]:
        operator = found[number]
        read = [reading.content for reading in operator.readings()]
        wanted = (each for each in read if each is not None and id(each) not in ends)
        return [maker for each in wanted for maker in missing(each, operator)]

    needed([maker for each in contents for maker in missing(each)], before)
    return found


def freed_reads(content: Content) -> set[int]:
    """Return the freed storages that what makes a content again would read, by `key_of`."""
    waiting = needed_operators([content])
    read = (reading.content for operator in waiting.values() for reading in operator.readings())
    memories = (each.memory for each in read if each is not None)
    return {
        key_of(each)
        for each in memories
        if each is not None and each.numel() and not each.untyped_storage().nbytes()
    }


def _for_request(content: Content, waiting: dict[int, TapedOperator]) -> Content:
    """Let what runs make and read contents of this request, not fleeting ones; return the one asked for."""
    stand_ins: dict[Content, Content] = {}
    content = content.for_request(stand_ins)
    for number in sorted(waiting, reverse=True):  # readers tell which contents their makers are to fill
        waiting[number] = waiting[number].for_request(stand_ins)
    return content


def _repeated(value: Any, stand_ins: dict[Content, Content]) -> Any:
    """Return arguments with readings of their own."""
    if type(value) is Reading:
        return value.repeated(stand_ins)
    if isinstance(value, dict):
        return {name: _repeated(each, stand_ins) for name, each in value.items()}
    return [_repeated(each, stand_ins) for each in value] if type(value) in {list, tuple} else value


def _add_readings(values: Iterable[Any], found: list[Reading]) -> None:
    for value in values:
        kind = type(value)
        if kind is Reading:
            found.append(value)
        elif kind is list:
            _add_readings(value, found)
        elif kind is dict:
            _add_readings(value.values(), found)


def _given(value: Any, tensor_of: Callable[[Reading], Tensor]) -> Any:
    """Return arguments with the tensors that they read."""
    if type(value) is Reading:
        return tensor_of(value)
    if isinstance(value, dict):
        return {name: _given(each, tensor_of) for name, each in value.items()}
    if type(value) is list or type(value) is tuple:
        return [tensor_of(each) if type(each) is Reading else _given(each, tensor_of) for each in value]
    return value


def _nothing() -> None:
    pass


def _described(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} tensor of {list(tensor.shape)}"
