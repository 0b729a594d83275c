"""The round trip through pfl: known answers with a model small enough to compute by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pfl.aggregate.weighting import WeightByDatapoints, WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism, NormClippingOnly
from torch import Tensor, nn

from pfl_ext.algorithms.algorithm import RunContext
from pfl_ext.algorithms.clients import Clients
from pfl_ext.algorithms.optimizers import OptimizerConfig
from pfl_ext.backend import CentrallyEvaluatedBackend
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.data.sampling import LocalSampling
from pfl_ext.evaluation import KEPT, LOSS, SCORES, CentralEvaluation
from pfl_ext.privacy.accounting import PrivacyConfig
from pfl_ext.privacy.central import private_mean
from pfl_ext.tasks.multi_label import MultiLabel
from pfl_ext.tasks.multi_label_scores import MultiLabelScores
from tests.card import card
from tests.closeness import assert_close_as_vector
from tests.pfl_ext.samplings import local_sampling
from tests.pfl_ext.stores import NumberedStore

WHOLE = local_sampling(num_epochs=1, batch_size=64, max_images=None, flip="none", input_size=8)


class Linear(nn.Module):
    """Logits are linear in an image's mean colour."""

    task = MultiLabel()

    def __init__(self, num_labels: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 3 * num_labels).reshape(num_labels, 3))

    def forward(self, images: Tensor, crops: Tensor | None = None) -> Tensor:
        return images.float().mean((1, 2)) / 255 @ self.weight.T

    def outputs(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self(images), targets

    def loss(self, images: Tensor, targets: Tensor, crops: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self(images), targets.float())

    def metrics(self, images: Tensor, targets: Tensor, crops: Tensor) -> dict[str, Any]:
        raise AssertionError("users are not scored")


def train(
    store: NumberedStore,
    *,
    rounds: int = 1,
    cohort: int,
    local_rate: float = 0.5,
    server: Any = None,
    weighting: Any = None,
    sampling: LocalSampling = WHOLE,
    on_evaluation: Any = lambda *_: None,
    every: int | None = None,
) -> Tensor:
    """The weight after so many rounds, through pfl's own loop, which scores the model ``every`` so many."""
    module = Linear()
    optimizer = server(module.parameters()) if server else torch.optim.SGD(module.parameters(), lr=1.0)
    model = PyTorchModel(module, torch.optim.SGD, optimizer)
    data = FederatedImageDataset(store, sampling, seed=1)
    backend = CentrallyEvaluatedBackend(
        data,
        seed=1,
        postprocessors=[weighting or WeightByUser()],
        evaluation=CentralEvaluation(NumberedStore([7, 2]), batch_size=4) if every else None,
        on_evaluation=on_evaluation,
    )
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, every or 1, cohort, 1 if every else None),
        backend,
        model,
        NNTrainHyperParams(
            local_num_epochs=sampling.num_epochs,
            local_learning_rate=local_rate,
            local_batch_size=sampling.batch_size,
        ),
        NNEvalHyperParams(local_batch_size=None),
        send_metrics_to_platform=False,
    )
    return module.weight.detach()


def gradient(weight: Tensor, images: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> Tensor:
    """Gradient of the mean binary cross-entropy over images and labels: (sigmoid(z) - y) x^T / (n K)."""
    x = torch.from_numpy(images).double().mean((1, 2)) / 255
    y = torch.from_numpy(targets).double()
    return ((torch.sigmoid(x @ weight.double().T) - y).T @ x) / y.numel()


def test_one_user_one_step_is_a_gradient_step() -> None:
    store = NumberedStore([6])
    start = Linear().weight.detach()
    expected = start.double() - 0.5 * gradient(start, *store.read(np.arange(6)))
    assert_close_as_vector(train(store, cohort=1), expected, 50)  # a sum over six images of three colours


@pytest.mark.parametrize(
    "weighting, shares", [(WeightByUser(), (0.5, 0.5)), (WeightByDatapoints(), (0.25, 0.75))]
)
def test_updates_are_averaged_with_the_weights_asked_for(weighting: Any, shares: Sequence[float]) -> None:
    store = NumberedStore([2, 6])
    start = Linear().weight.detach()
    steps = [gradient(start, *store.read(np.arange(*rows))) for rows in ((0, 2), (2, 8))]
    expected = start.double() - 0.5 * sum(share * step for share, step in zip(shares, steps))
    assert_close_as_vector(train(store, cohort=2, weighting=weighting), expected, 50)


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_the_server_optimizer_sees_minus_the_mean_update(beta: float) -> None:
    """FedAvgM (Hsu et al. 2020, 5.1): v <- beta v + g, x <- x - lr v, no (1 - beta); with beta 0 FedAvg."""
    store = NumberedStore([4])
    weight = Linear().weight.detach().double()
    velocity = torch.zeros_like(weight)
    for _ in range(3):
        velocity = beta * velocity + 0.5 * gradient(weight, *store.read(np.arange(4)))
        weight = weight - 0.3 * velocity
    got = train(
        store, cohort=1, rounds=3, server=lambda p: OptimizerConfig(learning_rate=0.3, momentum=beta).build(p)
    )
    assert_close_as_vector(got, weight, 3 * 50)


def test_what_is_scored_is_the_model_at_the_start_of_the_round() -> None:
    seen: list[tuple[int, Tensor, float]] = []

    def note(round_number: int, metrics: Metrics, model: PyTorchModel) -> None:
        weight = model.pytorch_model.weight.detach().clone()
        seen.append((round_number, weight, metrics[LOSS].overall_value))

    store = NumberedStore([5, 3, 4])
    after_four = train(store, rounds=5, cohort=2, every=2, on_evaluation=note)
    assert [round_number for round_number, *_ in seen] == [0, 2, 4]
    assert torch.equal(seen[0][1], Linear().weight.detach())
    assert torch.equal(seen[1][1], train(store, rounds=2, cohort=2))
    assert torch.equal(seen[2][1], train(store, rounds=4, cohort=2))
    assert not torch.equal(seen[2][1], after_four)
    images, targets = NumberedStore([7, 2]).read(np.arange(9))
    for _, weight, loss in seen:
        module = Linear()
        module.weight.data.copy_(weight)
        expected = module.loss(torch.from_numpy(images), torch.from_numpy(targets).float(), torch.empty(0))
        assert loss == pytest.approx(expected.item(), rel=50 * 2.0**-24)


def test_a_validation_cohort_needs_an_evaluation() -> None:
    store = NumberedStore([2])
    module = Linear()
    with pytest.raises(ValueError, match="no evaluation: give the backend one"):
        FederatedAveraging().run(
            NNAlgorithmParams(1, 1, 1, 1),
            CentrallyEvaluatedBackend(FederatedImageDataset(store, WHOLE, seed=1), seed=1),
            PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
            NNTrainHyperParams(1, 0.5, WHOLE.batch_size),
            NNEvalHyperParams(local_batch_size=None),
            send_metrics_to_platform=False,
        )


def test_scores_stand_at_their_own_rows_whatever_the_batches() -> None:
    store = NumberedStore([7, 2])
    module = Linear()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    images, targets = store.read(np.arange(9))
    expected = torch.sigmoid(module(torch.from_numpy(images))).detach().numpy()
    loss = module.loss(torch.from_numpy(images), torch.from_numpy(targets).float(), torch.empty(0)).item()
    for batch_size in (1, 4, 100):
        metrics = CentralEvaluation(store, batch_size=batch_size)(model)
        assert metrics[LOSS].overall_value == pytest.approx(loss, rel=50 * 2.0**-24)
        scores = metrics[SCORES]
        assert isinstance(scores, MultiLabelScores)
        assert_close_as_vector(scores.scores(), expected, 50)
        assert np.array_equal(scores.targets(), targets)


@pytest.mark.parametrize("fits", [True, False])
def test_a_split_that_fits_stays_on_the_card(fits: bool) -> None:
    """All nine images fit, or all but a byte do: each batch says how large the split is."""
    store = NumberedStore([7, 2])
    images, stored = store.read(np.arange(9))
    free = round((images.nbytes + Linear().task.collate(stored).nbytes) / KEPT) + (1 if fits else -10)
    read, seen = store.read, []
    store.read = lambda rows: seen.append(len(rows)) or read(rows)  # type: ignore[method-assign, func-returns-value]
    expected = torch.sigmoid(Linear()(torch.from_numpy(read(np.arange(9))[0]))).detach().numpy()
    with card(free) as waits:
        module = Linear()
        model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
        evaluation = CentralEvaluation(store, batch_size=4)
        sent = Counter(waits)
        for _ in range(3):
            scores: Any = evaluation(model)[SCORES]
            assert_close_as_vector(scores.scores(), expected, 50)
    assert sorted(seen) == sorted([4, 4, 1] * (1 if fits else 3))
    assert waits - sent == {"cpu": 3, "_local_scalar_dense": 3}, "the end of each evaluation"


def test_workers_score_disjoint_shares_that_make_up_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    from pfl_ext import evaluation

    store = NumberedStore([7, 2])
    module = Linear()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    alone = CentralEvaluation(store, batch_size=2)(model)
    monkeypatch.setattr("pfl.internal.ops.all_reduce_metrics", lambda metrics: metrics)
    total: Any = None
    for rank in range(3):
        distributed = type("Fake", (), {"world_size": 3, "global_rank": rank})
        monkeypatch.setattr(evaluation, "get_ops", lambda d=distributed: type("Ops", (), {"distributed": d}))
        part = CentralEvaluation(store, batch_size=2)(model)
        assert len(part[SCORES].rows()) == 3
        total = part if total is None else total + part
    np.testing.assert_array_equal(total[SCORES].scores(), alone[SCORES].scores())
    assert total[LOSS].overall_value == pytest.approx(alone[LOSS].overall_value, rel=1e-12)


def test_global_random_state_does_not_matter() -> None:
    results = []
    for seed in (0, 1):
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        results.append(train(NumberedStore([5, 3, 40]), rounds=3, cohort=2))
    assert torch.equal(*results)


def backend_with(postprocessor: Any, **options: Any) -> CentrallyEvaluatedBackend:
    store = NumberedStore([3, 2, 4])
    data = FederatedImageDataset(store, WHOLE, seed=1, **options)
    return CentrallyEvaluatedBackend(data, seed=1, postprocessors=[WeightByUser(), postprocessor])


@pytest.mark.parametrize("wrap", [lambda m: m, CentrallyAppliedPrivacyMechanism])
def test_noise_of_pfls_own_mechanisms_needs_a_secret_seed(wrap: Any) -> None:
    """From the public seed anybody could draw it again and subtract it."""
    mechanism = wrap(GaussianMechanism(0.1, 1.0))
    with pytest.raises(ValueError, match="secret noise_seed"):
        backend_with(mechanism)
    backend_with(mechanism, noise_seed=2**100 + 7)
    backend_with(NormClippingOnly(2, 0.1))


def test_the_seeds_that_pfl_noises_with_come_from_the_secret_and_nothing_else_does() -> None:
    def drawn(**options: Any) -> tuple[list[int], list[str]]:
        data = FederatedImageDataset(NumberedStore([3, 2, 4]), WHOLE, seed=1, **options)
        pairs = list(data.get_cohort(3))
        return [seed for _, seed in pairs], [user.user_id for user, _ in pairs]

    (public, users), (secret, same), (other, _) = drawn(), drawn(noise_seed=5), drawn(noise_seed=6)
    assert users == same
    assert not set(public) & set(secret)
    assert not set(secret) & set(other)


PRIVATE = private_mean(PrivacyConfig(epsilon=2.0).calibrate(9, 9, 1), noise_seed=4)


@pytest.mark.parametrize(
    "postprocessors, together",
    [
        ([WeightByUser()], True),
        ([WeightByDatapoints()], True),
        ([WeightByUser(), PRIVATE], True),
        ([], False),
        ([PRIVATE], False),
        ([WeightByUser(), NormClippingOnly(2, 0.1)], False),
        ([WeightByUser(), NormClippingOnly(2, 0.1), PRIVATE], False),
    ],
)
def test_users_share_a_pass_where_all_that_is_asked_of_an_update_is_its_norm(
    postprocessors: Any, together: bool
) -> None:
    data = FederatedImageDataset(NumberedStore([3]), WHOLE, seed=1, noise_seed=5)
    backend = CentrallyEvaluatedBackend(data, seed=1, postprocessors=postprocessors)
    assert backend._only_norms_matter() == together


@pytest.mark.parametrize(
    "postprocessors, refused",
    [([WeightByUser()], False), ([NormClippingOnly(2, 0.1)], True), ([WeightByUser(), PRIVATE], True)],
)
def test_an_algorithm_that_wants_a_weighting_alone_gets_nothing_else(
    postprocessors: Any, refused: bool
) -> None:
    data = FederatedImageDataset(NumberedStore([3]), WHOLE, seed=1, noise_seed=5)
    backend = CentrallyEvaluatedBackend(data, seed=1, postprocessors=postprocessors)
    algorithm = SimpleNamespace(refusals={"postprocessors": "a weighting alone"})
    with pytest.raises(ValueError, match="a weighting alone") if refused else nullcontext():
        backend._refuse(algorithm, np.array([0]))


def clients(store: NumberedStore) -> Clients:
    module = Linear()
    context: Any = SimpleNamespace(
        model=PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        users=FederatedImageDataset(store, WHOLE, seed=1),
        local=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=0.5, local_batch_size=WHOLE.batch_size
        ),
        local_rate=None,
        seed=1,
        postprocessors=[WeightByDatapoints()],
        engine=None,
        check=None,
        accumulate=torch.float32,
        config_hash="",
    )
    context.backend = partial(RunContext.backend, context)
    context.local_in = partial(RunContext.local_in, context)
    return Clients(context)


def test_the_mean_is_of_the_users_that_are_named_and_weighs_them_by_their_images() -> None:
    store = NumberedStore([2, 5, 6])
    ours = clients(store)
    update, line = ours.mean_update(ours.weights(), np.array([0, 2]), 3)
    start = Linear().weight.detach()
    steps = [gradient(start, *store.read(np.arange(*rows))) for rows in ((0, 2), (7, 13))]
    moved = start.double() - 0.5 * (steps[0] / 4 + steps[1] * 3 / 4)
    assert_close_as_vector(start + update["weight"], moved, 50)
    assert (line["users"], line["images"]) == (2, 8)


def test_users_without_images_move_nothing() -> None:
    ours = clients(NumberedStore([0, 0, 6]))
    for users in (np.array([0, 1]), np.empty(0, np.int64)):
        update, line = ours.mean_update(ours.weights(), users, 0)
        assert not update["weight"].any()
        assert line["images"] == 0
