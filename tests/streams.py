"""Whether the streams of a card that is not there could get in each other's way.

A card may do the work of two streams in any order, as long as each does its own in the order in which it was
asked for, and ``wait_stream`` and the CPU's waits are kept. Here all work is done at once, so a wait that was
forgotten would never show. Instead each access to memory is compared with those before it: two of which one
writes, and neither of which is certain to have ended before the other, raise. A run in which none raise has
the same result in every order that a card may choose.

Memory that is given back while another stream may still use it raises, too: torch gives it to the next who
asks on the stream where it was made.

What the CPU knows to have ended is one clock for all its threads, so a wait that another thread has made
counts: more is then thought to be safe than is, never less.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

Clock = dict[int, int]
"""How many operations have ended, by stream."""
Places = dict[int, UntypedStorage]
"""Memory, by its address."""
Use = tuple[str, Places, Places]
"""An operation's name, and what it reads and writes."""


class StreamRace(AssertionError):
    """Two streams may use the same memory at the same time."""


@dataclass
class _Memory:
    alive: StorageWeakRef
    made_by: int
    what: str
    written: tuple[int, int] | None = None
    """Stream and number of the operation that last wrote to it."""
    read: Clock = field(default_factory=dict)
    """The last operation of each stream that has read it since."""


class Streams:
    """The operations asked for so far, by stream; 0 is the default stream."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._asked: Clock = {}
        self._known: dict[int, Clock] = {}
        self._cpu: Clock = {}
        self._memory: dict[int, _Memory] = {}

    def operation(self, stream: int, name: str, read: Places, written: Places) -> None:
        """An operation is asked for on a stream.

        Raises:
            StreamRace: if another stream may write what it reads, or use what it writes.
        """
        with self._lock:
            self._asked[stream] = number = self._asked.get(stream, 0) + 1
            known = self._of(stream)
            _merge(known, self._cpu)
            known[stream] = number
            for place in read.items():
                memory = self._found(place, stream, name)
                self._ended(known, memory.written, f"{name} reads", memory)
                memory.read[stream] = number
            for place in written.items():
                memory = self._found(place, stream, name)
                for access in (memory.written, *memory.read.items()):
                    self._ended(known, access, f"{name} writes", memory)
                memory.written, memory.read, memory.what = (stream, number), {}, name

    def wait(self, stream: int, other: Clock | int) -> None:
        """What is asked for on a stream from here on comes after another's operations, or an event's."""
        with self._lock:
            self._returned()
            _merge(self._of(stream), self._reached(other))

    def reached(self, stream: int) -> Clock:
        """What has ended once a stream has done what it was asked for so far."""
        with self._lock:
            return dict(self._reached(stream))

    def synchronize(self, other: Clock | int | None = None) -> None:
        """The CPU waits for a stream, an event or, for None, for all streams."""
        with self._lock:
            self._returned()
            for one in self._known.copy() if other is None else [other]:
                _merge(self._cpu, self._reached(one))

    def _of(self, stream: int) -> Clock:
        return self._known.setdefault(stream, {})

    def _reached(self, other: Clock | int) -> Clock:
        return self._of(other) if isinstance(other, int) else other

    def _found(self, place: tuple[int, UntypedStorage], stream: int, name: str) -> _Memory:
        key, storage = place
        memory = self._memory.get(key)
        if memory is None:
            alive = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            memory = self._memory[key] = _Memory(alive, stream, name)
        return memory

    def _returned(self) -> None:
        """Look at the memory that nothing points to any more."""
        expired = UntypedStorage._expired  # of which `StorageWeakRef.expired` makes three calls
        for key in [key for key, memory in self._memory.items() if expired(memory.alive.cdata)]:
            memory = self._memory.pop(key)
            known = {**self._of(memory.made_by)}
            _merge(known, self._cpu)
            for access in (memory.written, *memory.read.items()):
                self._ended(known, access, "another may be given", memory)

    @staticmethod
    def _ended(known: Clock, access: tuple[int, int] | None, name: str, memory: _Memory) -> None:
        if access is not None and known.get(access[0], 0) < access[1]:
            raise StreamRace(f"{name} memory of {memory.what} that stream {access[0]} may still use")


def memory_of(tensors: Iterable[Tensor]) -> Places:
    """The memory in which tensors lie; several may share one."""
    storages = [t.untyped_storage() for t in tensors]
    return {storage._cdata: storage for storage in storages}


def _merge(into: Clock, other: Clock) -> None:
    for stream, number in other.items():
        into[stream] = max(into.get(stream, 0), number)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation changes, by its schema."""
    found = [args[place] for place, _ in _changed(func) if place < len(args)]
    return found + [kwargs[name] for _, name in _changed(func) if name in kwargs]


@functools.cache
def _changed(func: Any) -> list[tuple[int, str]]:
    """Place and name of each argument that an operation changes."""
    schema = enumerate(func._schema.arguments)
    return [(place, a.name) for place, a in schema if a.alias_info and a.alias_info.is_write]


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those of an operation's arguments or results, of which some are lists of tensors; `tree_leaves`, which
    knows every kind of tree, takes five times as long.
    """
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
