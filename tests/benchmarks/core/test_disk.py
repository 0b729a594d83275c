"""A run that the disk has no room for is refused before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.core import disk
from tests.benchmarks.conftest import Train, killed_at
from tests.benchmarks.core.test_faults import LONG, USER_STATES
from tests.benchmarks.run_files import error_line

MODEL = 4 * (6 * 75 + 6 + 16 * 150 + 16 + 120 * 16 + 120 + 84 * 120 + 84 + 17 * 84 + 17)
"""Bytes of the weights of lenet."""


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
