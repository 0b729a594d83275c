"""What two streams could do to each other, on the card that is not there (`tests.streams`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pfl_ext.data.transfer import pinned
from pfl_ext.engine.card import begin_thread
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.lane import Lane
from tests.card import REAL, card
from tests.pfl_ext.engine.setting import Setting, private
from tests.streams import StreamRace

pytestmark = [
    pytest.mark.skipif(REAL, reason="of the card that is not there"),
    pytest.mark.xdist_group("card"),
]


def two_streams() -> tuple[Any, Any, torch.Tensor]:
    x = torch.zeros(3, device="cuda")
    one, two = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]
    for stream in (one, two):
        stream.wait_stream(torch.cuda.current_stream())
    return one, two, x


@pytest.mark.parametrize(
    "second", [lambda x: x.sum(), lambda x: x.add_(1), lambda x: x.tolist(), lambda x: x.cpu()]
)
def test_what_a_stream_writes_no_other_may_use_without_a_wait(second: Callable[[Any], Any]) -> None:
    with card():
        one, two, x = two_streams()
        with torch.cuda.stream(one):
            x.add_(1)
        with torch.cuda.stream(two):
            with pytest.raises(StreamRace, match="memory of add_ that stream"):
                second(x)
            two.wait_stream(one)
            second(x)


def test_what_a_stream_reads_no_other_may_write_without_a_wait() -> None:
    with card():
        one, two, x = two_streams()
        with torch.cuda.stream(one):
            kept = x * 2
        with torch.cuda.stream(two):
            also = x * 3  # two may read
            with pytest.raises(StreamRace, match="add_ writes"):
                x.view(3)[:1].add_(1)
        one.synchronize()
        with torch.cuda.stream(two):
            x.add_(1)
        del kept, also


def test_a_wait_is_for_what_was_asked_for_before_it() -> None:
    with card():
        one, two, x = two_streams()
        two.wait_stream(one)
        with torch.cuda.stream(one):
            x.add_(1)
        with torch.cuda.stream(two), pytest.raises(StreamRace):
            x.sum()


def test_an_event_is_where_its_stream_was_when_it_was_recorded() -> None:
    with card():
        one, two, x = two_streams()
        y = torch.zeros(3, device="cuda")
        one.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(one):
            x.add_(1)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(one)
            y.add_(1)
        event.synchronize()
        with torch.cuda.stream(two):
            x.sum()
            with pytest.raises(StreamRace):
                y.sum()


def test_memory_is_not_given_back_while_another_stream_uses_it() -> None:
    with card():
        one, two, _ = two_streams()
        with torch.cuda.stream(one):
            x = torch.zeros(3, device="cuda")
        two.wait_stream(one)
        with torch.cuda.stream(two):
            x.sum()
        del x
        with pytest.raises(StreamRace, match="another may be given memory of zeros"):
            two.synchronize()


def test_a_replay_reads_and_writes_what_was_recorded() -> None:
    with card():
        one, two, x = two_streams()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=one):
            x.add_(1)
        with torch.cuda.stream(one):
            graph.replay()
        with torch.cuda.stream(two), pytest.raises(StreamRace):
            x.sum()


def test_no_graph_is_recorded_in_the_default_stream() -> None:
    with card(), pytest.raises(AssertionError, match="default stream"):
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.current_stream()).__enter__()


def trains(is_private: bool, fuse: bool = False) -> None:
    more = [private(4)] if is_private else []
    with card():
        Setting([1, 3, 5, 2], rounds=2, by_images=not is_private, more=more).run(True, lanes=2, fuse=fuse)


@contextlib.contextmanager
def at_once(lane: Lane) -> Iterator[None]:
    with torch.cuda.stream(lane._stream):
        yield


@pytest.mark.parametrize("is_private", [False, True])
@pytest.mark.parametrize(("name", "fault"), [("join", lambda _: None), ("working", at_once)])
def test_a_lane_that_does_not_wait_is_found_out(
    name: str, fault: Any, is_private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lane, name, fault)
    with pytest.raises(StreamRace):
        trains(is_private)


def test_lanes_share_nothing_that_one_of_them_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to d232112 the first private user's lane made what all lanes clip by, while the others went on."""
    clear = Lane.clear
    monkeypatch.setattr(Lane, "clear", lambda self, scaling=None: clear(self))
    monkeypatch.setattr(Lane, "_owners", property(lambda self: self.layout.owners), raising=False)
    with pytest.raises(StreamRace):
        trains(True)


@pytest.mark.parametrize("is_private", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_round_is_the_same_in_every_order_that_a_card_may_choose(fuse: bool, is_private: bool) -> None:
    trains(is_private, fuse)


def test_threads_that_prepare_work_stand_on_its_card() -> None:
    def pins(begins: bool) -> None:
        if begins:
            begin_thread(torch.device("cuda:1"))
        pinned(torch.zeros(1), torch.device("cuda:1"))

    with card(index=1), ThreadPoolExecutor(1) as pool:
        with pytest.raises(AssertionError, match="stands on GPU 0 wakes it up"):
            pool.submit(pins, False).result()
        pool.submit(pins, True).result()


@pytest.mark.parametrize("is_private", [False, True])
def test_all_of_a_round_is_done_on_the_second_card(is_private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.device] = []
    train = CohortEngine.train

    def watched(self: CohortEngine, *job: Any) -> Any:
        done = train(self, *job)
        seen.extend(t.device for t in done.update.values())
        return done

    monkeypatch.setattr(CohortEngine, "train", watched)
    more = [private(4)] if is_private else []
    with card(index=1):
        torch.cuda.set_device(torch.device("cuda:1"))
        Setting([1, 3, 5, 2], by_images=not is_private, more=more).run(True, lanes=2, fuse=False)
    assert {str(device) for device in seen} == {"cuda:1"}
