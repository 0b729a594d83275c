"""Runs whose head has a closed form: from features and images alike, killed and resumed, and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.benchmarks.core.test_features import EACH_ROUND
from tests.benchmarks.run_files import lines, results

HEAD = ("--model.trained=head", "--model.input_size=20", "--augment.flip=none", "--evaluation.best_by=last")


def head(directory: Path) -> torch.Tensor:
    """Weights and bias of the last layer, as one vector."""
    tensors = list(load_file(directory / "model.safetensors").items())
    layer = tensors[-1][0].rpartition(".")[0]
    return torch.cat([t.double().flatten() for name, t in tensors if name.startswith(f"{layer}.")])


@pytest.mark.parametrize("name", ["fed3r", "fedncm"])
def test_a_killed_run_goes_on_to_the_bit_and_features_give_the_head_of_images(
    name: str, train: Train
) -> None:
    words = [*HEAD, f"--federated.algorithm={name}"]
    words += ["--federated.options.ridge=100"] if name == "fed3r" else []
    whole, _ = killed_and_resumed(train, 2, *words)
    assert results(whole)["traffic"]["down"] == 0
    assert [line["users"] for line in lines(whole)[:3]] == [4, 4, 4]
    images = train(*words, EACH_ROUND, name="images")
    ours, theirs = head(whole), head(images)  # whose features differ by rounding in float32
    assert float((ours - theirs).norm()) <= 1e-4 * float(theirs.norm()), (
        "features differ by rounding in float32"
    )
    assert float(theirs.norm()) > 0


def test_training_goes_on_from_a_head_in_closed_form(train: Train, refused: Refused) -> None:
    words = (*HEAD, "--federated.algorithm=fed3r", "--federated.options.temperature=0.1")
    start = train(*words, name="start")
    more = (
        *HEAD,
        "--model.pretrained=true",
        "--model.keep_head=true",
        f"--weights={start}/model.safetensors",
    )
    first = lines(train(*more, name="more"))[0]["val"]
    expected = results(start)["last"]["val"]
    assert first["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert {name: round(expected[name], 3) for name in first} == {
        name: round(first[name], 3) for name in first
    }
    refused("privacy refuses model.keep_head = true", *more, "--config=pfl-r-17", name="private")


def test_fedcof_is_killed_and_goes_on(vision: Train) -> None:
    words = [*HEAD, "--federated.algorithm=fedcof", "--federated.num_rounds=3"]
    words += ["--model.arch=lenet", "--runtime.checkpoint_every=1", "--local.learning_rate=0.01"]
    whole, _ = killed_and_resumed(vision, 2, *words)
    assert results(whole)["traffic"]["up"] > 0


ONCE = ("--federated.cohort_size=12", "--federated.num_rounds=1")
CENTRAL = (
    "--config=pfl-r-17",
    "--privacy.noise_seed=run",
    "--privacy.noise_cohort_size=none",
    "--privacy.mechanism=gaussian",
    "--privacy.delta=0.01",
)


@pytest.mark.parametrize(
    ("name", "privacy"),
    [
        ("fedncm", CENTRAL),
        ("fed3r", CENTRAL),
        ("fed3r", ("--local_privacy.epsilon=8", "--local_privacy.noise_seed=run")),
    ],
)
def test_a_private_head_is_killed_and_goes_on_and_says_what_was_protected(
    name: str, privacy: tuple[str, ...], train: Train
) -> None:
    words = [*privacy, *HEAD, *ONCE, f"--federated.algorithm={name}"]
    whole, _ = killed_and_resumed(train, 0, *words)
    line = lines(whole)[0]
    assert line["privacy"]["users"] == line["users"] == 12
    statement = json.loads((whole / "privacy.json").read_text())
    assert "vector of sums was" in statement["paragraph"]
    assert "divided by" not in statement["paragraph"]
    exact = train(*HEAD, *ONCE, f"--federated.algorithm={name}", name="exact")
    assert float((head(whole) - head(exact)).norm()) > 0.01 * float(head(exact).norm()), "there was noise"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--evaluation.best_by=loss",),
            "fed3r has a model for all users only after the last round: set",
        ),
        (
            ("--federated.cohort_size=5", "--federated.num_rounds=2"),
            "needs each of the 12 users exactly once, with 5 in a round: set",
        ),
        (("--model.trained=all",), "Fed3R computes only the last layer: set model.trained to head"),
        (
            ("--local.learning_rate=0.5",),
            "--local.learning_rate has no effect where federated.algorithm is fed3r",
        ),
        (("--server.optimizer=sgd",), "--server.optimizer has no effect where federated.algorithm is fed3r"),
        (
            ("--local.virtual_size=6", "--federated.weighting=users"),
            "--local.virtual_size has no effect where federated.algorithm is fed3r",
        ),
        (("--runtime.lanes=2",), "--runtime.lanes has no effect where federated.algorithm is fed3r"),
        (
            ("--runtime.precision=bf16",),
            "--runtime.precision has no effect where federated.algorithm is fed3r",
        ),
        (("--federated.options.shrinkage=1",), "shrinkage is not an option of fed3r, which has"),
        (
            ("--federated.algorithm=fedcof",),
            "FedCOF needs images with exactly one label each: choose fed3r or fedncm",
        ),
        (
            ("--federated.algorithm=fedcof", "--config=pfl-r-17"),
            "privacy refuses federated.algorithm = fedcof",
        ),
        (
            ("--local_privacy.epsilon=8",),
            (
                "private Fed3R adds its noise only once, to the sum over all users: set "
                "federated.num_rounds to 1 and federated.cohort_size to 12"
            ),
        ),
        (
            (*CENTRAL, "--federated.cohort_size=6"),
            "private Fed3R adds its noise only once, to the sum over all users: set",
        ),
        (
            (*CENTRAL, "--privacy.clipping=per_layer"),
            "--privacy.clipping has no effect where federated.algorithm is fed3r",
        ),
        (
            ("--config=pfl-r-17", *ONCE, "--privacy.noise_population=41131"),
            (
                "privacy.noise_cohort_size is 5000 and privacy.noise_population is 41131, but with fed3r "
                "every user takes part in the only round: set both"
            ),
        ),
    ],
)
def test_what_means_nothing_for_a_closed_form_is_one_line(
    words: tuple[str, ...], message: str, refused: Refused
) -> None:
    refused(message, *HEAD, "--federated.algorithm=fed3r", *words)
