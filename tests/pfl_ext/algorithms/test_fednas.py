"""FedNAS by its equations: a plain loop on the same batches, in float64, and what is averaged."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from dataset.arrays import IntArray
from pfl_ext.algorithms.algorithm import RunContext
from pfl_ext.algorithms.fednas import FedNAS, FedNASOptions, LocalSearch, halves, paired
from pfl_ext.backend import training_context
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.tasks.single_label import SingleLabel
from tests.pfl_ext.samplings import local_sampling
from tests.pfl_ext.stores import NumberedStore, rows_of

RATE, MOMENTUM, DECAY, CLIP = 0.05, 0.9, 3e-3, 0.3
OPTIONS = FedNASOptions(alpha_learning_rate=3e-3, alpha_weight_decay=0.1, train_loss_weight=0.5)
SIDE, BATCH, EPOCHS = 8, 2, 2


class Noise(NumberedStore):
    """Images of noise; a read beyond the users' rows raises."""

    def read(self, rows: IntArray) -> tuple[Any, Any]:
        _, targets = super().read(rows)
        all_images = np.random.default_rng(1).integers(0, 256, (self.user_offsets[-1], SIDE, SIDE, 3))
        return all_images.astype(np.uint8)[rows], targets


@functools.cache
def supernet() -> nn.Module:
    config = ModelConfig(arch="darts_search", input_size=SIDE, cells=3, cell_channels=2, groups=1)
    return build_backbone(config, 5, torch.Generator().manual_seed(2))


def search(sizes: Sequence[int], store: type[NumberedStore] = Noise, **more: Any) -> FedNAS:
    """In float64; users send float32."""
    module = ImageClassifier(copy.deepcopy(supernet()), task=SingleLabel(), input_size=SIDE).double()
    sampling = local_sampling(EPOCHS, BATCH, None, straddle=False, input_size=SIDE)

    def sgd(_: Any, lr: float) -> torch.optim.Optimizer:
        parameters = [p for p in module.parameters() if p.requires_grad]
        return torch.optim.SGD(parameters, lr, momentum=MOMENTUM, weight_decay=DECAY)

    users = FederatedImageDataset(store(sizes), sampling, seed=4, collate=SingleLabel().collate)
    values = {
        "options": OPTIONS,
        "num_rounds": 1,
        "cohort_size": len(sizes),
        "by_images": True,
        "private": False,
        "module": module,
        "users": users,
        "model": PyTorchModel(module, sgd, torch.optim.SGD(module.parameters(), lr=1.0)),
        "local": NNTrainHyperParams(
            local_num_epochs=EPOCHS,
            local_learning_rate=RATE,
            local_batch_size=BATCH,
            local_max_grad_norm=CLIP,
        ),
        "score": lambda model: Metrics(),
        "server_rate": lambda number: 1.0,
        "seed": 4,
        "postprocessors": [WeightByDatapoints()],
        "engine": None,
        "accumulate": torch.float64,
        "config_hash": "",
    }
    return FedNAS(RunContext(**{**values, **more}))


def plain_search(made: FedNAS, user: int) -> dict[str, Tensor]:
    """One process on all of a user's images: Adam, clipping and SGD with momentum written out."""
    module = made.context.module
    named = dict(module.named_parameters())
    alphas = {name: p for name, p in named.items() if "alpha" in name}
    weights = {name: p for name, p in named.items() if name not in alphas}
    made.context.users.set_round(0)
    first, second = halves(made.context.users.user_dataset(user), made.context.seed)
    kept = {name: p.detach().clone() for name, p in named.items()}
    m: dict[str, Tensor] = {name: torch.zeros_like(p) for name, p in alphas.items()}
    v, t = dict(m), 0
    speed: dict[str, Tensor] = {}

    def gradient(batch: Any, of: dict[str, Any]) -> dict[str, Tensor]:
        x, targets = module.prepare(*batch)
        loss = F.cross_entropy(module.backbone(x), targets.argmax(1))
        return dict(zip(of, torch.autograd.grad(loss, list(of.values()))))

    for _ in range(EPOCHS):
        train, val = list(first.iter(BATCH)), list(second.iter(BATCH))
        for place, batch in enumerate(train):
            of_train, of_val = gradient(batch, alphas), gradient(val[place % len(val)], alphas)
            t += 1
            with torch.no_grad():
                for name, alpha in alphas.items():
                    g = 0.5 * of_train[name] + of_val[name] + 0.1 * alpha
                    m[name] = 0.5 * m[name] + 0.5 * g
                    v[name] = 0.999 * v[name] + 0.001 * g**2
                    alpha.sub_(3e-3 * (m[name] / (1 - 0.5**t)) / ((v[name] / (1 - 0.999**t)).sqrt() + 1e-8))
            g_w = gradient(batch, weights)
            norm = torch.cat([g.flatten() for g in g_w.values()]).norm()
            assert norm > CLIP, "clipping is tried"
            with torch.no_grad():
                for name, w in weights.items():
                    step = g_w[name] * (CLIP / norm) + DECAY * w
                    speed[name] = step if name not in speed else MOMENTUM * speed[name] + step
                    w.sub_(RATE * speed[name])
    found = {name: p.detach().clone() for name, p in named.items()}
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(kept[name])
    return found


def test_with_one_client_it_is_the_search_of_one_process() -> None:
    made = search([4])
    start = made.init(0)
    expected = plain_search(made, 0)
    found, line = made.round(start, 0)
    for kind in ("alpha", ""):
        moved, wrong = (
            torch.cat([(a[n] - b[n]).flatten() for n in found if kind in n]).norm()
            for a, b in ((found, start), (found, expected))
        )
        assert wrong <= 1e-5 * moved, kind  # users send float32, and clipping adds 1e-6 to a norm
    assert (line["users"], line["images"]) == (1, 4)
    assert line["genotype"] == made.model(found).pytorch_model.backbone.genotype().text


def test_alpha_is_averaged_by_images_as_the_weights_are() -> None:
    made = search([4, 2])
    start = made.init(0)
    each = []
    for user in (0, 1):
        model = made.model(start)
        made.context.users.set_round(0)
        images = made.context.users.user_dataset(user)
        context = training_context(0, 1, made.context.local)
        update, _ = LocalSearch(made.context).simulate_one_user(model, images, context)
        each.append(update)
        for name, p in model.variable_map.items():
            assert torch.equal(p, start[name]), "the server's model is left as it was"
    found, _ = made.round(start, 0)
    for name in ("backbone.alpha_normal", "backbone.alpha_reduce", "backbone.classifier.weight"):
        mean = (4 * each[0][name].double() + 2 * each[1][name].double()) / 6
        torch.testing.assert_close(found[name] - start[name], mean, rtol=1e-6, atol=1e-12)
        assert (each[0][name] - mean).norm() > 0.05 * mean.norm()


def test_the_halves_are_apart_the_same_in_each_round_and_drawn_again_for_others() -> None:
    users = search([7], NumberedStore).context.users
    seen = []
    for number, seed in ((0, 4), (1, 4), (0, 5)):
        users.set_round(number)
        first, second = halves(users.user_dataset(0), seed)
        seen.append([sorted(rows_of(part.raw_data[0]).tolist()) for part in (first, second)])
        assert sorted(seen[-1][0] + seen[-1][1]) == list(range(7))
        assert len(first) == 4
        in_order = [rows_of(batch[0].numpy()).tolist() for batch in first.iter(BATCH)]
        assert sorted(row for batch in in_order for row in batch) == seen[-1][0]
        seen[-1].append(in_order)
    assert seen[0][:2] == seen[1][:2] != seen[2][:2]
    assert seen[0][2] != seen[1][2], "batches are drawn in each round"


def test_a_missing_batch_of_the_second_half_is_its_first_again() -> None:
    a, b, c, x, y = ((torch.tensor(n),) * 3 for n in range(5))
    assert list(map(str, paired([a, b, c], [x, y]))) == list(map(str, [(a, x), (b, y), (c, x)]))
    assert list(map(str, paired([a, b], []))) == list(map(str, [(a, None), (b, None)]))


def test_a_user_with_one_image_moves_the_weights_alone_and_one_without_moves_nothing() -> None:
    made = search([1, 0])
    start = made.init(0)
    found, line = made.round(start, 0)
    changed = {name for name in start if not torch.equal(start[name], found[name])}
    assert changed == set(start) - {"backbone.alpha_normal", "backbone.alpha_reduce"}
    assert line["images"] == 1


def test_what_it_cannot_search_is_refused() -> None:
    made = search([3])
    FedNAS.check(made.context)
    made.context.module.backbone.stem.requires_grad_(False)
    with pytest.raises(ValueError, match=r"set model\.trained to all"):
        FedNAS.check(made.context)
    backbone = build_backbone(ModelConfig(arch="lenet", input_size=32), 5, torch.Generator())
    other = ImageClassifier(backbone, task=SingleLabel(), input_size=32)
    with pytest.raises(ValueError, match=r"set model\.arch to darts_search"):
        FedNAS.check(search([3], module=other).context)
    capped = local_sampling(1, 2, 3, straddle=False, input_size=SIDE)
    users = FederatedImageDataset(Noise([2, 4]), capped, seed=0)
    with pytest.raises(ValueError, match=r"set local\.max_images to none"):
        FedNAS.check(search([3], users=users).context)
