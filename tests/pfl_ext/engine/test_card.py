"""What work on a GPU needs besides the work (`pfl_ext.engine.card`)."""

from __future__ import annotations

import json
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pfl_ext.backend as backend
from pfl_ext.data.federated_dataset import Member
from pfl_ext.engine import lane as lanes
from pfl_ext.engine.card import begin_thread, ieee_float32, is_out_of_memory
from pfl_ext.engine.lane import Lane
from pfl_ext.engine.plan import Task, plan
from pfl_ext.privacy.central import TALLY, PrivateMean
from pfl_ext.workers import distributed
from pfl_ext.workers.launch import Launch
from tests.card import REAL, card, plain
from tests.pfl_ext.engine.setting import Setting, distance, private, rounding_of

pytestmark = [
    pytest.mark.skipif(REAL, reason="of the card that is not there"),
    pytest.mark.xdist_group("card"),
]
GPU = torch.device("cuda:1")


@pytest.mark.parametrize(
    ("fault", "lacking"),
    [
        (torch.OutOfMemoryError("made up"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_memory_that_ran_out_is_told_from_other_faults(fault: Exception, lacking: bool) -> None:
    assert is_out_of_memory(fault) == lacking


def test_float32_is_ieees_within_and_what_it_was_after() -> None:
    cudnn, cublas = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, cublas.allow_tf32
    seen = []

    def fails() -> None:
        with ieee_float32(GPU):
            seen.append((cudnn.allow_tf32, cublas.allow_tf32))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert seen == [(False, False)]
    assert (cudnn.allow_tf32, cublas.allow_tf32) == before
    assert before[0], "torch's own choice, without which this would test nothing"
    with ieee_float32(torch.device("cpu")):
        assert cudnn.allow_tf32 == before[0]


def test_a_thread_stands_on_its_own_gpu_and_computes_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)

    def work(device: torch.device) -> None:
        begin_thread(device)
        seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    for device in (GPU, torch.device("cpu")):
        thread = threading.Thread(target=work, args=(device,))
        thread.start()
        thread.join()
    torch.set_num_threads(before)
    assert seen == [GPU, 1, 1]


def test_a_gpu_has_no_users_that_all_lanes_train_together() -> None:
    tasks = [Task((Member(0, 0, n, steps, n),), False) for n, steps in ((600, 40), (3, 1), (2, 1), (5, 2))]
    assert plan(tasks, 2).wide, "on a CPU the first is too heavy for one lane"
    alone = plan(tasks, 2, widen=False)
    assert not alone.wide
    assert sorted(t.work for lane in alone.lanes for t in lane) == sorted(t.work for t in tasks)


def test_lanes_are_given_up_where_memory_runs_out_in_a_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no group is there that could be smaller; the round is begun again with clear sums."""
    sizes = [1, 2, 3, 9, 5, 1, 2]
    theirs, *_ = Setting(sizes).run(True, lanes=1, cpu_kernels=False)
    real, names = Lane.train, set[str]()

    def train(self: Lane, *job: Any) -> None:
        names.add(threading.current_thread().name)
        if len(names) > 1:
            raise RuntimeError("CUDA error: out of memory")
        real(self, *job)

    monkeypatch.setattr(Lane, "train", train)
    monkeypatch.setattr(lanes.Lane, "rehearse", lambda *_: names.clear())
    with card():
        monkeypatch.setattr(torch.cuda, "empty_cache", names.clear)
        ours, *_ = Setting(sizes).run(True, lanes=4, fuse=False)
    assert distance({n: plain(t) for n, t in ours.items()}, theirs) <= rounding_of(Setting(sizes))
    assert "out of memory: 2 lanes from now on\nout of memory: 1 lanes from now on" in capsys.readouterr().err


def test_a_lane_does_not_run_ahead_of_the_gpu_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    awaited: list[int] = []

    class Event:
        made = 0

        def __init__(self, blocking: bool) -> None:
            assert blocking, "waiting must not take a core"
            self.number = Event.made
            Event.made += 1

        def record(self, stream: Any) -> None:
            pass

        def synchronize(self) -> None:
            awaited.append(self.number)

    with card():
        monkeypatch.setattr(torch.cuda, "Event", Event)
        Setting([1] * (lanes.AHEAD + 3)).run(True, lanes=1, fuse=False)
    assert awaited == [0, 1, 2]


def test_a_worker_without_users_tells_of_none_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def server(self: PrivateMean, *, stats: Any, **_: Any) -> Any:
        seen.append(stats[TALLY])
        raise KeyError

    monkeypatch.setattr(backend, "dealt", lambda tasks, parts: [[]])
    monkeypatch.setattr(PrivateMean, "postprocess_server", server)
    setting = Setting([2, 3], by_images=False, more=[private(2)])
    with card(), pytest.raises(KeyError):
        setting.run(True, lanes=1)
    assert seen[0].is_cuda
    assert not plain(seen[0]).any()


@pytest.mark.parametrize(("theirs", "own"), [("GPU-b", True), ("GPU-a", False)])
def test_gpus_are_told_apart_by_what_they_are_and_not_by_their_names(
    theirs: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that shows each worker one GPU alone has all of them call theirs cuda:0."""
    notes = {
        "worker/1": json.dumps({"host": "here", "pid": 1, "device": "cuda:0", "what": "", "uuid": theirs})
    }
    store = SimpleNamespace(set=notes.__setitem__, get=notes.__getitem__)
    asked: list[bool] = []

    def choose(on_own_gpus: bool) -> str:
        asked.append(on_own_gpus)
        return "NCCL"

    transport: Any = SimpleNamespace(store=lambda timeout: store, choose=choose)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-a"))
    distributed._introduce(Launch("torchrun", rank=0, world_size=2), transport, "cuda:0")
    assert asked == [own]
