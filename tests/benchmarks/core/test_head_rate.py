"""A learning rate of the head's own: for users, for the server, and in one place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pfl_ext.models.classifier import RATE_FACTOR, ImageClassifier
from pfl_ext.tasks.single_label import SingleLabel
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.pfl_ext.models.test_trained import SIDE, build

ONE_STEP = ("--local.num_epochs=1", "--local.batch_size=64", "--local.max_grad_norm=none")
ONE_ROUND = ("--federated.num_rounds=1", "--server.optimizer=sgd", "--server.learning_rate=1", *ONE_STEP)
ONE_EPOCH = ("--config=c-r-17", "--centralised.num_epochs=1", "--centralised.optimizer=sgd")
WHOLE = ("--centralised.batch_size=4096", "--centralised.max_grad_norm=none")
PLACES = {"local": ONE_ROUND, "server": ONE_ROUND, "centralised": (*ONE_EPOCH, *WHOLE)}


@pytest.mark.parametrize("section", PLACES)
def test_the_heads_step_alone_is_as_long_as_its_factor_says(section: str, train: Train) -> None:
    """One step of gradient descent is proportional to its learning rate."""
    one, four, seven = (
        load_file(
            train(*PLACES[section], f"--{section}.head_rate_factor={f}", name=f"{f}") / "model.safetensors"
        )
        for f in (1, 4, 7)
    )
    for name in one:
        if name.startswith("backbone.fc3."):
            shorter, longer = four[name] - one[name], seven[name] - one[name]
            assert shorter.any()
            # two differences of rounded weights
            torch.testing.assert_close(
                2 * shorter, longer, rtol=0, atol=8 * 2**-24 * float(seven[name].abs().max())
            )
        else:
            assert torch.equal(one[name], four[name])


@pytest.mark.parametrize("section", ["local", "centralised"])
def test_a_blocks_step_is_as_long_as_the_decay_says(section: str, train: Train) -> None:
    """LeNet has four blocks before its head, ``fc3``. Its first layer has the decay's fourth power."""
    words = (*PLACES[section], f"--{section}.layer_decay")
    one, half, quarter = (
        load_file(train(*words[:-1], f"{words[-1]}={d}", name=f"{d}") / "model.safetensors")
        for d in (1, 0.5, 0.25)
    )
    powers = {"conv1": 4, "conv2": 3, "fc1": 2, "fc2": 1, "fc3": 0}
    for name in one:
        power = powers[name.split(".")[1]]
        if not power:
            assert torch.equal(one[name], half[name])
            continue
        shorter, longer = one[name] - half[name], one[name] - quarter[name]
        assert shorter.any()
        ratio = (1 - 0.25**power) / (1 - 0.5**power)
        # two differences of rounded weights
        torch.testing.assert_close(
            ratio * shorter, longer, rtol=0, atol=8 * 2**-24 * float(one[name].abs().max())
        )


@pytest.mark.parametrize("words", [(), ("--config=c-r-17", "--centralised.layer_decay=0.5")], ids=str)
def test_a_killed_run_with_such_rates_goes_on_to_the_bit(words: tuple[str, ...], train: Train) -> None:
    if not words:
        words = ("--local.head_rate_factor=3", "--server.head_rate_factor=2", "--server.optimizer=adam")
        words = (*words, "--local.layer_decay=0.5")
    killed_and_resumed(train, 1, *words)


def test_fednova_with_a_proximal_term_refuses_two_rates(train: Train, refused: Refused) -> None:
    nova = ("--federated.algorithm=fednova", "--local.head_rate_factor=3", "--federated.num_rounds=1")
    train(*nova)
    message = "needs a single learning rate: set local.head_rate_factor to 1, or federated.mu to none"
    refused(message, *nova, "--federated.mu=0.1", name="mu")
    message = "set local.head_rate_factor and local.layer_decay to 1, or federated.mu to none"
    refused(message, *nova, "--federated.mu=0.1", "--local.layer_decay=0.5", name="mu")


@pytest.mark.parametrize(
    "arch, options, head",
    [
        ("lenet", {}, "fc3."),
        ("lenet", {"bottleneck": 6}, "fc3."),
        ("lenet", {"random_features": 6}, "fc3.linear."),
        ("mobilenet_v3_small", {"trained": "lora"}, "classifier.3."),
        ("deeplabv3plus_efficientnet_lite0", {}, "decoder."),
    ],
)
def test_the_head_is_what_pretrained_weights_leave_new(arch: str, options: dict[str, Any], head: str) -> None:
    module = ImageClassifier(build(arch, **options), task=SingleLabel(), input_size=SIDE)
    others, of_head = module.rate_groups(0.5, 8.0)
    assert (of_head["lr"], of_head[RATE_FACTOR], "lr" in others) == (4.0, 8.0, False)
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    found = [names[id(p)] for p in of_head["params"]]
    assert found == [name for name in names.values() if name.startswith(f"backbone.{head}")] != []
    assert len(found) + len(others["params"]) == len(names)
    assert module.rate_groups(0.5, 1.0) == [{"params": [p for p in module.parameters() if p.requires_grad]}]


def test_a_head_that_stays_with_users_has_no_rate_at_the_server(refused: Refused, train: Train) -> None:
    words = ("--server.head_rate_factor=0.5", "--federated.num_rounds=1")
    refused("fedper the head stays with the users", *words, "--federated.algorithm=fedper")
    train(*words, "--federated.algorithm=ditto")
    train(*words, "--federated.algorithm=fedper", "--federated.options.personal=none", name="shared")
