"""Collectives between real processes; who is found by which launcher; and what a watchdog notices."""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import DistNetworkError, HashStore  # type: ignore[attr-defined]

from pfl_ext.summing import FlatSumAggregator
from pfl_ext.workers import transport
from pfl_ext.workers import watchdog as watchdog_module
from pfl_ext.workers.distributed import (
    connected,
    current,
    from_any,
    from_main,
    is_main,
    tensors_from_main,
    worker_seconds,
)
from pfl_ext.workers.launch import Launch, find_launch, place
from pfl_ext.workers.watchdog import Watchdog
from tests.closeness import assert_close_as_vector
from tests.launching import LAUNCHERS, ROOT, command, finish, fresh_environment, run, start, warmly

SCRIPT = "tests.pfl_ext.workers.collectives"
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
HOROVODRUN = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_sums_words_and_agreement_between_three_workers(launcher: str) -> None:
    assert "ALL WELL with 3 workers" in run(command(launcher, 3, SCRIPT, "3"))


def free_port(host: str) -> int:
    """One that nobody listens at."""
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])


def test_two_machines_meet_by_the_documented_torchrun_command() -> None:
    """Two addresses of this machine stand for two: one torchrun on each, meeting at the first's port."""
    endpoint = f"127.0.0.2:{free_port('127.0.0.2')}"
    words = [
        "--nnodes=2",
        "--nproc_per_node=1",
        "--rdzv_backend=c10d",
        "--rdzv_id=flair",
        f"--rdzv_endpoint={endpoint}",
    ]
    launch, script = warmly("torch.distributed.run", *words), warmly(SCRIPT, "2")[1:]
    machines = [start([*launch, f"--local_addr={host}", *script]) for host in ("127.0.0.2", "127.0.0.3")]
    outputs = [finish(machine) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert "".join(outputs).count("ALL WELL with 2 workers") == 1


def test_under_torchrun_pfl_does_not_connect_by_itself() -> None:
    """With torchrun's variables and nobody to meet, pfl's own context would wait for ever at import."""
    lonely = fresh_environment(
        TORCHELASTIC_RUN_ID="x",
        RANK="1",
        WORLD_SIZE="2",
        LOCAL_RANK="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    script = (
        "import os, pfl_ext; from pfl.internal.ops import pytorch_ops as o; "
        "assert o.distributed.world_size == 1 and os.environ['TORCHELASTIC_RUN_ID'] == 'x'"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=lonely, cwd=ROOT, timeout=400)


def test_the_launcher_is_found_by_its_variables() -> None:
    assert find_launch({}) == Launch("none", 0, 1, 0, 1)
    assert find_launch(TORCHRUN) == Launch("torchrun", 5, 8, 1, 4)
    assert find_launch(HOROVODRUN) == Launch("horovod", 3, 4, 1, 2)
    assert find_launch({"RANK": "5", "PATH": ""}).launcher == "none"
    with pytest.raises(ValueError, match="RANK=five"):
        find_launch({**TORCHRUN, "RANK": "five"})


def test_each_worker_takes_the_gpu_of_its_local_rank_under_both_launchers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert place(find_launch(HOROVODRUN), "auto") == "cpu"
    current_device: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current_device.append)
    for variables in (TORCHRUN, HOROVODRUN):
        assert place(find_launch(variables), "auto") == "cuda:1"
        assert place(find_launch(variables), "cuda") == "cuda:1"
    assert place(Launch("horovod", 2, 4, 2, 4), "auto") == "cuda:0"  # two workers share each GPU
    assert place(Launch("torchrun", 2, 4, 2, 4), "cpu") == "cpu"
    assert current_device == ["cuda:1"] * 4 + ["cuda:0"]


def test_a_process_without_a_launcher_is_the_main_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *HOROVODRUN):
        monkeypatch.delenv(name, raising=False)
    with connected("auto") as device:
        assert (device, current(), is_main(), worker_seconds()) == ("auto", None, True, [])
        assert from_main({"a": 1}) == {"a": 1}
        assert (from_any(15), from_any(None)) == (15, None)
        assert torch.equal(tensors_from_main({"t": torch.arange(3)})["t"], torch.arange(3))


def test_sums_in_float64_do_not_depend_on_the_order_of_users() -> None:
    from pfl.stats import MappedVectorStatistics

    values = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))

    def total(order: torch.Tensor, dtype: torch.dtype) -> Any:
        aggregator = FlatSumAggregator(dtype)
        out: Any = None
        for user in order.tolist():
            stats = MappedVectorStatistics({"w": values[user].clone()}, weight=1.0)
            out = aggregator.accumulate(accumulated=out, user_stats=stats)
        assert out is not None
        assert out.weight == 64
        return out["w"]

    forwards, shuffled = torch.arange(64), torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert total(forwards, torch.float64).dtype == torch.float64
    exact = [total(order, torch.float64) for order in (forwards, shuffled)]
    assert_close_as_vector(exact[0], exact[1], 64)
    rough = [total(order, torch.float32) for order in (forwards, shuffled)]
    assert float((rough[0] - rough[1]).abs().max()) > 1e-8


class OnCard(Tensor):
    """A tensor that leaves its card only by `cpu`."""

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()


@pytest.mark.parametrize("nccl", [True, False])
def test_sums_travel_from_card_to_card_by_nccl_and_by_way_of_the_cpu_without_it(
    nccl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo cannot read a card's memory, and NCCL no other."""
    carried: list[type[Tensor]] = []

    def three_workers(flat: Tensor) -> None:
        carried.append(type(flat))
        flat.mul_(3)

    monkeypatch.setattr("torch.distributed.all_reduce", three_workers)
    torchs = object.__new__(transport._TorchTransport)
    torchs._nccl = nccl
    flat = torch.arange(4.0).as_subclass(OnCard)
    torchs.sum_(flat)
    assert carried == [OnCard if nccl else Tensor]
    assert flat.tolist() == [0, 3, 6, 9], "the sum comes back to where the data was"


def test_a_sum_of_horovods_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's own waiting takes a whole core, so it is asked for a sum only once that is there."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    horovod = object.__new__(transport._HorovodTransport)
    horovod._hvd = SimpleNamespace(
        poll=lambda handle: len(pauses) == 3, synchronize=lambda handle: (handle, len(pauses))
    )
    assert horovod._result(7) == (7, 3)


def test_the_first_worker_serves_the_store_where_no_agent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a scheduler that sets torchrun's variables and starts the workers itself."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port("127.0.0.1")))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    second = transport.open_transport(Launch("torchrun", rank=1, world_size=2), 1)
    with pytest.raises(DistNetworkError):  # nobody serves it yet
        second.store(0.5)
    first = transport.open_transport(Launch("torchrun", rank=0, world_size=2), 5)
    first.store(5).set("word", "said")
    assert second.store(5).get("word") == b"said"


@pytest.mark.parametrize(
    "host, port", [(None, "29500"), ("127.0.0.1", None), ("127.0.0.1", "many"), ("a", "99999")]
)
def test_a_first_worker_without_an_address_is_refused(
    host: str | None, port: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under a scheduler that sets RANK and WORLD_SIZE alone."""
    for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    said = f"MASTER_ADDR is {host or ''!r} and MASTER_PORT is {port or ''!r}: start the job by torchrun"
    with pytest.raises(ValueError, match=said):
        transport.open_transport(Launch("torchrun", rank=1, world_size=2), 1)


class Kennel:
    """Watchdogs whose processes do not end, and the other workers that they watch."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.exit_codes: list[int] = []
        self._dogs: list[Watchdog] = []
        self._others: list[tuple[threading.Thread, threading.Event]] = []

    def watchdog(self, rank: int, timeout: float) -> Watchdog:
        """The watchdog of one of two workers; it is not started."""
        self._dogs.append(
            Watchdog(self.store, rank, ["worker 0", "worker 1"], timeout, self.exit_codes.append)
        )
        return self._dogs[-1]

    def thread(self, target: Callable[[threading.Event], object]) -> threading.Thread:
        """A started thread that gets the event by which it is stopped."""
        stop = threading.Event()
        self._others.append((threading.Thread(target=target, args=(stop,)), stop))
        self._others[-1][0].start()
        return self._others[-1][0]

    def healthy(self, rank: int) -> None:
        """Another worker, in good health."""

        def beat(stop: threading.Event) -> None:
            count = 0
            while not stop.wait(0.02):
                count += 1
                self.store.set(f"beat/{rank}", str(count))

        self.thread(beat)

    def silence(self) -> None:
        """The other workers are no longer heard of."""
        for thread, stop in self._others:
            stop.set()
            thread.join()

    def close(self) -> None:
        """No thread outlives its test."""
        self.silence()
        for dog in self._dogs:
            dog.stop()


@pytest.fixture
def kennel() -> Iterator[Kennel]:
    with contextlib.closing(Kennel()) as kept:
        yield kept


def wait(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether it came true."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    return condition()


def test_a_silent_worker_is_named_by_the_next_in_the_ring(
    kennel: Kennel, capfd: pytest.CaptureFixture[str]
) -> None:
    kennel.healthy(1)
    dog = kennel.watchdog(0, timeout=1.0)
    with dog.waiting():
        dog.start()
        time.sleep(2.5)
        assert not kennel.exit_codes, "nobody is lost"
        kennel.silence()
        assert wait(lambda: bool(kennel.exit_codes))
    assert kennel.store.get("fault").decode() == "worker 1 has not been heard of for 1 s"
    assert capfd.readouterr().err.startswith("\nerror: worker 1 has not been heard of for 1 s; ")
    assert kennel.exit_codes == [2]


def test_a_worker_that_stands_still_gives_itself_up_unless_it_waits_or_computes(
    kennel: Kennel, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = itertools.count()
    monkeypatch.setattr(time, "process_time", lambda: float(next(used)))
    kennel.healthy(0)
    dog = kennel.watchdog(1, timeout=0.4)
    dog._main = kennel.thread(lambda stop: stop.wait()).ident
    with dog.waiting():
        dog.start()
        time.sleep(1.2)
        assert not kennel.exit_codes, "it waits for the others"
    time.sleep(1.2)
    assert not kennel.exit_codes, "another thread of it computes"
    monkeypatch.setattr(time, "process_time", lambda: 1e9)
    assert wait(lambda: bool(kennel.exit_codes))
    assert kennel.store.get("fault").decode() == "worker 1 has made no progress for 0.4 s"


def test_a_worker_that_knows_of_a_fault_leaves_and_one_at_fault_says_so(
    kennel: Kennel, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watchdog_module, "LEAVE_S", 0.0)
    faulty, other = kennel.watchdog(1, timeout=5), kennel.watchdog(0, timeout=5)
    other.start()
    faulty.start()
    faulty.report("ValueError: image 7 is damaged")
    assert wait(lambda: len(kennel.exit_codes) == 2)
    assert capfd.readouterr().err.count("error: worker 1: ValueError: image 7 is damaged; ") == 1
    assert kennel.exit_codes == [2, 2]
