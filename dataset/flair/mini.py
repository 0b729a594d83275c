"""The embedded stand-in for FLAIR: procedurally drawn, with FLAIR's shape at any scale.

    python -m dataset.flair.mini --output_file F [--train_users N] [--image_size S] ...

Shape letters: U users, N images, K coarse labels (17), F fine labels, S side in pixels.

Every user, label and pixel is a pure function of (spec, split, position), drawn with integer hashes
(`dataset.flair.mini_draw`). Pixels use only exactly rounded arithmetic. Sizes and labels also use float64
``log`` and ``exp``: another numpy could change one only where two numbers agree to about 15 digits.

* Images per user: a quantile function Q, piecewise a Pareto law, at the midpoints (i + 1/2) / U. So every
  scale has the same histogram; the largest user grows with U.
* Coarse labels: each image has a number of labels, which it draws without replacement, with odds that depend
  on its user's tastes (Gumbel top-k). The larger a user, the closer its tastes are to the mean. Users in
  order of size take their tastes from a low-discrepancy sequence, so that the few users who own half of the
  images do not decide how frequent a label is.
* Fine labels: each coarse label of an image adds one or more of its own fine labels, long-tailed, often from
  the few that its user favours. As in FLAIR, the fine vocabulary contains the coarse names too.
"""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from dataset.arrays import BoolArray, ByteArray, FloatArray, IntArray
from dataset.cli import OneLineParser, output_file, run
from dataset.flair.mini_draw import COARSE_LABELS, Scene, draw, keyed, uniform
from dataset.journal import only_writer
from dataset.store.annotations import LabelMatrix, offsets_of, positions
from dataset.store.index import SPLITS, DatasetIndex, SplitIndex
from dataset.store.native import Storage
from dataset.store.writer import DataWriter

__all__ = ["COARSE_LABELS", "VERSION", "MiniSpec", "draw_images", "main", "mini_index", "write_mini"]

VERSION = 1
"""Version of the drawn data, to be raised with every change of the images or labels of a spec."""

MAX_COARSE, MAX_FINE = 9, 36
"""The most labels on an image, as in FLAIR."""

_Floats = FloatArray

# Fitted to FLAIR once, at full scale; tests/dataset/flair/test_mini.py holds them to it.
_TAIL = (1.0, 0.5, 0.25, 0.1, 0.023, 0.002, 0.5 / 41131)  # share of users at least as large
_SIZE = (0.45, 1.45, 4.6, 12.86, 37.6, 560.72, 4150.5)  # size there, before rounding up
_LABELS_PER_IMAGE = (
    0.1346157, 0.2867529, 0.3207267, 0.1883552, 0.0580812, 0.0094039, 0.0017982, 0.0002354, 0.0000308,
)  # fmt: skip
_IMAGES = {  # FLAIR's images with each coarse label, of 429,078
    "structure": 228923, "equipment": 225862, "material": 139733, "outdoor": 131322, "plant": 123363,
    "food": 110792, "animal": 68858, "liquid": 68677, "art": 37230, "interior_room": 32042, "light": 11326,
    "recreation": 5651, "celebration": 3769, "fire": 3011, "music": 2571, "games": 1093, "religion": 866,
}  # fmt: skip
_LOG_ODDS = {  # solved for so that the frequencies above come out
    "animal": 1.0491, "art": 0.1584, "celebration": -2.553, "equipment": 3.2775, "fire": -2.7972,
    "food": 1.7997, "games": -3.8493, "interior_room": -0.0388, "light": -1.3229, "liquid": 1.0346,
    "material": 2.2221, "music": -2.959, "outdoor": 2.1082, "plant": 1.9839, "recreation": -2.1005,
    "religion": -2.5549, "structure": 4.5421,
}  # fmt: skip
_TASTE, _OWN_TASTE = 1.12, {"structure": 0.4, "religion": 0.3}  # how far users' log-odds differ, per label
_SIZE_SLOPE = {"structure": -0.3, "religion": -0.1}  # change of log-odds with the log of a user's size
_FINE_RANK, _FINE_MASS = (1, 10, 100, 373, 1628), (110e3, 35e3, 6500, 70, 32)  # images by rank, at full scale
_OWN_NAME = 0.25  # share of the coarse name among its fine labels
_EXTRA_MEAN, _EXTRA_SHAPE = 0.9, 0.38  # further fine labels per coarse label: negative binomial
_FAVOURED, _FAVOURITES = 0.4, 0.25  # share of fine labels among a user's favourites; favourites per image


@dataclass(frozen=True)
class MiniSpec:
    """What to draw. The defaults are FLAIR's own users. Raises ValueError if a value is out of range.

    Attributes:
        train_users, val_users, test_users: U of each split, at least 1.
        image_size: S in pixels, at least 8. The same image at another size shows the same scene.
        seed: the seed of all draws.
        num_fine_labels: F, at least the 17 coarse names.
        max_user_images: most images of a user; None: no limit (4,151 with FLAIR's users).
        size_factor: multiplies every user's number of images, rounded up.
        difficulty: scales specks, grain and exposure of the images, 0 to 1; labels do not depend on it.
        coarse_labels: number of labels of each image, 1 to 9; None: as in FLAIR. 1 makes a single-label data
            set, which may lack a label at a small scale.
    """

    train_users: int = 41131
    val_users: int = 5141
    test_users: int = 5142
    image_size: int = 32
    seed: int = 0
    num_fine_labels: int = 1628
    max_user_images: int | None = None
    size_factor: float = 1.0
    difficulty: float = 1.0
    coarse_labels: int | None = field(default=None, repr=False)  # the repr names files

    def __post_init__(self) -> None:
        ranges = dict.fromkeys(("train_users", "val_users", "test_users", "max_user_images"), (1, 10**8))
        ranges |= {"image_size": (8, 4096), "seed": (0, 2**63 - 1), "coarse_labels": (1, MAX_COARSE)}
        ranges |= {"num_fine_labels": (len(COARSE_LABELS), 65535)}
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} is {value}; give {low} to {high}")
        if not 0 < self.size_factor <= 1000:
            raise ValueError(f"size_factor is {self.size_factor}; give a number above 0 and at most 1000")
        if not 0 <= self.difficulty <= 1:
            raise ValueError(f"difficulty is {self.difficulty}; give a number from 0 to 1")

    def users(self, split: str) -> int:
        """U of a split."""
        return int(getattr(self, f"{split}_users"))


def mini_index(spec: MiniSpec) -> DatasetIndex:
    """Users, images and labels of the whole data set; no pixels. Full scale takes a few seconds."""
    fine = _fine_vocabulary(spec.num_fine_labels)
    return DatasetIndex(
        splits={split: _split(spec, split, fine) for split in SPLITS},
        label_mappings={
            "labels": {name: column for column, name in enumerate(COARSE_LABELS)},
            "fine_grained_labels": {name: column for column, name in enumerate(fine.names)},
        },
        provenance={
            "source": "mini",
            "description": "procedurally drawn stand-in for FLAIR; not FLAIR's images",
            "revision": f"dataset.flair.mini version {VERSION}",
            "spec": asdict(spec),
        },
    )


def draw_images(spec: MiniSpec, index: DatasetIndex, split: str, rows: IntArray) -> ByteArray:
    """Images of the given rows, ``[len(rows), S, S, 3]`` uint8 RGB.

    A row's pixels depend only on (spec, split, row), and not on other rows or their order. ``index`` is the
    `mini_index` of the spec.
    """
    return draw(scene_of(spec, index, split, np.asarray(rows, np.int64)), spec.image_size, spec.difficulty)


def scene_of(spec: MiniSpec, index: DatasetIndex, split: str, rows: IntArray) -> Scene:
    """What the images of these rows show."""
    table, code = index.splits[split], SPLITS.index(split)
    fine, users = table.labels["fine_grained_labels"], table.user_index[rows]
    names = index.label_mappings["fine_grained_labels"]
    parents = np.array([COARSE_LABELS.index(name.split("/")[0]) for name in names])
    looks = keyed(0, "look", [zlib.crc32(name.encode()) for name in names])  # the same in every data set
    marks = fine.take(rows)
    return Scene(
        image_keys=keyed(spec.seed, "image", code, rows),
        user_keys=keyed(spec.seed, "user", code, users),
        mark_image=np.repeat(np.arange(len(rows)), np.diff(marks.indptr)),
        mark_coarse=parents[marks.indices],
        mark_fine=looks[marks.indices],
    )


def _split(spec: MiniSpec, split: str, fine: _Vocabulary) -> SplitIndex:
    code, num_users = SPLITS.index(split), spec.users(split)
    sizes, rank = _sizes(spec, code, num_users)
    user = np.repeat(np.arange(num_users), sizes)
    coarse = _coarse_labels(spec, code, sizes, rank)
    image, label = np.nonzero(coarse)
    name = [f"{split}-{u:05d}" for u in range(num_users)]
    return SplitIndex(
        user_ids=name,
        user_offsets=offsets_of(sizes),
        user_index=user.astype(np.int32),
        image_ids=[f"{name[u]}-{i:04d}" for u, i in zip(user.tolist(), positions(sizes).tolist())],
        annotations={
            "labels": LabelMatrix.from_pairs(image, label, len(user), len(COARSE_LABELS)),
            "fine_grained_labels": _fine_labels(spec.seed, code, sizes, coarse, fine),
        },
    )


def _sizes(spec: MiniSpec, code: int, num_users: int) -> tuple[IntArray, IntArray]:
    """Images of each user, and each user's place in descending order of size, both ``[U]``."""
    share = (np.arange(num_users) + 0.5) / num_users
    quantile = np.exp(np.interp(-np.log(share), -np.log(_TAIL), np.log(_SIZE)))
    descending = np.maximum(1, np.ceil(quantile * spec.size_factor)).astype(np.int64)
    if spec.max_user_images is not None:
        descending = np.minimum(descending, spec.max_user_images)
    rank = np.argsort(np.argsort(keyed(spec.seed, "size", code, np.arange(num_users))))
    return descending[rank], rank


def _coarse_labels(spec: MiniSpec, code: int, sizes: IntArray, rank: IntArray) -> BoolArray:
    """Which coarse labels each image has, ``[N, K]``."""
    seed, log_weights = spec.seed, _log_weights(spec.seed, code, sizes, rank)
    num_images, num_labels = int(sizes.sum()), len(COARSE_LABELS)
    image, column = np.arange(num_images), np.arange(num_labels)
    bounds = np.cumsum(_LABELS_PER_IMAGE)[:-1]
    many = 1 + np.searchsorted(bounds, uniform(keyed(seed, "labels per image", code, image)))
    luck = -np.log(-np.log(uniform(keyed(seed, "coarse label", code, image[:, None], column))))
    luck += np.repeat(log_weights, sizes, axis=0)
    if spec.coarse_labels is not None:
        many = np.full(num_images, spec.coarse_labels)
    labels = luck >= np.sort(luck, axis=1)[image, num_labels - many][:, None]
    return labels if spec.coarse_labels is not None else _with_every_label(seed, code, labels)


def _log_weights(seed: int, code: int, sizes: IntArray, rank: IntArray) -> _Floats:
    """Each user's log-odds of the coarse labels, ``[U, K]``."""
    primes = np.array([2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59])
    start = uniform(keyed(seed, "taste", code, np.arange(len(COARSE_LABELS))))
    place = rank[:, None] * np.sqrt(primes) + start
    place = 0.01 + 0.98 * (place - np.floor(place))
    taste = np.array([_OWN_TASTE.get(name, _TASTE) for name in COARSE_LABELS])
    slope = np.array([_SIZE_SLOPE.get(name, 0.0) for name in COARSE_LABELS])
    odds = np.array([_LOG_ODDS[name] for name in COARSE_LABELS])
    size = sizes[:, None].astype(np.float64)
    tilt = taste * np.log(place / (1 - place)) / np.sqrt(1 + size / 500)
    log_weights: _Floats = odds + slope * np.log(size) + tilt
    return log_weights


def _with_every_label(seed: int, code: int, labels: BoolArray) -> BoolArray:
    """Give a label that no image has to an image with room for it: small scales keep all 17 labels."""
    for column in np.flatnonzero(~labels.any(axis=0)):
        room = np.flatnonzero(labels.sum(axis=1) < min(MAX_COARSE, 1 + int(labels.sum(axis=1).min())))
        if len(room):
            labels[room[np.argmin(keyed(seed, "missing label", code, column, room))], column] = True
    return labels


@dataclass(frozen=True)
class _Vocabulary:
    names: list[str]  # [F], alphabetical
    parents: IntArray  # [F]: the coarse label that each belongs to; never decreasing
    cumulative: _Floats  # [F]: column of the coarse label plus the share of its fine labels up to this one


def _fine_vocabulary(num_fine: int) -> _Vocabulary:
    """F fine labels: the coarse names, and the rest divided by how many images a coarse label has left.

    The frequencies follow FLAIR's: a slow fall over the first hundred, a steep one to rank 373 (1,255 of
    1,628 labels are on fewer than 0.1 % of the users), then a long tail.
    """
    total = np.array([_IMAGES[name] for name in COARSE_LABELS], np.float64)
    rank = (np.arange(num_fine - len(total)) + 1) * (1628 / num_fine)
    mass = np.exp(np.interp(np.log(rank), np.log(_FINE_RANK), np.log(_FINE_MASS)))
    base = _OWN_NAME * total
    left = (total - base) * (mass.sum() / (total - base).sum() if len(mass) else 1.0)
    shares = [
        [(name, float(base[k] / (total[k] - base[k]) * left[k]))] for k, name in enumerate(COARSE_LABELS)
    ]
    digits = max(3, len(str(num_fine)))
    for amount in mass.tolist():
        k = int(np.argmax(left))
        left[k] -= amount
        shares[k].append((f"{COARSE_LABELS[k]}/{len(shares[k]):0{digits}d}", amount))
    sums = [np.cumsum([amount for _, amount in part]) for part in shares]
    return _Vocabulary(
        [name for part in shares for name, _ in part],
        np.repeat(np.arange(len(shares)), [len(part) for part in shares]),
        np.concatenate([k + part / part[-1] for k, part in enumerate(sums)]),
    )


def _fine_labels(seed: int, code: int, sizes: IntArray, coarse: BoolArray, fine: _Vocabulary) -> LabelMatrix:
    """The fine labels of each image: for every coarse label it has, at least one that belongs to it."""
    image, parent = np.nonzero(coarse)
    extra = np.searchsorted(_extra_bounds(), uniform(keyed(seed, "fine labels", code, image, parent)))
    number = positions(1 + extra)
    image, parent = np.repeat(image, 1 + extra), np.repeat(parent, 1 + extra)
    user = np.repeat(np.arange(len(sizes)), sizes)[image]
    place = uniform(keyed(seed, "fine label", code, image, parent, number))
    kept = uniform(keyed(seed, "favoured", code, image, parent, number)) / _FAVOURED
    favourite = np.floor(kept * (1 + _FAVOURITES * sizes[user]))
    favoured = uniform(keyed(seed, "favourite", code, user, parent, favourite))
    place = np.where(kept < 1, favoured, place)
    column = np.searchsorted(fine.cumulative, parent + place).clip(0, len(fine.names) - 1)
    column = np.where(fine.parents[column] == parent, column, np.searchsorted(fine.parents, parent))
    # First every coarse label's first pick, then the others: the cap must leave each coarse label one.
    order = np.lexsort((number > 0, image))
    first = np.searchsorted(image[order], image[order])
    order = order[np.arange(len(order)) - first < MAX_FINE]
    return LabelMatrix.from_pairs(image[order], column[order], len(coarse), len(fine.names))


def _extra_bounds() -> _Floats:
    """Cumulative probabilities of 0, 1, ... further fine labels (negative binomial, at most 30)."""
    chance, mass = _EXTRA_MEAN / (_EXTRA_MEAN + _EXTRA_SHAPE), [1.0]
    for count in range(1, 31):
        mass.append(mass[-1] * chance * (count - 1 + _EXTRA_SHAPE) / count)
    return (np.cumsum(mass) / sum(mass))[:-1]


def write_mini(
    path: Path, spec: MiniSpec, storage: Storage = "raw", index: DatasetIndex | None = None
) -> None:
    """Draw the data set into one HDF5 file (`dataset.store.hdf5`); memory stays small at any scale.

    ``jpeg`` storage (quality 95) draws everything twice, since the file needs the lengths beforehand.
    ``index`` is the `mini_index`, possibly with more annotations.

    Raises:
        OSError: if the disk is full.
    """
    index, raw = index or mini_index(spec), storage == "raw"

    def drawn(split: str, rows: IntArray) -> ByteArray | list[bytes]:
        images = draw_images(spec, index, split, rows)
        return images if raw else _jpegs(images)

    lengths = {name: np.zeros(split.num_images, np.int64) for name, split in index.splits.items()}
    for split, rows in () if raw else _batches(index, spec, "measuring"):
        lengths[split][rows] = [len(image) for image in drawn(split, rows)]
    with DataWriter(
        path,
        index,
        storage=storage,
        image_bytes=None if raw else lengths,
        image_size=spec.image_size if raw else None,
    ) as writer:
        for split, rows in _batches(index, spec, "drawing"):
            writer.write(split, rows, drawn(split, rows))


def _jpegs(images: ByteArray) -> list[bytes]:
    out = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=95)
        out.append(buffer.getvalue())
    return out


def _batches(index: DatasetIndex, spec: MiniSpec, title: str) -> Iterator[tuple[str, IntArray]]:
    """Rows in order, some megabytes of pixels at a time, with a progress bar on a terminal."""
    step = max(1, (1 << 22) // spec.image_size**2)
    total = sum(split.num_images for split in index.splits.values())
    with tqdm(total=total, desc=title, unit="images", unit_scale=True, disable=None) as bar:
        for name, split in index.splits.items():
            for start in range(0, split.num_images, step):
                rows = np.arange(start, min(start + step, split.num_images))
                yield name, rows
                bar.update(len(rows))


def main(argv: Sequence[str]) -> None:
    """Draw a stand-in for FLAIR, with its shape, into one HDF5 file."""
    parser = OneLineParser(prog="python -m dataset.flair.mini", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--output_file", type=Path, required=True, help="the HDF5 file to write")
    parser.add_argument("--storage", choices=("jpeg", "raw"), default="raw")
    for entry in fields(MiniSpec):
        kind, default = type(entry.default or 0), entry.default
        parser.add_argument(f"--{entry.name}", type=kind, default=default, help=f"default {default}")
    options = vars(parser.read(argv))
    path, storage = output_file("--output_file", options.pop("output_file")), options.pop("storage")
    with only_writer(path):
        write_mini(path, MiniSpec(**options), storage)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(run(main))
