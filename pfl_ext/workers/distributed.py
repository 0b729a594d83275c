"""Workers: processes that share a cohort's users, over Horovod or torch.distributed.

Both implement pfl 0.6's ``DistributedContext``, so that pfl, the engine and the evaluation reduce through
``pfl.internal.ops.pytorch_ops.distributed`` with any launcher. pfl itself knows only torchrun, uses NCCL
wherever there is CUDA, and under ``horovodrun`` puts every worker on GPU 0.

    with connected("auto", timeout=120) as device:    # before CUDA wakes up
        begin_work(round=3, cohort="1f0c", config="9a2e")
        ...                                           # train this worker's users
        all_reduce([flat_sum])                        # through pfl's context; compares the words above first

Every reduction is one collective over one flat vector. Before it, in a small collective, workers check that
they are at the same place (`Workers.all_reduce`). If a worker is lost, the job ends on all workers
(`pfl_ext.workers.watchdog`).

Shape letters: W workers, P values reduced.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors.torch
import torch
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.distributed import DistributedContext, NotDistributedContext
from pfl.internal.ops.selector import set_framework_module
from torch import Tensor

from pfl_ext.workers.launch import Launch, find_launch, place
from pfl_ext.workers.transport import Transport, open_transport
from pfl_ext.workers.watchdog import Watchdog

HEADER = 1024
"""Bytes of the words that each worker sends before a reduction."""
COMPRESSIBLE = 1024
"""Tensors with fewer values, such as counts and norms' parameters, are never rounded to bf16."""
START_S = 300.0
"""Most seconds between the starts of two workers."""


class Workers(DistributedContext):
    """pfl's view of the workers. `connected` creates the one of a process.

    Args:
        compress: whether the model's tensors are sent as bf16: half the bytes, 2^-8 relative error each way.
    """

    def __init__(self, launch: Launch, transport: Transport, watchdog: Watchdog, *, compress: bool) -> None:
        self._launch, self._transport, self._watchdog = launch, transport, watchdog
        self.compress = compress
        self.seconds: list[float] = []
        self._words: dict[str, Any] = {}
        self._reductions, self._since = 0, time.perf_counter()

    @property
    def local_rank(self) -> int:
        """This worker's rank on its machine."""
        return self._launch.local_rank

    @property
    def global_rank(self) -> int:
        """This worker's rank among all W."""
        return self._launch.rank

    @property
    def world_size(self) -> int:
        """W, the number of workers."""
        return self._launch.world_size

    @property
    def local_size(self) -> int:
        """Number of workers on this machine."""
        return self._launch.local_size

    def begin_work(self, **words: Any) -> None:
        """Set the words that workers compare before reductions, and start this worker's clock."""
        self._words, self._since, self.seconds = words, time.perf_counter(), []

    def all_reduce(self, tensors: list[Tensor], average: bool = False) -> list[Tensor]:
        """Sum (or mean) over workers, in place, as one flat vector: float64 if any tensor is, else float32.

        Raises:
            ValueError: on every worker, when they are not at the same place (round, cohort, config or size).
                The message names the worker and the value that differ.
        """
        wide = any(t.dtype == torch.float64 for t in tensors)
        flat = torch.cat(
            [t.detach().reshape(-1).to(torch.float64 if wide else torch.float32) for t in tensors]
        )
        with self._together():
            self._agree(flat)
            self._transport.sum_(flat)
        _hand_out(flat / self.world_size if average else flat, tensors)
        return tensors

    def sum_model(self, exact: list[Tensor], model: list[Tensor]) -> None:
        """Sum over workers, in place, in one reduction; with ``compress``, ``model`` separately as bf16."""
        if not self.compress:
            self.all_reduce([*exact, *model])
            return
        self.all_reduce([*exact, *(t for t in model if t.numel() < COMPRESSIBLE)])
        large = [t for t in model if t.numel() >= COMPRESSIBLE]
        if not large:
            return
        flat = torch.cat([t.detach().reshape(-1).float() for t in large])
        with self._together():
            _hand_out(self._sum_as_bf16(flat), large)

    def _sum_as_bf16(self, flat: Tensor) -> Tensor:
        """Each worker sums its W-th part in float32, so bf16 rounds twice and not W times."""
        size, pad = flat.numel(), -flat.numel() % self.world_size
        sent = torch.nn.functional.pad(flat, (0, pad)).bfloat16().view(self.world_size, -1)
        part = self._transport.exchange(sent.view(torch.uint8)).view(torch.bfloat16).float().sum(0)
        return (
            self._transport.gather(part.bfloat16().view(torch.uint8))
            .view(torch.bfloat16)
            .float()
            .view(-1)[:size]
        )

    def broadcast(self, content: bytes | None) -> bytes:
        """Worker 0's bytes, on every worker."""
        with self._together():
            size = self._transport.broadcast(torch.tensor([len(content or b"")]))
            data = torch.frombuffer(bytearray(content or bytes(int(size))), dtype=torch.uint8)
            return bytes(self._transport.broadcast(data).numpy()) if len(data) else b""

    def largest(self, value: int) -> int:
        """The largest of all workers' values, on every worker."""
        mine = torch.tensor([value]).view(torch.uint8)
        with self._together():
            return int(self._transport.gather(mine).view(torch.int64).max())

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """A context for operations that need all workers."""
        try:
            with self._watchdog.waiting():
                yield
        except RuntimeError:  # torch's and Horovod's for a lost peer; neither says which
            self._watchdog.linger()
            raise

    def _agree(self, flat: Tensor) -> None:
        """Compare this worker's words with the others', and collect how long each worked."""
        self._reductions += 1
        words = {**self._words, "reduction": self._reductions, "size": f"{flat.numel()} {flat.dtype}"}
        text = json.dumps([time.perf_counter() - self._since, words]).encode()
        assert len(text) <= HEADER
        mine = torch.frombuffer(bytearray(text.ljust(HEADER)), dtype=torch.uint8)
        everybody = [json.loads(bytes(row.numpy())) for row in self._transport.gather(mine)]
        self.seconds = self.seconds or [seconds for seconds, _ in everybody]
        first = everybody[0][1]
        differing = [
            f"worker {rank} has {key} {words.get(key)}, worker 0 has {first.get(key)}"
            for rank, (_, words) in enumerate(everybody)
            for key in first | words
            if words.get(key) != first.get(key)
        ]
        if differing:
            raise ValueError(f"the workers do not agree: {'; '.join(differing[:4])}")


def _hand_out(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors])):
        tensor.data.copy_(part.view_as(tensor))


def current() -> Workers | None:
    """The workers that this process is connected to, if there are others."""
    found = pytorch_ops.distributed
    return found if isinstance(found, Workers) else None


def is_main() -> bool:
    """Whether this process is worker 0, the only one that writes files and prints."""
    workers = current()
    return workers is None or workers.global_rank == 0


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """In this context the process has no other workers: pfl and the backend reduce only its own values.

    Nothing here waits for other workers, who may be in such a context longer, or not at all.
    """
    joined, pytorch_ops.distributed = pytorch_ops.distributed, NotDistributedContext()
    try:
        yield
    finally:
        pytorch_ops.distributed = joined


def begin_work(**words: Any) -> None:
    """Call `Workers.begin_work`; does nothing without other workers."""
    workers = current()
    if workers is not None:
        workers.begin_work(**words)


def worker_seconds() -> list[float]:
    """Seconds of each worker between its last `begin_work` and its next reduction; empty without others."""
    workers = current()
    return [] if workers is None else list(workers.seconds)


def from_main(value: Any) -> Any:
    """Worker 0's ``value`` (of any JSON type), on every worker; the others' values are ignored."""
    workers = current()
    if workers is None:
        return value
    return json.loads(workers.broadcast(json.dumps(value).encode() if is_main() else None))


def from_any(number: int | None) -> int | None:
    """A ``number`` above 0 that any worker has, the largest, on every worker; None if none has one."""
    workers = current()
    return number if workers is None else workers.largest(number or 0) or None


def tensors_from_main(tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Worker 0's named CPU tensors, on every worker, as one broadcast of their bytes."""
    workers = current()
    mine = {name: t.detach().cpu().contiguous() for name, t in (tensors or {}).items()}
    if workers is None:
        return mine
    received = safetensors.torch.load(workers.broadcast(safetensors.torch.save(mine) if is_main() else None))
    return {name: received[name] for name in from_main(list(mine))}


def barrier() -> None:
    """Wait until all workers are here."""
    workers = current()
    if workers is not None:
        workers.broadcast(b"-" if is_main() else None)


@contextlib.contextmanager
def connected(
    device: str, *, threads: int | None = None, timeout: float = 120.0, compress: bool = False
) -> Iterator[str]:
    """Join the workers that the launcher started. Yields the device for pfl to use.

    Args:
        device: with ``auto`` or ``cuda`` each worker of a machine takes the GPU of its local rank, round
            robin if there are fewer. Any other device is used as it is.
        threads: number of torch's threads; by default the machine's cores are divided among its workers.
        timeout: seconds after which a dead or stuck worker ends the job on all workers.

    Raises:
        ValueError: when horovodrun started it without Horovod, another launcher without MASTER_ADDR or
            MASTER_PORT, or the device needs more GPUs than there are.
    """
    launch = find_launch(os.environ)
    if launch.world_size == 1:
        yield device
        return
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // launch.local_size))
    device = place(launch, device)
    transport = open_transport(launch, timeout)
    names = _introduce(launch, transport, device)
    watchdog = Watchdog(transport.store(timeout), launch.rank, names, timeout)
    workers = Workers(launch, transport, watchdog, compress=compress)
    alone, pytorch_ops.distributed = pytorch_ops.distributed, workers
    set_framework_module(pytorch_ops)
    watchdog.start()
    try:
        yield device
        barrier()
    except Exception as fault:
        watchdog.report(f"{type(fault).__name__}: {fault}")
        raise
    except BaseException:  # a signal, which all workers get from their launcher
        watchdog.stop()
        raise
    finally:
        pytorch_ops.distributed = alone
    watchdog.stop()
    transport.close()


def _introduce(launch: Launch, transport: Transport, device: str) -> list[str]:
    """Exchange the workers' places, choose the transport, and print the map. Returns every worker's name."""
    store = transport.store(START_S)
    gpu = (
        torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else f"{torch.get_num_threads()} threads"
    )
    me = {"host": socket.gethostname(), "pid": os.getpid(), "device": device, "what": gpu}
    if device.startswith("cuda"):  # workers that see only one GPU each all call it cuda:0
        me["uuid"] = str(torch.cuda.get_device_properties(device).uuid)
    store.set(f"worker/{launch.rank}", json.dumps(me))
    all_of_them = [json.loads(store.get(f"worker/{rank}")) for rank in range(launch.world_size)]
    places = {(w["host"], w["uuid"]) for w in all_of_them if "uuid" in w}
    means = transport.choose(on_own_gpus=len(places) == launch.world_size)
    if launch.rank == 0:
        print(
            f"{launch.world_size} workers, started by {launch.launcher}, sums over {means}:", file=sys.stderr
        )
        for rank, w in enumerate(all_of_them):
            print(
                f"  worker {rank}: {w['device']} ({w['what']}) on {w['host']}, process {w['pid']}",
                file=sys.stderr,
            )
    return [f"worker {rank} ({w['host']}, process {w['pid']})" for rank, w in enumerate(all_of_them)]
