"""Runs with LoRA in attention: which layers have adapters, also in runs from before there was a choice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torchvision.models as zoo
from safetensors.torch import load_file
from torch import nn

from benchmarks.core.config.digests import config_tree
from benchmarks.flair.config import FLAIR, parse
from benchmarks.flair.per_user import main as score_users
from dataset.cli import run
from pfl_ext.models.small import NETWORKS
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed, killed_at
from tests.benchmarks.run_files import results, saved
from tests.closeness import assert_close_as_vector

LORA = ("--model.trained=lora", "--model.lora_rank=2", "--model.lora_alpha=4")
VIT = ("--model.arch=own_vit", "--model.init=torchvision", *LORA)


@pytest.fixture
def own_vit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of the user's own, with attention that reads its weights."""

    def build(labels: int, side: int) -> nn.Module:
        net: nn.Module = zoo.VisionTransformer(side, 6, 1, 2, hidden_dim=8, mlp_dim=8, num_classes=labels)
        return net

    NETWORKS.names()
    monkeypatch.setattr(NETWORKS, "_things", {**NETWORKS._things, "own_vit": build})


@pytest.mark.usefixtures("own_vit")
def test_a_killed_run_of_adapters_of_attention_goes_on_and_its_users_are_scored(train: Train) -> None:
    whole, _ = killed_and_resumed(train, 1, *VIT, "--federated.num_rounds=2")
    adapters = load_file(whole / "adapters.safetensors")
    attention = "backbone.encoder.layers.encoder_layer_0.self_attention"
    for part in ("query", "key", "value", "out"):
        assert bool(adapters[f"{attention}.{part}.lora_b.weight"].any())
    assert f"{attention}.in_proj_weight" in saved(whole)
    assert not [name for name in saved(whole) if "lora" in name]
    assert run(score_users, [str(whole)]) == 0


@pytest.mark.usefixtures("own_vit")
def test_a_head_on_attention_and_adapters_learns_on_features_what_it_does_on_images(train: Train) -> None:
    """The network starts from a model whose adapters were merged."""
    first = train(*VIT, "--federated.num_rounds=1", name="adapters") / "model.safetensors"
    head = ("--model.arch=own_vit", "--model.trained=head", "--model.pretrained=true", f"--weights={first}")
    same = ("--data.image_size=18", "--augment.flip=none", "--runtime.accumulate=fp64")
    features, images = (
        saved(train(*head, *same, f"--runtime.cache_features={cached}", name=cached))
        for cached in ("true", "false")
    )
    assert_close_as_vector(features, images, 1e4)


@pytest.mark.usefixtures("own_vit")
def test_an_older_run_goes_on_with_the_layers_that_it_had(train: Train, refused: Refused) -> None:
    """The config.yaml of a run from before there was a choice of layers does not have it."""
    called, words = "--model.lora_targets=called", (*VIT, "--federated.num_rounds=2")
    with killed_at(1):
        older = train(*words, called, code=130)
    assert "lora_targets" not in (older / "config.yaml").read_text()
    message = (
        "(model.lora_targets: called -> all): choose another --run_dir; to continue this older run, add "
    )
    refused(f"{message}--model.lora_targets called", *words)
    refused("(model.lora_targets: called -> *.query): choose another", *words, "--model.lora_targets=*.query")
    assert results(train(*words, called))["trainable_parameters"] < sum(
        t.numel() for t in saved(older).values()
    )


def test_the_layers_with_adapters_are_in_the_config_of_networks_for_which_they_matter() -> None:
    vit = ("--model.arch=vit_b_16", *LORA)
    words = ((), LORA, (*LORA, "--model.lora_targets=a, b"), vit, (*vit, "--model.lora_targets=called"))
    trees = [config_tree(parse([*each]).config) for each in words]
    assert [tree["model"].get("lora_targets") for tree in trees] == [None, None, "a,b", "all", None]
    for each, tree in zip(words, trees):
        assert FLAIR.read(tree, "config.yaml") == parse([*each]).config
    assert parse([*LORA]).config.model.lora_targets == "called", "which is all, and as in older runs"


def test_layers_with_adapters_may_be_a_list(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text("model: {trained: lora, lora_targets: ['*.query', '*.value']}")
    assert parse([f"--config={path}"]).config.model.lora_targets == "*.query,*.value"
