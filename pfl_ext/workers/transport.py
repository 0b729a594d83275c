"""Transports of bytes and sums between workers: torch.distributed or Horovod.

Both have Gloo for CPU tensors. NCCL refuses two workers on one GPU, so it is used for CUDA tensors only if
every worker has its own GPU; otherwise CUDA tensors are copied through the CPU. All methods of a transport
except ``store`` are collective: every worker calls them in the same order, with the same sizes.

Shape letters: W workers.
"""

from __future__ import annotations

import importlib
import os
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from pfl_ext.workers.launch import Launch

COLLECTIVE_S = 30 * 24 * 3600.0
"""Seconds after which collectives give up, in effect never. Waiting for a working worker is no fault, and the
watchdog detects, and names, one that is lost or stuck."""

PAUSE_S = 0.001
"""Seconds between two polls of a Horovod collective; Horovod's own cycle takes as long."""


class Transport(ABC):
    """The interface that `pfl_ext.workers.distributed.Workers` needs. Tensors of bytes are uint8."""

    _nccl: bool  # set by `choose`

    @abstractmethod
    def choose(self, *, on_own_gpus: bool) -> str:
        """Prepare for sums, with NCCL if every worker has its own GPU. Returns the name of the method."""

    def sum_(self, flat: Tensor) -> None:
        """Sum over workers, in place, with the same bits on all."""
        carried = self._there(flat)
        self._all_reduce(carried)
        if carried is not flat:
            flat.copy_(carried)

    def _there(self, data: Tensor) -> Tensor:
        return data if self._nccl else data.cpu()

    @abstractmethod
    def _all_reduce(self, carried: Tensor) -> None: ...

    @abstractmethod
    def gather(self, data: Tensor) -> Tensor:
        """``[n]`` bytes of each worker -> ``[W, n]``, on the same device."""

    @abstractmethod
    def exchange(self, data: Tensor) -> Tensor:
        """``[W, n]`` bytes, row r for worker r -> ``[W, n]``, row r from worker r."""

    @abstractmethod
    def broadcast(self, data: Tensor) -> Tensor:
        """Worker 0's tensor, on every worker."""

    @abstractmethod
    def store(self, timeout: float) -> Any:
        """A new client of the store that all workers share, for one thread."""

    @abstractmethod
    def close(self) -> None:
        """Shut down in good order; all workers call this."""


def _client(host: str, port: int, timeout: float, prefix: str, *, server: bool = False) -> Any:
    store = TCPStore(host, port, is_master=server, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    return PrefixStore(f"pfl_ext/{prefix}", store)


def _address() -> tuple[str, int]:
    """Host and port of the first worker, by which all of them find each other."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16):
        raise ValueError(
            f"RANK is set, but MASTER_ADDR is {host!r} and MASTER_PORT is {port!r}: start the job by "
            "torchrun, or set them to the host of worker 0 and a free port there"
        )
    return host, int(port)


class _TorchTransport(Transport):
    """torch.distributed, under torchrun (or anything that sets its variables).

    Raises:
        ValueError: when the address of the first worker is not set.
    """

    def __init__(self, launch: Launch, timeout: float) -> None:
        self._launch, self._timeout = launch, timeout
        self._prefix = (
            f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        )
        self._address = _address()
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun's own process
        if launch.rank == 0 and not served:
            self._server = _client(*self._address, timeout, self._prefix, server=True)

    def choose(self, *, on_own_gpus: bool) -> str:
        self._nccl = on_own_gpus and dist.is_nccl_available()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._nccl else "gloo",
            store=PrefixStore("group", self.store(COLLECTIVE_S)),
            rank=self._launch.rank,
            world_size=self._launch.world_size,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )
        return "NCCL" if self._nccl else "Gloo"

    def _all_reduce(self, carried: Tensor) -> None:
        dist.all_reduce(carried)

    def gather(self, data: Tensor) -> Tensor:
        carried = self._there(data)
        rows = [torch.empty_like(carried) for _ in range(self._launch.world_size)]
        dist.all_gather(rows, carried)
        return torch.stack(rows).to(data.device)

    def exchange(self, data: Tensor) -> Tensor:
        carried = self._there(data)
        out = torch.empty_like(carried)
        dist.all_to_all_single(out, carried)
        return out.to(data.device)

    def broadcast(self, data: Tensor) -> Tensor:
        dist.broadcast(data, src=0)
        return data

    def store(self, timeout: float) -> Any:
        return _client(*self._address, timeout, self._prefix)

    def close(self) -> None:
        dist.barrier()
        dist.destroy_process_group()


class _HorovodTransport(Transport):
    """Horovod, under horovodrun; the store is worker 0's.

    Raises:
        ValueError: when Horovod is not installed.
    """

    def __init__(self, launch: Launch, timeout: float) -> None:
        try:
            self._hvd: Any = importlib.import_module("horovod.torch")
        except ImportError as missing:
            raise ValueError(
                f"started by horovodrun, but Horovod cannot be imported ({missing}): make horovod, or "
                "python -m pfl_ext.workers.build_horovod, builds it; or use torchrun"
            ) from missing
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(int(COLLECTIVE_S)))
        self._hvd.init()
        assert (self._hvd.rank(), self._hvd.size()) == (launch.rank, launch.world_size)
        host, port = os.environ.get("HOROVOD_HOSTNAME", "127.0.0.1"), 0
        if launch.rank == 0:
            self._server = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
            port = self._server.port
        address = f"{host}:{port}".encode().ljust(256)
        received = self.broadcast(torch.frombuffer(bytearray(address), dtype=torch.uint8))
        name, _, number = bytes(received.numpy()).decode().strip().rpartition(":")
        self._address = name, int(number)

    def choose(self, *, on_own_gpus: bool) -> str:
        self._nccl = on_own_gpus and bool(self._hvd.nccl_built())
        return "NCCL" if self._nccl else "Gloo"

    def _result(self, handle: int) -> Any:
        """The result of a collective. Horovod's own wait polls every 100 ns, which takes a whole core from
        the workers that still train."""
        while not self._hvd.poll(handle):
            time.sleep(PAUSE_S)
        return self._hvd.synchronize(handle)

    def _all_reduce(self, carried: Tensor) -> None:
        self._result(self._hvd.allreduce_async_(carried, op=self._hvd.Sum))

    def gather(self, data: Tensor) -> Tensor:
        rows = self._result(self._hvd.allgather_async(data.cpu()))
        return torch.as_tensor(rows).view(-1, len(data)).to(data.device)

    def exchange(self, data: Tensor) -> Tensor:
        received, _ = self._result(self._hvd.alltoall_async(data.cpu()))
        return torch.as_tensor(received).view_as(data).to(data.device)

    def broadcast(self, data: Tensor) -> Tensor:
        return torch.as_tensor(self._result(self._hvd.broadcast_async(data, root_rank=0)))

    def store(self, timeout: float) -> Any:
        return _client(*self._address, timeout, "horovod")

    def close(self) -> None:
        self._hvd.barrier()
        self._hvd.shutdown()


def open_transport(launch: Launch, timeout: float) -> Transport:
    """The transport of the launcher that was found; ``timeout`` in seconds.

    Raises:
        ValueError: under horovodrun without Horovod; otherwise without MASTER_ADDR and MASTER_PORT.
    """
    return (_HorovodTransport if launch.launcher == "horovod" else _TorchTransport)(launch, timeout)
