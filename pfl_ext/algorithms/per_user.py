"""How a model does on each user by itself, and after it was fine-tuned on part of that user's images.

Shape letters: U users, N images, K classes, M images that are scored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pfl.internal import ops
from pfl.internal.ops.selector import get_default_framework_module as get_ops
from pfl.metrics import Metrics, MetricValue, StringMetricName

from pfl_ext.data.federated_dataset import Annotations, ByteArray, ImageStore, IntArray, UserImages
from pfl_ext.data.sampling import LocalSampling
from pfl_ext.data.schedule import longest_first
from pfl_ext.engine.training import PerVariableClippedSGD
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.randomness import stream
from pfl_ext.tasks.task import Task
from pfl_ext.workers.distributed import begin_work

FloatArray = npt.NDArray[np.float64]
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
BEFORE, AFTER = StringMetricName("before"), StringMetricName("after")


def per_user_scores(
    task: Task, predictions: npt.NDArray[Any], annotations: Any, offsets: IntArray
) -> dict[str, FloatArray]:
    """The columns that a task has for one user, each ``[U]``.

    Args:
        task: whose predictions these are.
        predictions: ``[N, ...]`` as `Task.scored` makes them, a user's rows contiguous.
        annotations: ``[N, ...]`` as a store holds them.
        offsets: ``[U + 1]``: user u has the rows ``offsets[u]:offsets[u + 1]``, at least one.
    """
    users = [
        task.user_columns(torch.from_numpy(predictions[start:stop]), annotations[start:stop])
        for start, stop in itertools.pairwise(offsets.tolist())
    ]
    return {name: np.array([columns[name] for columns in users]) for name in users[0]}


def quantiles(values: FloatArray) -> dict[str, float]:
    """Number, mean and `QUANTILES` (interpolated) of the values that are numbers; only ``n`` if none."""
    known = values[~np.isnan(values)]
    if not len(known):
        return {"n": 0}
    places = {f"q{100 * q:g}": float(v) for q, v in zip(QUANTILES, np.quantile(known, QUANTILES))}
    return {"n": len(known), "mean": float(known.mean()), **places}


def spread(values: FloatArray, sizes: IntArray | None = None, shares: bool = False) -> dict[str, float]:
    """How a column differs over users, each of whom counts once, whatever its size.

    Scores of few images differ by chance alone. A user who is right with probability p on n images has a
    share a of right ones with the variance p (1 - p) / n, of which a (1 - a) / (n - 1) is an estimate without
    bias. ``variance without noise`` is the variance of the U users' p, estimated without bias as

        Var(a) - (1 - 1 / U) mean(a (1 - a) / (n - 1)),   Var(a) = mean (a - mean a)^2,

    over the users with two images or more. It may come out below 0, and then says that nothing but chance is
    seen.

    Args:
        values: ``[U]``, NaN for a user of whom the column says nothing, and who is left out.
        sizes: ``[U]``, on how many images each value rests; None: not known.
        shares: whether each value is the share, in percent, of the user's images that were right.

    Returns:
        ``n``, how many users are counted; without any, nothing else. ``mean``, ``std`` (of these users, not
        of a population), and ``lowest decile`` and ``highest decile``: the mean over the tenth of the users,
        rounded up, with the lowest values and the highest. With sizes, ``least images``: of the user with the
        fewest. With shares, ``variance without noise`` in squared percent, if two users have two images.
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
    if sizes is not None and shares and (several := counted & (sizes > 1)).sum() > 1:
        a, n = values[several], sizes[several]
        noise = (a * (100 - a) / (n - 1)).mean()
        found["variance without noise"] = a.var() - (1 - 1 / len(a)) * noise
    rounded = {name: round(float(value), 4) for name, value in found.items()}
    least = {} if sizes is None else {"least images": int(sizes[counted].min())}
    return {"n": len(known), **rounded, **least}


def spreads_by_group(
    users: Sequence[str],
    trained: Collection[str],
    sizes: IntArray,
    columns: Mapping[str, FloatArray],
    shares: Collection[str] = (),
) -> dict[str, Any]:
    """`spread` of users who have training images, ``seen``, and of others, ``new``, for ``results.json``.

    Args:
        users: ids, ``[U]``.
        trained: ids of the users with training images.
        sizes: ``[U]``, images on which each is scored.
        columns: each ``[U]``, of one model.
        shares: the columns that are shares of images.

    Returns:
        By group ``users``, ``images``, ``least images``, and as ``server`` the model's ``users`` by column,
        in the form that scores on users' own images have. A group without users is left out.
    """
    seen, found = np.array([user in trained for user in users], bool), dict[str, Any]()
    for group, members in (("seen", seen), ("new", ~seen)):
        if members.any():
            own = sizes[members]
            of_users = {
                name: spread(values[members], own, name in shares) for name, values in columns.items()
            }
            found[group] = {
                "users": int(members.sum()),
                "images": int(own.sum()),
                "least images": int(own.min()),
                "server": {"users": of_users},
            }
    return found


def user_split(user_id: str, num_images: int, share: float, seed: int) -> tuple[IntArray, IntArray]:
    """Positions of a user's images to fine-tune on, and those to score; ascending, disjoint, neither empty.

    A function of (seed, user) alone, so every model and every run is scored on the same images.
    ``share``: the part to fine-tune on, rounded to the nearest image. Needs at least two images.
    """
    assert num_images >= 2
    count = min(max(round(num_images * share), 1), num_images - 1)
    order = stream(seed, "personal split", user_id).permutation(num_images).astype(np.int64)
    return np.sort(order[:count]), np.sort(order[count:])


@dataclass(frozen=True)
class Personalisation:
    """How a model is fine-tuned on a user: SGD over so many epochs; gradients clipped for each variable."""

    sampling: LocalSampling
    learning_rate: float
    max_grad_norm: float | None
    train_share: float
    min_images: int
    split_seed: int


@dataclass(frozen=True)
class PersonalScores:
    """The task's statistics of the held-out images before and after each user's fine-tuning, over M rows."""

    users: Sequence[str]  # [U]
    offsets: IntArray  # [U + 1] into M
    trained_on: IntArray  # [U] images
    before: Any
    after: Any


def users_with(store: ImageStore, min_images: int) -> IntArray:
    """The numbers of the users who have at least so many images, and at least two.

    Raises:
        ValueError: when there is none.
    """
    sizes = np.diff(store.user_offsets)
    chosen = np.flatnonzero(sizes >= max(min_images, 2)).astype(np.int64)
    if not len(chosen):
        raise ValueError(
            f"no user of this split has {min_images} images: lower personal.min_images below "
            f"{int(sizes.max()) + 1}"
        )
    return chosen


def personalise(module: ImageClassifier, store: ImageStore, tuning: Personalisation) -> PersonalScores:
    """Fine-tune a copy of the model for every user of a split with enough images, and score both.

    Each worker takes its share of the users, dealt by their images, and has the scores of all at the end. The
    module is left as it was. Randomness is a function of (``split_seed``, user), so that the number of
    workers changes nothing.

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
            scored = partial(_statistics, module, num_rows, rows, images, annotations)
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
    collate = module.task.collate
    rng = stream(tuning.split_seed, "personal training", name)
    user = UserImages(*data, name, tuning.sampling, rng, collate)
    for _ in range(tuning.sampling.num_epochs):
        for batch in user.iter(tuning.sampling.batch_size):
            optimizer.zero_grad()
            module.loss(*(part.to(device) for part in batch)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


@torch.no_grad()
def _statistics(
    module: ImageClassifier,
    num_rows: int,
    rows: IntArray,
    images: ByteArray,
    annotations: Annotations,
    batch_size: int = 256,
) -> MetricValue:
    """The task's statistics of one user's held-out images."""
    device, predictions = module.mean.device, []
    for i in range(0, len(images), batch_size):
        pixels, targets = torch.from_numpy(images[i : i + batch_size]), annotations[i : i + batch_size]
        outputs, compared = module.outputs(pixels.to(device), module.task.collate(targets).to(device))
        predictions.append(module.task.scored(outputs.cpu(), compared.cpu())[1])
    return module.task.statistics(num_rows, rows, predictions, [annotations])


def shot_table(
    ap: Mapping[str, float], positives: Mapping[str, int], train_counts: IntArray, few_below: int
) -> dict[str, dict[str, float | int | None]]:
    """C-AP of the classes by training images: zero, few (fewer than ``few_below``) and many.

    It is in the unit of ``ap``, over the classes with a positive in the evaluated split (others have no AP);
    None where there are none. ``ap``, ``positives`` and ``train_counts`` ``[K]`` are in one order.
    """
    values, present = np.fromiter(ap.values(), float), np.fromiter(positives.values(), int) > 0
    zero, few = train_counts == 0, train_counts < few_below
    out: dict[str, dict[str, float | int | None]] = {}
    for name, group in {"zero": zero, "few": few & ~zero, "many": ~few}.items():
        scored = group & present
        mean = float(values[scored].mean()) if scored.any() else None
        out[name] = {"classes": int(group.sum()), "evaluated": int(scored.sum()), "C-AP": mean}
    return out
