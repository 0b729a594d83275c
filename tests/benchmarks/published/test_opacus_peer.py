"""What is handed to opacus is what our run trains on; opacus itself is in an environment of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.core.config.trees import Tree
from benchmarks.published import opacus_peer
from benchmarks.published.opacus_work import Work, read
from benchmarks.published.rows import read_row
from benchmarks.visual_classification.train import main as train
from dataset.cli import run as run_command
from tests.benchmarks.run_files import error_line
from tests.benchmarks.sparing import sparingly

IMAGES = 58
WORDS = (
    f"--data.partition=iid-clients-{IMAGES}-seed-0",
    "--federated.cohort_size=20",
    "--federated.num_rounds=2",
    "--evaluation.every_rounds=1",
    "--model.input_size=8",
    "--data.image_size=8",
    "--privacy.epsilon=30",
    "--local.learning_rate=0.5",
)


def test_opacus_gets_our_features_first_weights_and_training(
    classes_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handed: list[tuple[Work, float]] = []

    def pretended(python: Path, folder: Path) -> Tree:
        work, arrays = read(folder)
        x, y, weight, bias = (
            torch.from_numpy(arrays[name].copy())
            for name in ("test_features", "test_classes", "weight", "bias")
        )
        handed.append((work, float(F.cross_entropy(x @ weight.T + bias, y))))
        assert arrays["train_features"].shape == (IMAGES, x.shape[1])
        assert arrays["train_classes"].shape == (IMAGES,)
        return {"curve": {"2": 12.5}, "seconds": 3.4, "epsilons": {"prv": 2.5, "rdp": None}, "opacus": "0"}

    monkeypatch.setattr(opacus_peer, "trained_by", pretended)
    output = tmp_path / "new" / "o.json"
    command = [
        "--seed=3",
        f"--data_path={classes_file}",
        f"--opacus={sys.executable}",
        f"--output={output}",
        *WORDS,
    ]
    with sparingly(False):
        assert run_command(opacus_peer.main, command) == 0
    (work, loss) = handed[0]
    assert (work.clipping_bound, work.momentum, work.expected, work.every) == (0.2, 0.9, 20, 1)
    assert work.rates == pytest.approx([4.0 / 2, (0.32 + 3.68 / 2) / 2])
    assert work.sampling_rate == pytest.approx(20 / IMAGES)
    assert work.releases == [8.0, 8.0]
    assert work.ghost
    shown = capsys.readouterr().out
    assert "| opacus 0 | 12.50 | 2.500 (prv), - (rdp) | 3 |" in shown
    assert "| ours | - | " in shown, "the row's result is of other images"
    found = json.loads(output.read_text())
    assert found["ours"]["epsilons"]["pld"] <= 30
    assert found["theirs"]["accuracy"] == 12.5

    row = read_row("scatternet-linear").words(3)
    run = tmp_path / "run"
    words = [*row, *WORDS, f"--data_path={classes_file}", f"--run_dir={run}", "--runtime.progress=false"]
    with sparingly(False):
        assert run_command(train, words) == 0
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["tracked"]["loss"] == pytest.approx(loss, rel=1e-5)
    statement = json.loads((run / "privacy.json").read_text())
    assert f"{work.noise_multiplier:.4g}" in json.dumps(statement)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--row=niid-fedavg-iid-fn"], "opacus trains privately, and this run has no privacy"),
        (["--local.num_epochs=2"], "local.num_epochs is 2, and beside opacus it must be 1"),
        (["--local.optimizer=adam"], "local.optimizer is adam, and beside opacus it must be sgd"),
        (["--data.partition=iid-clients-9-seed-0"], "a user has several images"),
        (["--seed=-1"], "--seed is -1"),
        (["--opacus=/nowhere"], "/nowhere is not there: make opacus-peer installs opacus"),
        (["--data_path=/nowhere"], "there is no data file /nowhere"),
        (["--row=mine"], "there is no published row 'mine'"),
        (["--gradients=none"], "argument --gradients"),
    ],
)
def test_what_is_not_dp_sgd_on_single_images_is_one_line(
    words: list[str], named: str, classes_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more: Any = [] if words[0].startswith("--row") else [w for w in WORDS if not words[0].startswith(w[:12])]
    common = [f"--data_path={classes_file}", f"--opacus={sys.executable}", f"--output={tmp_path / 'o.json'}"]
    with sparingly(False):
        assert run_command(opacus_peer.main, [*common, *more, *words]) == 2
    assert named in error_line(capsys)
    assert not (tmp_path / "o.json").exists()


def test_a_process_that_fails_is_said_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"opacus_side ended with 1: .*Error") as caught:
        opacus_peer.trained_by(Path(sys.executable), tmp_path)
    assert "\n" not in str(caught.value)
