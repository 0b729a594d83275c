"""Losses other than cross-entropy, from the command line to the model."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.core.config.trees import read_yaml
from dataset.flair.mini_draw import COARSE_LABELS
from tests.benchmarks.conftest import Refused, Train
from tests.benchmarks.core.test_head_rate import ONE_EPOCH, ONE_ROUND, WHOLE
from tests.benchmarks.run_files import lines, results

CLASS, HEAD = "structure", "backbone.fc3."
"""A class that the round's users have, and what the names of the last layer's variables begin with."""


@pytest.mark.parametrize("words", [ONE_ROUND, (*ONE_EPOCH, *WHOLE)], ids=["federated", "centralised"])
def test_a_step_is_linear_in_the_weight_of_a_class(words: tuple[str, ...], train: Train) -> None:
    runs = [train(*words, f"--loss.class_weights.{CLASS}={w}", name=f"{w}") for w in (1, 4, 7)]
    one, four, seven = (load_file(run / "model.safetensors") for run in runs)
    assert read_yaml(runs[1] / "config.yaml")["loss"] == {"class_weights": {CLASS: 4.0}}
    plain = train(*words, name="plain")
    assert "loss" not in read_yaml(plain / "config.yaml")
    for name, value in load_file(plain / "model.safetensors").items():
        torch.testing.assert_close(value, one[name], rtol=0, atol=2.0**-20)
    for name in one:
        shorter, longer = four[name] - one[name], seven[name] - one[name]
        torch.testing.assert_close(2 * shorter, longer, rtol=0, atol=2.0**-18)  # sums of weights below 4
        if name.startswith(HEAD):
            row = COARSE_LABELS.index(CLASS)
            assert [i for i, moved in enumerate(shorter) if moved.any()] == [row]


def test_focus_changes_training_and_not_how_its_models_are_scored(train: Train) -> None:
    rate = "--local.learning_rate=1e-12"  # so that both models stay the first one
    focal, plain = train(rate, "--loss.focal_gamma=2", name="focal"), train(rate, name="plain")
    assert results(focal)["test"]["loss"] == pytest.approx(results(plain)["test"]["loss"], rel=1e-6)
    assert lines(focal)[0]["train_loss"] < 0.5 * lines(plain)[0]["train_loss"]


@pytest.mark.parametrize(
    "message, words",
    [
        ("names the class 'cat', which is not among the 17", ("--loss.class_weights.cat=2",)),
        ("input should be greater than or equal to 0", ("--loss.class_weights.food=-1",)),
        (
            "loss.absent_gamma has no effect where loss.focal_gamma is 2, too",
            ("--loss.focal_gamma=2", "--loss.absent_gamma=2"),
        ),
        (
            "those of mixed images are true in part: leave them out, or set augment.mixup and",
            ("--loss.focal_gamma=2", "--augment.mixup=0.2"),
        ),
        (
            "several labels of two images cannot be mixed: set it to none, or augment.mixup and",
            ("--federated.reweight=fedir", "--augment.cutmix=1"),
        ),
        ("loss.absent_margin is '1': input should be less than 1", ("--loss.absent_margin=1",)),
        (
            "privacy refuses loss.class_weights.food = 2.0",
            ("--config=pfl-r-17", "--loss.class_weights.food=2"),
        ),
        (
            "loss.focal_gamma has no effect where federated.algorithm is fedncm",
            ("--federated.algorithm=fedncm", "--evaluation.best_by=last", "--loss.focal_gamma=2"),
        ),
    ],
)
def test_what_cannot_be_right_is_refused(message: str, words: tuple[str, ...], refused: Refused) -> None:
    assert not (refused(message, *words) / "config.yaml").exists()
