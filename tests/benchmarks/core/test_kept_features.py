"""Runs that train on the features of a few augmented views of each image."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.core import kept_features
from benchmarks.core.config.digests import config_tree, digest
from benchmarks.core.kept_features import FeatureViews, KeptFeatures
from benchmarks.flair.config import FLAIR, parse
from dataset.store.hdf5 import DataFile
from pfl_ext.data.transforms import draw_crops
from pfl_ext.randomness import stream
from tests.benchmarks.conftest import Refused, Train, killed_at, train_into
from tests.benchmarks.core.test_features import CENTRAL, HALF, HEAD, SINGLE_STEPS, folders
from tests.benchmarks.core.test_features import computed as computed
from tests.benchmarks.core.test_features import own_file as own_file
from tests.benchmarks.core.test_private import PRIVATE
from tests.benchmarks.run_files import lines, results, saved
from tests.closeness import assert_close_as_vector

VIEWS = (*HEAD, "--augment.flip=both", "--model.input_size=18", "--augment.views=3")


def fitting(words: tuple[str, ...]) -> list[str]:
    """Words of a federated run that mean something for these."""
    return [word for word in (*VIEWS, *words) if not (CENTRAL in words and "accumulate" in word)]


def whole_image(seed: int, split: str, rows: Any, view: int, image_size: int, *_: Any) -> Any:
    """The crop of every view, in a test whose views are all the image as it is."""
    return np.tile(np.array([0, 0, image_size, image_size, 0, 0], np.float32), (len(rows), 1))


@pytest.mark.parametrize(
    "words",
    [
        ("--federated.algorithm=scaffold", "--local.num_epochs=2"),
        ("--local.virtual_size=6", "--federated.weighting=users"),
        (*PRIVATE, "--privacy.noise_seed=run"),
        (CENTRAL,),
    ],
    ids=" ".join,
)
def test_views_that_are_the_image_itself_train_the_model_of_the_image(
    words: tuple[str, ...], own_file: Path, tmp_path: Path
) -> None:
    """In the same order, with the same cohorts and noise, also in SCAFFOLD's pass for the gradient.

    How else they are trained on is that of any features (`tests.benchmarks.core.test_features`).
    """
    side = "--model.input_size=20"
    with mock.patch.object(kept_features, "crops_of_view", whole_image):
        views = train_into(tmp_path / "views", own_file, *fitting(words), side)
    plain = [word for word in fitting(words) if "augment.views" not in word]
    image = train_into(tmp_path / "image", own_file, *plain, side, "--augment.flip=none")
    assert_close_as_vector(saved(views), saved(image), SINGLE_STEPS)
    assert len(folders(own_file)) == 2


@pytest.mark.parametrize(
    "words",
    [(), (*PRIVATE, "--privacy.noise_seed=run")],
    ids=["plain", "private"],
)
def test_both_engines_see_the_same_views(words: tuple[str, ...], own_file: Path, tmp_path: Path) -> None:
    models, uses = [], []
    real = FeatureViews._drawn
    for engine in ("fast", "stock"):
        used = Counter[tuple[int, int]]()

        def noted(self: FeatureViews, split: str, rows: Any, views: Any, used: Any = used) -> Any:
            used.update(zip(rows.tolist(), views.tolist(), strict=True))
            return real(self, split, rows, views)

        with mock.patch.object(FeatureViews, "_drawn", noted):
            run = train_into(tmp_path / engine, own_file, *fitting(words), f"--runtime.engine={engine}")
        models.append(saved(run))
        uses.append(used)
    assert uses[0] == uses[1]
    assert {view for _, view in uses[0]} == {0, 1, 2}
    assert len({row for row, _ in uses[0]}) < len(uses[0]), "an image had several views"
    assert_close_as_vector(models[0], models[1], SINGLE_STEPS)


def test_what_is_kept_are_features_of_crops_and_flips_of_the_images(own_file: Path, tmp_path: Path) -> None:
    kept: list[tuple[KeptFeatures, Any]] = []
    real = KeptFeatures.views

    def noted(self: KeptFeatures, *args: Any) -> Any:
        kept.append((self, real(self, *args)))
        return kept[0][1]

    with mock.patch.object(KeptFeatures, "views", noted):
        train_into(tmp_path / "run", own_file, *VIEWS, "--federated.num_rounds=1", "--seed=4")
    ((network, views),) = kept
    rows = np.array([7, 0, 12])
    with DataFile(own_file) as file:
        images = file.read_images("train", rows, 20)
    for view in range(3):
        cut = []
        for row, image in zip(rows.tolist(), images):
            draw = draw_crops(stream(4, "augmented view", "train", row, view), 1, 20, 18, "crop", "both")
            top, left, height, width, left_right, upside_down = draw[0].astype(int).tolist()
            part = image[top : top + height, left : left + width]
            part = part[:, ::-1] if left_right else part
            cut.append(part[::-1] if upside_down else part)
        expected = network.split.features(torch.from_numpy(np.stack(cut)))
        found = views.features.read(f"train-view-{view}", rows)
        assert_close_as_vector(found, expected, 16)
    drawn = views.read("train", rows[[2, 2, 0, 1]])[np.array([3, 1, 0])]
    read = drawn.read(drawn.rows, np.array([2, 0, 1]))
    for place, (row, view) in enumerate([(0, 2), (12, 0), (12, 1)]):
        assert np.array_equal(read[place], views.features.read(f"train-view-{view}", np.array([row]))[0])
    assert views.read("train", np.empty(0, np.int64)).drawn(stream(0, "")).shape == (0, 84)


def test_scores_are_those_of_whole_images(own_file: Path, tmp_path: Path) -> None:
    views = train_into(tmp_path / "views", own_file, *VIEWS)
    other = [word for word in VIEWS if "augment.views" not in word]
    fresh = train_into(tmp_path / "fresh", own_file, *other)
    ours, theirs = (lines(directory)[0]["val"] for directory in (views, fresh))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5), "before training they are one model"
    files = {folder.name: sorted(file.stem for file in folder.glob("*.f32")) for folder in folders(own_file)}
    of_views = ["train-view-0", "train-view-1", "train-view-2"]
    assert sorted(files.values()) == [["test", "val"], of_views], "no whole training image is needed"


@pytest.mark.parametrize("words", [(CENTRAL,), (*PRIVATE, "--privacy.noise_seed=run")], ids=" ".join)
def test_a_killed_run_goes_on_to_the_bit(words: tuple[str, ...], own_file: Path, tmp_path: Path) -> None:
    whole = train_into(tmp_path / "whole", own_file, *fitting(words))
    with killed_at(1):
        train_into(tmp_path / "killed", own_file, *fitting(words), code=130)
    killed = train_into(tmp_path / "killed", own_file, *fitting(words))
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_more_views_compute_only_the_new_ones_and_another_draw_computes_its_own(
    own_file: Path, tmp_path: Path, computed: mock.Mock
) -> None:
    once = "--federated.num_rounds=1"

    def calls(name: str, *words: str) -> int:
        computed.reset_mock()
        train_into(tmp_path / name, own_file, *VIEWS, *words, once)
        return int(computed.call_count)

    all_of_two, one_more, none = calls("two", "--augment.views=2"), calls("three"), calls("again", "--seed=0")
    assert (one_more > 0, none) == (True, 0)
    whole = 2 * one_more
    assert all_of_two > whole, "two views, and the images that are scored"
    first = calls("half", HALF)
    assert first == all_of_two + one_more, "another format has files of its own"
    suffixes = [{file.suffix for file in folder.glob("*.f*")} for folder in folders(own_file)]
    assert sorted(map(sorted, suffixes)) == [[".f16"], [".f16"], [".f32"], [".f32"]]
    assert calls("flip", "--augment.flip=horizontal") == 3 * one_more, "the images that are scored are there"


def test_users_are_scored_and_fine_tuned_on_images_after_training_on_views(
    own_file: Path, tmp_path: Path
) -> None:
    words = (*VIEWS, "--personal.num_epochs=1", "--personal.min_images=2", "--evaluation.per_user=true")
    directory = train_into(tmp_path / "run", own_file, *words)
    found = json.loads((directory / "per_user.json").read_text())
    assert len(found["C-AP"]) == 5
    assert found["personal"]["after"]["O-AP"]
    plain = train_into(tmp_path / "plain", own_file, *VIEWS)
    assert results(plain)["last"] == results(directory)["last"]


def test_views_are_part_of_a_config_only_where_there_are_some() -> None:
    plain, views = (parse(words).config for words in (VIEWS[:-1], VIEWS))
    assert "views" not in config_tree(plain)["augment"]
    assert config_tree(views)["augment"]["views"] == 3
    assert digest(views) != digest(plain)
    assert FLAIR.read(config_tree(views), "config.yaml") == views


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--runtime.cache_features=false",),
            "augment.views is 3, which is for features that are computed once: set runtime.cache_features to "
            "true, or augment.views to none",
        ),
        *(
            (
                (f"--model.trained={kind}",),
                f"--augment.views has no effect where model.trained is {kind}: remove it, or set model.",
            )
            for kind in ("all", "last_blocks", "lora", "bias")
        ),
        (
            ("--augment.flip=none", "--model.input_size=20"),
            "--augment.views has no effect where augment.flip is none and crops are whole images: remove it",
        ),
        (
            ("--model.arch=scatternet", "--model.channel_norm=data", "--model.input_size=20"),
            ("augment.views is 3, but model.channel_norm data uses only one view of each image: set"),
        ),
        (
            ("--model.arch=simple_cnn", "--model.dropout=true"),
            "augment.views is 3, but features are not computed only once: model.dropout is true",
        ),
        (
            ("--model.arch=squeezenet1_1", "--model.input_size=20"),
            "augment.views is 3, but features are not computed only once: the layer classifier.1",
        ),
        *(
            (
                (f"--federated.algorithm={name}", "--evaluation.best_by=last"),
                f"--augment.views has no effect where federated.algorithm is {name}: remove it, or choose",
            )
            for name in ("fedncm", "fed3r", "fedcof")
        ),
        (("--augment.views=0",), "augment.views is '0'"),
        (("--augment.views=257",), "augment.views is '257'"),
        (("--augment.views=many",), "augment.views is 'many'"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, tuple) else "",
)
def test_what_views_cannot_go_with_is_refused_in_one_line(
    words: tuple[str, ...], message: str, refused: Refused
) -> None:
    algorithm = any("algorithm" in word for word in words)
    views = (word for word in VIEWS if not (algorithm and "accumulate" in word))
    assert not (refused(message, *views, *words) / "config.yaml").exists()


def test_a_setting_with_views_may_be_run_without_what_they_need(tmp_path: Path) -> None:
    """What the command line switches off is no mistake of the file."""
    path = tmp_path / "mine.yaml"
    path.write_text("model: {trained: head}\naugment: {flip: both, views: 4}\n")
    assert parse([f"--config={path}"]).config.augment.views == 4
    assert parse([f"--config={path}", "--model.trained=lora"]).config.augment.views is None
    closed = ("--federated.algorithm=fedncm", "--evaluation.best_by=last")
    assert parse([f"--config={path}", *closed]).config.augment.views is None


def test_a_disk_without_room_for_all_views_ends_in_one_line(
    own_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with DataFile(own_file) as file:
        one_view = file.split("train").num_images * 84 * 4
    monkeypatch.setattr("dataset.store.features.free", lambda folder: 2 * one_view)
    train_into(tmp_path / "two", own_file, *VIEWS, "--augment.views=2", "--federated.num_rounds=1")
    other = Path(shutil.copy(own_file, tmp_path / "other.hdf5"))
    train_into(tmp_path / "three", other, *VIEWS, code=2)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: the features need {3 * one_view / 1e9:.2g} GB in ")
    assert load_file(tmp_path / "two" / "model.safetensors")


def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(
    own_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(shutil.copy(own_file, tmp_path / "other.hdf5"))
    (tmp_path / "other.hdf5.features").touch()  # as good as a read-only folder, and root may write those
    train_into(tmp_path / "run", file, *VIEWS, code=2)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: {file}.features/")
    assert error.endswith(
        ": copy the data file to a folder of your own, or set runtime.cache_features to false"
    )


def test_a_val_that_is_carved_from_the_training_images_is_scored_whole(
    file_without_val: Path, vision: Train
) -> None:
    words = (
        f"--data_path={file_without_val}",
        "--data.scored=val",
        "--data.val_share=0.3",
        "--model.arch=lenet",
        "--model.trained=head",
        "--model.init=torchvision",
        "--local.learning_rate=0.01",
        "--augment.flip=horizontal",
    )
    views, fresh = vision(*words, "--augment.views=2", name="views"), vision(*words, name="fresh")
    assert lines(views)[0]["val"]["loss"] == pytest.approx(lines(fresh)[0]["val"]["loss"], rel=1e-5)
    files = sorted(sorted(file.stem for file in folder.glob("*.f32")) for folder in folders(file_without_val))
    assert files == [["test", "train"], ["train-view-0", "train-view-1"]]
