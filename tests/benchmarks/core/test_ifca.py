"""IFCA: by its equations in float64, two known clusters, kills, workers, updates on their way, refusals."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.core.config.trees import Tree, merge
from benchmarks.core.federated import setup, train_federated, training_data
from benchmarks.core.run_directory import RunDirectory
from benchmarks.predict.__main__ import main as predict
from dataset.arrays import ByteArray, IntArray
from dataset.cli import run
from pfl_ext import checkpoint
from pfl_ext.algorithms.clusters import first_models
from pfl_ext.algorithms.ifca import Ifca
from pfl_ext.attacks.attack import attackers
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.benchmarks.core import quadratics
from tests.benchmarks.core.quadratics import (
    CLASSES,
    SIDE,
    SIZES,
    USERS,
    Array,
    Direct,
    Trace,
    Users,
    classifier,
    run_of,
    server,
    traced,
    vector,
)
from tests.benchmarks.core.test_by_loss import loss, own
from tests.benchmarks.predict.test_personal import micro
from tests.benchmarks.predict.test_predict import rows_of
from tests.benchmarks.run_files import last_checkpoint, results

OPTION = "--federated.options."


def tree(more: Tree | None = None, **options: Any) -> Tree:
    return merge(
        {"federated": {"algorithm": "ifca", "options": {"held_out": 0.0, "max_draws": 4, **options}}},
        more or {},
    )


SOME: Tree = {"federated": {"cohort_size": 3}}
ADAM: Tree = {"server": {"optimizer": "adam", "learning_rate": 0.05, "epsilon": 0.05}}
FLIPPED: Tree = {"attack": {"kind": "sign_flip", "share": 0.4, "options": {"scale": 2.0}}}
TREES = {
    "by images": tree(),
    "by users, some": tree(merge(USERS, SOME), balance=0.0),
    "three, momentum": tree({"server": {"momentum": 0.5}}, num_clusters=3, max_draws=3),
    "adam": tree(merge(SOME, ADAM), balance=1.0),
    "near": tree(distance=0.2),
    "median": tree({"aggregation": {"kind": "median"}}),
    "attacked": tree(FLIPPED),
    "twice": tree({"federated": {"replacement": True, "cohort_size": 4}}),
}


def counts(line: Tree) -> list[int]:
    """How many users chose each model."""
    return list(line["users_of_models"].values())


class Models(Trace):
    """Also keeps all models ``[k, P]`` after each round, and the rounds' lines."""

    def step_done(self, step: int, values: Mapping[str, Any], state: Any) -> None:
        super().step_done(step, values, state)
        algorithm: Any = self.checkpoints.algorithm
        weights = [state.weights(cluster) for cluster in range(len(state.separate))]
        models = [vector(algorithm.clients.model(each).pytorch_model) for each in weights]
        self.models = [*getattr(self, "models", []), np.stack(models)]
        self.lines = [*getattr(self, "lines", []), dict(values)]
        self.state = state


def first(config: Any, draw: int) -> list[Array]:
    """The first models ``[k, P]`` of a draw."""
    options = config.federated.chosen_options
    weights = dict(quadratics.module().named_parameters())
    models = first_models(weights, options.num_clusters, options.distance or 1.0, config.seed, draw)
    return [np.concatenate([w.detach().double().numpy().ravel() for w in m.values()]) for m in models]


def expected(of: Tree) -> tuple[Array, list[list[int]], int]:
    """By the paper's equations: models ``[rounds, k, P]``, the choices of each round, and how many draws."""
    chosen_run = run_of(of)
    config, options = chosen_run.config, chosen_run.config.federated.chosen_options
    data, direct = training_data(chosen_run, Users(), quadratics.SquaredError()), Direct(chosen_run)
    direct.c = np.zeros_like(vector(quadratics.module()))
    direct.own = dict.fromkeys(range(len(SIZES)), direct.c)
    k, bad = options.num_clusters, attackers(config.seed, len(SIZES), config.attack.share)
    steps, seen, choices = [server(config) for _ in range(k)], [], []

    def choice(x: list[Array], users: list[tuple[int, Any]]) -> list[int]:
        return [int(np.argmin([loss(each, data.user_dataset(u)) for each in x])) for u, _ in users]

    for number in range(config.federated.num_rounds):
        data.set_round(number)
        cohort = data.cohort(config.federated.cohort_size).tolist()
        users = [(u, data.user_dataset(u, cohort[:place].count(u))) for place, u in enumerate(cohort)]
        if number == 0:
            tried = [choice(first(config, draw), users) for draw in range(options.max_draws)]
            fewest = [min(np.bincount(each, minlength=k)) for each in tried]
            least = max(int(options.balance * len(users) / k), options.balance > 0)
            good = [d for d, n in enumerate(fewest) if n >= least]
            x = first(config, good[0] if good else int(np.argmax(fewest)))
            draws = good[0] + 1 if good else options.max_draws
        chosen = choice(x, users)
        for cluster in range(k):
            members = [user for user, c in zip(users, chosen) if c == cluster]
            if not members:
                continue
            updates = np.stack([own(direct, x[cluster], u, i, 0.1) for u, i in members])
            if config.attack.kind != "honest":
                updates[[bool(bad[u]) for u, _ in members]] *= -2
            by_images = config.federated.weighting == "images"
            weights = [len(i) if by_images else 1 for _, i in members]
            mean = np.average(updates, axis=0, weights=weights)
            if config.aggregation.kind == "median":
                mean = np.median(updates, axis=0)
            x[cluster] = steps[cluster](x[cluster], mean)
        seen.append(np.stack(x))
        choices.append(chosen)
    return np.stack(seen), choices, draws


@pytest.mark.parametrize("name, engine", [*((name, "fast") for name in TREES), ("by images", "stock")])
def test_it_chooses_and_trains_as_its_equations_say(name: str, engine: str, tmp_path: Path) -> None:
    found = traced(run_of(TREES[name], engine), tmp_path, Models)
    models, choices, draws = expected(TREES[name])
    assert found.lines[0]["draws"] == draws
    for line, chosen in zip(found.lines, choices):
        assert counts(line) == np.bincount(chosen, minlength=models.shape[1]).tolist()
    for cluster in range(models.shape[1]):
        ours = np.stack(found.models)[:, cluster]
        assert quadratics.distances(ours, models[:, cluster]).max() < quadratics.TOLERANCE
    assert np.array_equal(found.seen[-1], found.models[-1][found.state.largest]), "what is scored and saved"


def test_a_model_that_too_few_chose_for_the_aggregation_stays(tmp_path: Path) -> None:
    krum: Tree = {"aggregation": {"kind": "krum", "options": {"tolerated": 0.0}}}
    found = traced(run_of(tree(krum), "fast"), tmp_path, Models)
    rare = [n for n, line in enumerate(found.lines) if n and min(counts(line)) in (1, 2)]
    assert rare
    for number in rare:
        cluster = int(np.argmin(counts(found.lines[number])))
        assert found.lines[number]["too_few_for"] == [cluster]
        assert np.array_equal(found.models[number][cluster], found.models[number - 1][cluster])
        assert not np.array_equal(found.models[number][1 - cluster], found.models[number - 1][1 - cluster])


def two_layers() -> Any:
    torch.manual_seed(0)
    return classifier(
        nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, 4), nn.ReLU(), nn.Linear(4, CLASSES))
    )


@pytest.mark.parametrize("kind", ["mean", "median"])
def test_with_a_shared_encoder_it_is_averaged_over_all_clusters(kind: str, tmp_path: Path) -> None:
    """By users where the rule counts them alike, however many images they say that they have."""
    one = {"federated": {"num_rounds": 1}, "aggregation": {"kind": kind}}
    shared = tree(one, shared="encoder", balance=1.0)
    network = two_layers()
    start = {name: p.detach().clone() for name, p in network.named_parameters()}
    files = RunDirectory(run_of(shared, "fast"), tmp_path)
    files.begin()
    found = Models(files)
    train_federated(files.run, Users(), Users(), network, found)
    algorithm: Any = found.checkpoints.algorithm
    own = [{**start, **each} for each in algorithm._drawn(found.lines[0]["draws"] - 1)]
    chosen = found.state.chosen.numpy()
    assert set(chosen) == {0, 1}, "the test would say nothing"
    updates = []
    for cluster in (0, 1):
        users = algorithm.clients.cohort(0)
        updates.append(algorithm._mean_update(own[cluster], users[chosen[users] == cluster], 0)[0])
    each = SIZES if kind == "mean" else (1,) * len(SIZES)
    sizes = [sum(size for size, c in zip(each, chosen) if c == cluster) for cluster in (0, 1)]
    for name, before in start.items():
        for cluster in (0, 1):
            after = found.state.weights(cluster)[name]
            wanted = own[cluster][name] + updates[cluster][name]
            if "backbone.1." in name:
                share = np.array(sizes) / sum(sizes)
                wanted = before + sum(float(s) * update[name] for s, update in zip(share, updates))
            torch.testing.assert_close(after, wanted, rtol=1e-5, atol=1e-6)
    assert algorithm.bytes(found.state) == (4 * (13 * 4 + 2 * 5 * 3), 4 * (13 * 4 + 5 * 3) + 4)


class TwoKinds(Users):
    """Eight users; those of odd number call the brightest colour by another class."""

    def __init__(self) -> None:
        self.user_ids, self.user_offsets = [f"user-{u}" for u in range(8)], np.arange(9) * 12
        self._images: ByteArray = np.random.default_rng(1).integers(0, 256, (96, SIDE, SIDE, 3), np.uint8)
        kind: IntArray = np.arange(96) // 12 % 2
        self._targets = np.eye(CLASSES, dtype=np.uint8)[
            (self._images.mean((1, 2)).argmax(1) + kind) % CLASSES
        ]


def test_two_known_clusters_are_found_and_users_are_scored_with_their_models(tmp_path: Path) -> None:
    """Those who never took part, too."""
    more = {"federated": {"cohort_size": 6, "num_rounds": 30}, "local": {"learning_rate": 0.3}}
    files = RunDirectory(
        run_of(tree(merge(more, USERS), held_out=0.25, score_every=29, max_draws=20), "fast"), tmp_path
    )
    files.begin()
    found = Models(files)
    train_federated(files.run, TwoKinds(), TwoKinds(), quadratics.module(), found)
    algorithm: Any = found.checkpoints.algorithm
    found.state.chosen[[3, 4]] = -1  # as if these two had never been drawn
    rows: list[dict[str, Any]] = []
    scores = algorithm.scores(found.state, 30, rows)
    clusters = {row["user"]: row["cluster"] for row in rows if row["model"] == "personal"}
    kinds = [clusters[f"user-{u}"] for u in range(8)]
    assert kinds in ([0, 1] * 4, [1, 0] * 4)
    assert {(row["group"], row["user"]) for row in rows if row["group"] == "new"} == {
        ("new", "user-3"),
        ("new", "user-4"),
    }
    for group, users in (("seen", 6), ("new", 2)):
        assert counts(scores[group]) == [users // 2] * 2
        mine, servers = (scores[group][kind]["pooled"] for kind in ("personal", "server"))
        assert mine["loss"] < servers["loss"]
        assert mine["accuracy"] > servers["accuracy"]
    assert "clients" in found.lines[28]
    assert "clients" not in found.lines[29]
    alone = [vector(algorithm.model_of(found.state, user, 30).pytorch_model) for user in range(8)]
    for user, model in enumerate(alone):
        assert np.array_equal(model, found.models[-1][kinds[user]])
    nobody = mock.patch.object(algorithm, "_choice", return_value=np.array([-1]))
    with nobody, pytest.raises(ValueError, match=r"^has no images by which a model could be chosen$"):
        algorithm.model_of(found.state, 0, 30)


SHARED = (f"{OPTION}shared=encoder", f"{OPTION}score_every=2", "--aggregation.kind=median")
IFCA = ("--federated.algorithm=ifca", "--runtime.checkpoint_every=1")


@pytest.mark.parametrize("more", [("--server.optimizer=adam",), SHARED], ids=["adam", "shared"])
def test_it_is_killed_and_goes_on_bit_for_bit(more: tuple[str, ...], train: Train) -> None:
    whole, directory = killed_and_resumed(train, 2, *IFCA, "--federated.num_rounds=4", *more)
    assert results(directory)["clients"] == results(whole)["clients"]
    assert (whole / "clients.csv").read_bytes() == (directory / "clients.csv").read_bytes()
    kept, again = last_checkpoint(whole), last_checkpoint(directory)
    assert kept.keys() == again.keys()
    assert all(tensor.equal(again[name]) for name, tensor in kept.items())
    models = load_file(directory / "clusters.safetensors")
    assert {name.partition("/")[0] for name in models} == {"0", "1"}
    largest = results(directory)["clusters"]["model"]
    saved = load_file(directory / "model.safetensors")
    if results(directory)["best_step"] == 4:
        names = {name.partition("/")[2] for name in models}
        assert all(saved[name].equal(models[f"{largest}/{name}"]) for name in names)


def test_a_user_is_predicted_with_the_model_of_its_cluster(
    train: Train, mini_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose frozen layers are those of a file."""
    begun = train("--federated.num_rounds=1", name="begun") / "model.safetensors"
    words = ("--model.trained=lora", "--model.pretrained=true", f"--weights={begun}")
    directory = train(*IFCA, "--federated.num_rounds=2", f"{OPTION}distance=0.5", *words)
    names, output = results(directory)["classes"], tmp_path / "p.csv"
    with (directory / "clients.csv").open() as file:
        scored = [row for row in csv.DictReader(file) if row["model"] == "personal"]
    largest = results(directory)["clusters"]["model"]
    row = next((row for row in scored if int(row["cluster"]) != largest), scored[0])
    assert run(predict, [str(directory), f"--user={row['user']}", f"--output={output}"]) == 0
    assert micro(rows_of(output), names) == pytest.approx(float(row["O-AP"]), abs=1e-3)
    real = checkpoint.load

    def without_frozen(path: Path) -> Any:
        tensors, account = real(path)
        return {n: t for n, t in tensors.items() if not n.startswith(checkpoint.MODEL)}, account

    with mock.patch.object(checkpoint, "load", without_frozen):
        assert run(predict, [str(directory), f"--user={row['user']}", f"--output={tmp_path / 'q.csv'}"]) == 2
    assert "last.safetensors is of an earlier version, without backbone." in capsys.readouterr().err


def test_its_updates_are_compressed_and_its_models_are_not(train: Train) -> None:
    words = ("--compression.kind=uniform", "--compression.options.bits=8", "--federated.num_rounds=1")
    plain = results(train(*IFCA, "--federated.num_rounds=1", name="plain"))["traffic"]
    size = plain["up"] - 4
    assert plain["down"] == 2 * size
    found = train(*IFCA, *words, f"{OPTION}num_clusters=3", name="compressed")
    assert results(found)["traffic"] == {"down": 3 * size, "up": size // 4 + 8 * 10 + 4}


@pytest.mark.parametrize(
    "argv, message",
    [
        ([f"{OPTION}num_clusters=1"], "federated.options.num_clusters is '1': "),
        ([f"{OPTION}distance=0"], "federated.options.distance is '0': "),
        ([f"{OPTION}shared=head"], "federated.options.shared is 'head': "),
        ([f"{OPTION}num_clusters=99999999"], "ifca keeps 99,999,999 models, which needs up to "),
        ([f"{OPTION}balance=0", f"{OPTION}max_draws=5"], "federated.options.max_draws has no effect if"),
        ([f"{OPTION}held_out=0", f"{OPTION}score_every=2"], "federated.options.score_every has no effect if"),
        (
            [f"{OPTION}shared=encoder", "--model.trained=head"],
            "is encoder, but nothing but the head is train",
        ),
        (["--compression.kind=top_k"], "set it to false"),
        (["--evaluation.average=ema", "--evaluation.best_by=last"], "no model of the server that could be"),
        (["--federated.reweight=fedir"], "has no effect where federated.algorithm is ifca"),
        (["--devices.drop_out=0.1"], "does not support it"),
        (["--attack.kind=label_flip"], "held-out images, on which users are scored: set federated.options."),
        (["--config=pfl-r-17"], "privacy refuses federated.algorithm = ifca"),
        (
            ["--federated.weighting=users", "--local_privacy.epsilon=4"],
            "local_privacy refuses federated.algo",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(argv: list[str], message: str, refused: Refused) -> None:
    refused(message, "--federated.algorithm=ifca", *argv)


@pytest.mark.parametrize("trained, remedy", [("bias", "model.trained to"), ("", "model.init to")])
def test_equal_first_models_are_refused(trained: str, remedy: str) -> None:
    """Also those that differ before a last layer of zeros."""
    of, network = run_of(tree()), two_layers()
    users = training_data(of, Users(), quadratics.SquaredError())
    Ifca.check(setup(of.config, network, users))
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.endswith(trained))
        if name.endswith("bias") or name.startswith("backbone.3"):
            nn.init.zeros_(parameter)
    with pytest.raises(ValueError, match=rf"^ifca would start from equal models, since .*: set {remedy}"):
        Ifca.check(setup(of.config, network, users))


def test_the_disk_has_room_for_all_models() -> None:
    network = two_layers()
    for shared, apart in (("none", 13 * 4 + 5 * 3), ("encoder", 5 * 3)):
        of = run_of(tree(num_clusters=3, shared=shared))
        users = training_data(of, Users(), quadratics.SquaredError())
        found = Ifca.state_bytes(setup(of.config, network, users))
        assert found == 4 * (3 * 2 * apart + 3 * (13 * 4 + 5 * 3))
