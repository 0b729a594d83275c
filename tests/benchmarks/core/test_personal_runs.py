"""Runs in which users keep something: they are killed and go on, are scored, or refused."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from benchmarks.core.config.trees import merge
from benchmarks.core.federated import train_federated
from benchmarks.core.run_directory import RunDirectory
from dataset.store.hdf5 import DataFile
from pfl_ext import checkpoint
from pfl_ext.algorithms.own_images import OwnImages
from pfl_ext.algorithms.personal_parts import FILE
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed, killed_at
from tests.benchmarks.core import quadratics
from tests.benchmarks.core.quadratics import CLASSES, SIZES, Batch, Trace, run_of
from tests.benchmarks.core.test_personal import vectors
from tests.benchmarks.run_files import last_checkpoint, lines, results

OPTION = "--federated.options."
WORDS = {
    "fedper": (f"{OPTION}tune_epochs=1", f"{OPTION}score_every=2", "--server.optimizer=adam"),
    "fedrep": (f"{OPTION}personal_epochs=2", "--local.clip_by=global"),
    "ditto": (f"{OPTION}personal_learning_rate=0.02",),
    "pfedme": (f"{OPTION}personal_steps=2", f"{OPTION}personal_learning_rate=0.02"),
    "moon": (f"{OPTION}mu=5", f"{OPTION}held_out=0.25"),
}


def words(name: str) -> list[str]:
    return [f"--federated.algorithm={name}", *WORDS[name]]


@pytest.mark.parametrize("name", WORDS)
def test_it_is_killed_and_goes_on_bit_for_bit(
    name: str, train: Train, mini_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = (*words(name), "--federated.num_rounds=4", "--runtime.checkpoint_every=1")
    whole, directory = killed_and_resumed(train, 2, *argv)
    assert "seen users, O-AP: " in capsys.readouterr().out, "C-AP counts 0 for the classes that a user lacks"
    assert results(directory)["clients"] == results(whole)["clients"]
    kept, again = (last_checkpoint(path) for path in (whole, directory))
    assert torch.equal(kept["users/digests"], again["users/digests"]), "every user's own numbers"
    assert int(kept["seen"].sum()) == int((kept["users/rows"] >= 0).sum()) > 4
    clients = results(whole)["clients"]
    assert (whole / "clients.csv").read_bytes() == (directory / "clients.csv").read_bytes()
    rows = csv.DictReader((whole / "clients.csv").read_text().splitlines())
    own = {row["user"]: int(row["images"]) + int(row["training_images"]) for row in rows}
    with DataFile(mini_file) as file:
        split = file.split("train")
        sizes = dict(zip(split.user_ids, np.diff(split.user_offsets).tolist()))
    assert own == {user: size for user, size in sizes.items() if size > 1}
    assert set(clients["seen"]) > {"personal", "server"}
    assert ("personal" in clients["new"]) == (name == "fedper"), "new users are tuned, or have the server's"
    size = sum(w.numel() * 4 for w in checkpoint.part(kept, checkpoint.MODEL).values())
    head = 4 * (84 * 17 + 17)
    sent = size - head if name in ("fedper", "fedrep") else size
    assert results(whole)["traffic"] == {"down": sent, "up": sent}
    assert ("clients" in lines(whole)[1]) == (name == "fedper")


def test_users_are_scored_on_images_that_they_do_not_train_on(tmp_path: Path) -> None:
    """The scores are those of numpy in float64, from what each user has kept."""
    options = {"personal": "1.bias", "held_out": 0.4}
    tree = {"federated": {"algorithm": "fedper", "options": options, "cohort_size": 2, "num_rounds": 1}}
    run_ = run_of(merge({"local": {"learning_rate": 0.5}}, tree), "fast")
    files = RunDirectory(run_, tmp_path)
    files.begin()
    trace = Trace(files)
    store = quadratics.Users()
    train_federated(run_, store, store, quadratics.module(), trace)
    algorithm: Any = trace.checkpoints.algorithm
    rows_of_users: list[dict[str, Any]] = []
    x, found = trace.seen[-1], algorithm.scores(1, rows_of_users)
    images: OwnImages = algorithm.images
    for user, size in enumerate(SIZES):
        rows = range(store.user_offsets[user], store.user_offsets[user + 1])
        kept, scored = images.users.partition.rows_of(user), images.split.rows[user]
        assert len(scored) == (0 if size == 1 else min(max(size - round(0.6 * size), 1), size - 1))
        assert sorted([*kept, *scored]) == list(rows)
    own = vectors(algorithm, 5).double().numpy()
    trained = algorithm.seen.numpy()
    assert trained.sum() == 2
    for group, members in (("seen", np.flatnonzero(trained)), ("new", np.flatnonzero(~trained))):
        for kind in ("personal", "server") if group == "seen" else ("server",):
            right, losses = [], []
            for user in members.tolist():
                if not len(images.split.rows[user]):
                    continue
                w = np.concatenate([x[:-CLASSES], own[user]]) if kind == "personal" else x
                pixels, targets = store.read(images.split.rows[user])
                batch = Batch.of(
                    torch.from_numpy(pixels), torch.from_numpy(targets), torch.tensor([[0, 0, 2, 2, 0, 0]])
                )
                z = batch.x @ np.hstack([w[:-CLASSES].reshape(CLASSES, -1), w[-CLASSES:, None]]).T
                right.append(z.argmax(1) == batch.t.argmax(1))
                losses.append(np.log(np.exp(z).sum(1)) - (z * batch.t).sum(1))
            each = 100 * np.array([r.mean() for r in right])
            listed = [row for row in rows_of_users if (row["group"], row["model"]) == (group, kind)]
            assert [row["accuracy"] for row in listed] == pytest.approx(each, abs=1e-3)
            assert [row["images"] for row in listed] == list(map(len, right))
            users = found[group][kind]["users"]["accuracy"]
            expected = {"n": len(each), "mean": each.mean(), "std": each.std()}
            expected |= {"lowest decile": each.min(), "highest decile": each.max()}  # of fewer than 11
            expected["least images"] = min(map(len, right))
            users.pop("variance without noise", None)  # tests of spread
            assert users == pytest.approx(expected, abs=1e-3)
            pooled = found[group][kind]["pooled"]
            assert pooled["accuracy"] == pytest.approx(100 * np.concatenate(right).mean(), abs=1e-3)
            assert pooled["loss"] == pytest.approx(np.concatenate(losses).mean(), abs=1e-3)
    assert found["seen"]["personal"]["pooled"]["loss"] != found["seen"]["server"]["pooled"]["loss"]
    algorithm.seen[:] = True
    assert list(algorithm.scores(1)) == ["seen"]
    assert (quadratics.vector(algorithm.context.module) == x).all(), "the server's model is back"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["fedbn"], "no norm layer of this network is trained, so none can be personal: choose a"),
        (["fedper", f"{OPTION}personal=fc9"], "federated.options.personal is fc9, but no trained variable"),
        (["fedper", f"{OPTION}personal=norms"], "no norm layer of this network is trained, so none can be"),
        (["fedrep", f"{OPTION}personal=fc3,,"], "no trained variable begins with 'nothing'"),
        (["fedper", f"{OPTION}held_out=1"], "federated.options.held_out is '1': "),
        (["fedper", f"{OPTION}tune_epochs=-1"], "federated.options.tune_epochs is '-1': "),
        (
            ["fedrep", f"{OPTION}personal=none", f"{OPTION}personal_epochs=2"],
            "federated.options.personal_epochs has no effect if federated.options.personal is none",
        ),
        (
            ["fedrep", f"{OPTION}personal=none", f"{OPTION}personal_learning_rate=0.1"],
            "federated.options.personal_learning_rate has no effect if federated.options.personal is none",
        ),
        (["fedrep", f"{OPTION}personal_epochs=0"], "federated.options.personal_epochs is '0': "),
        (["fedbn", f"{OPTION}personal=head"], "personal is not an option of fedbn, which has held_out"),
        (["ditto", f"{OPTION}proximal_weight=-1"], "federated.options.proximal_weight is '-1': "),
        (["ditto", f"{OPTION}personal=head"], "personal is not an option of ditto"),
        (["ditto", f"{OPTION}max_state_gb=0.0001"], "Ditto keeps 1"),
        (["pfedme", f"{OPTION}proximal_weight=0"], "federated.options.proximal_weight is '0': "),
        (["pfedme", f"{OPTION}personal_steps=0"], "federated.options.personal_steps is '0': "),
        (["pfedme", "--local.head_rate_factor=2"], "pfedme trains all layers with the same learning rate"),
        (["pfedme", "--local.layer_decay=0.5"], "the same learning rate: set local.layer_decay to 1"),
        (["moon", f"{OPTION}mu=-1"], "federated.options.mu is '-1': "),
        (
            ["moon", f"{OPTION}score_every=2"],
            "federated.options.score_every has no effect if federated.opt",
        ),
        (
            ["moon", f"{OPTION}split_seed=2"],
            "federated.options.split_seed has no effect if federated.opti",
        ),
        (
            ["moon", f"{OPTION}mu=0", f"{OPTION}temperature=1"],
            "federated.options.temperature has no effect if federated.options.mu is 0",
        ),
        (["moon", f"{OPTION}temperature=0"], "federated.options.temperature is '0': "),
        (
            ["moon", "--model.parties=4", "--model.arch=cifar_cnn"],
            "moon needs one feature vector for each image, which networks for masks",
        ),
        (["moon", "--model.trained=head"], "moon compares features before the last layer, but none of the"),
        (["moon", "--runtime.lanes=2"], "--runtime.lanes has no effect where federated.algorithm is moon"),
        (["fedper", "--model.trained=head"], "FedPer would share nothing, because all trained variables"),
        (["fedrep", f"{OPTION}personal=conv,fc"], "FedRep would share nothing"),
        (["fedper", "--federated.replacement=true"], "each user keeps its own state, so a user must not be"),
        (["fedper", "--federated.reweight=fedir"], "--federated.reweight has no effect where federated.algo"),
        (
            ["fedrep", "--runtime.lanes=2"],
            "--runtime.lanes has no effect where federated.algorithm is fedrep",
        ),
        *[
            ([name, "--config=pfl-r-17"], f"privacy refuses federated.algorithm = {name}")
            for name in (*WORDS, "fedbn")
        ],
        (["fedper", "--federated.weighting=users", "--local_privacy.epsilon=4"], "local_privacy refuses fed"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(argv: list[str], message: str, refused: Refused) -> None:
    refused(message, f"--federated.algorithm={argv[0]}", *argv[1:])


def test_fedbn_averages_all_but_the_norms(train: Train) -> None:
    arch = "shufflenet_v2_x0_5"  # with a thirtieth of ResNet18's parameters
    network = (f"--model.arch={arch}", "--model.input_size=16", "--model.groups=4")
    norms = [m for m in torchvision.models.get_model(arch).modules() if isinstance(m, nn.BatchNorm2d)]
    size_of_norms = sum(p.numel() for norm in norms for p in norm.parameters())
    few = (*network, "--federated.num_rounds=1", "--federated.cohort_size=3", "--local.max_images=4")
    directory = train("--federated.algorithm=fedbn", *few)
    kept = last_checkpoint(directory)
    assert (kept["model/backbone.stage2.0.branch1.1.weight"] == 1).all(), "as before training"
    assert (kept["model/backbone.conv1.1.bias"] == 0).all()
    content = np.fromfile(directory / "checkpoint" / FILE, "<f4").reshape(-1, size_of_norms)
    assert (np.abs(content - np.median(content, axis=0)).max(1) > 0).all(), "each user's own"
    size = sum(w.numel() * 4 for w in checkpoint.part(kept, checkpoint.MODEL).values())
    assert results(directory)["traffic"]["up"] == size - 4 * size_of_norms
    same = train("--federated.algorithm=fedper", f"{OPTION}personal=norms", *few, name="same")
    assert results(same)["clients"] == results(directory)["clients"]


def test_another_file_of_users_is_refused(train: Train, refused: Refused) -> None:
    argv = ("--federated.algorithm=fedper", "--runtime.checkpoint_every=1")
    with killed_at(2):
        directory = train(*argv, code=130)
    path = directory / "checkpoint" / FILE
    path.write_bytes(bytes(path.stat().st_size))
    refused(f"{FILE} is not the one that the checkpoint was written with", *argv)
