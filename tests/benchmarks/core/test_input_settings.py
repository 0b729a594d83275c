"""Padding, normalisation and dropout in the config: what they may be, and what they leave as it was."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from benchmarks.core.config.digests import config_tree
from benchmarks.core.config.effects import check_training
from benchmarks.core.experiment import build_model, trained_task
from benchmarks.core.features import reason_against
from benchmarks.flair.config import FLAIR
from benchmarks.flair.config import parse as parse_flair
from benchmarks.visual_classification.config import VISION, parse
from pfl_ext.data.normalisation import scale_of
from pfl_ext.tasks.single_label import SingleLabel
from tests.benchmarks.core.quadratics import SquaredError
from tests.pfl_ext.data.test_normalisation import Pixels

PADDED = "--augment.crop=padded"


@pytest.mark.parametrize("benchmark", [FLAIR, VISION])
def test_a_config_with_the_defaults_says_nothing_of_them(benchmark: Any) -> None:
    plain = benchmark.parse([]).config
    assert (plain.augment.padding, plain.model.normalisation) == ("zero", "imagenet")
    assert not plain.model.dropout
    assert not plain.sampling.keys
    tree = config_tree(plain)
    assert "padding" not in tree["augment"]
    assert not {"normalisation", "dropout"} & {*tree["model"]}
    assert benchmark.read(tree, "config.yaml") == plain


@pytest.mark.parametrize(
    "word, key", [("--augment.padding=reflect", "augment"), ("--model.normalisation=none", "model")]
)
def test_another_value_is_part_of_the_config_and_comes_back(word: str, key: str) -> None:
    plain, other = parse([PADDED]).config, parse([PADDED, word]).config
    tree = config_tree(other)
    assert tree != config_tree(plain)
    assert tree[key][word.split("=")[0].split(".")[1]] == word.split("=")[1]
    assert VISION.read(tree, "config.yaml") == other


def test_dropout_is_part_of_the_config_and_has_images_bring_keys() -> None:
    other = parse(["--model.dropout=true", "--model.arch=simple_cnn"]).config
    tree = config_tree(other)
    assert tree["model"]["dropout"] is True
    assert VISION.read(tree, "config.yaml") == other
    assert other.sampling.keys


@pytest.mark.parametrize(
    ("key", "value"),
    [("cutout", 5), ("color_jitter", 0.4), ("random_erasing", 0.2), ("rand_augment", 9), ("noise", 0.1)],
)
def test_what_changes_images_by_key_is_part_of_the_config_and_has_them_bring_keys(
    key: str, value: float
) -> None:
    plain = parse([]).config
    assert key not in config_tree(plain)["augment"]
    other = parse([f"--augment.{key}={value}"]).config
    tree = config_tree(other)
    assert tree["augment"][key] == value
    assert VISION.read(tree, "config.yaml") == other
    assert other.sampling.keys
    assert parse(["--mode=centralised", f"--augment.{key}={value}"]).config.keys


@pytest.mark.parametrize("key", ["mixup", "cutmix"])
def test_mixing_is_part_of_the_config_and_of_a_users_sampling(key: str) -> None:
    assert key not in config_tree(parse([]).config)["augment"]
    other = parse([f"--augment.{key}=0.5"]).config
    tree = config_tree(other)
    assert tree["augment"][key] == 0.5
    assert VISION.read(tree, "config.yaml") == other
    assert getattr(other.sampling, key) == 0.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--augment.cutout=0"], r"augment\.cutout is '0'"),
        (
            ["--augment.cutout=33", "--model.input_size=32"],
            "augment.cutout is 33, but must be at most model.input_size = 32: lower",
        ),
        (
            ["--augment.cutout=5", "--model.trained=head", "--augment.flip=horizontal", "--augment.views=2"],
            (
                "augment.cutout is 5 and augment.views is 2, but the two cannot be combined: set one "
                "of them to"
            ),
        ),
        (["--augment.color_jitter=0"], r"augment\.color_jitter is '0'"),
        (["--augment.color_jitter=1.1"], r"augment\.color_jitter is '1.1'"),
        (
            ["--augment.color_jitter=1", "--model.trained=head", "--augment.flip=both", "--augment.views=2"],
            "augment.color_jitter is 1 and augment.views is 2, but the two cannot be combined",
        ),
        (["--augment.random_erasing=0"], r"augment\.random_erasing is '0'"),
        (["--augment.random_erasing=1.5"], r"augment\.random_erasing is '1.5'"),
        (
            [
                "--augment.random_erasing=1",
                "--model.trained=head",
                "--augment.flip=both",
                "--augment.views=2",
            ],
            "augment.random_erasing is 1 and augment.views is 2, but the two cannot be combined",
        ),
        (["--augment.noise=0"], r"augment\.noise is '0'"),
        (["--augment.noise=2"], r"augment\.noise is '2'"),
        (
            ["--augment.noise_by_user=true"],
            "--augment.noise_by_user has no effect where augment.noise is none: remove it, or give",
        ),
        (
            ["--mode=centralised", "--augment.noise=0.1", "--augment.noise_by_user=true"],
            "--augment.noise_by_user has no effect where mode is centralised: remove it, or set mode to",
        ),
        (["--augment.rand_augment=0"], r"augment\.rand_augment is '0'"),
        (["--augment.rand_augment=31"], r"augment\.rand_augment is '31'"),
        (["--augment.rand_augment=2.5"], r"augment\.rand_augment is '2.5'"),
        (
            ["--augment.rand_augment=9", "--model.trained=head", "--augment.flip=both", "--augment.views=2"],
            "augment.rand_augment is 9 and augment.views is 2, but the two cannot be combined",
        ),
        (["--augment.mixup=0"], r"augment\.mixup is '0'"),
        (["--augment.cutmix=inf"], r"augment\.cutmix is 'inf'"),
        (["--augment.cutmix=1e308"], r"augment\.cutmix is '1e308'"),
        (
            ["--augment.mixup=1", "--model.trained=head", "--augment.flip=horizontal", "--augment.views=2"],
            "augment.mixup is 1 and augment.views is 2, but the two cannot be combined",
        ),
        (
            ["--augment.cutmix=1", "--local.batch_size=1"],
            r"augment\.cutmix has no effect where local\.batch_size is 1: remove it, or raise it",
        ),
        (
            ["--augment.mixup=1", "--local.max_images=1"],
            r"augment\.mixup has no effect where local\.max_images is 1: remove it, or raise it",
        ),
        (
            ["--augment.cutmix=1", "--local.virtual_size=1", "--federated.weighting=users"],
            r"augment\.cutmix has no effect where local\.virtual_size is 1",
        ),
        (
            ["--augment.mixup=1", "--mode=centralised", "--centralised.batch_size=1"],
            r"augment\.mixup has no effect where centralised\.batch_size is 1",
        ),
        (
            ["--augment.mixup=1", "--federated.algorithm=fedncm"],
            r"augment\.mixup has no effect where federated\.algorithm is fedncm",
        ),
    ],
)
def test_squares_and_mixtures_that_could_not_be_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse(words)
    assert "\n" not in str(caught.value)


def test_a_single_image_is_mixed_with_itself_where_batches_go_on_across_epochs() -> None:
    words = ["--augment.mixup=1", "--local.max_images=1", "--local.num_epochs=2"]
    assert parse([*words, "--local.straddle=true"]).config.augment.mixes
    with pytest.raises(ValueError, match=r"augment\.mixup has no effect"):
        parse(words)


@pytest.mark.parametrize("word", ["mixup=1", "label_smoothing=0.1"])
def test_a_task_of_ones_own_keeps_its_scores_and_its_loss(word: str) -> None:
    class OwnScores(SingleLabel):
        headline = ("C-accuracy",)

        def __init__(self, more: int) -> None:
            super().__init__()
            self.more = more

    config = parse([f"--augment.{word}"]).config
    trained = trained_task(config, OwnScores(3), ["a", "b"])
    assert (type(trained), trained.more) == (OwnScores, 3)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"^SquaredError has a loss of its own, which no option changes"):
        trained_task(config, SquaredError(), ["a", "b"])


@pytest.mark.parametrize(
    "word",
    [
        "cutout=5",
        "color_jitter=0.4",
        "random_erasing=0.2",
        "rand_augment=9",
        "noise=0.1",
        "mixup=0.2",
        "cutmix=1",
    ],
)
def test_features_are_not_kept_where_squares_are_hidden_or_images_mixed(word: str) -> None:
    words = ["--model.trained=head", "--augment.flip=none", "--model.input_size=32", "--data.image_size=32"]
    words += ["--augment.crop=crop"]
    assert reason_against(parse(words).config) is None
    reason = f"augment.{word.replace('=', ' is ')}"
    assert reason_against(parse([*words, f"--augment.{word}"]).config) == reason


def test_padding_is_refused_where_no_crop_is_padded() -> None:
    with pytest.raises(ValueError, match=r"--augment\.padding has no effect where augment\.crop is crop"):
        parse(["--augment.padding=reflect"])


@pytest.mark.parametrize("privacy", [["--privacy.epsilon=2"], ["--local_privacy.epsilon=2"]])
def test_private_runs_take_every_normalisation_that_is_not_of_the_data(privacy: list[str]) -> None:
    words = ["--federated.weighting=users", "--local.max_images=10", *privacy]
    for name in ("imagenet", "none", "half"):
        dropout = ["--model.dropout=true", "--model.arch=vgg9", "--augment.cutout=8", "--augment.mixup=1"]
        dropout += ["--augment.color_jitter=0.4", "--augment.random_erasing=1", "--augment.rand_augment=9"]
        dropout += ["--augment.noise=0.1", "--augment.noise_by_user=true"]
        parse([*words, f"--model.normalisation={name}", PADDED, "--augment.padding=reflect", *dropout])
    with pytest.raises(ValueError, match=r"privacy refuses model\.normalisation = data \(the mean"):
        parse([*words, "--model.normalisation=data"])
    with pytest.raises(ValueError, match=r"privacy refuses model\.normalisation = data"):
        parse_flair(["--config=pfl-r-17", "--model.normalisation=data"])


def test_a_model_has_the_scale_of_its_config() -> None:
    words = ["--model.arch=lenet", "--model.input_size=16", "--data.image_size=16", PADDED]
    store = Pixels()
    for name, scale in (("half", ((0.5,) * 3, (0.5,) * 3)), ("data", scale_of(store))):
        config = parse([*words, f"--model.normalisation={name}", "--augment.padding=reflect"]).config
        check_training(config)
        module = build_model(config, 2, None, SingleLabel(), lambda split: {"train": store}[split])
        np.testing.assert_allclose(module.mean.numpy(), scale[0], rtol=1e-6)
        np.testing.assert_allclose(module.std.numpy(), scale[1], rtol=1e-6)
        assert asdict(module.framing) == {"input_size": 16, "exact": True, "padding": "reflect"}
