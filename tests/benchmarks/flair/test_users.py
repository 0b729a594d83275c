"""Per-user scores at the end of a run and on a finished one, and what a run says of its start."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from benchmarks.core.config.trees import Tree
from benchmarks.core.experiment import build_model
from benchmarks.flair.config import parse
from benchmarks.flair.per_user import main
from benchmarks.flair.standin import main as make_standin
from dataset.cli import run
from dataset.store.hdf5 import DataFile
from pfl_ext.checkpoint import load
from pfl_ext.models.classifier import build_backbone, probe_checksum
from pfl_ext.models.config import ModelConfig
from pfl_ext.randomness import torch_stream
from pfl_ext.tasks.multi_label import MultiLabel
from tests.benchmarks.conftest import RESNET18, SMALL, TINY, Train

ROUND = ("--federated.num_rounds=1",)
PERSONAL = ("--personal.num_epochs=2", "--personal.min_images=2")


def tree(path: Path) -> Tree:
    return dict(json.loads(path.read_text()))


def test_a_run_scores_its_users_and_a_finished_run_is_scored_alike(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--evaluation.per_user=true", "--loss.focal_gamma=2")
    directory = train(*ROUND, *words, *PERSONAL, draw=True)
    per_user, results = tree(directory / "per_user.json"), tree(directory / "results.json")
    assert (
        len(per_user["user_ids"]) == len(per_user["O-AP"]) == results["per_user"]["users"] == TINY.test_users
    )
    assert results["per_user"]["quantiles"]["O-AP"]["n"] == TINY.test_users
    new = results["clients"]["new"]
    assert list(results["clients"]) == ["new"]
    assert new["users"] == TINY.test_users
    assert new["images"] == sum(per_user["images"])
    assert new["server"]["users"]["O-AP"]["lowest decile"] == pytest.approx(min(per_user["O-AP"]), abs=1e-3)
    personal = per_user["personal"]
    assert personal["images_trained_on"] == sum(personal["trained_on"])
    assert personal["images_scored"] == sum(personal["scored_on"])
    assert min(personal["trained_on"] + personal["scored_on"]) >= 1
    assert set(personal["quantiles"]) == {"before", "after", "change"}
    assert personal["before"]["O-AP"] != personal["after"]["O-AP"]
    before = (directory / "results.json").read_bytes()
    (directory / "per_user.json").unlink()
    capsys.readouterr()
    assert run(main, [str(directory), *PERSONAL]) == 0
    assert tree(directory / "per_user.json") == per_user
    assert (directory / "results.json").read_bytes() == before
    assert "held out, change O-AP" in capsys.readouterr().out
    assert (directory / "plots" / "per_user.png").read_bytes().startswith(b"\x89PNG")
    assert run(main, [str(directory), "--local.learning_rate=1"]) == 2
    assert "only personal.*, runtime.* and data_path" in capsys.readouterr().err
    (directory / "results.json").write_text(json.dumps(results | {"data_sha256": "a" * 64}))
    assert run(main, [str(directory), f"--data_path={results['dataset']}"]) == 2
    line = (
        f"error: {results['dataset']} has other data than {directory} learnt from: give the file of the run"
    )
    assert capsys.readouterr().err.startswith(line), "its per_user.json was replaced by scores on other data"
    assert tree(directory / "per_user.json") == per_user


def test_scoring_users_does_not_change_the_model_or_its_columns(train: Train) -> None:
    plain = tree(train(*ROUND, name="plain") / "results.json")
    scored = tree(train(*ROUND, *PERSONAL, name="scored") / "results.json")
    assert plain["model_probe"] == scored["model_probe"]
    assert plain["test"] == scored["test"]
    assert "per_user" not in plain


def test_a_run_says_what_it_started_from(train: Train, mini_file: Path) -> None:
    results = tree(train(*RESNET18, *ROUND) / "results.json")
    assert results["weights"] is None
    assert results["norm"] == "20 GroupNorm"
    assert results["parameters"] == results["trainable_parameters"] > 11_000_000
    with DataFile(mini_file) as file:
        assert results["data"]["content_sha256"] == file.fingerprint
    assert results["data"]["source"] == "mini"
    assert results["data"]["users"] == {"train": 12, "val": 5, "test": 5}
    assert sum(group["classes"] for group in results["shots"].values()) == 17
    assert results["start_probe"] != results["model_probe"]
    for seed, same in ((0, True), (1, False)):
        config = parse(["--config=fl-r-17", *SMALL, *RESNET18, f"--seed={seed}"]).config
        assert (probe_checksum(build_model(config, 17, None, MultiLabel())) == results["start_probe"]) == same


def test_the_fine_tuning_rows_run_from_a_stand_in_that_says_so(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "standin.safetensors"
    words = ["--users=2", "--epochs=1", "--image_size=16", f"--output_file={path}"]
    assert run(make_standin, words) == 0
    first = path.read_bytes()
    assert run(make_standin, words) == 0
    assert path.read_bytes() == first
    assert (
        run(make_standin, [*words[:3], f"--output_file={tmp_path / 'random.safetensors'}", "--method=random"])
        == 0
    )
    assert load(tmp_path / "random.safetensors")[1]["description"].startswith(
        "STAND-IN, not ImageNet: random"
    )
    trained, drawn = load(path)[0], load(tmp_path / "random.safetensors")[0]
    assert not torch.equal(trained["bn1.running_mean"], drawn["bn1.running_mean"])
    build_backbone(ModelConfig(pretrained=True), 5, torch_stream(0, "x"), path)
    directory = train("--config=fl-f-17", f"--weights={path}", *RESNET18, *ROUND)
    results = tree(directory / "results.json")
    assert results["weights"]["sha256"] == hashlib.sha256(first).hexdigest()
    assert results["weights"]["file"] == "standin.safetensors"
    assert "STAND-IN, not ImageNet: 1 epochs on 2 drawn users" in results["weights"]["description"]
    assert not results["weights"]["torchvision"]
    assert results["norm"] == "20 FrozenStatisticsBatchNorm2d"
    capsys.readouterr()
    assert run(make_standin, ["--output_file=x.pth"]) == 2
    assert "must end in .safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["fedavg", "fedper"])
def test_users_are_scored_in_the_precision_of_their_split(
    algorithm: str, train: Train, scored_by_autocast: list[bool]
) -> None:
    words = ("--runtime.precision=bf16", "--runtime.engine=stock", f"--federated.algorithm={algorithm}")
    train(*ROUND, *PERSONAL, *words)
    assert scored_by_autocast
    assert all(scored_by_autocast)
