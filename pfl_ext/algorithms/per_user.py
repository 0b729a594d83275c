"""Scores of a model on each user alone, before and after fine-tuning on part of that user's images.

Shape letters: U users, N images, K classes, M images that are scored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pfl.internal import ops
from pfl.internal.ops.selector import get_default_framework_module as get_ops
from pfl.metrics import Metrics, MetricValue, StringMetricName
from torch import Tensor

from dataset.arrays import ByteArray, FloatArray, IntArray
from pfl_ext.data.federated_dataset import ImageStore
from pfl_ext.data.sampling import LocalSampling
from pfl_ext.data.schedule import longest_first
from pfl_ext.data.user_images import Annotations, UserImages
from pfl_ext.engine.training import PerVariableClippedSGD
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.randomness import stream
from pfl_ext.tasks.task import Task, WeightedTask
from pfl_ext.workers.distributed import begin_work

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
BEFORE, AFTER = StringMetricName("before"), StringMetricName("after")


def per_user_scores(
    task: Task, predictions: npt.NDArray[Any], annotations: Any, offsets: IntArray
) -> dict[str, FloatArray]:
    """A task's scores of each user (`Task.user_columns`), as columns of shape ``[U]``.

    Args:
        task: the task of the predictions.
        predictions: ``[N, ...]`` from `Task.scored`, with each user's rows together.
        annotations: ``[N, ...]`` as a store holds them.
        offsets: ``[U + 1]``. User u has the rows ``offsets[u]:offsets[u + 1]``, at least one.
    """
    users = [
        task.user_columns(torch.from_numpy(predictions[start:stop]), annotations[start:stop])
        for start, stop in itertools.pairwise(offsets.tolist())
    ]
    return {name: np.array([columns[name] for columns in users]) for name in users[0]}


def quantiles(values: FloatArray) -> dict[str, float]:
    """Number, mean and `QUANTILES` (interpolated) of the values that are not NaN; only ``n`` if all are."""
    known = values[~np.isnan(values)]
    if not len(known):
        return {"n": 0}
    places = {f"q{100 * q:g}": float(v) for q, v in zip(QUANTILES, np.quantile(known, QUANTILES))}
    return {"n": len(known), "mean": float(known.mean()), **places}


def spread(values: FloatArray, sizes: IntArray, shares: bool = False) -> dict[str, float]:
    """How a column varies over users. Each user counts once, however many images it has.

    Scores on few images vary by chance. If a user's images are right with probability p, the share a of n
    images that are right has the variance p (1 - p) / n. An unbiased estimate of it is a (1 - a) / (n - 1).
    ``variance without noise`` is an unbiased estimate of the variance of p over the U users,

        Var(a) - (1 - 1 / U) mean(a (1 - a) / (n - 1)),   Var(a) = mean (a - mean a)^2,

    over users with at least two images. A result below 0 means that no more than chance is seen.

    Args:
        values: ``[U]``; NaN for a user without a score, who is left out.
        sizes: ``[U]``, the number of images behind each value.
        shares: whether each value is the share, in percent, of the user's images that were right.

    Returns:
        ``n``, the number of users that count; nothing else if it is 0. ``mean`` and ``std`` (of these users,
        not of a population). ``lowest decile`` and ``highest decile``: the means over the tenth of the users,
        rounded up, with the lowest and the highest values. ``least images``, the smallest of their sizes.
        With shares, ``variance without noise`` in squared percent, if two users have two images each.
    """
    counted = ~np.isnan(values)
    known = np.sort(values[counted])
    if not len(known):
        return {"n": 0}
    tenth = math.ceil(len(known) / 10)
    found = {
        "mean": known.mean(),
        "std": known.std(),
        "lowest decile": known[:tenth].mean(),
        "highest decile": known[-tenth:].mean(),
    }
    if shares and (several := counted & (sizes > 1)).sum() > 1:
        a, n = values[several], sizes[several]
        noise = (a * (100 - a) / (n - 1)).mean()
        found["variance without noise"] = a.var() - (1 - 1 / len(a)) * noise
    rounded = {name: round(float(value), 4) for name, value in found.items()}
    return {"n": len(known), **rounded, "least images": int(sizes[counted].min())}


def spreads_by_group(
    users: Sequence[str],
    trained: Collection[str],
    sizes: IntArray,
    columns: Mapping[str, FloatArray],
) -> dict[str, Any]:
    """`spread` over users with training images (``seen``) and over others (``new``), for ``results.json``.

    Args:
        users: ids, ``[U]``.
        trained: ids of the users with training images.
        sizes: ``[U]``, the number of images on which each user is scored.
        columns: the model's scores by column, each ``[U]``.

    Returns:
        For each group ``users``, ``images``, ``least images``, and the `spread` of each column under
        ``server``, ``users``: the form of `own_images.Scores.summary`. A group without users is left out.
    """
    seen, found = np.array([user in trained for user in users], bool), dict[str, Any]()
    for group, members in (("seen", seen), ("new", ~seen)):
        if members.any():
            scored = sizes[members]
            of_users = {name: spread(values[members], scored) for name, values in columns.items()}
            found[group] = {
                "users": int(members.sum()),
                "images": int(scored.sum()),
                "least images": int(scored.min()),
                "server": {"users": of_users},
            }
    return found


def user_split(user_id: str, num_images: int, share: float, seed: int) -> tuple[IntArray, IntArray]:
    """Positions of a user's images to fine-tune on, and of those to score: ascending, disjoint, not empty.

    The split is a function of (seed, user) alone, so every model and every run is scored on the same images.
    ``share`` is the part to fine-tune on, rounded to the nearest image. The user needs at least two images.
    """
    assert num_images >= 2
    count = min(max(round(num_images * share), 1), num_images - 1)
    order = stream(seed, "personal split", user_id).permutation(num_images).astype(np.int64)
    return np.sort(order[:count]), np.sort(order[count:])


@dataclass(frozen=True)
class Personalisation:
    """How a model is fine-tuned on a user: by SGD, with the gradient of each variable clipped by itself."""

    sampling: LocalSampling
    learning_rate: float
    max_grad_norm: float | None
    train_share: float
    min_images: int
    split_seed: int


@dataclass(frozen=True)
class PersonalScores:
    """The task's statistics of M held-out images, before and after each user's fine-tuning."""

    users: Sequence[str]  # [U]
    offsets: IntArray  # [U + 1] into M
    trained_on: IntArray  # [U] images
    before: Any
    after: Any


def users_with(store: ImageStore, min_images: int) -> IntArray:
    """The numbers of the users who have at least ``min_images`` images, and at least two.

    Raises:
        ValueError: when there is no such user.
    """
    sizes = np.diff(store.user_offsets)
    chosen = np.flatnonzero(sizes >= max(min_images, 2)).astype(np.int64)
    if not len(chosen):
        raise ValueError(
            f"no user of this split has {min_images} images: lower personal.min_images below "
            f"{int(sizes.max()) + 1}"
        )
    return chosen


def personalise(
    module: ImageClassifier,
    store: ImageStore,
    tuning: Personalisation,
    amp: AbstractContextManager[Any] | None = None,
) -> PersonalScores:
    """Fine-tune a copy of the model for every user of a split with enough images; score model and copy.

    The users are divided among the workers by their images, and every worker has all scores at the end. The
    module is not changed. Randomness is a function of (``split_seed``, user), so that the number of workers
    changes nothing. ``amp``: in this context models are scored, as the split is; they are tuned without.

    Raises:
        ValueError: when no user has ``min_images`` images.
    """
    start = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    device = next(iter(start.values())).device
    sizes, chosen = np.diff(store.user_offsets), users_with(store, tuning.min_images)
    names = [store.user_ids[user] for user in chosen.tolist()]
    parts = [
        user_split(name, int(sizes[user]), tuning.train_share, tuning.split_seed)
        for name, user in zip(names, chosen.tolist())
    ]
    offsets = np.cumsum([0, *(len(held_out) for _, held_out in parts)]).astype(np.int64)
    firsts = store.user_offsets[chosen]
    num_rows, task = int(offsets[-1]), module.task
    nobody = task.statistics(num_rows, np.empty(0, np.int64), [], [store.targets(np.empty(0, np.int64))])
    before, after = nobody, nobody
    workers = get_ops().distributed
    mine = longest_first(sizes[chosen].astype(np.float64), workers.world_size)[workers.global_rank]
    begin_work(personalisation=tuning.split_seed, users=len(chosen))
    try:
        for place in sorted(mine):
            (train, held_out), first = parts[place], int(firsts[place])
            rows = np.arange(offsets[place], offsets[place + 1])
            images, annotations = store.read(first + held_out)
            scored = partial(_statistics, module, num_rows, rows, images, annotations, amp or nullcontext())
            before = before + scored()
            _fine_tune(module, store.read(first + train), names[place], tuning, device)
            after = after + scored()
            module.load_state_dict(start)
    finally:
        module.load_state_dict(start)
    if workers.world_size > 1:
        scores = Metrics([(BEFORE, before), (AFTER, after)])
        scores = ops.all_reduce_metrics(scores)
        before, after = scores[BEFORE], scores[AFTER]
    trained_on = np.asarray([len(train) for train, _ in parts], np.int64)
    return PersonalScores(names, offsets, trained_on, before, after)


def _fine_tune(
    module: ImageClassifier,
    data: tuple[ByteArray, Annotations],
    name: str,
    tuning: Personalisation,
    device: torch.device,
) -> None:
    trainable = [p for p in module.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(trainable, lr=tuning.learning_rate)
    if tuning.max_grad_norm is not None:
        optimizer = PerVariableClippedSGD(trainable, lr=tuning.learning_rate, max_norm=tuning.max_grad_norm)
    (images, annotations), task = data, module.task
    if isinstance(task, WeightedTask):  # FedIR's weights are for users who train together
        annotations = task.alike(annotations)
    rng = stream(tuning.split_seed, "personal training", name)
    user = UserImages(images, annotations, name, tuning.sampling, rng, task.collate)
    for _ in range(tuning.sampling.num_epochs):
        for batch in user.iter(tuning.sampling.batch_size):
            optimizer.zero_grad()
            module.loss(*(part.to(device) for part in batch)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def _statistics(
    module: ImageClassifier,
    num_rows: int,
    rows: IntArray,
    images: ByteArray,
    annotations: Annotations,
    amp: AbstractContextManager[Any],
) -> MetricValue:
    """The task's statistics of one user's held-out images."""
    predictions = [batch for _, batch in scored_in_batches(module, images, annotations, amp)]
    return module.task.statistics(num_rows, rows, predictions, [annotations])


@torch.no_grad()
def scored_in_batches(
    module: ImageClassifier, images: ByteArray, annotations: Annotations, amp: AbstractContextManager[Any]
) -> Iterator[tuple[Tensor, Tensor]]:
    """`Task.scored` of some images on the CPU, batch by batch; ``amp``: the context of the network."""
    device, size = module.mean.device, module.task.scored_together
    for i in range(0, len(images), size):
        pixels, targets = torch.from_numpy(images[i : i + size]), annotations[i : i + size]
        with amp:
            outputs, compared = module.outputs(pixels.to(device), module.task.collate(targets).to(device))
        yield module.task.scored(outputs.float().cpu(), compared.cpu())


def shot_table(
    ap: Mapping[str, float], positives: Mapping[str, int], train_counts: IntArray, few_below: int
) -> dict[str, dict[str, float | int | None]]:
    """C-AP of the classes with zero, few (fewer than ``few_below``) and many training images.

    A class without a positive in the evaluated split has no AP and is left out; C-AP is None where no class
    is left. It has the unit of ``ap``. ``ap``, ``positives`` and ``train_counts`` ``[K]`` have one order.
    """
    values, present = np.fromiter(ap.values(), float), np.fromiter(positives.values(), int) > 0
    zero, few = train_counts == 0, train_counts < few_below
    out: dict[str, dict[str, float | int | None]] = {}
    for name, group in {"zero": zero, "few": few & ~zero, "many": ~few}.items():
        scored = group & present
        mean = float(values[scored].mean()) if scored.any() else None
        out[name] = {"classes": int(group.sum()), "evaluated": int(scored.sum()), "C-AP": mean}
    return out
