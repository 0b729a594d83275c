"""Make the one HDF5 file that every benchmark reads from your own images, or from another library's file.

    python -m dataset.convert folder --images DIR [--labels CSV] --output_file F

The formats: folder (client/class/file, split/client/class/file, or a CSV with path, client and label), hf (a
Hugging Face data set with a client column: parquet, or what save_to_disk writes), leaf (LEAF's JSON), tff
(TensorFlow Federated's HDF5 or SQLite), npz (numpy's arrays, as MedMNIST's), flamby (FLamby's Fed-ISIC2019),
fedscale (FedScale's client_data_mapping).
python -m dataset.convert FORMAT --help says more, docs/own_data.md shows each, step by step.

JPEGs are kept as they are. PNG, WebP, GIF, BMP and TIFF images become JPEGs of --jpeg_quality, or with
--storage raw the very pixels. What was stopped goes on with the same command; the file has its name when it
is complete.
"""

from __future__ import annotations

import argparse
import inspect
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dataset.cli import OneLineParser, cores, counted, input_file, output_file, run, training_command
from dataset.convert import folder, hf, leaf, npz, tff
from dataset.convert.files import Folder
from dataset.convert.source import Found, assembled
from dataset.convert.splits import OTHERS, Dealing
from dataset.convert.text import Names, lines, read_classes, say_splits
from dataset.preprocess import SIDE, UPRIGHT, Options, make, side_or_own
from dataset.store.hdf5 import DataFile
from dataset.store.images import BACKGROUNDS, Transcoding
from dataset.tables import header_of

SHARE = 0.1
"""Share of the users, or of each user's images, for val, and for test, where the source has no splits."""
ISIC = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
"""The columns of FLamby's CSV that have the names of the classes, in their order."""


def _parser() -> OneLineParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog="python -m dataset.convert", description=__doc__, formatter_class=shape)
    formats = parser.add_subparsers(
        dest="format", required=True, metavar="FORMAT", parser_class=OneLineParser
    )
    for name, (reader, add_to) in FORMATS.items():
        says = inspect.cleandoc(reader.__doc__ or "")
        first = says.partition("\n")[0]
        chosen = formats.add_parser(name, help=first, formatter_class=shape, description=says)
        add_to(chosen)
        _add_common(chosen)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--output_file", type=Path, required=True, help="the HDF5 file to make")
    add("--overwrite", action="store_true", help="replace an existing output file")
    add(
        "--classes",
        type=Path,
        help="a text file with the class names, a line each, in the order of their numbers",
    )
    splits_help = (
        "given: the source's own splits stay (the default where it has any); deal: dealt by --split_by"
    )
    add("--splits", choices=("given", "deal"), help=splits_help)
    by = "users: a split has whole users; images: each user keeps some of its images for val and test"
    add("--split_by", choices=("users", "images"), help=f"{by} (users)")
    for name in OTHERS:
        share = f"share that becomes {name} ({SHARE}; 0 with the source's own splits)"
        add(f"--{name}_share", type=float, help=share)
    add("--seed", type=int, help="seed of the drawn splits (0)")
    add("--storage", choices=("jpeg", "raw"), help="the original bytes, or pixels (jpeg for image files)")
    size = (
        f"raw: side in pixels of the squares, or own: each keeps its size ({SIDE}; of pixels their own side)"
    )
    add("--image_size", type=side_or_own, default=argparse.SUPPRESS, help=size)
    add("--verify", choices=("header", "full"), default="full", help="how far each image is decoded (full)")
    add("--jpeg_quality", type=int, default=95, help="quality of JPEGs made of other formats (95)")
    add("--background", choices=BACKGROUNDS, default="white", help="colour behind transparent images (white)")
    add("--upright", action="store_true", help=UPRIGHT)
    bad = "leave out, and list in the file, images that are missing; these and damaged ones; or none (fail)"
    add("--on_bad_image", choices=("fail", "skip-missing", "skip"), default="fail", help=bad)
    nobody = "skip: users whom the source lists without an image are left out and counted (fail)"
    add("--on_empty_user", choices=("fail", "skip"), default="fail", help=nobody)
    add("--licence", metavar="TEXT", default="the source's", help="licence of the images, kept in the file")
    add("--workers", type=int, default=cores(), help="threads (one for each core)")


def _classes(arguments: argparse.Namespace) -> list[str] | None:
    return None if arguments.classes is None else read_classes("--classes", arguments.classes)


def _folder(arguments: argparse.Namespace) -> Found:
    """Images in folders by client, or listed by a CSV with the columns path, client, label.

    Without --labels the folder holds client/class/file, or split/client/class/file. In class/file, or
    split/class/file, there are no clients: one user owns each split, and clients are dealt afterwards.

    A CSV may have a column split (train, val, validation, test) and one of fine labels, fine_label. Several
    labels of an image stand in columns labels and fine_labels, with a semicolon between them.
    """
    images, names = Folder("--images", arguments.images), {"labels": Names(_classes(arguments))}
    given = {key: getattr(arguments, f"{key}_column") for key in ("path", "client", "label", "split", "fine")}
    if arguments.labels is None:
        for key, column in given.items():
            if column is not None:
                raise ValueError(f"--{key}_column needs --labels: add --labels FILE, or leave it out")
        return folder.walked(images, names)
    table = input_file("--labels", arguments.labels)
    columns = folder.columns_of(table, given, arguments.several)
    if unread := folder.unread_columns(table, columns):
        print(f"{table}: these columns are not read: {', '.join(unread)}"[:400], file=sys.stderr)
    if columns.fine:
        names["fine_grained_labels"] = Names()
    found = folder.listed(images, [(table, None)], columns, names)
    many = [name for name in names["labels"].vocabulary() if folder.SEVERAL in name]
    if many and not columns.separator:
        print(
            f"{len(many):,} class names contain a semicolon, such as {many[0]!r}: if each of them lists "
            "several labels of an image, add --several",
            file=sys.stderr,
        )
    return found


def _add_folder(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--images", type=Path, required=True, help="the folder of the images")
    add("--labels", type=Path, help="a CSV; its paths are below --images")
    for name, column in [("path", "path"), ("client", "client"), ("label", "label, labels")]:
        add(f"--{name}_column", help=f"the CSV's column ({column})")
    add("--split_column", help="the CSV's column (split, where there is one)")
    add(
        "--fine_column", help="the CSV's column of finer labels (fine_label, fine_labels, where there is one)"
    )
    add("--several", action="store_true", help="--label_column holds several labels with ; between them")


def _hf(arguments: argparse.Namespace) -> Found:
    """A Hugging Face data set: local parquet files, or a folder of save_to_disk.

    Without --client_column one user owns each split, and clients are dealt afterwards.
    """
    columns = hf.Columns(
        arguments.client_column,
        arguments.image_column,
        arguments.label_column,
        arguments.fine_column,
        arguments.split_column,
        arguments.id_column,
    )
    return hf.read(arguments.source, columns, _classes(arguments))


def _add_hf(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--source", type=Path, required=True, help="a folder, or a .parquet or .arrow file")
    add("--client_column", default="", help="the client of each image: text, or whole numbers")
    add("--image_column", default="image", help="the images' bytes (image)")
    add("--label_column", default="label", help="a class, its name or its number, or a list of them (label)")
    add("--fine_column", default="", help="the same of finer labels")
    add("--split_column", default="", help="train, val, validation or test, in the place of the files' names")
    add("--id_column", default="", help="an id for each image, in the place of its file and row")


def _leaf(arguments: argparse.Namespace) -> Found:
    """LEAF's JSON: train/ and test/ with users, num_samples and user_data, of pixels or of file names."""
    images = None if arguments.images is None else Folder("--images", arguments.images)
    return leaf.read(arguments.source, images, _classes(arguments))


def _add_leaf(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=Path, required=True, help="folder with train/ and test/, or file")
    parser.add_argument("--images", type=Path, help="the folder of the files that x names, as CelebA's")


def _tff(arguments: argparse.Namespace) -> Found:
    """TensorFlow Federated's HDF5 (examples/CLIENT/ with pixels or image, and label), or its SQLite."""
    return tff.read(arguments.source, _classes(arguments), arguments.prefix)


def _add_tff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=Path, required=True, help="a folder with *_train.h5, ..., or a file")
    parser.add_argument("--prefix", help="set in the SQLite file, where there are several: all, digits_only")


def _npz(arguments: argparse.Namespace) -> Found:
    """numpy's .npz, as MedMNIST's: arrays such as train_images and train_labels, or x_train and y_train.

    Labels are class numbers, or columns of 0 and 1 for several labels of an image. An array train_clients may
    say whose each image is; else one user owns each split, and clients are dealt afterwards.
    """
    return npz.read(input_file("--source", arguments.source), _classes(arguments))


def _add_npz(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=Path, required=True, help="the .npz file")


def _flamby(arguments: argparse.Namespace) -> Found:
    """FLamby's Fed-ISIC2019: the CSV train_test_folds.csv, and the folder of the preprocessed images.

    Its columns are image, target, center, fold; the centres are the clients.
    """
    table = input_file("--labels", arguments.labels)
    class_names = _classes(arguments)
    if class_names is None and set(ISIC) <= set(header_of(lines(table), table)):
        class_names = list(ISIC)
    columns = folder.Columns("image", "center", "target", "fold")
    names = {"labels": Names(class_names, numbered=True)}
    return folder.listed(
        Folder("--images", arguments.images), [(table, None)], columns, names, arguments.suffix
    )


def _add_flamby(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--images", type=Path, required=True, help="the folder ISIC_2019_Training_Input_preprocessed")
    add("--labels", type=Path, required=True, help="the CSV")
    add("--suffix", default=".jpg", help="suffix of the images' files (.jpg)")


def _fedscale(arguments: argparse.Namespace) -> Found:
    """FedScale's client_data_mapping: train.csv, val.csv, test.csv with client, path, class name, number."""
    images = Folder("--images", arguments.images)
    return folder.fedscale(images, arguments.labels, _classes(arguments))


def _add_fedscale(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--images", type=Path, required=True, help="the folder of the images, or of train/, val/ and test/")
    add("--labels", type=Path, required=True, help="the folder client_data_mapping, or one CSV")


Reader = Callable[[argparse.Namespace], Found]
FORMATS: Mapping[str, tuple[Reader, Callable[[argparse.ArgumentParser], None]]] = {
    "folder": (_folder, _add_folder),
    "hf": (_hf, _add_hf),
    "leaf": (_leaf, _add_leaf),
    "tff": (_tff, _add_tff),
    "npz": (_npz, _add_npz),
    "flamby": (_flamby, _add_flamby),
    "fedscale": (_fedscale, _add_fedscale),
}


def _dealing(arguments: argparse.Namespace, has_splits: bool, clients: bool) -> Dealing:
    """How images come into splits; without ``clients`` by image, unless the arguments say otherwise.

    Raises:
        ValueError: for an option that has no effect.
    """
    keep = has_splits if arguments.splits is None else arguments.splits == "given"
    if keep and not has_splits:
        raise ValueError("--splits given: the source has no splits; leave it out, or give --splits deal")
    default = 0.0 if keep else SHARE
    shares = {
        name: default if (share := getattr(arguments, f"{name}_share")) is None else share for name in OTHERS
    }
    if not any(shares.values()):
        for name in ("split_by", "seed"):
            if getattr(arguments, name) is not None:
                raise ValueError(
                    f"--{name} has no effect: the source's splits are kept; give a share, or --splits deal"
                )
    seed = 0 if arguments.seed is None else arguments.seed
    return Dealing(keep, arguments.split_by or ("users" if clients else "images"), shares, seed)


def _storage(arguments: argparse.Namespace, side: int | None) -> tuple[str, int | None]:
    """How images are stored, and their side in pixels.

    Args:
        arguments: of the command line.
        side: as in `Found`.

    Raises:
        ValueError: for options that contradict one another, or the source.
    """
    has_size = "image_size" in arguments  # its value may be None: own
    if side is not None:
        if arguments.storage == "jpeg":
            raise ValueError("--storage jpeg is for image files, but this source has arrays: leave it out")
        return "raw", arguments.image_size if has_size else (side or None)
    storage = arguments.storage or "jpeg"
    if storage == "jpeg" and has_size:
        raise ValueError("--image_size needs --storage raw: add --storage raw, or leave it out")
    return storage, arguments.image_size if has_size else SIDE


def main(argv: Sequence[str]) -> None:
    """The command line."""
    arguments = _parser().read(argv)
    output = output_file("--output_file", arguments.output_file, arguments.overwrite)
    for name in ("image_size", "workers"):
        if isinstance(value := getattr(arguments, name, None), int) and value < 1:
            raise ValueError(f"--{name} must be at least 1")
    transcoding = Transcoding(arguments.jpeg_quality, arguments.background, arguments.upright)
    if arguments.classes is not None:
        input_file("--classes", arguments.classes)
    inputs = [v for name, v in vars(arguments).items() if isinstance(v, Path) and name != "output_file"]
    if output.exists() and any(path.exists() and output.samefile(path) for path in inputs):
        raise ValueError(f"--output_file {output} is the source file: choose another file name")
    found = FORMATS[arguments.format][0](arguments)
    if found.files and arguments.splits != "deal":
        say_splits(arguments.source, found.files)
    storage, image_size = _storage(arguments, found.side)
    if found.empty_users and arguments.on_empty_user == "fail":
        count, first = len(found.empty_users), found.empty_users[0]
        raise ValueError(
            f"{count} user{'s have' if count > 1 else ' has'} no image, for example {first}: remove "
            "such users from the source, or leave them out with --on_empty_user skip"
        )
    has_splits = any(part.table["partition"].null_count < len(part.table) for part in found.parts)
    place = arguments.images if getattr(arguments, "images", None) else arguments.source
    provenance = {
        "source": str(place),
        "format": arguments.format,
        "licence": arguments.licence,
        "users_without_images": len(found.empty_users),
    }
    source = assembled(found, _dealing(arguments, has_splits, found.clients), provenance)
    options = Options(
        output,
        storage,  # type: ignore[arg-type]
        image_size,
        overwrite=arguments.overwrite,
        verify=arguments.verify,
        on_bad_image=arguments.on_bad_image,
        vocabulary={name: known.vocabulary() for name, known in found.names.items()},
        workers=arguments.workers,
        transcode=transcoding,
        tool=f"dataset.convert {arguments.format}",
    )
    make(source, options)
    _say(output, found.clients)


def _say(output: Path, clients: bool) -> None:
    """What the file holds, and what trains on it."""
    with DataFile(output) as file:
        for name in file.splits:
            split = file.split(name)
            print(f"{name}: {split.num_users:,} users, {split.num_images:,} images", file=sys.stderr)
        if "train" not in file.splits:
            return
        classes = {name: len(file.label_mapping(name)) for name in file.annotation_names}
        several = file.split("train").annotations["labels"].kind == "label set"
        users = file.split("train").num_users
        missing = [name for name in (OTHERS if several else OTHERS[1:]) if name not in file.splits]
    print(
        "; ".join(f"{counted(count, 'class', 'classes')} of {name}" for name, count in classes.items()),
        file=sys.stderr,
    )
    target, scale, cohort = ("make flair-fl", "small", 20) if several else ("make vision-fl", "mini", 10)
    installed = "flair --config fl-r-17" if several else "visual_classification --config cifar10-fedavgm"
    place = shlex.quote(str(output))
    if not clients:
        drawn = "iid-clients-10-seed-0" if several else "lda-1-clients-10-seed-0"
        see = "" if several else f"; to see it: python -m dataset.partitions {place} --partition {drawn}"
        print(
            "the source names no clients, so one user owns all images of a split: to train, give "
            f"--data.partition {drawn} --federated.cohort_size 10{see}",
            file=sys.stderr,
        )
    if missing:
        print(
            f"training needs {missing[0]}: repeat with --{missing[0]}_share {SHARE} --overwrite",
            file=sys.stderr,
        )
    if missing or not clients:
        return
    options = f"--scale {scale}" + (f" --federated.cohort_size {users}" if users < cohort else "")
    print(f"to train on it: {training_command(target, installed, output, options)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run(main))
