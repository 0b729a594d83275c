"""Write the predictions of a finished run's model for images into a file.

    python -m benchmarks.predict RUN_DIR --images photo.jpg folder --output predictions.csv
    python -m benchmarks.predict RUN_DIR --split test --output predictions.csv
    python -m benchmarks.predict RUN_DIR --user ID --output predictions.csv

Works with runs of every benchmark. Labels and classes give a CSV table with the probability of each class.
Masks give a folder of PNG files, whose pixels are class numbers, in the classes' colours. Boxes give a JSON
list in COCO's format of results. Masks and boxes have the image's own size.
Without --images, the images are a split of the run's data file, with their users and their labels.
With --user, the model is that user's personal model. The run must be personalised (fedper, ditto and others)
and trained with --runtime.keep_checkpoints true. Without --images and --split, the images are then those on
which the user was scored. In Python: `benchmarks.predict.trained` and `own_model`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from pfl.internal.ops.pytorch_ops import get_default_device

from benchmarks.core.commands import command_parser
from benchmarks.core.execute import pfl_device
from benchmarks.core.experiment import data_of, has_data_of
from benchmarks.predict.personal import own_model
from benchmarks.predict.trained import Trained, read_image, trained
from benchmarks.predict.writing import (
    Boxes,
    Masks,
    Shown,
    Table,
    Writer,
    check_table,
    mask_file,
    mask_places,
    numbers_of,
)
from dataset.arrays import IntArray
from dataset.cli import counted, input_file, output_file, output_folder
from dataset.cli import run as run_command
from dataset.fetch.archives import IMAGE_SUFFIXES
from dataset.files import replacing
from dataset.journal import only_writer
from dataset.store.hdf5 import DataFile
from dataset.store.views import Split
from pfl_ext.algorithms.personal_parts import FILE
from pfl_ext.data.federated_dataset import are_labels
from pfl_ext.tasks.task import Task

OF_RUN = (
    "config.yaml", "metrics.jsonl", "model.safetensors", "privacy.json", "results.json",
    "clusters.safetensors", "checkpoint/data.json", "checkpoint/last.safetensors", f"checkpoint/{FILE}",
)  # fmt: skip
"""Files of a run that must not be written over."""
EVERY_S = 10
"""Seconds between two lines of progress."""

Batch = tuple[list[Shown], torch.Tensor]


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_parser("predict", __doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of a finished run")
    parser.add_argument("--images", type=Path, nargs="+", metavar="PATH", help="image files, or folders")
    parser.add_argument(
        "--split", choices=("train", "val", "test"), help="split of the data; test if not given"
    )
    parser.add_argument("--data_path", type=Path, metavar="F", help="the data file, if not the run's own")
    parser.add_argument("--user", metavar="ID", help="predict with this training user's own model")
    parser.add_argument(
        "--output", "--output_file", type=Path, required=True, metavar="F", help="file; a folder for masks"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the file --output, or masks, if they exist"
    )
    parser.add_argument("--device", default="auto", help="such as cpu or cuda:0")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a CPU; all cores if not given")
    options = parser.read(argv)
    if options.images and (options.split or (options.data_path and options.user is None)):
        raise ValueError(
            "--images is for image files, but --split and --data_path are for a data file: give only "
            "one of the two"
        )
    if options.threads is not None and options.threads < 1:
        raise ValueError(f"--threads is {options.threads}: give at least 1")
    return options


def _files(paths: Sequence[Path], apart: bool) -> dict[Path, Path]:
    """The image files, and those in folders by their suffix; each with its place below its folder.

    Args:
        paths: of files and folders; links are followed, and hidden files in folders left out.
        apart: whether the places are those of masks, which two files must not share.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            found[input_file("--images", path)] = Path(path.name)
            continue
        inside = sorted(
            Path(folder, name)
            for folder, _, names in os.walk(path, followlinks=True)
            for name in names
            if Path(name).suffix.lower() in IMAGE_SUFFIXES and not name.startswith(".")
        )
        if not inside:
            raise ValueError(f"--images {path} holds no image: none of {', '.join(sorted(IMAGE_SUFFIXES))}")
        found |= {file: file.relative_to(path) for file in inside}
    places: dict[Path, Path] = {}
    for file, place in found.items():
        if apart and places.setdefault(place, file) != file:
            raise ValueError(
                f"{places[place]} and {file} would be written to the same mask, "
                f"{mask_places([place])[0]}.png: give each its own --output"
            )
    return dict(zip(found, mask_places([*found.values()]))) if apart else found


def _check_output(output: Path, model: Trained, inputs: Iterable[Path], overwrite: bool) -> None:
    """Refuse a file that this command reads, or that exists and is not to be replaced."""
    of_run = (model.record.directory / name for name in OF_RUN)
    for path in (*inputs, *of_run):
        if output.exists() and path.exists() and output.samefile(path):
            raise ValueError(f"--output {output} is read by this command: give another file")
    output_file("--output", output, overwrite)


def _check_masks(output: Path, places: Iterable[Path], inputs: Iterable[Path], overwrite: bool) -> None:
    """Refuse a folder in which a mask would replace an image that is read; or any file, if not allowed to."""
    output_folder("--output", output)
    read = {(found.st_dev, found.st_ino) for found in (path.stat() for path in inputs if path.exists())}
    there = [target for place in places if os.path.lexists(target := mask_file(output, place))]
    for target in there:
        if target.exists() and (target.stat().st_dev, target.stat().st_ino) in read:
            raise ValueError(
                f"--output {output}: the mask {target} would replace a file that this command reads: give "
                "another folder"
            )
    if there and not overwrite:
        more = f" (and {len(there) - 1:,} more)" if len(there) > 1 else ""
        raise ValueError(f"{there[0]} already exists{more}; add --overwrite to replace it")


def _of_files(model: Trained, files: Mapping[Path, Path], size: int) -> Iterator[Batch]:
    left = iter(files.items())
    while batch := list(itertools.islice(left, size)):
        shown, pixels = [], []
        for path, place in batch:
            image, size_of_file = read_image(path, model.image_size)
            shown.append(Shown(str(path), place, size_of_file))
            pixels.append(image)
        yield shown, torch.from_numpy(np.stack(pixels))


def _of_split(
    model: Trained, file: DataFile, name: str, size: int, chosen: IntArray | None
) -> tuple[Iterator[Batch], Sequence[Path]]:
    """The images of a split in batches, and their places; ``chosen``: the rows of only some of them."""
    store: Any = model.on(file).split_of_file(name)
    rows_of_all = np.arange(int(store.user_offsets[-1])) if chosen is None else chosen
    owners = np.repeat(np.arange(len(store.user_ids)), np.diff(store.user_offsets))
    of_images = model.task.outputs == "image"
    of_labels = of_images and are_labels(store.targets(rows_of_all[:256]))
    sizes = file.split(store.file_split).image_sizes if isinstance(store, Split) else None
    ids = [(store.user_ids[owners[row]], _image_id(file, store, row)) for row in rows_of_all.tolist()]
    places = mask_places([Path(*map(_file_name, pair)) for pair in ids])

    def batches() -> Iterator[Batch]:
        names = np.array(model.classes)
        for first in range(0, len(rows_of_all), size):
            rows = rows_of_all[first : first + size]
            images, targets = store.read(rows)
            shown = []
            for number, (row, target) in enumerate(zip(rows.tolist(), targets), first):
                user, image = ids[number]
                truth = None
                if of_images:
                    truth = names[np.flatnonzero(target)].tolist() if of_labels else numbers_of(target)
                height, width = images.shape[1:3] if sizes is None else sizes[store.file_rows[row]].tolist()
                shown.append(Shown(image, places[number], (height, width), user, truth))
            yield shown, torch.from_numpy(images)

    return batches(), places


def _image_id(file: DataFile, store: Any, row: int) -> str:
    """An image's id in the file; its number where a benchmark's store makes the images."""
    if not isinstance(store, Split):
        return str(row)
    return file.split(store.file_split).image_ids[int(store.file_rows[row])]


def _file_name(text: str) -> str:
    """An id as a file's name: other characters than letters, digits, blanks and -_. as in an address."""
    name = quote(text, safe=" ")
    return name.replace(".", "%2E", 1) if name.startswith(".") else name


def _category_ids(model: Trained, known: Sequence[int]) -> tuple[Sequence[int], str]:
    """The ids of the classes in lists of boxes, and which they are in words; ``known``: COCO's, if any."""
    if len(known) == len(model.classes):
        return known, "as in the annotations that the data file was made from"
    return range(1, len(model.classes) + 1), "from 1 on, in the order of the classes in results.json"


@contextlib.contextmanager
def _writer(
    model: Trained, output: Path, overwrite: bool, of_users: bool, numbers: Sequence[int]
) -> Iterator[Writer]:
    """What takes the predictions; the file appears when the block ends."""
    outputs = model.task.outputs
    if outputs == "pixels":
        yield Masks(output, model.classes)
        return
    with (
        only_writer(output, overwrite, "--output"),
        replacing(output) as path,
        path.open("w", newline="", encoding="utf-8") as file,
    ):
        if outputs == "boxes":
            writer: Writer = Boxes(file, [*zip(numbers, model.classes)], model.network.input_size)
        else:
            probable = type(model.task).predicted is not Task.predicted
            writer = Table(file, model.classes, model.task.exclusive, of_users, probable)
        yield writer
        writer.close()
        output_file("--output", output, overwrite)  # another program may have written it meanwhile


def _write(model: Trained, batches: Iterator[Batch], total: int, writer: Writer) -> None:
    started = said = time.monotonic()
    done = 0
    for shown, images in batches:
        writer.write(shown, model.predict(images))
        done += len(shown)
        now = time.monotonic()
        if now - said >= EVERY_S and done < total:
            said, left = now, (now - started) / done * (total - done)
            print(f"{done:,} of {total:,} images, about {left:.0f} s left", file=sys.stderr, flush=True)


def _check_data(file: DataFile, path: Path, run_dir: Path) -> None:
    """Refuse the run's own file where it has changed since."""
    if has_data_of(run_dir, file) is False:
        raise ValueError(
            f"{path} has other data now than {run_dir} learnt from: give the file of the run, or this "
            "one, with --data_path"
        )


def main(argv: Sequence[str]) -> None:
    """Read the model, predict, write."""
    options = _options(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pfl_device(options.device))
        model = trained(options.run_dir, get_default_device())
        size = min(model.task.scored_together, 64)
        places: Sequence[Path]
        path, split, own = options.data_path or data_of(options.run_dir) or Path(), options.split, None
        known: Sequence[int] = model.record.data.get("category_ids", ())
        if options.user is not None or not options.images:
            if path == Path():
                raise ValueError(f"{options.run_dir} does not say where its data lies: give --data_path")
            file = stack.enter_context(DataFile(path))
            if options.data_path is None:
                _check_data(file, path, options.run_dir)
            known = file.provenance.get("category_ids", known)
        if options.user is not None:
            model, of_user, rows = own_model(model, file, options.user)
            if split is None:
                split, own = of_user, rows
        if options.images:
            files = _files(options.images, apart=model.task.outputs == "pixels")
            inputs: Sequence[Path] = [*files, path]
            batches, places, source = _of_files(model, files, size), [*files.values()], "image files"
        else:
            inputs, split = [path], split or "test"
            if own is not None and not len(own):
                raise ValueError(
                    f"--user {options.user} has no images of {split} that scored it: give --split or --images"
                )
            batches, places = _of_split(model, file, split, size, own)
            source = f"images of {split} in {path}"
        total = len(places)
        if model.task.outputs == "pixels":
            _check_masks(options.output, places, inputs, options.overwrite)
        else:
            _check_output(options.output, model, inputs, options.overwrite)
        if model.task.outputs == "image":
            of_files = [*map(str, files)] if options.images else []
            check_table(of_files, model.classes, model.task.exclusive)
        numbers, meaning = _category_ids(model, known)
        with _writer(model, options.output, options.overwrite, not options.images, numbers) as writer:
            _write(model, batches, total, writer)
    classes = counted(len(model.classes), "class", "classes")
    print(f"{total:,} {source}, {classes}: {options.output}")
    if model.task.outputs == "boxes":
        print(f"category_id: {meaning}")


if __name__ == "__main__":
    sys.exit(run_command(main))
