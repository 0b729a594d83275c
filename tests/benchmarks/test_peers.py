"""Peers side by side: every side trains the same images, and a side that fails ends in one line."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.bench import peers
from benchmarks.bench.peer_work import Users, network, plain_rounds, train_user
from benchmarks.visual_classification import bench as vision
from dataset.cli import run as run_command

WORDS = ("--recipe=niid-bench+fedavg", "--local.num_epochs=1", "--local.batch_size=4")
TINY = vision.Case("tiny", WORDS, users=4, user_images=6, cohort=2)
CASE = peers.Case("tiny", lambda _: nullcontext(vision.compared(TINY)), "lenet", 10, False, 32)


@pytest.fixture
def users(tmp_path: Path) -> Users:
    """Those of `CASE`."""
    peers.prepare(CASE, tmp_path)
    return Users(tmp_path)


def test_all_sides_train_the_same_images_with_the_same_steps(users: Users, tmp_path: Path) -> None:
    sides = vision.compared(TINY)
    config, store = sides.fast.config, sides.opened(sides.fast).split("train")
    images, targets = store.read(np.arange(6, 12))
    ours, classes = users.of(1)
    assert torch.equal(ours, torch.from_numpy(images).permute(0, 3, 1, 2))
    assert torch.equal(classes, torch.from_numpy(targets).float())
    assert len(users) == 4
    work = users.work
    assert (work.epochs, work.batch_size, work.cohort) == (1, 4, 2)
    assert (work.learning_rate, work.momentum, work.weight_decay) == (
        config.local_learning_rate,
        config.local.momentum,
        config.local.weight_decay,
    )
    for side in ("fast", "plain loop"):
        assert len(peers.seconds_of(side, CASE, tmp_path, 1)) == 1
    parameters = sum(p.numel() for p in sides.opened(sides.fast).module.backbone.parameters())
    assert sum(p.numel() for p in network(work).parameters()) == parameters


def test_the_plain_loop_averages_its_users_weighted_by_images(
    users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    users.offsets = np.array([0, 1, 3, 6, 24])
    torch.manual_seed(3)
    start = network(users.work)
    monkeypatch.setattr("benchmarks.bench.peer_work.network", lambda work: start)
    before = {name: tensor.clone() for name, tensor in start.state_dict().items()}
    plain_rounds(users, 1)
    draw = torch.Generator().manual_seed(0)
    members = torch.randperm(4, generator=draw)[:2].tolist()
    total: dict[str, torch.Tensor | float] = {}
    for user in members:
        alone = network(users.work)
        alone.load_state_dict(before)
        share = train_user(alone, users, user, 0) / sum(len(users.of(u)[0]) for u in members)
        total = {name: total.get(name, 0) + share * t for name, t in alone.state_dict().items()}
    found = start.state_dict()
    size, apart, moved = (
        sum(float(difference(name).double().square().sum()) for name in found) ** 0.5
        for difference in (
            found.__getitem__,
            lambda name: found[name] - total[name],
            lambda name: found[name] - before[name],
        )
    )
    assert apart <= 4 * 2.0**-24 * size < moved, "sums of weights, each rounded a few times"


def test_a_side_is_a_process_whose_seconds_and_memory_are_read() -> None:
    code = "import time; kept = bytearray(300 << 20); time.sleep(0.8); print('said'); print([1.5, 2.5])"
    seconds, memory = peers.run_side([sys.executable, "-c", code])
    assert seconds == [1.5, 2.5]
    assert 0.3 < memory < 0.5
    with pytest.raises(ValueError, match=r"ended with 1: ZeroDivisionError: division by zero$"):
        peers.run_side([sys.executable, "-c", "1 / 0"])


def test_sides_take_turns_and_the_table_says_how_many_times_as_long_each_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def pretended(command: list[str]) -> tuple[list[float], float]:
        side = command[command.index("--side") + 1] if "--side" in command else "Flower"
        asked.append(side)
        return [9.0, *[float(len(side))] * 2], 1.0

    monkeypatch.setattr(peers, "CASES", (CASE,))
    monkeypatch.setattr(peers, "run_side", pretended)
    words = ["--rounds", "2", "--turns", "2", "--output", str(tmp_path / "out" / "peers.json")]
    assert run_command(peers.main, [*words, "--flower", str(tmp_path / "none")]) == 0
    assert asked == ["fast", "stock", "plain loop"] * 2
    assert "so Flower is left out" in capsys.readouterr().out
    assert run_command(peers.main, [*words, "--flower", sys.executable]) == 0
    out = capsys.readouterr().out
    assert "| tiny | Flower | 6.00 (6.00 to 6.00) | 1.5 | 1.0 |" in out
    found = json.loads((tmp_path / "out" / "peers.json").read_text())["results"]["tiny"]
    assert found["stock"]["rounds_s"] == [5.0] * 4, "the first round of a process is not counted"


@pytest.mark.parametrize(
    "words, named",
    [
        (["--rounds", "0"], "--rounds is 0"),
        (["--turns", "-1"], "--turns is -1"),
        (["--only", "nothing"], "--only 'nothing'"),
        (["--side", "fast"], "--side needs --folder"),
    ],
)
def test_bad_input_is_one_line(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(peers.main, words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {named}")
    assert error.count("\n") == 1
