"""Runs that train the last layers on features are the runs that compute them in every round."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import Tensor

from dataset.files import locked
from pfl_ext.models.features import Split
from tests.benchmarks.conftest import Train, killed_at, train_into
from tests.benchmarks.core.test_private import PRIVATE
from tests.closeness import assert_close_as_vector

HEAD = ("--model.trained=head", "--model.input_size=20", "--augment.flip=none", "--runtime.accumulate=fp64")
CENTRAL = "--config=c-r-17"
LOCAL = ("--local_privacy.epsilon=8", "--local_privacy.noise_seed=run")
EACH_ROUND = "--runtime.cache_features=false"
SINGLE_STEPS = 3 * 40 * 64
"""Roundings: rounds, steps of a user, and a sum of 4,096 terms, whose roundings go up as often as down."""


@pytest.fixture
def own_file(mini_file: Path, tmp_path: Path) -> Path:
    """A copy of the data, beside which there are no features yet."""
    return Path(shutil.copy(mini_file, tmp_path / "own.hdf5"))


@pytest.fixture
def computed() -> Iterator[mock.Mock]:
    """What computes features."""
    with mock.patch.object(Split, "features", autospec=True, side_effect=Split.features) as spy:
        yield spy


def folders(data: Path) -> list[Path]:
    return sorted(data.with_name(f"{data.name}.features").glob("*"))


def trained(directory: Path) -> dict[str, Tensor]:
    """All parameters of the best model."""
    return dict(load_file(directory / "model.safetensors"))


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--runtime.engine=stock",),
        ("--federated.algorithm=scaffold", "--local.num_epochs=2"),
        ("--federated.algorithm=fednova", "--local.batch_size=2"),
        ("--local.virtual_size=6", "--federated.weighting=users"),
        (*PRIVATE, "--privacy.noise_seed=run"),
        (
            "--config=pfl-r-17",
            "--privacy=none",
            "--local_privacy.epsilon=8",
            "--local_privacy.noise_seed=run",
        ),
        (CENTRAL,),
        ("--model.trained=two_layers", "--model.bottleneck=4"),
    ],
    ids=" ".join,
)
def test_the_model_is_that_of_images(words: tuple[str, ...], own_file: Path, tmp_path: Path) -> None:
    options = [word for word in (*HEAD, *words) if not (CENTRAL in words and "accumulate" in word)]
    runs = [
        train_into(tmp_path / name, own_file, *options, *more)
        for name, more in (("features", ()), ("images", (EACH_ROUND,)))
    ]
    assert len(folders(own_file)) == 1
    assert_close_as_vector(trained(runs[0]), trained(runs[1]), SINGLE_STEPS)


def test_users_are_fine_tuned_on_images_after_training_on_features(own_file: Path, tmp_path: Path) -> None:
    words = (*HEAD, "--personal.num_epochs=1", "--personal.min_images=2", "--evaluation.per_user=true")
    runs = [
        train_into(tmp_path / name, own_file, *words, *more)
        for name, more in (("features", ()), ("images", (EACH_ROUND,)))
    ]
    found = [json.loads((directory / "per_user.json").read_text()) for directory in runs]
    assert found[0]["personal"]["trained_on"] == found[1]["personal"]["trained_on"]
    scores = [np.array(one["personal"]["after"]["C-AP"], float) for one in found]
    np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=1e-4)


def test_a_second_run_computes_nothing(own_file: Path, tmp_path: Path, computed: mock.Mock) -> None:
    first = train_into(tmp_path / "first", own_file, *HEAD)
    assert computed.call_count > 0
    computed.reset_mock()
    second = train_into(tmp_path / "second", own_file, *HEAD)
    assert computed.call_count == 0
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


@pytest.mark.parametrize("word", ["--seed=1", "--model.normalisation=half", "--data.image_size=21"])
def test_other_weights_or_another_transform_have_features_of_their_own(
    word: str, own_file: Path, tmp_path: Path
) -> None:
    train_into(tmp_path / "first", own_file, *HEAD)
    side = ("--model.input_size=21",) if "image_size" in word else ()
    train_into(tmp_path / "second", own_file, *HEAD, word, *side)
    assert len(folders(own_file)) == 2


@pytest.mark.parametrize("then", [(), (EACH_ROUND,)], ids=["features", "images"])
def test_a_killed_run_goes_on_with_either(then: tuple[str, ...], own_file: Path, tmp_path: Path) -> None:
    whole = train_into(tmp_path / "whole", own_file, *HEAD)
    with killed_at(2):
        train_into(tmp_path / "killed", own_file, *HEAD, code=130)
    killed = train_into(tmp_path / "killed", own_file, *HEAD, *then)
    assert_close_as_vector(trained(killed), trained(whole), SINGLE_STEPS)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("--augment.flip=horizontal", "augment.flip is horizontal; with none they are computed once"),
        ("--model.input_size=18", "crops are drawn; with augment.crop=crop and model.input_size equal"),
        ("--augment.crop=resized", "crops are drawn; with augment.crop=crop and model.input_size equal"),
        (
            "--model.arch=squeezenet1_1 --model.input_size=20",
            "the layer classifier.1 takes more than a vector",
        ),
    ],
)
def test_where_features_change_it_is_said_and_nothing_is_kept(
    word: str, why: str, own_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_into(tmp_path / "run", own_file, *HEAD, *word.split(), "--federated.num_rounds=1")
    assert f"the frozen layers are computed in every round: {why}" in " ".join(
        capsys.readouterr().out.split()
    )
    assert not folders(own_file)


def test_a_second_process_waits_for_the_first(
    own_file: Path, tmp_path: Path, computed: mock.Mock, capsys: pytest.CaptureFixture[str]
) -> None:
    train_into(tmp_path / "first", own_file, *HEAD)
    (folder,) = folders(own_file)
    (folder / "test.json").unlink()  # something is left to compute
    computed.reset_mock()
    has_it = threading.Event()

    def hold() -> None:
        with locked(folder / "lock", ""):
            has_it.set()
            time.sleep(1)

    other = threading.Thread(target=hold)
    other.start()
    has_it.wait()
    train_into(tmp_path / "second", own_file, *HEAD)
    other.join()
    assert "waiting for another process that computes these features" in capsys.readouterr().err
    assert computed.call_count > 0


def test_a_full_disk_ends_in_one_line(
    own_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dataset.store.features.free", lambda folder: 10)
    directory = train_into(tmp_path / "run", own_file, *HEAD, code=2)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: the features need ")
    assert error.endswith("make room, or set runtime.cache_features to false")
    assert not list(directory.glob("*.jsonl"))


def test_a_bottleneck_that_would_never_learn_is_refused(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    train(*HEAD, "--model.bottleneck=4", code=2)
    assert "model.trained is head, and a bottleneck before it would never learn" in capsys.readouterr().err
