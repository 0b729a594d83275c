"""Image owners from the CSVs of the federated vision data sets, and as partitions of a file.

Google's federated-vision-datasets give a file for each way to deal the training images, with the columns
``user_id,image_id,class``, and ``test.csv`` with ``image_id,class``; TensorFlow Federated's iNaturalist has
one file with a column of user ids for each way, where ``NA`` means that none of its users has the image.
Ids are strings, whatever they look like. Shape letters: M rows of a CSV, N images of a split, V users.
"""

from __future__ import annotations

import hashlib
import io
import re
import unicodedata
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataset.arrays import IntArray
from dataset.files import utf8
from dataset.store.annotations import MAX_LABELS, offsets_of
from dataset.store.index import PartitionIndex
from dataset.tables import rows_of

NOBODY = "NA"
TRAIN_CSV, TEST_CSV = re.compile(r"federated_train.*\.csv"), "test.csv"
MAX_CSV_BYTES = 1 << 28
MAX_ROWS = 1 << 24


@dataclass(frozen=True)
class Listing:
    """The rows of one CSV, M long each; ``users`` is empty for a test set."""

    origin: str
    image_ids: list[str]
    classes: IntArray
    users: Mapping[str, list[str]]  # by partition
    labels: list[str] | None = None  # the source's own, where the CSV has a column for them


def partition_name(file_name: str) -> str:
    """``federated_train_alpha_0.50.csv`` -> ``alpha-0.50``; ``federated_train.csv`` -> ``users``."""
    stem = Path(file_name).name.removesuffix(".csv").removeprefix("federated_train")
    return stem.strip("_").replace("_", "-") or "users"


def read_listing(text: str, origin: str, user_columns: Mapping[str, str]) -> Listing:
    """Parse a CSV.

    Args:
        text: the CSV.
        origin: its name in an error.
        user_columns: maps a column of user ids to the name of the partition.

    Raises:
        ValueError: for a missing column, a row of another length, an empty id, a class that is no number from
            0 to `MAX_LABELS` - 1, and an image that occurs twice; the message names file and line.
    """
    ids: list[str] = []
    classes: list[int] = []
    labels: list[str] = []
    users: dict[str, list[str]] = {name: [] for name in user_columns.values()}
    for where, row in csv_rows(text, origin, ["image_id", "class", *user_columns], user_columns):
        if not all(row[column] for column in ("image_id", *user_columns)):
            raise ValueError(f"{where} has an empty id; download the file again")
        if not (row["class"].isascii() and row["class"].isdigit() and len(row["class"]) < 6):
            raise ValueError(
                f"{where} has the class {row['class']!r}, which is not a whole number of at least 0"
            )
        if int(row["class"]) >= MAX_LABELS:
            raise ValueError(
                f"{where} has the class {row['class']}, but class numbers go from 0 to {MAX_LABELS - 1}: use "
                "lists with fewer classes"
            )
        ids.append(row["image_id"])
        classes.append(int(row["class"]))
        labels += [row["label"]] if "label" in row else []
        for column, name in user_columns.items():
            users[name].append(row[column])
    return Listing(origin, ids, np.array(classes, np.int64), users, labels or None)


def csv_rows(
    text: str, origin: str, needed: Sequence[str], users: Collection[str] | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """The rows of a CSV by column, each with the words that say where it stands.

    Names of users are those of Unicode's NFC, so that one name is one user however it is typed.

    Args:
        text: the CSV.
        origin: what it is called in an error.
        needed: the columns that it must have; ``image_id`` is one of them.
        users: the columns of users; None: those whose names begin with user.

    Raises:
        ValueError: that names file and line, as `rows_of`, and for an image that comes twice, and white space
            around an image id or a user.
    """
    seen: dict[str, int] = {}
    for line, row in rows_of(io.StringIO(text, newline=""), origin, needed):
        where = f"{origin}, line {line}"
        owners = [name for name in row if name.startswith("user")] if users is None else users
        for name in ("image_id", *owners):
            if row[name] != row[name].strip():
                raise ValueError(f"{where} has white space around the {name} {row[name]!r}: remove it")
            if name != "image_id":  # whose name is that of a file
                row[name] = unicodedata.normalize("NFC", row[name])
        first = seen.setdefault(row["image_id"], line)
        if first != line:
            raise ValueError(
                f"{where} has image {row['image_id']} a second time (line {first}): remove one of "
                "the two lines"
            )
        yield where, row


def rows_digest(listing: Listing, name: str) -> str:
    """SHA-256 over who owns which image in a partition; line ends and the order of the rows do not matter."""
    columns = zip(listing.users[name], listing.image_ids, listing.classes.tolist())
    rows = sorted(f"{user},{image},{label}\n" for user, image, label in columns)
    return hashlib.sha256("".join(rows).encode()).hexdigest()


def partition_of(listing: Listing, name: str, row_of: Mapping[str, int]) -> PartitionIndex:
    """One of a listing's partitions on the rows of a split; images that are not in ``row_of`` are left out.

    Users are sorted by id (numbers by value), and a user's images by row, so that the order of the CSV does
    not matter. A user whose images are all missing is left out.
    """
    pairs = [
        (user, row_of[image])
        for user, image in zip(listing.users[name], listing.image_ids)
        if user != NOBODY and image in row_of
    ]
    if not pairs:
        raise ValueError(
            f"none of the images in {listing.origin} is in the data set; check that the list belongs to "
            "these images"
        )
    return deal([user for user, _ in pairs], np.array([row for _, row in pairs], np.int64))


def deal(users: Sequence[str], rows: IntArray) -> PartitionIndex:
    """The partition in which ``users[i]`` owns ``rows[i]``, in the order that `partition_of` states."""
    names = sorted(set(users), key=_by_number)
    number = {name: position for position, name in enumerate(names)}
    owner = np.array([number[user] for user in users], np.int64)
    order = np.lexsort((rows, owner))
    offsets = offsets_of(np.bincount(owner, minlength=len(names)))
    return PartitionIndex(names, rows[order], offsets)


def _by_number(user: str) -> tuple[int, str]:
    return (int(user) if user.isascii() and user.isdigit() and len(user) < 19 else 1 << 62, user)


def check_classes(listing: Listing, row_of: Mapping[str, int], classes: IntArray) -> None:
    """Raise ValueError if the listing has an image that is not in the split, or gives one another class."""
    for image, stated in zip(listing.image_ids, listing.classes.tolist()):
        if image not in row_of:
            raise ValueError(f"{listing.origin} has image {image}, which this data set does not have")
        if classes[row_of[image]] != stated:
            raise ValueError(
                f"{listing.origin} says that image {image} has class {stated}, but its class is "
                f"{classes[row_of[image]]}: use splits of this data set (version 1.0 of the CIFAR "
                "splits has wrong image ids: use version 1.1)"
            )


def csv_texts(place: Path) -> dict[str, str]:
    """The CSVs in a folder, at any depth, or in a zip archive, by the last part of their name.

    Raises:
        ValueError: for a damaged archive, a CSV of more than 2^28 bytes or that is not UTF-8, and two of
            the same name.
    """
    found: dict[str, str] = {}

    def put(name: str, content: bytes) -> None:
        if name in found:
            raise ValueError(f"{place} has two files named {name}; give a folder with only one of them")
        found[name] = utf8(content, f"{place}: {name}")

    if place.is_dir():
        for path in sorted(place.rglob("*.csv")):
            _bounded(path, path.stat().st_size)
            put(path.name, path.read_bytes())
        return found
    try:
        with zipfile.ZipFile(place) as archive:
            for member in archive.infolist():
                name = Path(member.filename).name
                if name.endswith(".csv") and "__MACOSX" not in member.filename:
                    _bounded(f"{place}: {name}", member.file_size)
                    put(name, archive.read(member))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{place} is damaged ({error}); delete it and run the command again") from None
    return found


def _bounded(what: Path | str, size: int) -> None:
    if size > MAX_CSV_BYTES:
        raise ValueError(f"{what} has {size:,} bytes; a list of images may have at most {MAX_CSV_BYTES:,}")
