"""A GPU that is not there: its tensors lie in the CPU's memory, and what a real one would refuse is refused.

* An operation on tensors of both devices raises, but for numbers of no dimensions, which the CPU may add.
* What makes the CPU wait for the device (``item``, ``tolist``, ``cpu``, ``nonzero``; sending it what is
  not in pinned memory) is counted, and raises while a graph is recorded.
* A CUDA graph is a recording of operations and of the tensors they read and wrote. Its replay does just these
  again, in the same memory: a value that Python computed is the recorded one, as on a card.

* Under autocast, convolutions and linear layers are done in its type and norms in float32, as there.
* Work is done at once, in the order in which it is asked for; what would not bear another order of two
  streams raises (`tests.streams`). The current stream and the current card are each thread's own.

Where there is a real GPU, `any_card` is that one: the same tests then hold it to the CPU's results.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tests.streams import Clock, Streams, Use, memory_of, tensors_in, written_by

DEVICE = torch.device("cuda:0")
BETWEEN = {"copy_", "_to_copy", "_foreach_copy_"}  # may have tensors of both devices
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero"}
HALF, WHOLE = {"conv2d", "linear", "matmul"}, {"group_norm"}
MOVING = {"to", "cpu", "cuda", "numpy", "tolist"}
SPECIAL = HALF | WHOLE | MOVING


class OnCard(Tensor):
    """A tensor of the card."""

    def __new__(cls, values: Tensor) -> OnCard:
        made: OnCard = torch.Tensor._make_subclass(cls, values)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _STATE.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return cls._dispatched(func, args, kwargs or {})

    @staticmethod
    def _dispatched(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        given = [*tensors_in(args), *tensors_in(kwargs.values())]
        strangers = [t for t in given if not isinstance(t, OnCard) and t.ndim]
        if strangers and name not in BETWEEN:
            raise RuntimeError(
                f"{name}: tensors on the card and on the CPU, {[tuple(t.shape) for t in strangers]}"
            )
        direct = name == "copy_" and (kwargs.get("non_blocking") or True in args[2:])
        waits = name in WAITING or (strangers and not (direct and all(is_pinned(t) for t in strangers)))
        if waits:
            _wait(name)
        with torch._C._DisableTorchDispatch():
            made = func(*args, **kwargs)
        made = _on_card(made)
        if _STATE.recording is None:
            _STATE.asked(_use(func, args, kwargs, made))
            if waits:
                _STATE.streams.synchronize(_LOCAL.stream.number)
        else:
            if strangers:
                raise RuntimeError(f"{name}: a tensor of the CPU inside a graph")
            _STATE.recording.append(
                (func, args, kwargs, list(tensors_in([made])), _use(func, args, kwargs, made))
            )
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _on_card(made: Any) -> Any:
    """An operation's result as one of the card."""
    if isinstance(made, list | tuple):
        return type(made)(map(_on_card, made))
    return OnCard(made) if type(made) is Tensor else made


class _Stream:
    """``number`` 0: the default stream, in which no graph may be recorded."""

    made = 0

    def __init__(self) -> None:
        _Stream.made += 1
        self.number = _Stream.made

    def synchronize(self) -> None:
        _STATE.waits["synchronize"] += 1
        _STATE.streams.synchronize(self.number)

    def wait_stream(self, other: _Stream) -> None:
        _STATE.streams.wait(self.number, other.number)


class _DefaultStream(_Stream):
    def __init__(self) -> None:
        self.number = 0


class _Event:
    reached: Clock

    def record(self, stream: _Stream) -> None:
        self.reached = _STATE.streams.reached(stream.number)

    def synchronize(self) -> None:
        _STATE.streams.synchronize(self.reached)


class _State:
    device = DEVICE
    recording: list[Any] | None = None

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.streams = Streams()

    def asked(self, use: Use | None) -> None:
        """An operation on the current stream."""
        if use is not None:
            self.streams.operation(_LOCAL.stream.number, *use)


def _use(func: Any, args: Any, kwargs: Any, made: Any) -> Use | None:
    """An operation's name and the memory that it reads and writes; None: a view, which does neither."""
    name = func.overloadpacket.__name__
    read = memory_of(t for t in tensors_in([*args, *kwargs.values()]) if isinstance(t, OnCard))
    fresh = {key: memory for key, memory in memory_of(tensors_in([made])).items() if key not in read}
    written = memory_of(t for t in tensors_in(written_by(func, args, kwargs)) if isinstance(t, OnCard))
    return (name, read, written | fresh) if fresh or written or name in WAITING else None


class _Local(threading.local):
    """What each thread has of its own."""

    stream: _Stream = _DefaultStream()
    device = 0
    intercepted = False
    """Whether `_Calls` sees what this thread calls: twice would cost twice."""

    def set_device(self, device: Any) -> None:
        self.device = device if isinstance(device, int) else torch.device(device).index

    def stands_here(self) -> None:
        assert self.device == _STATE.device.index, f"a thread that stands on GPU {self.device} wakes it up"


_STATE, _LOCAL = _State(), _Local()


def _wait(name: str) -> None:
    if _STATE.recording is not None:
        raise RuntimeError(f"{name}: waits for the device while a graph is recorded")
    _STATE.waits[name] += 1


class _Calls(TorchFunctionMode):
    """Sends what asks for the device to `OnCard`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not kwargs and name not in SPECIAL:
            return func(*args)
        kwargs = dict(kwargs or {})
        if name in MOVING and isinstance(args[0], Tensor):
            return self._moved(func, name, args, kwargs)
        if (name in HALF or name in WHOLE) and torch.is_autocast_enabled("cuda"):
            kind = torch.get_autocast_dtype("cuda") if name in HALF else torch.float32
            args, kwargs = tree_map(
                lambda t: t.to(kind) if isinstance(t, OnCard) and t.is_floating_point() else t, (args, kwargs)
            )
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == "cuda":
            kwargs["device"] = "cpu"
            values = [t.detach() if type(t) is Tensor else t for t in args]
            if name in ("tensor", "as_tensor"):
                _wait(name)
            learnt = kwargs.pop("requires_grad", False)
            with torch._C.DisableTorchFunctionSubclass():
                return _arrived(name, OnCard(func(*values, **kwargs))).requires_grad_(learnt)
        return func(*args, **kwargs)

    def _moved(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        own, *others = args
        here = isinstance(own, OnCard)
        if name == "numpy" and here:
            raise TypeError("numpy of a tensor on the card")
        if name in ("numpy", "tolist"):
            if here:
                _wait(name)
                _fetched(name, own)
            return func(plain(own) if here else own, **kwargs)
        device = kwargs.pop("device", None) or {"cpu": "cpu", "cuda": "cuda"}.get(name)
        direct = kwargs.pop("non_blocking", False) and is_pinned(own)
        for other in others:
            if isinstance(other, (str, torch.device)):
                device = other
            elif isinstance(other, torch.dtype):
                kwargs["dtype"] = other
            elif isinstance(other, Tensor):
                device, kwargs["dtype"] = other.device, other.dtype
        there = here if device is None else torch.device(device).type == "cuda"
        if here != there and not (there and direct):
            _wait(name)
        if there and not here:
            own = _Sent.apply(own)
        elif here and not there:
            _fetched(name, own)
            own = plain(own).clone()
        return own.to(**kwargs) if kwargs else own


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return _arrived("to", OnCard(values.clone()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _wait("backward of to")
        _fetched("backward of to", gradient)
        return plain(gradient).clone()


def _arrived(name: str, values: OnCard) -> OnCard:
    """Values that the current stream has been asked to write to new memory."""
    if _STATE.recording is None:
        _STATE.asked((name, {}, memory_of([values])))
    return values


def _fetched(name: str, values: Tensor) -> None:
    """Values that the CPU has waited for."""
    _STATE.asked((name, memory_of([values]), {}))
    _STATE.streams.synchronize(_LOCAL.stream.number)


def plain(tensor: Tensor) -> Tensor:
    """As a tensor of the CPU; of the pretended card, the same memory."""
    if not isinstance(tensor, OnCard):
        return tensor.cpu()
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
        made: Tensor = torch.Tensor._make_subclass(Tensor, tensor.detach())
    return made


def _pinned(tensor: Tensor) -> Tensor:
    assert not isinstance(tensor, OnCard), "only memory of the CPU can be pinned"
    _LOCAL.stands_here()
    copied: Any = tensor.clone()
    copied.is_in_locked_pages = True
    return copied  # type: ignore[no-any-return]


def is_pinned(tensor: Tensor) -> bool:
    """Whether the card can take it over while the CPU goes on."""
    return getattr(tensor, "is_in_locked_pages", False)


class _Graph:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
            for func, args, kwargs, made, use in self.calls:
                _STATE.asked(use)
                again = func(*args, **kwargs)
                for old, new in zip(made, tensors_in([again])):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@contextlib.contextmanager
def _graph(graph: _Graph, stream: _Stream | None = None, **_: Any) -> Iterator[None]:
    assert _STATE.recording is None
    chosen = stream or _Stream()
    assert chosen.number, "no graph can be recorded in the default stream"
    _LOCAL.stands_here()
    _STATE.recording = graph.calls
    try:
        with _within(chosen):
            yield
    finally:
        _STATE.recording = None


@contextlib.contextmanager
def _within(stream: _Stream) -> Iterator[None]:
    before = _LOCAL.stream, _LOCAL.device
    _LOCAL.stream, _LOCAL.device = stream, _STATE.device.index
    try:
        with _intercepted():
            yield
    finally:
        _LOCAL.stream, _LOCAL.device = before


@contextlib.contextmanager
def _intercepted() -> Iterator[None]:
    before, _LOCAL.intercepted = _LOCAL.intercepted, True
    try:
        with contextlib.nullcontext() if before else _Calls():
            yield
    finally:
        _LOCAL.intercepted = before


@contextlib.contextmanager
def card(free: int = 10**9, index: int = 0) -> Iterator[Counter[str]]:
    """Within, there is a card with so many bytes of free memory; yields how often what made the CPU wait.

    ``index``: its place among this machine's; threads begin on the first.
    """
    _STATE.waits, _STATE.streams, _STATE.device = Counter(), Streams(), torch.device("cuda", index)
    makers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: index + 1,
        "current_device": lambda: _LOCAL.device,
        "set_device": _LOCAL.set_device,
        "get_device_name": lambda *_: "H200 that is not there",
        "max_memory_allocated": lambda *_: 10**9,
        "max_memory_reserved": lambda *_: 2 * 10**9,
        "reset_peak_memory_stats": lambda *_: None,
        "is_bf16_supported": lambda *_: True,
        "is_initialized": lambda: True,
        "Stream": lambda *_: _Stream(),
        "Event": lambda **_: _Event(),
        "current_stream": lambda *_: _LOCAL.stream,
        "stream": _within,
        "synchronize": lambda *_: _STATE.streams.synchronize(),
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (free, free),
        "CUDAGraph": _Graph,
        "graph": _graph,
        "graph_pool_handle": lambda: (0, 0),
    }
    with contextlib.ExitStack() as stack:
        for name, maker in makers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, maker))
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, False)
        torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter stays the same object
        stack.enter_context(mock.patch.object(nn.Module, "load_state_dict", _loaded))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", _pinned))
        own = {"PFL_PYTORCH_DEVICE": str(_STATE.device), "XDG_CACHE_HOME": _CACHE.name}
        stack.enter_context(mock.patch.dict(os.environ, own))
        stack.enter_context(_intercepted())
        stack.callback(_LOCAL.set_device, _LOCAL.device)
        yield _STATE.waits


_CACHE = tempfile.TemporaryDirectory()
"""A cache folder for this process, so that no card is found that was checked by another."""
_LOAD = nn.Module.load_state_dict


def _loaded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Values are copied, as on a card; to swap parameters a module must be the only one that has them."""
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        return _LOAD(self, *args, **kwargs)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(True)


@contextlib.contextmanager
def real_card() -> Iterator[Counter[str]]:
    """Within, the first GPU of this machine; nothing is counted."""
    with mock.patch.dict(os.environ, PFL_PYTORCH_DEVICE=str(DEVICE)):
        yield Counter()


REAL = torch.cuda.is_available()
any_card = real_card if REAL else card
