"""Data sets that consist of CSVs with image owners, and of archives with these images among many others.

Landmarks needs 184,000 of the 4 million images in 500 archives, iNaturalist 156,000 of those in two. Each
archive is downloaded, checked, reduced to the listed images, and deleted, one after the other. A stopped
command continues within the archive where it stopped.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import urllib.request
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from dataset.cli import SourceError
from dataset.fetch import http
from dataset.fetch.archives import JPEG_SUFFIXES, archive_images
from dataset.fetch.http import below, fetch_checked, remote, retried
from dataset.fetch.members import files_below
from dataset.fetch.source import Shard
from dataset.files import replacing
from dataset.partitions.assignments import (
    NOBODY,
    TEST_CSV,
    TRAIN_CSV,
    Listing,
    csv_texts,
    partition_name,
    read_listing,
)
from dataset.store.annotations import Kind
from dataset.store.columns import schema
from dataset.tables import header_of

OWNERS = {"train": "no-author", "test": "all-test"}
"""The owner of an image whose author is not known."""
SPLITS = "splits"
"""Name of the folder of a download folder into which the CSVs are downloaded."""


@dataclass(frozen=True)
class Archive:
    """An archive of images below a base address, with its MD5 or the place of its MD5."""

    path: str
    md5: str = ""
    md5_path: str = ""


@dataclass(frozen=True)
class ListedSet:
    """A data set: its CSVs, its archives, and how large its images are."""

    name: str
    title: str
    splits_base: str
    splits: tuple[Archive, ...]  # CSVs, or a zip archive of them
    images_base: str
    archives: tuple[Archive, ...]
    natural: str  # the partition by author
    mean_image_bytes: int  # for the disk
    licence: str


@dataclass(frozen=True)
class Lists:
    """The CSVs together: every image with its split and class, and the users of each partition."""

    origin: str
    listings: Sequence[Listing]  # training images; an image may be in several
    test: Listing
    num_classes: int

    @property
    def partition_names(self) -> list[str]:
        """The names of the partitions of all listings."""
        return [name for listing in self.listings for name in listing.users]

    def table(self, natural: str) -> pa.Table:
        """A source's records, a row for each image; its user is that of the partition ``natural``.

        The class number is the annotation ``labels``; the class name of a source that has names is
        ``fine_grained_labels``.
        """
        owner: dict[str, str] = {}
        found: dict[str, tuple[int, str]] = {}
        for listing in self.listings:
            for image, k, name in zip(listing.image_ids, listing.classes.tolist(), self._names(listing)):
                if found.setdefault(image, (k, name))[0] != k:
                    raise ValueError(
                        f"{listing.origin} says that image {image} has class {k}, but another CSV file "
                        f"says {found[image][0]}; use CSV files of the same version"
                    )
            authors = zip(listing.image_ids, listing.users.get(natural, ()))
            owner |= {image: user for image, user in authors if user != NOBODY}
        rows = [(owner.get(image, OWNERS["train"]), image, "train", *label) for image, label in found.items()]
        test = zip(self.test.image_ids, self.test.classes.tolist(), self._names(self.test))
        for image, k, name in test:
            if image in found:
                raise ValueError(
                    f"image {image} is a training image but is also in {self.test.origin}; download "
                    "both CSV files again"
                )
            rows.append((OWNERS["test"], image, "test", k, name))
        users, images, splits, classes, names = (list(column) for column in zip(*rows))
        columns = [users, images, splits, [class_name(k, self.num_classes) for k in classes]]
        kinds: dict[str, Kind] = {"labels": "class"}
        if any(listing.labels for listing in (*self.listings, self.test)):
            columns, kinds = [*columns, names], {**kinds, "fine_grained_labels": "class"}
        return pa.table(columns, schema(kinds))

    def _names(self, listing: Listing) -> list[str]:
        return listing.labels or [class_name(k, self.num_classes) for k in listing.classes.tolist()]

    def vocabulary(self, table: pa.Table) -> dict[str, list[str]]:
        """The class names of the annotations of `table`: all class numbers, and the names that occur."""
        found = {"labels": [class_name(number, self.num_classes) for number in range(self.num_classes)]}
        if "fine_grained_labels" in table.schema.names:
            found["fine_grained_labels"] = sorted(set(table["fine_grained_labels"].to_pylist()))
        return found


def class_name(number: int, num_classes: int) -> str:
    """The number with leading zeros, so that alphabetical order is that of the numbers."""
    return f"{number:0{len(str(num_classes - 1))}d}"


def read_lists(place: Path) -> Lists:
    """The CSVs in a folder or zip archive: Google's, or TensorFlow Federated's.

    A training CSV has a column ``user_id``, or one column of users for each partition.

    Raises:
        ValueError: when there is no training CSV or no test CSV, or one is damaged.
    """
    listings: list[Listing] = []
    tests: list[Listing] = []
    for name, text in sorted(csv_texts(place).items()):
        origin = f"{place}: {name}"
        header = header_of(io.StringIO(text, newline=""), origin)
        if TRAIN_CSV.fullmatch(name) or name.endswith(("_train.csv", "_train_split.csv")):
            users = [column for column in header if column not in ("image_id", "class", "label")]
            part = partition_name(name) if TRAIN_CSV.fullmatch(name) else "users"
            columns = {column: column.lower().replace("_", "-") for column in users}
            plain = "user_id" in users or not users
            listings.append(read_listing(text, origin, {"user_id": part} if plain else columns))
        elif name == TEST_CSV or name.endswith("_test.csv"):
            tests.append(read_listing(text, origin, {}))
    if not listings or len(tests) != 1:
        raise ValueError(
            f"{place} has {len(listings)} training CSV files (federated_train*.csv) and {len(tests)} "
            "test CSV files (test.csv); give --splits a folder or zip archive with at least one "
            "training CSV file and exactly one test CSV file"
        )
    highest = max(int(listing.classes.max()) for listing in [*listings, *tests])
    lists = Lists(str(place), listings, tests[0], highest + 1)
    names = lists.partition_names
    if len(set(names)) < len(names):
        raise ValueError(f"{place} has two CSV files of the same partition ({', '.join(names)}); remove one")
    return lists


def fetch_lists(spec: ListedSet, base: str, folder: Path) -> Path:
    """Download the CSVs, or the zip archive of them, and check them; returns where they are."""
    place = folder / SPLITS
    for part in spec.splits:
        fetch_checked(below(base, part.path), place / part.path, "md5", part.md5)
    zipped = [place / part.path for part in spec.splits if part.path.endswith(".zip")]
    return zipped[0] if zipped else place


def remote_shard(archive: Archive, base: str, folder: Path, wanted: Mapping[str, int]) -> Shard:
    """An archive on a server as a shard, which holds only the wanted images once it is fetched.

    The keys of ``wanted`` are the ids of the images. The shard's size is not known beforehand.
    """
    url = below(base, archive.path)
    name = Path(archive.path).name
    digest = hashlib.sha256("\n".join(wanted).encode()).hexdigest()
    kept = folder / f"{name}.{digest[:12]}.kept.tar"

    def get() -> Path:
        if kept.is_file():
            return kept
        whole = folder / name
        fetch_checked(url, whole, "md5", archive.md5 or _announced_md5(archive, base))
        keep(whole, wanted, kept)
        whole.unlink()
        return kept

    return Shard(kept.name, 0, get, f"{url} {digest}")


def _announced_md5(archive: Archive, base: str) -> str:
    """The first word of the file with an archive's MD5, if there should be one."""
    if not archive.md5_path:
        return ""
    url = below(base, archive.md5_path)

    def ask() -> str:
        with urllib.request.urlopen(url, timeout=http.PATIENCE.timeout_s) as answer:
            return str(answer.read(4096).decode("ascii", "replace"))

    words = retried(ask, url).split()
    if not words or len(words[0]) != 32:
        raise SourceError(f"{url} gives no MD5 checksum; run the command again later")
    return words[0].lower()


def keep(archive: Path, wanted: Container[str], target: Path) -> int:
    """Copy the wanted images of an archive to ``target``, which appears when complete; returns their number.

    Raises:
        ValueError: when the archive is damaged.
    """
    count = 0
    with (
        replacing(target) as temporary,
        tarfile.open(temporary, mode="w", format=tarfile.GNU_FORMAT) as output,
    ):
        for name, read in archive_images(archive):
            if name in wanted:
                content = read()
                member = tarfile.TarInfo(f"{name}.jpg")
                member.size = len(content)
                output.addfile(member, io.BytesIO(content))
                count += 1
    return count


def image_files(
    folder: Path,
    wanted: Container[str],
    inside: Container[str] | None = None,
    suffixes: Container[str] = JPEG_SUFFIXES,
) -> dict[str, Path]:
    """Wanted images that are files anywhere below a folder, by id: the name without its last suffix.

    Args:
        folder: the folder to search.
        wanted: the ids.
        inside: names of the folders that may contain images; None: any folder.
        suffixes: suffixes of images, in small letters.

    Raises:
        ValueError: when two files have the same id; links to one file are one.
    """
    found: dict[str, Path] = {}
    for path in files_below(folder):
        is_wanted = path.suffix.lower() in suffixes and path.stem in wanted
        is_wanted = is_wanted and (inside is None or path.parent.name in inside)
        if is_wanted and not (other := found.setdefault(path.stem, path)).samefile(path):  # by no link
            raise ValueError(
                f"two files are named like image {path.stem}, {other} and {path}: if they are the same "
                "photo, delete one; otherwise rename one, also in the annotations and lists"
            )
    return found


def largest(spec: ListedSet, base: str) -> int:
    """Bytes of the largest archive; of many, of the first."""
    asked = spec.archives if len(spec.archives) < 4 else spec.archives[:1]
    return max(remote(below(base, archive.path)).size for archive in asked)
