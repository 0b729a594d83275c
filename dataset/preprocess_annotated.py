"""The command line of data sets with masks or boxes: `dataset.voc`, `dataset.coco`, `dataset.yolo`, ..."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from dataset.cli import input_file, is_address, training_command
from dataset.fetch.annotated import (
    COLUMNS,
    MAX_USERS_BYTES,
    USERS_CSV,
    Annotated,
    Finish,
    Layout,
    Reading,
    Users,
    read_users,
)
from dataset.fetch.archives import IMAGE_SUFFIXES, JPEG_SUFFIXES, ArchiveSource
from dataset.fetch.http import below, fetch_checked, remote
from dataset.fetch.listed import Archive, image_files
from dataset.fetch.mask_values import values_of
from dataset.fetch.members import collected
from dataset.fetch.source import Shard, bytes_to_download, delete_downloads, digest_of
from dataset.journal import only_downloader, only_writer
from dataset.preprocess import UPRIGHT, Options, check_room, checked_places, command_parser, make
from dataset.store.annotations import BACKGROUND
from dataset.store.hdf5 import DataFile
from dataset.store.images import Transcoding

TRAINED_BY: Mapping[str, tuple[str, int, bool]] = {
    "mask": ("segmentation", 3, True),
    "boxes": ("detection", 20, False),
}
"""FedCV's task for each form of annotations; of its usual setting the users in a round, and whether it needs
a file with val."""
FEW_USERS = 20
"""Users who all take part in each round, as FedCV's do."""
NOBODY_KNOWN = (
    "nobody is named who took these images, so one user owns all images of a split: give --users_csv, "
    "or divide them among clients in training, for example with --data.partition iid-clients-10-seed-0"
)


@dataclass(frozen=True)
class AnnotatedSet:
    """A data set.

    Attributes:
        name: of its folder below ``dataset``.
        title: for the help.
        layout: of its lists and annotations.
        licence: of images and annotations of the data set itself.
        classes: the names by which a folder is known to hold the data set; empty where its layout is its own.
        base: the address below which its archives are; empty where there are none to download.
        listing: the archives that hold lists and annotations.
        images: the archives that hold images; the same ones, it may be.
        mean_image_bytes: for the disk.
        bad_boxes: what is done with boxes that reach beyond their image, or are empty: ``fail`` or ``cut``.
        in_archives: the suffixes of images in archives, which may hold masks of the same name, too.
        by_hand: why there is no ``base`` though there are archives.
        val_as: the split that val becomes, ``val`` or ``test``.
    """

    name: str
    title: str
    layout: Layout
    licence: str
    classes: frozenset[str] = frozenset()
    base: str = ""
    listing: tuple[Archive, ...] = ()
    images: tuple[Archive, ...] = ()
    mean_image_bytes: int = 120_000
    bad_boxes: str = "fail"
    in_archives: tuple[str, ...] = JPEG_SUFFIXES
    by_hand: str = "there is no archive of it"
    val_as: str = "val"

    @property
    def archives(self) -> tuple[Archive, ...]:
        """The archives of annotations and images, each once."""
        return tuple(dict.fromkeys((*self.listing, *self.images)))

    def licence_of(self, classes: Sequence[str]) -> str:
        """The licence of a folder with these classes, which may hold anything else in the layout."""
        is_own = not self.classes or {*classes} - {BACKGROUND} == self.classes
        return self.licence if is_own else "the folder's own"


def _arguments(specs: Mapping[str, AnnotatedSet], argv: Sequence[str]) -> argparse.Namespace:
    spec = next(iter(specs.values()))
    parser = command_parser(spec.name, f"Make one HDF5 file of {spec.title}.")
    add = parser.add_argument
    if len(specs) > 1:
        add("--subset", choices=tuple(specs), default=next(iter(specs)), help="which images")
    place = "a folder with images and annotations, or with their archives"
    if spec.base:
        add("--source", default=spec.base, help=f"{place}; or the address below which the archives are")
    else:
        add("--source", required=True, help=place)
    if len(spec.layout.forms) > 1:
        add("--annotation", choices=spec.layout.forms, default=spec.layout.forms[0], help="what is kept")
    if "boxes" in spec.layout.forms:
        cut = "cut: boxes that reach beyond their image are cut off, and left out if they are empty then"
        add("--bad_boxes", choices=("fail", "cut"), default=spec.bad_boxes, help=cut)
    if spec.layout.open_first_pixel:
        pixel = (
            "number of the first pixel in boxes: 1 as VOC counts, whose boxes include their last pixel, or 0"
        )
        add("--first_pixel", type=int, choices=(0, 1), default=1, help=pixel)
    if spec.layout.open_values:
        values = (
            "pixel values of the classes in masks, in the classes' order, as in 0,255 (the classes' numbers; "
            "255: no class)"
        )
        add("--mask_values", metavar="V,V,...", default="", help=values)
    add("--users_csv", type=Path, help=f"image_id, user_...: whose each image is (--source's {USERS_CSV})")
    add(
        "--users",
        help="the column of --users_csv with the file's users; others become partitions (the first)"
        + (f"; without a CSV {' or '.join(spec.layout.ways)}" if spec.layout.ways else ""),
    )
    without_test = "test: the published val is the file's test, for a set whose test has no annotations"
    add("--val_as", choices=("val", "test"), default=spec.val_as, help=without_test)
    add(
        "--licence",
        metavar="TEXT",
        help="licence of the images, kept in the file (the data set's if SOURCE holds it)",
    )
    add("--upright", action="store_true", help=f"{UPRIGHT}; for annotations of upright photos")
    bad = "leave out and list images that are missing; these, damaged ones and those not annotated; or none"
    add("--on_bad_image", choices=("fail", "skip-missing", "skip"), default="fail", help=bad)
    arguments = parser.read(argv)
    if getattr(arguments, "annotation", "boxes") != "boxes":
        for name in ("bad_boxes", "first_pixel"):
            if getattr(arguments, name, None) != parser.get_default(name):
                raise ValueError(f"--{name} can be used only with --annotation boxes: leave it out")
    elif getattr(arguments, "mask_values", ""):
        raise ValueError("--mask_values can be used only with --annotation mask: leave it out")
    if arguments.download_folder is not None and not is_address(arguments.source):
        raise ValueError("--download_folder can be used only if --source is an address: leave it out")
    return arguments


def main(specs: Mapping[str, AnnotatedSet], argv: Sequence[str]) -> None:
    """Annotations, users, images, file."""
    arguments = _arguments(specs, argv)
    spec = specs[arguments.subset] if len(specs) > 1 else next(iter(specs.values()))
    output, folder = checked_places(arguments)
    place = _Place.of(spec, arguments.source, folder)
    downloading = only_downloader(arguments.download_folder)
    with only_writer(output, arguments.overwrite), downloading:  # before the first download
        _make(place, arguments, output)


def _make(place: _Place, arguments: argparse.Namespace, output: Path) -> None:
    spec = place.spec
    form = getattr(arguments, "annotation", spec.layout.forms[0])

    def wanted(path: PurePosixPath) -> tuple[str, int] | None:
        return (USERS_CSV, MAX_USERS_BYTES) if path.name == USERS_CSV else spec.layout.wanted(path, form)

    files = collected(place.fetched(), wanted)
    users = _users(arguments, files.pop(USERS_CSV, None), spec.layout.ways)
    reading = Reading(
        form,
        getattr(arguments, "bad_boxes", None) == "cut",
        getattr(arguments, "first_pixel", 1),
        users.partitions if users else {},
        arguments.upright,
        arguments.on_bad_image == "skip",
        values_of(arguments.mask_values) if getattr(arguments, "mask_values", "") else (),
    )
    annotated = spec.layout.read(files, arguments.source, reading)
    owners, others, said = _owners(annotated, users, arguments.users)
    if arguments.val_as == "test":
        annotated = annotated.with_val_as_test()
    table = annotated.table(owners)
    said = _counted(table, owners, said)
    print(f"{len(table):,} images; {said}", file=sys.stderr)
    if annotated.warning:
        print(annotated.warning, file=sys.stderr)
    for key, count in annotated.repaired.items():
        print(f"{count:,} {key.replace('_', ' ')}", file=sys.stderr)
    licence = arguments.licence or spec.licence_of(annotated.classes)
    provenance: dict[str, Any] = {"source": arguments.source, "licence": licence, "users": said}
    provenance |= {**annotated.notes, **annotated.repaired}
    options = Options.of(
        arguments,
        spec.name,
        locked=True,
        vocabulary={COLUMNS[form]: list(annotated.classes)},
        transcode=Transcoding(upright=arguments.upright),
        finish=Finish(others, annotated.sizes),
    )
    make(place.source(table, annotated.folders, provenance), options, place.downloads)
    _say_training(output, form)


def _say_training(output: Path, form: str) -> None:
    """The command that trains on a file. Few users are all in each round; val is the file's, or of train.

    Without images of test, what to do about it.
    """
    with DataFile(output) as file:
        if "test" not in file.splits:
            remedy = ": --val_as test --overwrite makes those of val the test images"
            print(f"training needs images of test{remedy * ('val' in file.splits)}", file=sys.stderr)
        if not {"train", "test"} <= set(file.splits):
            return
        users, has_val = file.split("train").num_users, "val" in file.splits
    task, cohort, needs_val = TRAINED_BY[form]
    options = [f"--federated.cohort_size {users}"] if users != cohort and users <= FEW_USERS else []
    if users == 1:
        options = ["--data.partition iid-clients-10-seed-0 --federated.cohort_size 10"]
    if has_val != needs_val:
        options.append(f"--data.val_share {0 if has_val else 0.1:g}")
    command = training_command(f"make fedcv-fl TASK={task}", f"fedcv-{task}", output, " ".join(options))
    print(f"train on it: {command}", file=sys.stderr)


def _users(arguments: argparse.Namespace, content: bytes | None, ways: Sequence[str]) -> Users | None:
    """What the CSV says, if there is one; ``content``: that of the one among the annotations."""
    if arguments.users_csv is not None:
        path = input_file("--users_csv", arguments.users_csv)
        return read_users(path.read_bytes(), str(path))
    beside = Path(arguments.source) / USERS_CSV  # of archives
    if content is None and beside.is_file():
        content = beside.read_bytes()
    if content is not None:
        return read_users(content, f"{arguments.source}: {USERS_CSV}")
    if ways and arguments.users not in (None, *ways):
        raise ValueError(f"--users is {arguments.users!r}; it must be {' or '.join(ways)}")
    if arguments.users is not None and not ways:
        raise ValueError(
            f"--users can be used only with a {USERS_CSV}, and there is none: add --users_csv FILE, or "
            "leave --users out"
        )
    return None


def _owners(
    annotated: Annotated, users: Users | None, chosen: str | None
) -> tuple[Mapping[str, str], Mapping[str, Mapping[str, str]], str]:
    """Who owns which image, the columns that become partitions, and where that is from."""
    if users is None and annotated.ways:
        ways = dict(annotated.ways)
        name = chosen or next(iter(ways))
        owners = ways.pop(name)
        return owners, ways, f"users by {name}"
    if users is None:
        return annotated.owners, {}, "photographers by the annotations" if annotated.owners else NOBODY_KNOWN
    known = users.named(annotated)
    columns, others = dict(known.columns), len(users.images) - len(known.images)
    name = chosen or next(iter(columns))
    if name not in columns:
        raise ValueError(f"--users is {name!r}; the columns of users are {', '.join(columns)}")
    owners = columns.pop(name)
    said = f"users by the column {name} of {users.origin}"
    return (
        owners,
        columns,
        said + (f", which also lists {others:,} images that are not in the source" if others else ""),
    )


def _counted(table: pa.Table, owners: Mapping[str, str], said: str) -> str:
    """What is said of the users, with their number, and that of the images of nobody beside them."""
    if not owners:
        return said
    rows = zip(table["image_id"].to_pylist(), table["user_id"].to_pylist())
    nobody = Counter(user for image, user in rows if image not in owners)
    more = (
        f"; {nobody.total():,} images without a user belong to {' and '.join(sorted(nobody))}"
        if nobody
        else ""
    )
    return f"{len(set(owners.values())):,} {said}{more}"


@dataclass(frozen=True)
class _Place:
    """The place of a data set: archives on a server, or a folder with some of them or with what they hold."""

    spec: AnnotatedSet
    listing: Sequence[Shard]
    images: Sequence[Shard]
    root: Path | None  # of a folder
    downloads: Path

    @classmethod
    def of(cls, spec: AnnotatedSet, source: str, downloads: Path) -> _Place:
        """The place that ``--source`` names.

        Raises:
            ValueError: when it is none.
            OSError: when the disk has no room for the archives.
        """
        if not is_address(source):
            root = Path(source)
            if not root.is_dir():
                words = "neither an existing folder nor an address (http...)" if spec.base else "not a folder"
                raise ValueError(f"--source {source} is {words}")
            here = {archive: root / Path(archive.path).name for archive in spec.archives}
            shards = {a: Shard.on_disk(path, path.name) for a, path in here.items() if path.is_file()}
        else:
            if not spec.base:
                raise ValueError(
                    f"--source {source} is an address, but this data set cannot be downloaded: give a "
                    f"folder ({spec.by_hand})"
                )
            root, shards = None, {archive: _remote(archive, source, downloads) for archive in spec.archives}
        listing, images = ([shards[a] for a in group if a in shards] for group in (spec.listing, spec.images))
        need = bytes_to_download([*shards.values()], downloads) if root is None else 0
        check_room(need, downloads)
        return cls(spec, listing, images, root, downloads)

    def fetched(self) -> list[Path]:
        """The folder, or the archives, with the annotations."""
        if self.root is not None and not self.listing:
            return [self.root]
        return [shard.fetch() for shard in self.listing]

    def source(self, table: pa.Table, inside: frozenset[str], provenance: Mapping[str, Any]) -> ArchiveSource:
        """The images of these records."""
        ids = table["image_id"].to_pylist()
        digest = digest_of(table)
        shards = [*self.listing, *self.images]
        paths, size = None, self.spec.mean_image_bytes * len(ids)
        if self.root is not None:
            paths = image_files(self.root, frozenset(ids), inside, IMAGE_SUFFIXES)
            if not self.images:
                size = sum(path.stat().st_size for path in paths.values())
        return ArchiveSource(
            Shard("annotations", 0, lambda: self.downloads, digest),
            lambda _: table,
            self.images,
            self.root,
            paths=paths,
            suffixes=self.spec.in_archives,
            schema=table.schema,
            num_images=len(ids),
            image_bytes=size,
            provenance={**provenance, "annotations_sha256": digest},
            download_bytes=bytes_to_download(shards, self.downloads) if self.root is None else 0,
            discard=partial(
                delete_downloads, self.downloads, [s.name for s in shards] if self.root is None else []
            ),
        )


def _remote(archive: Archive, base: str, downloads: Path) -> Shard:
    """An archive on a server, downloaded and checked when it is needed."""
    url, target = below(base, archive.path), downloads / Path(archive.path).name

    @cache  # its digest takes a minute for the largest
    def fetch() -> Path:
        fetch_checked(url, target, "md5", archive.md5)
        return target

    size = target.stat().st_size if target.is_file() else remote(url).size
    return Shard(target.name, size, fetch, f"{url} {archive.md5}")
