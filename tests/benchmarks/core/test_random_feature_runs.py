"""Runs whose last layer takes random features: with every kind of training, killed, kept and refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.core.config.digests import config_tree, digest
from benchmarks.flair.config import FLAIR, parse
from benchmarks.flair.per_user import main as score_users
from dataset.cli import run
from pfl_ext.models.features import Split
from pfl_ext.models.random_features import RandomFeatures
from pfl_ext.randomness import torch_stream
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed, train_into
from tests.benchmarks.core.test_channel_norm import PRIVATE as MOMENTS
from tests.benchmarks.core.test_channel_norm import SCATTER
from tests.benchmarks.core.test_closed_form_runs import CENTRAL, HEAD, ONCE, head
from tests.benchmarks.core.test_features import EACH_ROUND, folders
from tests.benchmarks.core.test_private import PRIVATE
from tests.benchmarks.run_files import results, saved
from tests.closeness import assert_close_as_vector

RANDOM = ("--model.random_features=30", "--model.random_features_width=0.5")
RIDGE = ("--federated.algorithm=fed3r", "--federated.options.ridge=1")
ON_IMAGES = ("--model.trained=head", "--model.input_size=20", "--augment.flip=none")
SINGLE_STEPS = 3 * 40 * 64  # roundings: as in `tests.benchmarks.core.test_features`


TRAININGS = {
    "head": (*ON_IMAGES, "--runtime.accumulate=fp64"),
    "private": (*ON_IMAGES, *PRIVATE, "--privacy.noise_seed=run"),
    "centralised": (*ON_IMAGES, "--config=c-r-17"),
    "all": (),
    "last blocks": (
        "--model.trained=last_blocks",
        "--model.last_blocks=2",
        "--model.input_size=20",
        "--augment.flip=none",
    ),
    "lora": ("--model.trained=lora", "--model.lora_rank=2"),
    "dropout": ("--model.arch=simple_cnn", "--model.dropout=true", "--model.trained=head"),
    "ridge": (*HEAD, *RIDGE),
    "private ridge": (*CENTRAL, *HEAD, *ONCE, "--federated.algorithm=fed3r"),
}


@pytest.mark.parametrize("words", TRAININGS.values(), ids=TRAININGS)
def test_a_killed_run_goes_on_to_the_bit_and_its_random_features_are_those_of_the_seed(
    words: tuple[str, ...], train: Train
) -> None:
    step = 0 if "--federated.num_rounds=1" in words else 1
    theirs, ours = map(saved, killed_and_resumed(train, step, *RANDOM, *words))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    drawn = {name.rpartition(".")[2]: t for name, t in theirs.items() if ".random." in name}
    seed = torch_stream(0, "model initialisation").initial_seed()
    expected = RandomFeatures(drawn["frequencies"].shape[1], 30, 0.5, seed).state_dict()
    assert drawn.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in drawn.items())


@pytest.mark.parametrize("name", ["head", "private", "centralised", "ridge"])
def test_features_from_disk_give_the_model_of_images(name: str, train: Train) -> None:
    words = [w for w in TRAININGS[name] if not (name == "centralised" and "accumulate" in w)]
    features, images = train(*RANDOM, *words, name="features"), train(*RANDOM, *words, EACH_ROUND, name="im")
    if name == "ridge":
        ours, theirs = head(features), head(images)
        assert float((ours - theirs).norm()) <= 1e-4 * float(theirs.norm())
    else:
        assert_close_as_vector(saved(features), saved(images), SINGLE_STEPS)


@pytest.mark.parametrize("name", ["head", "all", "lora", "last blocks"])
def test_both_engines_train_the_same(name: str, train: Train) -> None:
    ours, theirs = (
        saved(train(*RANDOM, *TRAININGS[name], f"--runtime.engine={engine}", name=engine))
        for engine in ("fast", "stock")
    )
    assert_close_as_vector(ours, theirs, SINGLE_STEPS)


def test_what_is_kept_on_disk_are_the_networks_features_for_any_number_of_random_ones(
    mini_file: Path, tmp_path: Path
) -> None:
    own = Path(shutil.copy(mini_file, tmp_path / "own.hdf5"))
    train_into(tmp_path / "plain", own, *HEAD, *RIDGE)
    with mock.patch.object(Split, "features", autospec=True) as computed:
        for number in (30, 50):
            train_into(tmp_path / str(number), own, *HEAD, *RIDGE, f"--model.random_features={number}")
    assert computed.call_count == 0
    assert len(folders(own)) == 1
    assert saved(tmp_path / "50")["backbone.fc3.linear.weight"].shape == (17, 50)


def test_features_are_standardised_by_released_moments_before_them(mini_file: Path, tmp_path: Path) -> None:
    own = Path(shutil.copy(mini_file, tmp_path / "own.hdf5"))
    directory = train_into(tmp_path / "run", own, *SCATTER, *MOMENTS, *RANDOM)
    tensors = saved(directory)
    assert tensors["backbone.classifier.random.frequencies"].shape == (30, 243 * 25)
    assert tensors["backbone.norm.mean"].any()
    assert len(folders(own)) == 1


def test_a_run_counts_and_sends_the_last_layer_alone(train: Train) -> None:
    found = results(train(*RANDOM, *TRAININGS["head"]))
    assert found["trainable_parameters"] == 31 * 17
    assert found["traffic"] == {"down": 4 * 31 * 17, "up": 4 * 31 * 17}


def test_training_goes_on_from_a_ridge_with_another_seed(train: Train, refused: Refused) -> None:
    start = train(*RANDOM, *HEAD, *RIDGE, "--federated.options.temperature=0.1", name="start")
    more = (
        *HEAD,
        "--model.pretrained=true",
        "--model.keep_head=true",
        f"--weights={start}/model.safetensors",
        "--seed=5",
        RANDOM[0],
    )
    directory = train(*more, RANDOM[1], name="more")
    first = json.loads((directory / "metrics.jsonl").read_text().splitlines()[0])["val"]
    assert first["loss"] == pytest.approx(results(start)["last"]["val"]["loss"], rel=1e-5)
    refused("model.random_features_width is 1, and the weights file's last layer was", *more, name="other")


def test_users_are_fine_tuned_by_the_command_as_at_the_end(train: Train) -> None:
    words = ("--personal.num_epochs=1", "--personal.min_images=2", "--evaluation.per_user=true")
    at_end = train(*RANDOM, *TRAININGS["head"], *words, name="at_end")
    later = train(*RANDOM, *TRAININGS["head"], name="later")
    assert run(score_users, [str(later), *words[:2]]) == 0
    found = [json.loads((directory / "per_user.json").read_text()) for directory in (at_end, later)]
    after = [users["personal"]["quantiles"]["after"]["O-AP"]["mean"] for users in found]
    assert after[0] == pytest.approx(after[1], abs=1e-3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model.random_features_width=2",), "has no effect where model.random_features is none: remove"),
        (("--model.random_features=0",), "model.random_features is '0': input should be greater than 0"),
        ((*RANDOM[:1], "--model.random_features_width=-1"), "model.random_features_width is '-1': input"),
        ((*RANDOM, "--model.bottleneck=4"), "but only one layer can be before the last: set one of them to"),
        ((*RANDOM, "--model.arch=squeezenet1_1", "--model.input_size=20"), "takes no random features; leave"),
        (("--model.random_features=10000000000",), "GB in each copy of it, where there are"),
        (
            (*HEAD, *RIDGE, "--model.random_features=300000"),
            ("Fed3R solves for a layer of 300,000 features, which needs up to 5,040.0 GB of memory, but"),
        ),
    ],
)
def test_what_cannot_be_is_one_line(words: tuple[str, ...], message: str, refused: Refused) -> None:
    refused(message, *words)


def test_a_config_without_them_is_that_of_runs_before_there_were_any() -> None:
    runs = [(), RANDOM[:1], RANDOM, ("--model.random_features=31",)]
    assert len({digest(parse([*words]).config) for words in runs}) == len(runs)
    assert not {"random_features", "random_features_width"} & set(config_tree(parse([]).config)["model"])
    tree = config_tree(parse([*RANDOM]).config)
    assert FLAIR.read(tree, "config.yaml") == parse([*RANDOM]).config
