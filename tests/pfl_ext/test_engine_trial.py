"""Faults put into each path of the engine on a GPU that is not there are found before a round is lost."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pfl.postprocessor.base import Postprocessor

from pfl_ext.engine import selfcheck, tuning
from pfl_ext.engine.gpu_layers import GpuLayers
from pfl_ext.engine.graphs import StepGraphs
from pfl_ext.engine.lane import Lane
from pfl_ext.engine.pool import LanePool
from pfl_ext.engine.selfcheck import PATHS, SelfCheck
from pfl_ext.engine.tuning import Tuner
from tests.card import REAL, card, plain
from tests.pfl_ext.engine.setting import Setting, distance, private
from tests.pfl_ext.samplings import local_sampling

pytestmark = [
    pytest.mark.skipif(REAL, reason="of the card that is not there"),
    pytest.mark.xdist_group("card"),
]
SIZES = [3, 1, 5, 2, 0, 4]
FEW = local_sampling(num_epochs=1, batch_size=2, input_size=10)
"""A lane records four graphs."""


def stale(patch: pytest.MonkeyPatch) -> None:
    """A graph that replays the images it was recorded with."""

    def run(self: StepGraphs, step: Any, local: Any, first: bool, batch: Any) -> None:
        self._recorded[max(self._recorded, key=lambda key: key[0])[0], first, local].replay()

    patch.setattr(StepGraphs, "run", run)


def not_a_number(patch: pytest.MonkeyPatch) -> None:
    real = StepGraphs.run

    def run(self: StepGraphs, *job: Any) -> None:
        real(self, *job)
        self._changed()[0].mul_(float("nan"))

    patch.setattr(StepGraphs, "run", run)


def no_capture(patch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")

    patch.setattr(StepGraphs, "_capture", fail)


def out_of_memory(patch: pytest.MonkeyPatch) -> None:
    """What no smaller group and no fewer lanes help against."""

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("made up")

    patch.setattr(StepGraphs, "_capture", fail)


def one_stream_alone(patch: pytest.MonkeyPatch) -> None:
    """A stream whose work is not waited for: what the others trained is lost."""
    real = LanePool.run

    def run(self: LanePool, lanes: Any, tasks: Any, work: Any) -> Any:
        faults = real(self, lanes, tasks, work)
        for lane in lanes[1:]:
            with lane.working():
                lane.sums.vector.zero_()
        return faults

    patch.setattr(LanePool, "run", run)


def wrong_layers(patch: pytest.MonkeyPatch) -> None:
    def replaced(self: GpuLayers, network: Any, side: int = 0) -> Any:
        raise RuntimeError("a kernel that does not compile")

    patch.setattr(GpuLayers, "replaced", replaced)


def no_clipping(patch: pytest.MonkeyPatch) -> None:
    real = Lane.add
    patch.setattr(Lane, "add", lambda self, weight, scaling: real(self, weight, None))


def checked(folder: Path, **more: Any) -> SelfCheck:
    return SelfCheck(folder, kept=folder / "cache", **more)


def run(setting: Setting, check: SelfCheck, **options: Any) -> dict[str, Any]:
    setting.check = check
    with card():
        updates, *_ = setting.run(True, lanes=2, **options)
    return {name: plain(t) for name, t in updates.items()}


@pytest.mark.parametrize(
    ("fault", "path", "why"),
    [
        (None, 0, ""),
        (stale, 1, "off by more than rounding by"),
        (not_a_number, 1, "by nan"),
        (no_capture, 1, "RuntimeError: CUDA error: operation not permitted when stream is capturing"),
        (out_of_memory, 1, "no memory to train on"),
        (one_stream_alone, 2, "off by"),
        (wrong_layers, 3, "RuntimeError: a kernel that does not compile"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_is_found_and_the_next_path_is_taken(
    fault: Callable[[pytest.MonkeyPatch], None] | None,
    path: int,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    amp = torch.bfloat16 if fault is wrong_layers else None
    with card():
        theirs = {n: plain(t) for n, t in Setting(SIZES, FEW, amp=amp).run(False)[0].items()}
    if fault is not None:
        fault(monkeypatch)
    check = checked(tmp_path)
    ours = run(Setting(SIZES, FEW, amp=amp), check)
    assert check.outcome is not None
    assert (check.outcome["path"], check.outcome["users"]) == (path, 3)
    limit = check.outcome["limit"]
    assert check.outcome["deviation"] <= limit < (selfcheck.LIMIT if amp is None else 0.5) * 1.001
    assert distance(ours, theirs) <= limit
    said = capsys.readouterr().err.splitlines()
    (line,) = [line for line in said if line.startswith("engine checked on H200")]
    assert line.endswith(PATHS[path])
    assert "3 users, deviation" in line
    assert [f["path"] for f in check.outcome["failures"]] == list(range(path))
    assert all(why in failure["why"] and len(failure["why"].splitlines()) == 1
               for failure in check.outcome["failures"])  # fmt: skip
    assert (tmp_path / "engine_check.json").exists() == (path > 0)
    if path:
        report = json.loads((tmp_path / "engine_check.json").read_text())
        assert report["device"] == "H200 that is not there"
        assert [failure["path"] for failure in report["failures"]] == list(PATHS[:path])


def test_without_a_home_folder_the_engine_is_checked_and_nothing_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(tuning, "SHORT", 0.0)
    check, tuner = SelfCheck(), Tuner()
    run(Setting(SIZES, FEW), check)
    assert check.outcome is not None
    assert check.outcome["path"] == 0
    Setting(SIZES, FEW, tuner=tuner).run(True, lanes=2)
    assert tuner.outcome is not None
    assert tuner.outcome["source"] == "timed"


@pytest.mark.parametrize("more", [False, True], ids=["plain", "private"])
def test_pfls_loop_trains_where_no_path_holds(
    more: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def setting() -> Setting:
        if more:
            return Setting(SIZES, by_images=False, more=[private(len(SIZES), noisy=False)])  # clipped
        return Setting(SIZES, FEW)

    with card():
        theirs = {n: plain(t) for n, t in setting().run(False)[0].items()}
    if more:
        no_clipping(monkeypatch)
    else:
        monkeypatch.setattr(Lane, "_step", lambda *_: None)
    check = checked(tmp_path, private=more)
    ours = run(setting(), check, fuse=False)
    assert check.outcome is not None
    assert check.outcome["path"] == len(PATHS)
    deviations = [failure["deviation"] for failure in check.outcome["failures"]]
    assert (deviations == [None] * len(PATHS)) == more
    assert distance(ours, theirs) == 0
    assert "pfl's own loop trains the users" in capsys.readouterr().err


def test_an_outcome_is_kept_for_the_same_code_network_and_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted: list[int] = []
    real = SelfCheck._tried

    def tried(self: SelfCheck, number: int, *job: Any) -> Any:
        counted.append(number)
        return real(self, number, *job)

    monkeypatch.setattr(SelfCheck, "_tried", tried)
    for count, setting in [
        (1, Setting(SIZES, FEW)),
        (1, Setting(SIZES, FEW)),
        (2, Setting(SIZES, FEW, learning_rate=0.1)),
    ]:
        check = checked(tmp_path)
        run(setting, check)
        assert len(counted) == count
        assert check.outcome is not None
        assert check.outcome["path"] == 0
    assert capsys.readouterr().err.count("engine checked before on H200") == 1


def test_a_path_that_hangs_ends_the_process_and_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, codes = threading.Event(), []
    real = StepGraphs.run

    class Killed(BaseException):
        pass

    def wait(self: StepGraphs, *job: Any) -> None:
        assert ended.wait(30)
        raise Killed

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(StepGraphs, "run", wait)
    with pytest.raises(Killed):
        run(Setting(SIZES, FEW), checked(tmp_path, seconds=0.3, end=end))
    assert codes == [75]
    assert "hangs on this machine; start the same command again, which does not" in capsys.readouterr().err
    monkeypatch.setattr(StepGraphs, "run", real)
    (noted,) = (tmp_path / "cache").glob("engine-check-*.json")
    other = subprocess.Popen(["sleep", "60"])
    attempt = json.loads(noted.read_text())
    of_another = json.dumps({**attempt, "by": [socket.gethostname(), other.pid]})
    noted.write_text(of_another)
    check = checked(tmp_path)
    run(Setting(SIZES, FEW), check)
    assert check.outcome is not None
    assert check.outcome["path"] == 0, "another run tries this path just now"
    other.kill()
    other.wait()
    noted.write_text(of_another)
    check = checked(tmp_path)
    run(Setting(SIZES, FEW), check)
    assert check.outcome is not None
    assert check.outcome["path"] == 1
    assert "took the process with it" in check.outcome["failures"][0]["why"]


def test_a_gpu_that_refuses_all_further_work_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_capture(monkeypatch)
    with card():

        def dead(*_: Any) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(torch.cuda, "synchronize", dead)
        setting = Setting(SIZES, FEW, check=checked(tmp_path))
        with pytest.raises(SystemExit) as ended:
            setting.run(True, lanes=1)
    assert ended.value.code == 75
    assert "start the same command again" in capsys.readouterr().err


def uncorrected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lane, "correct", lambda *_: None)


def anothers_correction(patch: pytest.MonkeyPatch) -> None:
    """Each user but the first gets the correction of the one before."""
    real, before = Lane.correct, dict[Lane, Any]()

    def correct(self: Lane, corrections: Any, local: Any) -> None:
        real(self, before.get(self, corrections), local)
        before[self] = corrections

    patch.setattr(Lane, "correct", correct)


IN_GRADIENT, AFTER_STEP = ({"scaffold": ("II", place)} for place in ("gradient", "step"))


@pytest.mark.parametrize(
    ("training", "fault", "path"),
    [
        (IN_GRADIENT, None, 0),
        (AFTER_STEP, None, 0),
        ({"dynamic": 0.3}, None, 0),
        (IN_GRADIENT, not_a_number, 1),
        (AFTER_STEP, uncorrected, len(PATHS)),
        (IN_GRADIENT, anothers_correction, len(PATHS)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_corrections_are_compared_and_no_control_variate_is_renewed(
    training: dict[str, Any],
    fault: Callable[[pytest.MonkeyPatch], None] | None,
    path: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SCAFFOLD's and FedDyn's rounds are then those of pfl's loop."""

    def setting() -> Setting:
        return Setting([3, 1, 5, 2, 4], FEW, rounds=2, **training)

    with card():
        theirs = {n: plain(t) for n, t in setting().run(False)[0].items()}
    if fault is not None:
        fault(monkeypatch)
    check = checked(tmp_path)
    ours = run(setting(), check)
    assert check.outcome is not None
    assert check.outcome["path"] == path
    assert distance(ours, theirs) <= check.outcome["limit"]


def test_users_trained_one_by_one_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for fault, path in ((None, 0), (stale, 1)):
        if fault is not None:
            fault(monkeypatch)
        check = checked(tmp_path / str(path))
        run(Setting(SIZES, FEW, more=[Postprocessor()]), check)
        assert check.outcome is not None
        assert check.outcome["path"] == path
