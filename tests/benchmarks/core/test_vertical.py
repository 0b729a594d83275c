"""Vertical federated learning against all parties' networks as one, and what crosses between parties."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.trees import Tree, merge
from benchmarks.core.experiment import build_model
from benchmarks.core.federated import run_context, setup, training_data
from benchmarks.flair.config import parse
from pfl_ext import checkpoint
from pfl_ext.algorithms.split import Wire
from pfl_ext.algorithms.vertical import Vertical
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.parties import PartyNetworks
from pfl_ext.tasks.multi_label import MultiLabel
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.benchmarks.core.quadratics import (
    CLASSES,
    SIDE,
    SIZES,
    SquaredError,
    Users,
    classifier,
    run_of,
    trajectory,
    vector,
)
from tests.benchmarks.run_files import lines, results

TREE: Tree = {
    "augment": {"flip": "none"},
    "local": {"momentum": 0.5, "weight_decay": 0.01, "straddle": False},
    "federated": {"algorithm": "vertical", "cohort_size": 3},
}


def module(parties: int) -> ImageClassifier:
    """A network of two layers for each party, of which the first ends in place."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        width = 3 * SIDE * SIDE // parties
        networks = [
            nn.Sequential(nn.Flatten(), nn.Linear(width, 5), nn.ReLU(inplace=True), nn.Linear(5, CLASSES))
            for _ in range(parties)
        ]
    return classifier(PartyNetworks(networks))


def in_one_place(run: AnyRun, parties: int, dtype: torch.dtype) -> Any:
    """All parties' networks as one module, trained by one optimiser in one place."""
    config, model = run.config, module(parties)
    model.backbone.to(dtype)
    data, local, seen = training_data(run, Users(), SquaredError()), config.local, []
    for number in range(config.federated.num_rounds):
        rate, decay = local.learning_rate, local.weight_decay
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum=local.momentum, weight_decay=decay)
        data.set_round(number)
        images = data.pooled(config.federated.cohort_size)
        for batch in (b for _ in range(local.num_epochs) for b in images.iter(local.batch_size)):
            x, targets = model.prepare(*batch)
            optimizer.zero_grad()
            errors = model.backbone(x.to(dtype)) - (targets > 0).to(dtype)
            (0.5 * errors.square().sum(1)).mean().backward()
            optimizer.step()
        seen.append(vector(model))
    return np.stack(seen)


@pytest.mark.parametrize("parties", [2, 4])
def test_parties_are_one_network_in_one_place(parties: int, tmp_path: Path) -> None:
    run = run_of(TREE)
    found = trajectory(run, tmp_path, module(parties))
    assert (found == in_one_place(run, parties, torch.float32)).all()
    exact = in_one_place(run, parties, torch.float64)
    gaps = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert gaps.max() < 1e-5, "float32"
    assert np.linalg.norm(found[-1] - found[0]) > 0.01 * np.linalg.norm(found[0])


def algorithm(tree: Tree, parties: int = 4) -> Vertical:
    run = run_of(merge(TREE, tree))
    data = training_data(run, Users(), SquaredError())
    chosen = setup(run.config, module(parties), data)
    Vertical.check(chosen)
    return Vertical(run_context(run, chosen, lambda _: None))


@pytest.mark.parametrize("cohort, images", [(1, 11), (3, 11 + 7 + 5), (5, sum(SIZES))])
def test_a_run_needs_memory_for_the_images_of_its_largest_round(cohort: int, images: int) -> None:
    need = 2 * images * 3 * SIDE**2
    with mock.patch("pfl_ext.models.memory.physical_memory", return_value=need):
        algorithm({"federated": {"cohort_size": cohort}})
    with (
        mock.patch("pfl_ext.models.memory.physical_memory", return_value=need - 1),
        pytest.raises(ValueError, match=r"choose a smaller data\.image_size or federated\.cohort_size"),
    ):
        algorithm({"federated": {"cohort_size": cohort}})


def test_hosts_send_outputs_and_get_the_gradient_of_their_sum() -> None:
    vertical, sent = algorithm({"federated": {"cohort_size": len(SIZES)}}), list[tuple[Tensor, bool]]()
    real = Wire.send

    def send(self: Wire, tensor: Tensor, up: bool) -> Tensor:
        arrived = real(self, tensor, up)
        sent.append((arrived, up))
        return arrived

    with mock.patch.object(Wire, "send", send):
        state, line = vertical.round(vertical.init(0), 0)
    batches = [sent[i : i + 6] for i in range(0, len(sent), 6)]
    for batch in batches:
        assert [up for _, up in batch] == [True] * 3 + [False] * 3
        assert {tensor.shape[1] for tensor, _ in batch} == {CLASSES}
        assert torch.equal(batch[3][0], batch[5][0])
    assert all(tensor.grad_fn is None for tensor, _ in sent)
    assert len(batches) == 2 * -(-sum(SIZES) // 4)
    assert (line["users"], line["images"]) == (len(SIZES), sum(SIZES))
    assert 0 < line["train_loss"] < 5
    assert vertical.bytes(state) == (vertical.wire.down / 3, vertical.wire.up / 3)


def test_a_host_learns_from_nothing_but_the_gradient() -> None:
    vertical = algorithm({"local": {"weight_decay": 0.0}})
    before, real = vertical.init(0), Wire.send
    with mock.patch.object(Wire, "send", lambda wire, tensor, up: real(wire, tensor, up) * up):
        after, _ = vertical.round(before, 0)
    changed = {name.split(".")[2] for name, w in after.items() if not torch.equal(w, before[name])}
    assert changed == {"0"}, "the guest"


def test_each_party_has_its_part_of_an_image() -> None:
    images = torch.arange(2 * 3 * 4 * 4).view(2, 3, 4, 4)
    left, right = PartyNetworks([nn.Identity()] * 2).parts(images)
    assert torch.equal(left, images[..., :2])
    assert torch.equal(right, images[..., 2:])
    quadrants = PartyNetworks([nn.Identity()] * 4).parts(images)
    for place, quadrant in enumerate(quadrants):
        top, side = 2 * (place // 2), 2 * (place % 2)
        assert torch.equal(quadrant, images[:, :, top : top + 2, side : side + 2])


def test_the_same_images_in_an_order_of_their_own_in_every_round() -> None:
    data = algorithm({}).context.users
    orders = []
    for number in (0, 1, 0):
        data.set_round(number)
        images = data.pooled(len(SIZES))
        assert len(images) == sum(SIZES)
        orders.append(torch.cat([batch[0].flatten(1) for batch in images.iter(4)]))
    assert torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[0], orders[1])
    assert torch.equal(orders[0].sort(0).values, orders[1].sort(0).values)


def test_networks_that_cannot_take_halves_are_refused() -> None:
    def backbone(arch: str, parties: Any) -> nn.Module:
        config = ModelConfig(arch=arch, input_size=32, parties=parties)
        return build_backbone(config, 3, torch.Generator().manual_seed(1))

    for arch, parties in (("lenet", 4), ("resnet18", 2), ("resnet18", 4)):
        assert backbone(arch, parties)(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    with pytest.raises(ValueError, match=r"^lenet for 2 parts cannot take images of 32 x 32 pixels"):
        backbone("lenet", 2)
    first, second = backbone("lenet", 4).networks[:2]  # type: ignore[index]
    assert not torch.equal(next(first.parameters()), next(second.parameters()))


@pytest.mark.parametrize("arch", ["cifar_cnn", "lenet"])
def test_the_engine_trains_it_too_by_joined_layers(arch: str) -> None:
    config = ModelConfig(arch=arch, input_size=32, parties=4)
    backbone = build_backbone(config, 3, torch.Generator().manual_seed(1))
    engine = CohortEngine(ImageClassifier(backbone, task=MultiLabel(), input_size=32))
    engine.close()
    graph = fx.Tracer().trace(backbone)
    assert sum(node.op == "call_module" for node in graph.nodes) > 4 * 5


KEYS = (
    "--federated.algorithm=vertical",
    "--model.parties=4",
    "--model.arch=simple_cnn",
    "--model.input_size=20",
    "--augment.flip=none",
)


def test_it_is_killed_and_goes_on_and_its_file_gives_the_same_scores(train: Train, mini_file: Path) -> None:
    whole, _ = killed_and_resumed(train, 2, *KEYS)
    file = whole / "model.safetensors"
    kept = ("--model.pretrained=true", "--model.keep_head=true", f"--weights={file}")
    again = train(*KEYS, *kept, name="again")
    loss = results(whole)["val"]["loss"]
    assert lines(again)[0]["val"]["loss"] == pytest.approx(loss, rel=1e-6)
    config = parse([f"--config={whole / 'config.yaml'}"]).config
    fresh = build_model(config, 17, None, MultiLabel())
    tensors, _ = checkpoint.load(file)
    assert set(tensors) == set(fresh.state_dict())


def test_centralised_training_takes_the_same_network(train: Train) -> None:
    words = [word for word in KEYS if not word.startswith("--federated")]
    directory = train("--config=c-r-17", *words)
    tensors, _ = checkpoint.load(directory / "model.safetensors")
    assert any(name.startswith("backbone.networks.3.") for name in tensors)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.parties=3"], "model.parties is '3': "),
        (["--model.parties=none"], "set model.parties to 2 or 4"),
        (["--model.parties=2"], "simple_cnn for 2 parts cannot take images"),
        (["--model.input_size=19"], "which needs an even model.input_size"),
        (["--augment.flip=horizontal"], "set augment.flip to none and augment.crop to crop"),
        (["--augment.crop=resized"], "set augment.flip to none and augment.crop to crop"),
        (
            ["--augment.noise=0.1", "--augment.noise_by_user=true"],
            "no user has more noise than another: set augment.noise_by_user to false",
        ),
        (["--augment.color_jitter=0.4"], "may depend on the pixels of another party: set both to none"),
        (["--augment.rand_augment=9"], "may depend on the pixels of another party: set both to none"),
        (["--model.trained=head"], "whose networks each have a last layer"),
        (["--local.head_rate_factor=2"], "head_rate_factor applies only to one: set it to 1"),
        (["--local.layer_decay=0.5"], "layer_decay counts the blocks of a single network: set it to 1"),
        (["--local.max_grad_norm=1", "--local.clip_by=global"], "set local.clip_by to variable, or"),
        (["--federated.weighting=users"], "has no effect where federated.algorithm is vertical"),
        (["--server.learning_rate=1"], "has no effect where federated.algorithm is vertical"),
        (["--config=pfl-r-17"], "privacy refuses federated.algorithm = vertical"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(words: list[str], message: str, refused: Refused) -> None:
    refused(message, *KEYS, *words)


def test_it_is_trained_in_one_process() -> None:
    assert "NP=1" in Vertical.refusals["workers"]
