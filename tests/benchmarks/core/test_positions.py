"""Runs that start from a vision transformer's weights for images of another size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchvision.models as zoo
from torch import nn

from benchmarks.predict.__main__ import main as predict
from dataset.cli import run
from pfl_ext.models.small import NETWORKS
from tests.benchmarks.conftest import Train, killed_and_resumed
from tests.benchmarks.run_files import results, saved


def vit(labels: int, side: int) -> nn.Module:
    net: nn.Module = zoo.VisionTransformer(side, 6, 1, 2, hidden_dim=8, mlp_dim=8, num_classes=labels)
    return net


def test_a_run_from_weights_for_other_images_says_so_and_goes_on_and_predicts(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    NETWORKS.names()
    monkeypatch.setattr(NETWORKS, "_things", {**NETWORKS._things, "own_vit": vit})
    torch.save(vit(1000, 30).state_dict(), tmp_path / "larger.pth")
    words = ("--model.arch=own_vit", "--model.pretrained=true", f"--weights={tmp_path / 'larger.pth'}")
    directory, _ = killed_and_resumed(train, 1, *words, "--federated.num_rounds=2")
    line = (
        "the position embedding of the weights is for 5 x 5 patches (images of 30 pixels): interpolated to "
        "3 x 3 patches (images of 18 pixels)\n"
    )
    assert line in capsys.readouterr().out
    assert results(directory)["weights"]["position_embedding"] == {
        "from": {"patches": 5, "input_size": 30},
        "to": {"patches": 3, "input_size": 18},
    }
    assert saved(directory)["backbone.encoder.pos_embedding"].shape == (1, 10, 8)
    assert run(predict, [str(directory), f"--output={tmp_path / 'p.csv'}"]) == 0
