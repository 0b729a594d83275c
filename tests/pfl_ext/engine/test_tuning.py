"""The engine's choice of lanes, groups and readers."""

from __future__ import annotations

import functools
import gc
import json
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dataset.cli import Stopped
from pfl_ext.data.federated_dataset import Member
from pfl_ext.engine import cohort, tuning
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.lane import Lane
from pfl_ext.engine.plan import Arrangement
from pfl_ext.engine.readers import Readers
from pfl_ext.engine.tuning import Round, Tuner
from tests.card import REAL, card
from tests.pfl_ext.engine.setting import Setting, distance, private, rounding_of
from tests.pfl_ext.samplings import local_sampling

pytestmark = pytest.mark.xdist_group("card")
SIZES = [1, 3, 2, 5, 1, 1, 4, 2]
FEW = SIZES[:2]
"""Where what is trained is looked at nowhere."""
OWN, TWICE, FOUR, ALONE = (
    Arrangement(2, True, 32),
    Arrangement(2, True, 64),
    Arrangement(2, True, 128),
    Arrangement(2, False, 32),
)


class Timed:
    """A clock that only training moves on, by these seconds an arrangement; what was tried, in order.

    Users who are timed are trained only if ``trains``: what comes of it is looked at nowhere.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, seconds: dict[Arrangement, float], trains: bool = False
    ) -> None:
        self.now, self.tried = 0.0, list[Arrangement]()
        train = CohortEngine.train

        def watched(engine: CohortEngine, *job: Any) -> Any:
            self.tried.append(engine.arrangement)
            self.now += seconds[engine.arrangement]
            is_timed = engine.readers.held
            return train(engine, *job) if trains or not is_timed else None

        patch.setattr(CohortEngine, "train", watched)

    def clock(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@functools.cache
def plainly() -> tuple[dict[str, torch.Tensor], float]:
    """What pfl's loop computes, and how far rounding may take another computation away from it."""
    theirs, *_ = Setting(SIZES).run(False)
    return theirs, rounding_of(Setting(SIZES))


def tuned(
    patch: pytest.MonkeyPatch,
    folder: Path,
    seconds: dict[Arrangement, float],
    sizes: list[int] = FEW,
    trains: bool = False,
    **more: Any,
) -> Any:
    clock = Timed(patch, seconds, trains)
    tuner = Tuner(folder, kept=folder / "kept", clock=clock.clock)
    update, *_ = Setting(sizes, tuner=tuner, **more).run(True)
    patch.undo()
    return tuner.outcome, clock.tried, update


def trained(patch: pytest.MonkeyPatch, folder: Path, **options: Any) -> Any:
    """The outcome where all passes are trained and none is too short."""
    patch.setattr(tuning, "SHORT", 0.0)
    tuner = Tuner(folder, kept=folder)
    Setting(FEW, tuner=tuner).run(True, **options)
    return tuner.outcome


@pytest.mark.parametrize("best", [OWN, TWICE, FOUR, ALONE])
def test_the_fastest_is_taken_and_trains_the_same(
    best: Arrangement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = dict.fromkeys((OWN, TWICE, FOUR, ALONE), 2.0) | {best: 1.0}
    outcome, tried, update = tuned(monkeypatch, tmp_path, seconds, SIZES, trains=True)
    assert asdict(best).items() <= outcome.items()
    assert [s["seconds"] for s in outcome["seconds"]] == [seconds[c] for c in (OWN, TWICE, FOUR, ALONE)]
    assert tried[-1] == best
    assert json.loads((tmp_path / "engine_choice.json").read_text()) == outcome
    theirs, rounding = plainly()
    assert distance(update, theirs) <= rounding


@pytest.mark.parametrize(("lanes", "fuse", "images"), [(1, True, 2), (3, True, 128), (3, False, 32)])
def test_every_arrangement_trains_the_same(
    lanes: int, fuse: bool, images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = CohortEngine.__init__

    def arranged(self: CohortEngine, *job: Any, **more: Any) -> None:
        begin(self, *job, **more)
        self.arrange(Arrangement(lanes, fuse, images))

    monkeypatch.setattr(CohortEngine, "__init__", arranged)
    ours, *_ = Setting(SIZES).run(True)
    theirs, rounding = plainly()
    assert distance(ours, theirs) <= rounding


def test_a_choice_is_timed_once_and_a_run_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = dict.fromkeys((OWN, TWICE, FOUR, ALONE), 2.0) | {FOUR: 1.0}
    first, tried, _ = tuned(monkeypatch, tmp_path, seconds)
    assert (first["source"], len(tried)) == ("timed", 4 * 3 + 1)

    other = tmp_path / "other"
    other.mkdir()
    clock = Timed(monkeypatch, seconds | {FOUR: 9.0})
    again = Tuner(other, kept=tmp_path / "kept", clock=clock.clock)
    Setting(FEW, tuner=again).run(True)
    assert again.outcome is not None
    assert (again.outcome["source"], clock.tried) == ("as timed before", [FOUR])

    (other / "engine_choice.json").write_text(json.dumps(asdict(ALONE)))
    resumed = Tuner(other, kept=tmp_path / "kept", clock=clock.clock)
    Setting(FEW, tuner=resumed).run(True)
    assert resumed.outcome is not None
    assert asdict(ALONE).items() <= resumed.outcome.items()
    assert resumed.outcome["source"] == "as this run began"


@pytest.mark.parametrize("text", ["{", "[]", '{"lanes": "2", "fuse": true, "images": 32}'])
def test_what_cannot_be_read_is_timed_again(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine_choice.json").write_text(text)
    outcome, *_ = tuned(monkeypatch, tmp_path, dict.fromkeys((OWN, TWICE, FOUR, ALONE), 2.0))
    assert outcome["source"] == "timed"


def kept_file(folder: Path) -> Path:
    (found,) = (folder / "kept").glob("engine-choice-*.json")
    return found


@pytest.mark.parametrize(
    ("process", "why"),
    [(2**22 + 1, "an earlier attempt to time others broke off"), (os.getppid(), "while another")],
)
def test_what_may_have_ended_a_process_is_not_tried_again(
    process: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = dict.fromkeys((OWN, TWICE, FOUR, ALONE), 2.0) | {FOUR: 1.0}
    tuned(monkeypatch, tmp_path, seconds)
    kept_file(tmp_path).write_text(json.dumps({"trying": {}, "by": [socket.gethostname(), process]}))
    (tmp_path / "engine_choice.json").unlink()
    outcome, tried, _ = tuned(monkeypatch, tmp_path, seconds)
    assert why in outcome["source"]
    assert tried == [OWN]
    assert "by" in json.loads(kept_file(tmp_path).read_text())
    again, *_ = tuned(monkeypatch, tmp_path, seconds)
    assert again["source"] == "as this run began"


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Stopped(15), SystemExit(75)], ids=repr)
def test_a_stop_while_others_are_timed_leaves_no_note(
    stop: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But that of a device that refuses all further work does."""
    train = CohortEngine.train

    def stops(engine: CohortEngine, *job: Any) -> Any:
        if engine.arrangement == TWICE:
            raise stop
        return train(engine, *job)

    monkeypatch.setattr(CohortEngine, "train", stops)
    with pytest.raises(type(stop)):
        trained(monkeypatch, tmp_path)
    assert bool(list(tmp_path.iterdir())) == isinstance(stop, SystemExit)


def test_own_lanes_that_find_no_room_are_timed_again_with_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = CohortEngine.train

    def shrinks(engine: CohortEngine, *job: Any) -> Any:
        if len(engine.lanes) > 1:
            engine._keep_lanes(1)
        return train(engine, *job)

    monkeypatch.setattr(CohortEngine, "train", shrinks)
    outcome = trained(monkeypatch, tmp_path)
    first = outcome["seconds"][0]
    assert (first["lanes"], first["seconds"] is None) == (1, False)


def test_passes_that_are_too_short_decide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, tried, _ = tuned(monkeypatch, tmp_path, {OWN: 0.4})
    assert "too short" in outcome["source"]
    assert set(tried) == {OWN}
    assert not (tmp_path / "kept").exists()
    assert asdict(OWN).items() <= json.loads((tmp_path / "engine_choice.json").read_text()).items()


def test_what_a_run_began_with_must_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine_choice.json").mkdir()
    with pytest.raises(OSError, match="engine_choice"):
        tuned(monkeypatch, tmp_path, dict.fromkeys((OWN, TWICE, FOUR, ALONE), 2.0))


def test_a_run_that_goes_on_elsewhere_says_nothing_of_this_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine_choice.json").write_text(
        json.dumps(asdict(FOUR) | {"device": "another", "seconds": [1]})
    )
    outcome, tried, _ = tuned(monkeypatch, tmp_path, {FOUR: 1.0})
    assert (outcome["source"], outcome["seconds"], tried) == ("as this run began", [1], [FOUR])
    assert not (tmp_path / "kept").exists()
    assert json.loads((tmp_path / "engine_choice.json").read_text())["device"] == "another"


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_text("no folder")
    seconds = dict.fromkeys((OWN, TWICE, FOUR, ALONE), 2.0) | {FOUR: 1.0}
    outcome, *_ = tuned(monkeypatch, tmp_path, seconds)
    assert (outcome["source"], outcome["images"]) == ("timed", FOUR.images)


def test_a_gain_that_may_be_noise_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, *_ = tuned(monkeypatch, tmp_path, {OWN: 2.0, TWICE: 1.94, FOUR: 2.0, ALONE: 2.0})
    assert asdict(OWN).items() <= outcome.items()


def test_no_more_is_tried_once_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {OWN: 6.0, TWICE: 5.0, FOUR: 1.0, ALONE: 1.0}
    outcome, tried, _ = tuned(monkeypatch, tmp_path, seconds)
    assert [s["images"] for s in outcome["seconds"]] == [32, 64]  # at 18 and 33 of 30 seconds
    assert tried[-1] == TWICE


@pytest.mark.parametrize("text", ["", "an engine that cannot\nand more lines"])
def test_what_fails_is_no_choice(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = CohortEngine.train

    def fails(engine: CohortEngine, *job: Any) -> Any:
        if engine.arrangement == TWICE:
            raise RuntimeError(text)
        return train(engine, *job)

    monkeypatch.setattr(CohortEngine, "train", fails)
    outcome = trained(monkeypatch, tmp_path)
    assert outcome["seconds"][1]["seconds"] is None
    first = text.partition("\n")[0]
    said = f"engine: 2 lanes, groups of up to 64 images is no choice here: RuntimeError: {first}\n"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "kinds"), [({"fuse": False}, 0), ({"lanes": 3}, 3), ({"lanes": 3, "fuse": True}, 0)]
)
def test_what_was_asked_for_stays(
    options: dict[str, Any],
    kinds: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = trained(monkeypatch, tmp_path, **options)
    assert ("nothing else to try" in capsys.readouterr().err) == (kinds == 0)
    assert kinds == (0 if outcome is None else len(outcome["seconds"]) - 1)
    for choice in [] if outcome is None else outcome["seconds"]:
        assert options.items() <= choice.items()


def test_a_private_run_is_not_tuned(tmp_path: Path) -> None:
    setting = Setting(SIZES, by_images=False, more=[private(len(SIZES))], tuner=Tuner(tmp_path))
    with pytest.raises(ValueError, match="a private run is not tuned"):
        setting.run(True)


@pytest.mark.skipif(REAL, reason="of the card that is not there")
def test_a_card_gets_another_number_of_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)  # two wait for each other at each of the card's small operations
    monkeypatch.setattr(cohort, "GPU_LANES", 2)
    ways = [Arrangement(count, False, 256) for count in (1, 2, 4)]
    seconds = dict.fromkeys(ways, 2.0) | {ways[0]: 1.0}
    most, begin, alive = 0, Lane.__init__, list[weakref.ref[Lane]]()

    def counted(self: Lane, *job: Any) -> None:
        nonlocal most
        alive[:] = [*(r for r in alive if r() is not None), weakref.ref(self)]
        most = max(most, len(alive))
        begin(self, *job)

    monkeypatch.setattr(Lane, "__init__", counted)
    gc.collect()
    with card():
        sampling = local_sampling(input_size=10, batch_size=1)
        outcome, *_ = tuned(monkeypatch, tmp_path, seconds, [1, 2, 1, 1], trains=True, sampling=sampling)
    assert (outcome["lanes"], outcome["fuse"], outcome["device"]) == (1, False, "H200 that is not there")
    assert [s["lanes"] for s in outcome["seconds"]] == [2, 4, 1]
    assert most == 4, "lanes that are given up leave their memory before others are made"


def test_users_who_are_timed_are_spread_over_all_sizes() -> None:
    members = [Member(0, user, n, n, n) for user, n in enumerate((5, 1, 9, 3, 7, 2, 8, 4))]
    job: Any = Round(None, members, None, None, None, None)  # type: ignore[arg-type]
    assert [m.num_images for m in job.some(4).members] == [2, 4, 7, 9]
    for number in (8, 99):
        assert [m.num_images for m in job.some(number).members] == [1, 2, 3, 4, 5, 7, 8, 9]


def test_readers_grow_where_lanes_wait_and_no_further() -> None:
    now = 0.0
    readers = Readers(2, most=6, clock=lambda: now)

    def slow() -> Iterator[int]:
        nonlocal now
        for number in range(3):
            now += 1.0
            yield number

    def lane() -> None:
        assert list(readers.timed(slow())) == [0, 1, 2]

    lane()
    lane()
    assert not readers.after(41.0), "4 seconds of waiting, as the first wait of each lane does not count"
    lane()
    assert readers.after(19.0)
    assert readers.threads == 4
    assert not readers.after(19.0), "nothing has waited since"
    lane()
    assert readers.after(19.0)
    assert readers.threads == 6
    lane()
    assert not readers.after(19.0)
    readers.most, readers.held = 12, True
    lane()
    assert not readers.after(19.0)
    assert list(readers.timed(iter(()))) == []


def test_lanes_that_wait_at_the_same_time_are_added_up() -> None:
    now = 0.0

    def second() -> None:
        nonlocal now
        now += 1.0

    readers, both = Readers(2, most=4, clock=lambda: now), threading.Barrier(2, second, timeout=60)

    def slow() -> Iterator[int]:
        yield 0
        both.wait()
        yield 1

    def lane() -> None:
        assert list(readers.timed(slow())) == [0, 1]

    threads = [threading.Thread(target=lane) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert readers.after(19.0), "2 seconds of waiting, of which one lane alone had 1"
