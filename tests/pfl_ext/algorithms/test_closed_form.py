"""Heads in closed form are those of all images in one place, whoever owns them, and their papers' formulas.

Bounds are those of float64, times how far the equations are from singular: the ridge and the shrinkage are at
least a thousandth of the largest eigenvalue.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from pfl.aggregate.weighting import WeightByUser
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn

from dataset.arrays import ByteArray, FloatArray, IntArray
from pfl_ext.algorithms.algorithm import RunContext
from pfl_ext.algorithms.closed_form import NOISE, ClosedForm, HeadOptions, RidgeOptions, Sums, solved
from pfl_ext.algorithms.fed3r import Fed3R, largest_of_noise
from pfl_ext.algorithms.fedcof import FedCOF, FedCOFOptions
from pfl_ext.algorithms.fedncm import FedNCM
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.features import FeatureClassifier
from pfl_ext.models.random_features import OnRandomFeatures, RandomFeatures
from pfl_ext.tasks.multi_label import MultiLabel
from pfl_ext.tasks.single_label import SingleLabel
from pfl_ext.tasks.task import Task
from tests.pfl_ext.engine.setting import private
from tests.pfl_ext.samplings import local_sampling

Matrix = FloatArray
IMAGES, WIDTH, LABELS, SIDE = 60, 12, 4, 2
NEAR = 1e-9
"""Float64 to 1e-16, a sum of 60 terms, and a condition of a thousand, with a margin of ten thousand."""


class Features:
    """A store of features ``[N, D]`` and labels ``[N, K]``, of users with so many images."""

    def __init__(self, sizes: Sequence[int], order: IntArray, several: bool = False) -> None:
        rng = np.random.default_rng(5)
        classes = rng.integers(LABELS - 1, size=IMAGES)  # of the last class there is no image
        labels = np.eye(LABELS, dtype=np.uint8)[classes]
        if several:
            labels[rng.integers(3, size=IMAGES) == 0, 1] = 1
        centres = rng.normal(size=(LABELS, WIDTH))
        features = (centres[classes] + rng.normal(size=(IMAGES, WIDTH)) + 1).astype(np.float32)
        assert sum(sizes) == IMAGES
        self.features, self.labels = features[order], labels[order]
        self.user_ids = [f"user {number}" for number in range(len(sizes))]
        self.user_offsets = np.concatenate([[0], np.cumsum(sizes)])

    def read(self, rows: IntArray) -> tuple[Any, ByteArray]:
        return self.features[rows], self.labels[rows]

    def targets(self, rows: IntArray) -> ByteArray:
        return self.labels[rows]


def network(task: Task, random: int | None = None) -> FeatureClassifier:
    """A linear layer on features, or on so many random features of them."""
    head: nn.Module = nn.Linear(WIDTH, LABELS)
    if random is not None:
        head = OnRandomFeatures(RandomFeatures(WIDTH, random, 0.8, 3), nn.Linear(random, LABELS))
    layers = OrderedDict(flat=nn.Flatten(), head=head)
    return FeatureClassifier(
        ImageClassifier(nn.Sequential(layers), task=task, input_size=SIDE), "head", WIDTH
    )


def algorithm(
    kind: type[ClosedForm],
    store: Features,
    options: Any,
    cohort_size: int,
    task: Task,
    seed: int = 0,
    mechanism: Any = None,
    random: int | None = None,
) -> ClosedForm:
    module = network(task, random)
    sampling = local_sampling(1, 7, None, straddle=False, input_size=SIDE)
    made = kind(
        RunContext(
            options=options,
            num_rounds=-(-len(store.user_ids) // cohort_size),
            cohort_size=cohort_size,
            by_images=False,
            module=module,
            users=FederatedImageDataset(store, sampling, seed=seed, collate=task.collate),
            model=PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
            local=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=1.0, local_batch_size=7),
            score=lambda model: Metrics(),
            server_rate=lambda number: 1.0,
            seed=seed,
            postprocessors=[WeightByUser(), *([] if mechanism is None else [mechanism])],
            private=mechanism is not None,
            engine=None,
            accumulate=torch.float32,
            config_hash="",
        )
    )
    kind.check(made.context)
    return made


def asked(made: ClosedForm) -> tuple[Matrix, Matrix, ClosedForm]:
    """Weights and bias after the last round, in float64."""
    state, seen = made.init(0), 0
    for number in range(made.context.num_rounds):
        state, line = made.round(state, number)
        seen += line["users"]
    assert seen == made.context.users.num_users, "each user once"
    weight, bias = made.head(state)
    made.model(state)
    model = made.layer
    np.testing.assert_array_equal(model.weight.detach().numpy(), weight.float().numpy())
    np.testing.assert_array_equal(model.bias.detach().numpy(), bias.float().numpy())
    made.last = state  # type: ignore[attr-defined]
    return weight.numpy(), bias.numpy(), made


def near(ours: Matrix, theirs: Matrix) -> None:
    assert np.linalg.norm(ours - theirs) <= NEAR * np.linalg.norm(theirs)


ALL = np.arange(IMAGES)
DEALT = {
    "one user has all": ([IMAGES], 1),
    "each image is a user": ([1] * IMAGES, 7),
    "uneven": ([0, 25, 1, 0, 30, 4], 4),
    "one at a time": ([20, 0, 40], 1),
}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("sizes", "cohort"), DEALT.values(), ids=DEALT)
def test_fed3r_is_the_ridge_regression_of_all_images(
    sizes: list[int], cohort: int, normalise: bool, several: bool
) -> None:
    store = Features(sizes, np.random.default_rng(len(sizes)).permutation(IMAGES), several)
    options = RidgeOptions(ridge=3.0, normalise=normalise)
    task = MultiLabel() if several else SingleLabel()
    weight, bias, _ = asked(algorithm(Fed3R, store, options, cohort, task))
    z = np.concatenate([store.features.astype(np.float64), np.ones((IMAGES, 1))], 1)
    expected = np.linalg.solve(z.T @ z + 3.0 * np.eye(WIDTH + 1), z.T @ store.labels.astype(np.float64))
    if several:
        expected[-1] -= 0.5  # a logit of 0 is where the regression is at 1/2
    if normalise:
        norms = np.linalg.norm(expected[:-1], axis=0)
        expected = expected / np.where(norms > 0, norms, 1)
    near(np.concatenate([weight.T, bias[None]]), expected)


def test_with_unit_features_fed3rs_bias_has_no_threshold() -> None:
    store = Features([IMAGES], ALL, True)
    options = RidgeOptions(ridge=3.0, normalise=False, unit_features=True)
    _, bias, _ = asked(algorithm(Fed3R, store, options, 1, MultiLabel()))
    z = store.features.astype(np.float64)
    z = np.concatenate([z / np.linalg.norm(z, axis=1, keepdims=True), np.ones((IMAGES, 1))], 1)
    expected = np.linalg.solve(z.T @ z + 3.0 * np.eye(WIDTH + 1), z.T @ store.labels.astype(np.float64))
    near(bias, expected[-1])


@pytest.mark.parametrize(("sizes", "cohort"), DEALT.values(), ids=DEALT)
def test_fed3r_on_random_features_is_the_ridge_regression_in_their_space(
    sizes: list[int], cohort: int
) -> None:
    """There are more features than images, so that the ridge makes the equations regular. As float32 rounds
    products by the size of a batch, numpy takes the features that the algorithm took, in its order.
    """
    store, number = Features(sizes, np.random.default_rng(len(sizes)).permutation(IMAGES)), 100
    options = RidgeOptions(ridge=0.1, normalise=False)
    made = algorithm(Fed3R, store, options, cohort, SingleLabel(), random=number)
    met: list[tuple[Matrix, Matrix]] = []
    rows_of = made.rows_of

    def noted(batch: Any) -> Any:
        rows = rows_of(batch)
        met.append((rows[0].numpy(), rows[1].numpy()))
        return rows

    made.rows_of = noted  # type: ignore[method-assign]
    weight, bias, _ = asked(made)
    mapped, labels = (np.concatenate(parts) for parts in zip(*met))
    z = np.concatenate([mapped, np.ones((IMAGES, 1))], 1)
    expected = np.linalg.solve(z.T @ z + 0.1 * np.eye(number + 1), z.T @ labels)
    near(np.concatenate([weight.T, bias[None]]), expected)
    unit = store.features / np.linalg.norm(store.features.astype(np.float64), axis=1, keepdims=True)
    (random,) = [m for m in made.context.module.modules() if isinstance(m, RandomFeatures)]
    angles = unit @ random.frequencies.double().numpy().T + random.phases.double().numpy()
    exact = math.sqrt(2 / number) * np.cos(angles)
    gap = np.linalg.norm(mapped.T @ mapped - exact.T @ exact)
    assert gap <= 2**-17 * np.linalg.norm(exact.T @ exact), "float32, of angles up to 12"


@pytest.mark.parametrize(("sizes", "cohort"), DEALT.values(), ids=DEALT)
def test_fedncm_is_the_directions_of_the_class_means(sizes: list[int], cohort: int) -> None:
    store = Features(sizes, ALL)
    weight, bias, _ = asked(algorithm(FedNCM, store, HeadOptions(), cohort, SingleLabel()))
    expected = np.zeros((LABELS, WIDTH))
    for label in range(LABELS - 1):
        mean = store.features[store.labels[:, label] == 1].astype(np.float64).mean(0)
        expected[label] = mean / np.linalg.norm(mean)
    near(weight, expected)
    assert not bias.any()


@pytest.mark.parametrize(("sizes", "cohort"), DEALT.values(), ids=DEALT)
def test_fedcof_is_its_papers_formula(sizes: list[int], cohort: int) -> None:
    store = Features(sizes, ALL)
    gamma = 0.7
    made = algorithm(FedCOF, store, FedCOFOptions(shrinkage=gamma), cohort, SingleLabel())
    weight, bias, _ = asked(made)
    x, owner = store.features.astype(np.float64), np.repeat(np.arange(len(sizes)), sizes)
    gram, cross = np.zeros((WIDTH, WIDTH)), np.zeros((WIDTH, LABELS))
    for label in range(LABELS - 1):
        of_class = store.labels[:, label] == 1
        users = sorted(set(owner[of_class].tolist()))
        scatter = np.zeros((WIDTH, WIDTH))
        for user in users:
            own = x[of_class & (owner == user)]
            apart = own.mean(0) - x[of_class].mean(0)
            scatter += len(own) * np.outer(apart, apart)
        covariance = scatter / max(len(users) - 1, 1) + gamma * np.eye(WIDTH)
        gram += (of_class.sum() - 1) * covariance
        cross[:, label] = x[of_class].sum(0)
    gram += len(x) * np.outer(x.mean(0), x.mean(0))
    expected = np.linalg.solve(gram, cross)
    norms = np.linalg.norm(expected, axis=0)
    near(weight.T, expected / np.where(norms > 0, norms, 1))
    assert not bias.any()


def test_fedcof_of_one_image_a_user_has_the_exact_scatter_within_classes() -> None:
    store = Features([1] * IMAGES, ALL)
    weight, _, _ = asked(algorithm(FedCOF, store, FedCOFOptions(shrinkage=0.5), 9, SingleLabel()))
    x = store.features.astype(np.float64)
    means = {c: x[store.labels[:, c] == 1].mean(0) for c in range(LABELS - 1)}
    centred = x - np.stack([means[c] for c in store.labels.argmax(1).tolist()])
    within = centred.T @ centred + 0.5 * (IMAGES - (LABELS - 1)) * np.eye(WIDTH)
    gram = within + IMAGES * np.outer(x.mean(0), x.mean(0))
    expected = np.linalg.solve(gram, x.T @ store.labels.astype(np.float64))
    norms = np.linalg.norm(expected, axis=0)
    near(weight.T, expected / np.where(norms > 0, norms, 1))


def test_unit_features_and_the_temperature() -> None:
    store = Features([20, 40], ALL)
    made = algorithm(FedNCM, store, HeadOptions(unit_features=True, temperature=0.1), 2, SingleLabel())
    state, _ = made.round(made.init(0), 0)
    x = store.features.astype(np.float64)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    sums = store.labels.T.astype(np.float64) @ unit
    near(state["sums"].numpy(), sums)
    head = made.model(state).pytorch_model.backbone.head.weight.detach().double()
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    expected = 10 * sums / np.where(norms > 0, norms, 1)
    assert np.linalg.norm(head.numpy() - expected) <= 2**-24 * np.linalg.norm(expected)


def test_what_a_user_sends_is_counted() -> None:
    """4 bytes a number: class sums; a triangle and cross products; a mean and a number for each class."""
    store = Features([20, 0, 40], ALL)
    found = {}
    for kind, options in ((FedNCM, HeadOptions()), (Fed3R, RidgeOptions()), (FedCOF, FedCOFOptions())):
        made = asked(algorithm(kind, store, options, 3, SingleLabel()))[2]
        found[kind] = made.bytes(made.last)  # type: ignore[attr-defined]
    of_each = WIDTH + 1
    assert found[FedNCM] == (0, 4 * LABELS * WIDTH)
    assert found[Fed3R] == (0, 4 * (of_each * (of_each + 1) // 2 + of_each * LABELS))
    assert found[FedCOF] == (0, 4 * (LABELS - 1) * of_each)


def test_of_singular_equations_it_is_the_shortest_solution() -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(3, 8)))
    y = torch.from_numpy(rng.normal(size=(3, 2)))
    expected = np.linalg.pinv(x.numpy()) @ y.numpy()
    near(solved(x.T @ x, x.T @ y).numpy(), expected)


def refused(kind: type[ClosedForm], module: ImageClassifier, **changes: Any) -> str:
    store = Features([20, 40], ALL)
    made = algorithm(kind, store, kind.options(), 2, SingleLabel())
    values = {**vars(made.context), "module": module, **changes}
    with pytest.raises(ValueError, match=kind.__name__) as fault:
        kind.check(RunContext(**values))
    return str(fault.value)


def test_what_has_no_closed_form_is_refused() -> None:
    whole = ImageClassifier(
        nn.Sequential(nn.Conv2d(3, 5, 1), nn.Flatten(), nn.Linear(20, LABELS)),
        task=SingleLabel(),
        input_size=2,
    )
    assert refused(Fed3R, whole) == "Fed3R computes only the last layer: set model.trained to head"
    ends = ImageClassifier(nn.Sequential(nn.Conv2d(3, LABELS, 2)), task=SingleLabel(), input_size=2)
    assert refused(FedNCM, ends).startswith(
        "FedNCM computes a last linear layer, but this network ends in a convolution: choose another"
    )
    assert refused(FedCOF, network(MultiLabel())).endswith("one label each: choose fed3r or fedncm")
    words = "needs each of the 2 users exactly once, with 1 in a round: set"
    assert words in refused(Fed3R, network(SingleLabel()), cohort_size=1, num_rounds=1)


BOUND, WITHOUT = 0.27, 2  # of `private`; the user who leaves


def private_sums(kind: type[ClosedForm], store: Features, *, noisy: bool = False) -> Sums:
    """What is known after the round of all users, who are clipped."""
    users = len(store.user_ids)
    made = algorithm(kind, store, kind.options(), users, SingleLabel(), mechanism=private(users, noisy=noisy))
    state, line = made.round(made.init(0), 0)
    assert line["privacy"]["users"] == np.count_nonzero(np.diff(store.user_offsets))
    assert line["privacy"]["clipping bound"] == BOUND
    return state


@pytest.mark.parametrize("kind", [FedNCM, Fed3R])
def test_without_one_user_the_sums_of_a_private_run_change_by_the_bound(kind: type[ClosedForm]) -> None:
    """All of whose numbers are clipped together: by no more, and with so long features by no less."""
    sizes = [15, 5, 30, 0, 10]
    with_user, without = Features(sizes, ALL), Features(sizes, ALL)
    first = sum(sizes[:WITHOUT])
    gone = slice(first, first + sizes[WITHOUT])
    without.user_ids = [user for n, user in enumerate(with_user.user_ids) if n != WITHOUT]
    without.features = np.delete(with_user.features, gone, 0)
    without.labels = np.delete(with_user.labels, gone, 0)
    without.user_offsets = np.cumsum([0, *(n for u, n in enumerate(sizes) if u != WITHOUT)])
    sums, fewer = private_sums(kind, with_user), private_sums(kind, without)
    change = math.sqrt(
        sum(float((sums[name] - fewer[name]).square().sum()) for name in fewer if name != NOISE)
    )
    assert BOUND * (1 - 2**-13) < change <= BOUND
    with_user.features[gone] = np.nan
    refused = private_sums(kind, with_user)
    assert all(torch.equal(refused[name], fewer[name]) for name in fewer if name != NOISE), "counts as zero"


@pytest.mark.parametrize("kind", [FedNCM, Fed3R])
def test_a_private_head_is_that_of_noisy_sums(kind: type[ClosedForm]) -> None:
    store = Features([20, 10, 30], ALL)
    exact, noisy = private_sums(kind, store), private_sums(kind, store, noisy=True)
    deviation = float(noisy[NOISE])
    noise = torch.cat([(noisy[name] - exact[name]).flatten() for name in exact if name != NOISE])
    # The deviation of n draws is within 5 / sqrt(2 n) of theirs, but for one draw in a million.
    assert float(noise.square().mean().sqrt()) == pytest.approx(deviation, rel=5 / math.sqrt(2 * len(noise)))
    made = algorithm(kind, store, kind.options(), 3, SingleLabel(), mechanism=private(3))
    weight, bias = made.head(noisy)
    assert made.bytes(noisy) == made.bytes(made.zeros())
    if kind is FedNCM:
        near(weight.numpy(), (noisy["sums"] / noisy["sums"].norm(dim=1, keepdim=True)).numpy())
        return
    gram = noisy["gram"].numpy()
    values, vectors = np.linalg.eigh((gram + gram.T) / 2)
    assert values[0] < 0, "noise made it something that no features have"
    inverse = (
        vectors @ np.diag(1 / (np.maximum(values, 0) + deviation * math.sqrt(2 * len(gram)))) @ vectors.T
    )
    solution = inverse @ noisy["cross"].numpy()
    solution /= np.linalg.norm(solution[:-1], axis=0)
    near(np.concatenate([weight.T.numpy(), bias[None].numpy()]), solution)


def test_the_default_ridge_is_the_largest_eigenvalue_of_noise() -> None:
    """The eigenvalue's relative spread is of the order of n^(-2/3)."""
    noise = 3 * np.random.default_rng(0).normal(size=(400, 400))
    largest = np.linalg.eigvalsh((noise + noise.T) / 2)[-1]
    assert largest_of_noise(3, 400) == pytest.approx(largest, rel=5 * 400 ** (-2 / 3))
