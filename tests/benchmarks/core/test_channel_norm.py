"""Runs whose features are standardised by moments of all training images."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.core.features import _Standardised
from dataset.store.hdf5 import DataFile
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.standardised import EPS
from tests.benchmarks.conftest import Refused, killed_at, train_into
from tests.benchmarks.core.test_features import HEAD, folders
from tests.benchmarks.run_files import saved
from tests.closeness import assert_close_as_vector

SCATTER = (*HEAD, "--model.arch=scatternet", "--model.channel_norm=data", "--data.image_size=20")
PRIVATE = (
    "--federated.weighting=users",
    "--privacy.epsilon=50",
    "--privacy.delta=0.01",
    "--privacy.noise_seed=run",
    "--privacy.mechanism=gaussian",
    "--privacy.moments_multiplier=8",
    "--privacy.square_bound=2",
)


@pytest.fixture
def own_file(mini_file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(mini_file, tmp_path / "own.hdf5"))


def test_a_private_run_releases_moments_counts_them_and_goes_on_with_the_same(
    own_file: Path, tmp_path: Path
) -> None:
    whole = train_into(tmp_path / "whole", own_file, *SCATTER, *PRIVATE)
    with killed_at(2):
        train_into(tmp_path / "killed", own_file, *SCATTER, *PRIVATE, code=130)
    killed = train_into(tmp_path / "killed", own_file, *SCATTER, *PRIVATE)
    ours, theirs = saved(killed), saved(whole)
    assert torch.equal(ours["backbone.norm.mean"], theirs["backbone.norm.mean"])
    assert_close_as_vector(ours, theirs, 3 * 40 * 64)
    said = json.loads((whole / "privacy.json").read_text())
    assert said["as_executed"]["releases_before_training"] == [8, 8]
    assert "both releases are part of epsilon" in said["paragraph"]
    other = saved(train_into(tmp_path / "other", own_file, *SCATTER, *PRIVATE, "--seed=1"))
    assert not torch.equal(other["backbone.norm.mean"], theirs["backbone.norm.mean"])
    assert len(folders(own_file)) == 1, "features are those of all runs, before any moment"


def test_without_privacy_moments_are_exact_and_images_meet_the_layer_that_features_met(
    own_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ImageClassifier] = []

    def checksum(module: ImageClassifier) -> str:
        seen.append(module)
        return "made up"

    monkeypatch.setattr("benchmarks.core.execute.probe_checksum", checksum)
    tensors = saved(train_into(tmp_path / "run", own_file, *SCATTER))
    with DataFile(own_file) as file:
        split = file.split("train")
        images = torch.from_numpy(file.read_images("train", np.arange(split.num_images), 20))
        offsets = np.asarray(split.user_offsets).tolist()
    met: list[tuple[torch.Tensor, torch.Tensor]] = []
    layer: Any = seen[0].backbone.get_submodule("norm")
    layer.register_forward_hook(lambda _, inputs, outputs: met.append((inputs[0], outputs)))
    with torch.no_grad():
        seen[0](images)
    ((plain, standardised),) = met
    users = [plain[first:last].double() for first, last in pairwise(offsets)]
    mean = torch.stack([own.mean((0, 2, 3)) for own in users]).mean(0)
    square = torch.stack([own.square().mean((0, 2, 3)) for own in users]).mean(0)
    assert_close_as_vector(tensors["backbone.norm.mean"], mean.float(), 200)
    scale = (square - mean.square() + EPS).rsqrt()
    assert float((tensors["backbone.norm.scale"] - scale).norm() / scale.norm()) < 1e-3, "digits cancel"
    wide = [tensors[f"backbone.norm.{name}"].numpy().repeat(25) for name in ("mean", "scale")]
    features = plain.flatten(1).numpy()
    stored = SimpleNamespace(read=lambda split, rows: features[rows])
    rows = np.array([4, 0, 4])
    read = _Standardised(stored, *wide).read("train", rows)
    assert_close_as_vector(read, standardised.flatten(1)[rows], 4)


@pytest.mark.parametrize(
    "words, message",
    [
        (
            (*SCATTER, "--model.trained=all"),
            "works only with frozen layers, but model.trained is all",
        ),
        (
            (*SCATTER, *PRIVATE[:-2]),
            "reads all training images, but privacy.moments_multiplier is none",
        ),
        (
            (*SCATTER, "--runtime.cache_features=false"),
            "set runtime.cache_features to true, or model.channel",
        ),
        (
            (*SCATTER, "--augment.flip=horizontal"),
            "but features are not computed only once: augment.flip is horizontal",
        ),
        ((*SCATTER, "--model.groups=9"), "--model.groups has no effect where model.channel_norm is data"),
        ((*HEAD, *PRIVATE), "privacy.moments_multiplier has no effect where model.channel_norm is group"),
        (
            (*SCATTER, "--local_privacy.epsilon=8", "--federated.weighting=users"),
            "local_privacy refuses model.channel_norm = data",
        ),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_what_moments_cannot_go_with_is_refused_in_one_line(
    words: tuple[str, ...], message: str, refused: Refused
) -> None:
    refused(message, *words)
