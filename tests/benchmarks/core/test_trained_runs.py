"""Runs that train part of a network: what they count, send and save, and how they go on."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.models import get_model

from benchmarks.core.config.digests import config_tree, digest, experiment_digest
from benchmarks.core.config.trees import read_yaml
from benchmarks.core.experiment import build_model
from benchmarks.core.weights import check_classes
from benchmarks.flair.config import FLAIR, parse
from benchmarks.flair.per_user import main as score_users
from dataset.cli import run
from pfl_ext import checkpoint
from pfl_ext.models.lora import adapter_tensors
from pfl_ext.models.small import NETWORKS
from pfl_ext.tasks.multi_label import MultiLabel
from tests.benchmarks.conftest import ONE_ROUND, Refused, Train, killed_and_resumed, killed_at
from tests.benchmarks.core.test_private import LOCAL, PRIVATE
from tests.benchmarks.run_files import last_checkpoint, results, saved
from tests.closeness import assert_close_as_vector

LORA = ("--model.trained=lora", "--model.lora_rank=2", "--model.lora_alpha=4")
PLAIN = {  # parameters of lenet with inputs of 18 pixels and 17 labels, by layer
    "conv1": 6 * 75 + 6,
    "conv2": 16 * 150 + 16,
    "fc1": 120 * 16 + 120,
    "fc2": 84 * 120 + 84,
    "fc3": 17 * 84 + 17,
}
ADDED = 2 * (75 + 6) + 2 * (150 + 16) + 2 * (16 + 120) + 2 * (120 + 84)
VALUES: dict[str, tuple[tuple[str, ...], int, int]] = {
    "lora": (LORA, ADDED, ADDED + PLAIN["fc3"]),
    "last_blocks": (
        ("--model.trained=last_blocks", "--model.last_blocks=2"),
        0,
        sum(PLAIN[name] for name in ("fc1", "fc2", "fc3")),
    ),
    "bias": (("--model.trained=bias",), 0, 6 + 16 + 120 + 84 + PLAIN["fc3"]),
    "lora_b": ((*LORA, "--model.lora_trained=b"), ADDED, 2 * (6 + 16 + 120 + 84) + PLAIN["fc3"]),
    "names": (
        ("--model.trained=names", "--model.trained_names=conv2,fc*.bias"),
        0,
        PLAIN["conv2"] + 120 + 84 + 17,
    ),
}
"""Words, parameters that the network has besides, and those that are trained."""


@pytest.mark.parametrize("value", VALUES)
def test_a_run_counts_and_sends_what_is_trained_and_saves_a_plain_network(value: str, train: Train) -> None:
    words, more, trained = VALUES[value]
    directory = train(*words)
    found = results(directory)
    assert found["parameters"] == sum(PLAIN.values()) + more
    assert found["trainable_parameters"] == trained
    assert found["traffic"] == {"down": 4 * trained, "up": 4 * trained}
    tensors = last_checkpoint(directory)
    adapters = {name for name in tensors if name.startswith("model/") and "lora_" in name}
    assert bool(adapters) == (value in ("lora", "lora_b"))
    names = {f"backbone.{layer}.{part}" for layer in PLAIN for part in ("weight", "bias")}
    assert set(saved(directory)) == names
    assert (directory / "adapters.safetensors").exists() == (value in ("lora", "lora_b"))
    if adapters:
        kept = load_file(directory / "adapters.safetensors")
        assert {f"model/{name}" for name in kept} == adapters
    assert sum(t.numel() for t in saved(directory).values()) == sum(PLAIN.values())


@pytest.mark.parametrize("engine", ["fast", "stock"])
def test_what_a_network_freezes_itself_is_neither_sent_nor_noised_nor_counted(
    engine: str, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Tensor] = {}

    def frozen_at_first(labels: int, side: int) -> nn.Module:
        network = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, labels)
        )
        network[0].weight.requires_grad_(False)
        drawn.update({name: t.clone() for name, t in network.state_dict().items()})
        return network

    NETWORKS.names()
    monkeypatch.setattr(NETWORKS, "_things", {**NETWORKS._things, "frozen_at_first": frozen_at_first})
    words = ("--privacy.noise_seed=run", "--model.arch=frozen_at_first", "--model.init=torchvision")
    directory = train(*PRIVATE, *words, *ONE_ROUND, f"--runtime.engine={engine}")
    found, trained = results(directory), 4 + 5 * 17
    assert (found["trainable_parameters"], found["parameters"]) == (trained, trained + 4 * 27)
    assert found["traffic"] == {"down": 4 * trained, "up": 4 * trained}
    moved = {name for name, t in saved(directory).items() if not t.equal(drawn[name.partition(".")[2]])}
    assert moved == {"backbone.0.bias", "backbone.3.weight", "backbone.3.bias"}


def test_norms_are_trained_where_there_are_some(train: Train, refused: Refused) -> None:
    arch = "shufflenet_v2_x0_5"  # with a thirtieth of ResNet18's parameters
    words = (f"--model.arch={arch}", "--model.input_size=16", "--model.groups=4", "--model.trained=norms")
    found = results(train(*words, "--federated.num_rounds=1", "--federated.cohort_size=1"))
    layers = get_model(arch).modules()
    norms = sum(p.numel() for m in layers if isinstance(m, nn.BatchNorm2d) for p in m.parameters())
    assert found["trainable_parameters"] == norms + 1025 * 17
    refused(
        "but lenet has no norm with a scale before its last layer: set",
        "--model.trained=norms",
        name="none",
    )


@pytest.mark.parametrize(
    "words",
    [
        (*PRIVATE, "--privacy.noise_seed=run"),
        (*LOCAL, "--local_privacy.noise_seed=run"),
        ("--config=c-r-17",),
        ("--federated.algorithm=scaffold",),
    ],
    ids=" ".join,
)
def test_a_killed_run_of_adapters_goes_on_to_the_bit(words: tuple[str, ...], train: Train) -> None:
    whole, again = killed_and_resumed(train, 1, *LORA, *words)
    for name in ("model.safetensors", "adapters.safetensors"):
        assert (again / name).read_bytes() == (whole / name).read_bytes()
    assert results(again)["model_probe"] == results(whole)["model_probe"]


@pytest.mark.parametrize("words", [(), (*PRIVATE, "--privacy.noise_seed=run")], ids=["plain", "private"])
def test_where_only_b_is_trained_a_stays_as_drawn_from_the_seed(
    words: tuple[str, ...], train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train(*VALUES["lora_b"][0], *words, *ONE_ROUND)
    assert "LoRA of rank 2 on 4 layers, which are all but the last\n" in capsys.readouterr().out
    config = FLAIR.read(read_yaml(directory / "config.yaml"), "its config")
    drawn = adapter_tensors(build_model(config, 17, None, MultiLabel()))
    kept = load_file(directory / "adapters.safetensors")
    assert {name for name, t in kept.items() if t.equal(drawn[name])} == {n for n in kept if "lora_a" in n}


KEPT = ("--model.input_size=20", "--augment.flip=none", "--evaluation.best_by=last")


def test_the_last_layer_by_its_name_is_the_head_and_keeps_features(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    head = train(*KEPT, "--model.trained=head", name="head")
    capsys.readouterr()
    names = ("--model.trained=names", "--model.trained_names")
    found = train(*KEPT, names[0], f"{names[1]}=fc3", name="names")
    assert "computed in every round" not in capsys.readouterr().out
    assert all(t.equal(saved(head)[name]) for name, t in saved(found).items())
    with killed_at(1):
        flipped = (*KEPT, "--augment.flip=horizontal", names[0])
        train(*flipped, f"{names[1]}=fc3", name="flipped", code=130)
        assert "with none they are computed once\n" in capsys.readouterr().out
        train(*flipped, f"{names[1]}=conv1", name="first", code=130)
        said = capsys.readouterr().out
        assert "computed in every round: the layer conv1 takes more than a" in said
        assert "fc3 makes the outputs, but none of its weights is trained" in said
        train(*KEPT, names[0], f"{names[1]}=fc2,fc3.bias", name="killed", code=130)
    said = capsys.readouterr().out
    assert "computed in every round: its trained layers are not one" in said
    assert "makes the outputs" not in said
    again = train(*KEPT, names[0], f"{names[1]}=fc2,fc3.bias", name="killed")
    whole = train(*KEPT, names[0], f"{names[1]}=fc2,fc3.bias", "--runtime.cache_features=false", name="whole")
    assert all(t.equal(saved(whole)[name]) for name, t in saved(again).items())
    moved = {n for n, t in saved(whole).items() if not t.equal(saved(head)[n])}
    assert moved == {"backbone.fc2.weight", "backbone.fc2.bias", "backbone.fc3.weight", "backbone.fc3.bias"}


@pytest.mark.parametrize("value", VALUES)
def test_both_engines_train_the_same(value: str, train: Train) -> None:
    ours, theirs = (
        saved(train(*VALUES[value][0], f"--runtime.engine={engine}", name=engine))
        for engine in ("fast", "stock")
    )
    assert_close_as_vector(ours, theirs, roundings=3 * 40 * 64)  # rounds, steps, and sums of 4,096 terms


def test_a_run_of_adapters_is_a_start_for_the_plain_network(train: Train) -> None:
    """Which records of what experiment it is a seed."""
    first = train(*LORA)
    begun = FLAIR.read(read_yaml(first / "config.yaml"), "its config")
    start = (f"--weights={first / 'model.safetensors'}", "--model.pretrained=true", "--model.keep_head=true")
    second = train(*start, "--federated.num_rounds=1", "--evaluation.best_by=loss", name="second")
    scored = json.loads((second / "metrics.jsonl").read_text().splitlines()[0])["val"]
    assert scored["loss"] == pytest.approx(results(first)["val"]["loss"], rel=1e-5)
    digest = experiment_digest(dataclasses.asdict(begun), type(begun))
    assert results(second)["weights"]["experiment_sha256"] == digest


@pytest.mark.parametrize(
    "names, message",
    [
        (
            ["b", "a", "c"],
            "the same classes in another order: its output 0 is 'b', but in the data it is 'a'",
        ),
        (["a", "b", "d"], "other classes: its output 2 is 'd', but in the data it is 'c': set"),
        (["a", "b", "c"], None),
        (["a", "b"], None),
        (None, None),
        (5, None),
    ],
    ids=["order", "names", "same", "number", "none", "damaged"],
)
def test_a_head_is_kept_for_its_own_classes_alone(
    names: list[str] | int | None, message: str | None, tmp_path: Path
) -> None:
    """Where the number differs, or the file names no classes, loading it decides."""
    file = tmp_path / "model.safetensors"
    checkpoint.save(file, {}, {} if names is None else {"classes": names})
    kept = parse(["--config=fl-r-17", "--model.pretrained=true", "--model.keep_head=true"]).config
    new = parse(["--config=fl-f-17"]).config
    check_classes(new, file, "abc")
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_classes(kept, file, "abc")


def test_the_head_of_a_run_is_refused_for_other_labels(train: Train, refused: Refused) -> None:
    first = train("--data.binary_label=animal")
    start = (f"--weights={first / 'model.safetensors'}", "--model.pretrained=true", "--model.keep_head=true")
    refused("output 0 is 'animal', but in the data it is", *start, "--data.binary_label=food", name="second")
    train(*start, "--data.binary_label=animal", name="second")


def test_users_of_a_run_of_adapters_are_fine_tuned_by_its_command_as_at_its_end(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--personal.num_epochs=1", "--personal.min_images=2", "--evaluation.per_user=true")
    at_end, later = train(*LORA, *words, name="at_end"), train(*LORA, name="later")
    assert run(score_users, [str(later), *words[:2]]) == 0
    found = [json.loads((directory / "per_user.json").read_text()) for directory in (at_end, later)]
    after = [users["personal"]["quantiles"]["after"]["O-AP"]["mean"] for users in found]
    assert after[0] == pytest.approx(after[1], abs=1e-3)
    (later / "adapters.safetensors").unlink()
    assert run(score_users, [str(later)]) == 2
    assert "adapters.safetensors is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ("--model.lora_rank=4",),
            "--model.lora_rank has no effect where model.trained is all: remove it, or",
        ),
        (("--model.trained=bias", "--model.lora_alpha=2"), "has no effect where model.trained is bias"),
        (("--model.trained=lora", "--model.last_blocks=2"), "has no effect where model.trained is lora"),
        ((*LORA, "--runtime.cache_features=false"), "has no effect where model.trained is lora: remove it"),
        (
            ("--model.trained=last_blocks", "--model.last_blocks=4"),
            "choose at most 3, or set model.trained to",
        ),
        (("--model.trained=lora", "--model.lora_rank=0"), "model.lora_rank is '0': input should be greater"),
        (
            ("--model.trained_names=fc3",),
            "--model.trained_names has no effect where model.trained is all: remove it, or set model.trained",
        ),
        (("--model.trained=bias", "--model.lora_trained=b"), "has no effect where model.trained is bias"),
        (("--model.trained=names", "--model.trained_names=fc4"), "choose other names, like fc"),
        (("--model.lora_targets=fc1",), "--model.lora_targets has no effect where model.trained is all: "),
        ((*LORA, "--model.lora_targets=fc1,,fc2"), "model.lora_targets is 'fc1,,fc2', with an empty name"),
        (
            (*LORA, "--model.lora_targets=fc*,*.query"),
            "model.lora_targets has *.query, but no layer of lenet that can have an adapter has this name: "
            "set it to all, or to names (* stands for any characters) like conv1, fc1",
        ),
        (
            ("--model.trained=names", "--model.trained_names=fc2", "--local.head_rate_factor=3"),
            "local.head_rate_factor is 3, but the last layer is not trained: set local.head_rate_factor to",
        ),
        (
            ("--model.trained=head", "--local.layer_decay=0.5"),
            "local.layer_decay is 0.5, but only the last layer is trained: set local.layer_decay to 1",
        ),
        (("--local.layer_decay=1.5",), "local.layer_decay is '1.5': "),
        ((*LORA, "--model.channel_norm=data"), "but model.trained is lora: set model.trained to head, or"),
        ((*LORA, "--federated.algorithm=fedncm", "--evaluation.best_by=last"), "set model.trained to head"),
    ],
    ids=str,
)
def test_what_has_no_effect_or_cannot_be_is_one_line(
    words: tuple[str, ...], message: str, refused: Refused
) -> None:
    refused(message, *words)


def test_rank_and_alpha_belong_to_a_run_of_adapters_alone() -> None:
    words = ("--model.trained=lora",)
    runs = [
        words,
        (*words, "--model.lora_rank=4"),
        (*words, "--model.lora_alpha=4"),
        ("--model.trained=bias",),
    ]
    assert len({digest(parse([*run_words]).config) for run_words in runs}) == len(runs)
    tree = config_tree(parse([*words]).config)
    young = {"lora_rank", "lora_alpha", "last_blocks", "lora_trained", "trained_names"}
    assert not young & set(tree["model"]), "as in runs before there were any"
    assert FLAIR.read(tree, "config.yaml") == parse([*words]).config


BLOCKS = (
    "--model.trained=last_blocks",
    "--model.last_blocks=2",
    "--model.input_size=20",
    "--augment.flip=none",
    "--runtime.accumulate=fp64",
)
EACH_STEP = "--runtime.cache_features=false"
ONCE = "the layers up to conv2 are computed once a round for each user"


@pytest.mark.parametrize(
    "words",
    [
        ("--local.num_epochs=2",),
        ("--runtime.engine=stock",),
        ("--federated.algorithm=scaffold",),
        ("--local.virtual_size=6", "--federated.weighting=users"),
        (*PRIVATE, "--privacy.noise_seed=run"),
        ("--config=c-r-17",),
    ],
    ids=" ".join,
)
def test_frozen_blocks_that_run_once_a_round_give_the_model_of_those_that_run_in_every_step(
    words: tuple[str, ...], train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a run with users' states, or one without rounds, is killed and goes on in the other way."""
    options = [word for word in (*BLOCKS, *words) if not ("--config=c-r-17" in words and "accumul" in word)]
    once = train(*options, name="once")
    assert ONCE in capsys.readouterr().out
    train(*options, EACH_STEP, name="each")
    assert ONCE not in capsys.readouterr().out
    assert_close_as_vector(saved(once), saved(once.with_name("each")), roundings=3 * 40 * 64)
    if not {"--federated.algorithm=scaffold", "--config=c-r-17"} & {*words}:
        return
    for name, then in (("killed", ()), ("other", (EACH_STEP,))):
        with killed_at(1):
            train(*options, name=name, code=130)
        train(*options, *then, name=name)
    killed, other = (saved(once.with_name(name)) for name in ("killed", "other"))
    assert all(t.equal(killed[name]) for name, t in saved(once).items())
    assert_close_as_vector(saved(once), other, roundings=3 * 40 * 64)


def test_a_run_with_drawn_flips_says_why_frozen_blocks_run_in_every_step(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    train(*BLOCKS, "--augment.flip=horizontal", "--federated.num_rounds=1")
    assert "computed in every step: augment.flip is horizontal; with none" in capsys.readouterr().out
