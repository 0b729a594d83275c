"""FedGKT against its equations in float64, and as runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.trees import Tree, merge
from benchmarks.core.federated import run_context, setup, training_data
from pfl_ext.algorithms.distillation import divergence, pooled
from pfl_ext.algorithms.fedgkt import FedGKT, FedGKTOptions, GKTState
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.tasks.multi_label import MultiLabel
from pfl_ext.tasks.single_label import SingleLabel
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.benchmarks.core.quadratics import CLASSES, SIDE, SIZES, Users, classifier, run_of
from tests.benchmarks.run_files import error_line, last_checkpoint, lines, results

ROUNDS, RATE, T, ALPHA = 3, 0.02, 2.0, 0.7
OPTIONS: Tree = {
    "temperature": T,
    "alpha": ALPHA,
    "server_epochs": 3,
    "server_learning_rate": RATE,
}
TREE: Tree = {
    "federated": {"algorithm": "fedgkt", "cohort_size": 4, "options": OPTIONS},
    "local": {"momentum": 0.5, "weight_decay": 0.01, "straddle": False},
}
CLIENT = ("1.weight", "1.bias", "classifier.weight", "classifier.bias")
SERVER = ("3.weight", "3.bias", "6.weight", "6.bias")


def module(flat: bool = True) -> ImageClassifier:
    """Two blocks and a head; the first layer of the second block works in place. ``flat``: no positions."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = [nn.Flatten(), nn.Linear(12, 8)] if flat else [nn.Identity(), nn.Conv2d(3, 8, 1)]
        second = nn.Linear(8, 6) if flat else nn.Conv2d(8, 6, 1)
        last = nn.Linear(6 if flat else 6 * SIDE * SIDE, CLASSES)
        backbone = nn.Sequential(*first, nn.Tanh(), second, nn.ReLU(inplace=True), nn.Flatten(), last)
    return classifier(backbone, SingleLabel())


def algorithm(run: AnyRun, flat: bool = True, store: Any = None) -> FedGKT:
    data = training_data(run, store or Users(), SingleLabel())
    chosen = setup(run.config, module(flat), data)
    FedGKT.check(chosen)
    return FedGKT(run_context(run, chosen, lambda _: None))


def softmax(logits: Any) -> Any:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def test_each_side_learns_from_the_others_softened_logits() -> None:
    client, server = (
        np.array([[0.3, -1.0, 2.0], [4.0, 0.5, 0.0]]),
        np.array([[1.0, 1.0, -2.0], [0.0, 3.0, 1.5]]),
    )
    for student, teacher in ((client, server), (server, client)):
        p, q = softmax(teacher / T), softmax(student / T)
        expected = T * T * (p * (np.log(p) - np.log(q))).sum(1).mean()
        learner = torch.from_numpy(student).requires_grad_()
        found = divergence(learner, torch.from_numpy(teacher), T)
        assert found.item() == pytest.approx(expected, rel=1e-6)
        torch.autograd.backward(found)
        assert learner.grad is not None
        np.testing.assert_allclose(learner.grad.numpy(), T * (q - p) / len(p), rtol=1e-5, atol=1e-7)
    assert float(divergence(torch.from_numpy(client), torch.from_numpy(client), T)) == pytest.approx(
        0, abs=1e-7
    )


def test_a_classifier_takes_means_over_positions_where_there_are_any() -> None:
    maps = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    assert torch.equal(pooled(maps), torch.from_numpy(maps.numpy().mean((2, 3))))
    assert pooled(maps[..., 0]).shape == (2, 12)


class Direct:
    """The four steps of a round in float64, with nothing of production but the draws.

    Teachers are looked up by the pixels of an image, which no two images share.
    """

    def __init__(self, run: AnyRun, gkt: FedGKT, state: GKTState, flat: bool) -> None:
        self.run, self.gkt, self.flat = run, gkt, flat
        self.of_client = [{name: state.clients[name][k].double() for name in CLIENT} for k in range(gkt.n)]
        self.of_server = {name: state.server[name].double() for name in SERVER}
        self.m = {name: torch.zeros_like(w) for name, w in self.of_server.items()}
        self.v, self.t = dict(self.m), 0
        self.teacher: dict[bytes, Tensor] = {}

    def layer(self, x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
        matrix, bias = w[f"{name}.weight"], w[f"{name}.bias"]
        if self.flat:
            return x.flatten(1) @ matrix.T + bias
        return torch.einsum("bchw,dc->bdhw", x, matrix[..., 0, 0]) + bias.view(-1, 1, 1)

    def features(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        return torch.tanh(self.layer(x, w, "1"))

    def client(self, h: Tensor, w: dict[str, Tensor]) -> Tensor:
        return (h if self.flat else h.mean((2, 3))) @ w["classifier.weight"].T + w["classifier.bias"]

    def server(self, h: Tensor, w: dict[str, Tensor]) -> Tensor:
        hidden = self.layer(h, w, "3").clamp(min=0).flatten(1)
        return hidden @ w["6.weight"].T + w["6.bias"]

    def loss(self, z: Tensor, y: Tensor, teacher: Tensor | None) -> Tensor:
        loss = -(z.log_softmax(1) * y).sum(1).mean()
        if teacher is None:
            return loss
        p, q = (teacher / T).softmax(1), (z / T).softmax(1)
        return loss + ALPHA * T**2 * (p * (p.log() - q.log())).sum(1).mean()

    def gradients(self, loss: Tensor, w: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(w, torch.autograd.grad(loss, list(w.values()))))

    def round(self, number: int) -> None:
        local, data = self.run.config.local, self.gkt.context.users
        data.set_round(number)
        sent = []
        for k, user in enumerate(self.gkt.users.tolist()):
            images, w = data.user_dataset(user), self.of_client[k]
            momentum = {name: torch.zeros_like(v) for name, v in w.items()}
            for batch in (b for _ in range(local.num_epochs) for b in images.iter(local.batch_size)):
                pixels, y, crops = batch
                flipped = torch.where(crops[:, 4, None, None, None] > 0, pixels.flip(2), pixels)
                teachers = [self.teacher[one.numpy().tobytes()] for one in pixels] if number else []
                w = {name: v.detach().requires_grad_() for name, v in w.items()}
                z = self.client(self.features(self.inputs(flipped), w), w)
                g = self.gradients(self.loss(z, y.double(), torch.stack(teachers) if number else None), w)
                g = self.clipped(g)
                for name, v in w.items():
                    momentum[name] = (
                        local.momentum * momentum[name] + g[name] + local.weight_decay * v.detach()
                    )
                    w[name] = v.detach() - local.learning_rate * momentum[name]
            self.of_client[k] = w
            pixels, labels = (torch.from_numpy(part) for part in images.raw_data)
            h = self.features(self.inputs(pixels), w).detach()
            sent += list(zip(pixels, h, self.client(h, w).detach(), labels.double()))
        for epoch in range(self.gkt.context.options.server_epochs):
            for rows in self.gkt._batches(number, epoch):
                _, *columns = zip(*[sent[row] for row in rows])
                self.adam(*map(torch.stack, columns))
        for one, of_one, *_ in sent:
            self.teacher[one.numpy().tobytes()] = self.server(of_one[None], self.of_server)[0]

    def inputs(self, pixels: Tensor) -> Tensor:
        return pixels.double().permute(0, 3, 1, 2) / 255

    def clipped(self, g: dict[str, Tensor]) -> dict[str, Tensor]:
        bound = self.run.config.local.global_max_grad_norm
        norm = float(torch.sqrt(sum(v.square().sum() for v in g.values())))  # type: ignore[arg-type]
        return g if bound is None or norm < bound else {name: v * bound / norm for name, v in g.items()}

    def adam(self, h: Tensor, teacher: Tensor, y: Tensor) -> None:
        w = {name: v.detach().requires_grad_() for name, v in self.of_server.items()}
        self.t += 1
        for name, g in self.gradients(self.loss(self.server(h, w), y, teacher), w).items():
            self.m[name] = 0.9 * self.m[name] + 0.1 * g
            self.v[name] = 0.999 * self.v[name] + 0.001 * g**2
            root = (self.v[name] / (1 - 0.999**self.t)).sqrt() + 1e-8
            step = RATE * self.m[name] / (1 - 0.9**self.t) / root
            self.of_server[name] = w[name].detach() - step


@pytest.mark.parametrize(
    ("flat", "tree"),
    [
        (True, {}),
        (True, {"local": {"batch_size": 3, "straddle": True}}),
        (False, {"local": {"max_grad_norm": 0.3, "clip_by": "global"}}),
    ],
    ids=["batches of 4", "batches of 3", "clipped, with positions"],
)
def test_rounds_are_the_equations_in_float64(flat: bool, tree: Tree) -> None:
    run = run_of(merge(TREE, tree))
    gkt = algorithm(run, flat)
    state = gkt.init(0)
    direct = Direct(run, gkt, state, flat)
    for number in range(ROUNDS):
        state, line = gkt.round(state, number)
        direct.round(number)
    pairs = [(state.clients[name][k], direct.of_client[k][name]) for k in range(4) for name in CLIENT]
    pairs += [(state.server[name], direct.of_server[name]) for name in SERVER]
    pairs += [(state.teacher, torch.stack(list(direct.teacher.values())))]
    for found, expected in pairs:
        gap = float((found.double() - expected).norm() / expected.norm())
        assert gap < 1e-4, "float32, of which these rounds have some 70 steps"
    assert int(state.steps) == direct.t
    assert line["users"] == 4
    assert line["images"] == len(direct.teacher) == len(state.teacher)
    assert 0 < line["server_loss"] < 3
    assert 0 < line["train_loss"] < 5
    whole = gkt.model(state).pytorch_model.backbone
    shown = direct.of_client[gkt.shown]
    x = direct.inputs(torch.from_numpy(Users().read(np.arange(26))[0]))
    expected = direct.server(direct.features(x, shown), direct.of_server)
    torch.testing.assert_close(whole(x.float()).double(), expected, rtol=1e-3, atol=1e-3)


def test_clients_share_no_weight_and_the_first_round_has_no_teacher() -> None:
    gkt = algorithm(run_of(TREE))
    before = gkt.init(0)
    alone = {"alpha": 0.0, "temperature": FedGKTOptions.temperature}
    other = algorithm(run_of(merge(TREE, {"federated": {"options": alone}})))
    (one, _), (untaught, _) = gkt.round(before, 0), other.round(other.init(0), 0)
    for name in CLIENT:
        assert torch.equal(one.clients[name], untaught.clients[name])
    assert not torch.equal(one.server["6.bias"], untaught.server["6.bias"])
    moved = {name: w.clone() for name, w in one.clients.items()}
    for w in moved.values():
        w[2:] += 0.1
    (again, _), (changed, _) = (
        gkt.round(GKTState(clients, one.server, one.adam, one.steps, one.teacher), 1)
        for clients in (one.clients, moved)
    )
    for name in CLIENT:
        assert torch.equal(again.clients[name][:2], changed.clients[name][:2])
        assert not torch.equal(again.clients[name][2:], changed.clients[name][2:])
    assert not torch.equal(again.server["6.bias"], changed.server["6.bias"])


def test_a_users_batches_say_which_images_they_are() -> None:
    data = algorithm(run_of(TREE)).context.users
    orders = []
    for number in range(2):
        data.set_round(number)
        images, same = data.user_dataset(3), data.user_dataset(3)
        pairs = list(zip(images.iter_with_places(4), same.iter(4), strict=True))
        orders.append(np.concatenate([places for (places, _), _ in pairs]))
        for (places, batch), expected in pairs:
            assert (batch[0].numpy() == images.raw_data[0][places]).all()
            assert (batch[1].numpy() == images.raw_data[1][places]).all()
            assert all(map(torch.equal, batch, expected))
    assert (orders[0] != orders[1]).any()
    assert (np.sort(orders[0]) == np.sort(orders[1])).all()


def test_a_pass_of_the_server_is_batches_of_one_client_in_an_order_of_its_own() -> None:
    gkt = algorithm(run_of(merge(TREE, {"federated": {"cohort_size": len(SIZES)}})))
    passes = [gkt._batches(number, epoch) for number, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))]
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    for batches in passes:
        assert (np.sort(np.concatenate(batches)) == np.arange(sum(SIZES))).all()
        assert all(len(set(owner[rows])) == 1 and len(rows) <= 4 for rows in batches)
    orders = [np.concatenate(batches).tolist() for batches in passes]
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_only_the_clients_images_are_read_and_all_that_crosses_is_counted() -> None:
    store, rows = Users(), list[int]()
    real = store.read
    gkt = algorithm(run_of(TREE), store=store)

    def read(some: Any) -> Any:
        rows.extend(some)
        return real(some)

    with mock.patch.object(store, "read", read):
        state, line = gkt.round(gkt.init(0), 0)
    own = [row for user in gkt.users for row in gkt.context.users.partition.rows_of(user)]
    assert sorted(set(rows)) == sorted(own)
    assert len(own) < sum(SIZES)
    assert gkt.bytes(state) == (round(gkt.wire.down / 4), round(gkt.wire.up / 4))
    assert gkt.wire.up == len(own) * (4 * 8 + 4 * CLASSES + CLASSES), (
        "features, logits, labels of a byte each"
    )
    largest = max(gkt.users.tolist(), key=lambda user: SIZES[user])
    assert line["extractor_of"] == f"user-{largest}"


KEYS = (
    "--federated.algorithm=fedgkt",
    "--federated.options.temperature=2",
    "--local.momentum=0.9",
    "--federated.num_rounds=3",
    "--runtime.keep_checkpoints=true",
    "--runtime.checkpoint_every=1",
)


def test_it_is_killed_and_goes_on_and_its_file_gives_the_same_scores(
    vision: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, directory = killed_and_resumed(vision, 2, *KEYS)
    assert "FedGKT: 4 users are the clients; 8 other users do not take part" in capsys.readouterr().err
    ours, theirs = (last_checkpoint(path) for path in (directory, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert any(name.endswith("teacher") for name in theirs)
    found = results(whole)
    assert found["extractor_of"] == lines(whole)[0]["extractor_of"]
    kept = ("--model.pretrained=true", "--model.keep_head=true", f"--weights={whole / 'model.safetensors'}")
    again = vision(*KEYS, *kept, "--federated.num_rounds=1", name="again")
    scores = [
        next(v for v in lines(d)[at].values() if isinstance(v, dict)) for d, at in ((whole, -1), (again, 0))
    ]
    assert scores[1]["loss"] == pytest.approx(scores[0]["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--federated.options.cut=0"], "federated.options.cut is '0': "),
        (["--federated.options.cut=9"], "fedgkt cannot cut this network after 9 blocks (it has 4 blocks"),
        (["--federated.options.temperature=0"], "federated.options.temperature is '0': "),
        (["--federated.options.alpha=-1"], "federated.options.alpha is '-1': "),
        (["--federated.options.server_epochs=0"], "federated.options.server_epochs is '0': "),
        (["--federated.options.server_learning_rate=0"], "server_learning_rate is '0': "),
        (["--model.trained=bias"], "fedgkt trains all layers: set model.trained to all"),
        (
            ["--federated.options.alpha=0", "--federated.options.temperature=2"],
            "federated.options.temperature has no effect if federated.options.alpha is 0",
        ),
        (["--local.max_images=2"], "fedgkt trains on all images of a client: set local.max_images to none"),
        (["--local.head_rate_factor=2"], "set local.head_rate_factor to 1"),
        (["--local.layer_decay=0.5"], "set local.layer_decay to 1"),
        (["--server.learning_rate=2"], "has no effect where federated.algorithm is fedgkt"),
        (["--federated.weighting=users"], "has no effect where federated.algorithm is fedgkt"),
        (["--runtime.lanes=2"], "has no effect where federated.algorithm is fedgkt"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(
    words: list[str], message: str, vision: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    vision(KEYS[0], *words, code=2)
    assert message in error_line(capsys)


def test_privacy_and_several_labels_are_refused(refused: Refused) -> None:
    refused("privacy refuses federated.algorithm = fedgkt", KEYS[0], "--config=pfl-r-17")
    refused("fedgkt needs exactly one label for each image: choose another algorithm", KEYS[0])


def test_dropout_and_what_has_no_room_are_refused() -> None:
    run = run_of(TREE)
    chosen = setup(run.config, module(), training_data(run, Users(), SingleLabel()))
    with (
        mock.patch("pfl_ext.models.memory.physical_memory", return_value=1000),
        pytest.raises(ValueError, match=r"fedgkt keeps 4 clients' networks and the features of 25 images, "),
    ):
        FedGKT.check(chosen)
    dropping: Any = SimpleNamespace(
        module=SimpleNamespace(backbone=module().backbone, task=SingleLabel()),
        users=SimpleNamespace(sampling=SimpleNamespace(keys=True, mixes=False)),
        cohort_size=4,
        options=FedGKTOptions(),
    )
    with pytest.raises(
        ValueError,
        match=r"keyed augmentation change the image: set model.dropout to false, and augment\.rand_augment",
    ):
        FedGKT.check(dropping)
    dropping.users.sampling.mixes = True
    with pytest.raises(
        ValueError, match=r"mixed images have none: set augment.mixup and augment.cutmix to none"
    ):
        FedGKT.check(dropping)
    dropping.module.task = MultiLabel()
    with pytest.raises(ValueError, match="one label for each image"):
        FedGKT.check(dropping)
    assert "NP=1" in FedGKT.refusals["workers"]
