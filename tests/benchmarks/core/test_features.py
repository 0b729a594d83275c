"""Runs that train the last layers on features are the runs that compute them in every round."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.core.config.digests import config_tree, digest
from benchmarks.core.features import reason_against
from benchmarks.flair.config import FLAIR, parse
from dataset.files import locked
from dataset.store.views import LabelSetView, SplitImages
from pfl_ext.models.features import Split
from pfl_ext.tasks.multi_label import MultiLabel
from tests.benchmarks.conftest import Refused, Train, killed_at, train_into
from tests.benchmarks.core.test_private import PRIVATE
from tests.benchmarks.run_files import saved
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


def on_features_and_images(data: Path, folder: Path, *words: str) -> tuple[Path, Path]:
    """A run that trains on features where it can, and one that computes them in every round."""
    on_features = train_into(folder / "features", data, *words)
    return on_features, train_into(folder / "images", data, *words, EACH_ROUND)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--runtime.engine=stock",),
        ("--federated.algorithm=scaffold", "--local.num_epochs=2"),
        ("--federated.algorithm=fednova", "--local.batch_size=2"),
        ("--local.virtual_size=6", "--federated.weighting=users"),
        (*PRIVATE, "--privacy.noise_seed=run"),
        ("--config=pfl-r-17", "--privacy=none", *LOCAL),
        (CENTRAL,),
        ("--model.trained=two_layers", "--model.bottleneck=4"),
    ],
    ids=" ".join,
)
def test_the_model_is_that_of_images(words: tuple[str, ...], own_file: Path, tmp_path: Path) -> None:
    """In ways to train that differ in what they read, and when."""
    options = [word for word in (*HEAD, *words) if not (CENTRAL in words and "accumulate" in word)]
    runs = on_features_and_images(own_file, tmp_path, *options)
    assert len(folders(own_file)) == 1
    assert_close_as_vector(saved(runs[0]), saved(runs[1]), SINGLE_STEPS)


@pytest.mark.parametrize("trained", ["head", "last_blocks"])
@pytest.mark.parametrize("method", ["augment", "pixels"])
def test_a_task_that_changes_images_itself_trains_on_images(
    method: str, trained: str, own_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features would leave out what it changes in training, and would serve a task of other pixels, too."""
    real = getattr(MultiLabel, method)

    def darkened(task: MultiLabel, *of_images: Any) -> Any:
        found, crops = real(task, *of_images), of_images[-2]
        factor = 1.0 if crops is None else 0.1
        return found * factor if method == "pixels" else (found[0] * factor, found[1])

    monkeypatch.setattr(MultiLabel, method, darkened)
    words = (*HEAD, f"--model.trained={trained}", "--federated.num_rounds=1")
    runs = on_features_and_images(own_file, tmp_path, *words)
    assert not folders(own_file)
    assert_close_as_vector(saved(runs[0]), saved(runs[1]), SINGLE_STEPS)


class Darker(SplitImages):
    """Images that are changed where they are read."""

    def read(self, rows: Any) -> Any:
        """Half as bright."""
        images, targets = super().read(rows)
        return images // 2, targets


def test_a_store_that_changes_images_itself_trains_on_images(
    own_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LabelSetView.split
    monkeypatch.setattr(LabelSetView, "split", lambda view, name: Darker(**vars(real(view, name))))
    runs = on_features_and_images(own_file, tmp_path, *HEAD, "--federated.num_rounds=1")
    assert not folders(own_file)
    assert_close_as_vector(saved(runs[0]), saved(runs[1]), SINGLE_STEPS)


def test_users_are_fine_tuned_on_images_after_training_on_features(own_file: Path, tmp_path: Path) -> None:
    words = (*HEAD, "--personal.num_epochs=1", "--personal.min_images=2", "--evaluation.per_user=true")
    runs = on_features_and_images(own_file, tmp_path, *words)
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


def test_other_weights_or_another_transform_have_features_of_their_own(
    own_file: Path, tmp_path: Path
) -> None:
    ways = ("", "--seed=1", "--model.normalisation=half", "--data.image_size=21 --model.input_size=21")
    for number, words in enumerate(ways, 1):
        train_into(tmp_path / str(number), own_file, *HEAD, "--federated.num_rounds=1", *words.split())
        assert len(folders(own_file)) == number, words


@pytest.mark.parametrize("then", [(), (EACH_ROUND,)], ids=["features", "images"])
def test_a_killed_run_goes_on_with_either(then: tuple[str, ...], own_file: Path, tmp_path: Path) -> None:
    whole = train_into(tmp_path / "whole", own_file, *HEAD)
    with killed_at(2):
        train_into(tmp_path / "killed", own_file, *HEAD, code=130)
    killed = train_into(tmp_path / "killed", own_file, *HEAD, *then)
    assert_close_as_vector(saved(killed), saved(whole), SINGLE_STEPS)


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


@pytest.mark.parametrize("more, read", [((), True), (("--federated.algorithm=fedncm",), False)])
def test_views_are_a_remedy_only_where_they_are_read(more: tuple[str, ...], read: bool) -> None:
    words = (
        "--config=fl-f-17",
        "--model.trained=head",
        "--augment.flip=horizontal",
        "--evaluation.best_by=last",
    )
    why = reason_against(parse([*words, *more]).config)
    assert why is not None
    assert ("augment.views" in why) == read


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
    assert error.endswith("free some space, or set runtime.cache_features to false")
    assert not list(directory.glob("*.jsonl"))


def test_a_bottleneck_that_would_never_learn_is_refused(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    train(*HEAD, "--model.bottleneck=4", code=2)
    assert "model.trained is head, so a bottleneck before the head would not be" in capsys.readouterr().err


HALF = "--model.feature_format=float16"


def rounded(split: Split, images: Tensor, crops: Any = None) -> Any:
    """What float16 keeps of features."""
    return (
        split._run(images.to(split.whole.mean.device))[0].cpu().numpy().astype(np.float16).astype(np.float32)
    )


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--federated.algorithm=fed3r", "--evaluation.best_by=last"),
        (CENTRAL,),
    ],
    ids=" ".join,
)
def test_half_precision_trains_on_rounded_features_to_the_bit(
    words: tuple[str, ...], own_file: Path, tmp_path: Path
) -> None:
    users_train = not {CENTRAL, "--federated.algorithm=fed3r"} & {*words}
    options = [word for word in (*HEAD, *words) if users_train or "accumulate" not in word]
    half = train_into(tmp_path / "half", own_file, *options, HALF)
    full = train_into(tmp_path / "full", own_file, *options)
    files = sorted(file for folder in folders(own_file) for file in folder.glob("train.f*"))
    sizes = {file.suffix: file.stat().st_size for file in files}
    assert len(folders(own_file)) == len(files) == 2, "side by side"
    assert sizes[".f32"] == 2 * sizes[".f16"] > 0
    with mock.patch.object(Split, "features", rounded):
        other = Path(shutil.copy(own_file, tmp_path / "other.hdf5"))
        expected = saved(train_into(tmp_path / "rounded", other, *options))
    found = saved(half)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    exact = saved(full)
    assert any(not torch.equal(found[name], tensor) for name, tensor in exact.items())
    read = [json.loads((folder / "results.json").read_text()) for folder in (half, tmp_path / "rounded")]
    assert [one["last"] for one in read[:1]] == [one["last"] for one in read[1:]], "scores, too"


def test_a_killed_run_on_half_precision_goes_on_to_the_bit_and_with_no_other_format(
    own_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train_into(tmp_path / "whole", own_file, *HEAD, HALF)
    with killed_at(2):
        train_into(tmp_path / "killed", own_file, *HEAD, HALF, code=130)
    capsys.readouterr()
    train_into(tmp_path / "killed", own_file, *HEAD, code=2)
    assert "has a run of another config (model.feature_format: float16 -> " in capsys.readouterr().err
    killed = train_into(tmp_path / "killed", own_file, *HEAD, HALF)
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_the_format_is_part_of_a_config_only_where_it_is_another() -> None:
    plain, half = parse(HEAD).config, parse([*HEAD, HALF]).config
    assert "feature_format" not in config_tree(plain)["model"]
    assert config_tree(half)["model"]["feature_format"] == "float16"
    assert digest(half) != digest(plain)
    assert FLAIR.read(config_tree(half), "config.yaml") == half


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (EACH_ROUND,),
            "model.feature_format is float16, which is for features that are computed once: set "
            "runtime.cache_features to true, or model.feature_format to float32",
        ),
        (
            ("--augment.flip=horizontal",),
            ("model.feature_format is float16, but features are not computed only once: augment.flip is"),
        ),
        (
            ("--model.arch=squeezenet1_1",),
            "model.feature_format is float16, but features are not computed only once: the layer",
        ),
        (
            ("--model.trained=all",),
            "--model.feature_format has no effect where model.trained is all: remove it, or set model.",
        ),
        (("--model.feature_format=float8",), "model.feature_format is 'float8'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_where_no_features_are_kept_half_precision_is_refused_in_one_line(
    words: tuple[str, ...], message: str, refused: Refused
) -> None:
    assert not (refused(message, *HEAD, HALF, *words) / "config.yaml").exists()


def test_features_beyond_half_precision_are_refused_in_one_line(
    own_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def large(split: Split, images: Tensor, crops: Any = None) -> Any:
        return rounded(split, images) + np.float32(70000)

    with mock.patch.object(Split, "features", large):
        directory = train_into(tmp_path / "run", own_file, *HEAD, HALF, code=2)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: the frozen layers compute numbers of up to 7000")
    assert error.endswith(", but model.feature_format float16 has a maximum of 65504: set it to float32")
    assert not list(directory.glob("*.jsonl"))
