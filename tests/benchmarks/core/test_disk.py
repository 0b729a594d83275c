"""A run that the disk has no room for is refused before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.core import disk
from benchmarks.core.recorder import Recorder
from benchmarks.flair.train import main
from tests.benchmarks.conftest import COMMON, Train, killed_at
from tests.benchmarks.core.test_device_runs import CLASSES_OF_RUN
from tests.benchmarks.core.test_faults import LONG, USER_STATES
from tests.benchmarks.run_files import error_line
from tests.benchmarks.sparing import run_into

MODEL = 4 * (6 * 75 + 6 + 16 * 150 + 16 + 120 * 16 + 120 + 84 * 120 + 84 + 17 * 84 + 17)
"""Bytes of the weights of lenet."""
BUFFER = ("--federated.options.concurrency=6", "--federated.options.buffer_size=2")


@pytest.mark.parametrize(
    "argv, moments, users",
    [
        (("--server.optimizer=sgd", "--server.momentum=0.9", "--evaluation.average=swa"), 2, 0),
        (("--server.optimizer=adam",), 2, 0),
        (USER_STATES["control_variates.f32"], 2, 12),
        (USER_STATES["linear_terms.f32"], 2, 12),
        (USER_STATES["personal.f32"], 2, 12),
        (USER_STATES["compression_errors.f32"], 2, 12),
        (("--config=c-r-17", "--centralised.optimizer=sgd"), 0, 0),
    ],
    ids=["momentum and average", "adam", "scaffold", "feddyn", "ditto", "feedback", "central"],
)
def test_a_run_that_the_disk_has_no_room_for_is_refused_before_it_writes_anything(
    argv: tuple[str, ...],
    moments: int,
    users: int,
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three checkpoints with two models each, and the model; a state of each user."""
    words = (*argv,) if "--config=c-r-17" in argv else (*LONG, *argv)
    need = 3 * (2 + moments) * MODEL + MODEL + users * MODEL
    monkeypatch.setattr(disk, "free", lambda folder: need - 1)
    directory = train(*words, code=2)
    assert "GB in" in (said := error_line(capsys))
    assert said.endswith("GB are free: free some space, or choose another --run_dir")
    assert not directory.exists()
    monkeypatch.setattr(disk, "free", lambda folder: need)
    train(*words)
    written = sum(path.stat().st_size for path in directory.glob("checkpoint/last*")) * 3 / 2
    assert 0.75 * written < 3 * (2 + moments) * MODEL < written, "headers, and SCAFFOLD's c, FedDyn's h"


@pytest.mark.parametrize(
    "argv",
    [
        ("--federated.algorithm=dsgd", "--federated.cohort_size=4"),
        ("--federated.algorithm=fedma", "--federated.cohort_size=4"),
        ("--federated.algorithm=fedbuff", *CLASSES_OF_RUN, *BUFFER),
    ],
    ids=["dsgd", "fedma", "fedbuff"],
)
def test_models_of_an_algorithm_of_its_own_are_counted(
    argv: tuple[str, ...], mini_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest checkpoint of the run is counted three times, but for its header, and the model."""
    needs, sizes = list[int](), list[int]()
    real_need, real_step = disk.least_bytes, Recorder.step_done

    def noted(*given: Any) -> int:
        needs.append(real_need(*given))
        return needs[-1]

    def done(self: Any, *given: Any) -> None:
        real_step(self, *given)
        sizes.append((self.files.path / "checkpoint" / "last.safetensors").stat().st_size)

    monkeypatch.setattr(disk, "least_bytes", noted)
    monkeypatch.setattr(Recorder, "step_done", done)
    words = ("--config=fl-r-17", *COMMON, f"--data_path={mini_file}", "--federated.num_rounds=10")
    run_into(main, tmp_path / "run", *words, "--evaluation.best_by=last", *argv)
    assert 0.9 * 3 * max(sizes) < needs[0] - MODEL < 3 * max(sizes)
    if "--federated.algorithm=fedbuff" in argv:
        assert max(sizes) > min(sizes) + MODEL, "old versions, which come and go"


def test_a_run_goes_on_where_its_checkpoints_have_taken_the_room(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_at(4):
        directory = train(*LONG, code=130)
    taken = sum(path.stat().st_size for path in directory.glob("checkpoint/*"))
    left = 3 * 4 * MODEL + MODEL - taken  # with adam
    (directory / "checkpoint" / "lost").symlink_to("nowhere")
    for room, code in ((left - 1, 2), (left, 0)):
        asked: list[Path] = []
        monkeypatch.setattr(disk, "free", lambda folder, room=room, asked=asked: asked.append(folder) or room)
        train(*LONG, code=code)
        assert asked == [directory / "checkpoint"], "it may be a link to another disk"
