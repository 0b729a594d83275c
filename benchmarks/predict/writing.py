"""Predictions as files: a table of probabilities, a PNG of classes for each image, or a list of boxes."""

from __future__ import annotations

import csv
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from dataset.fetch.archives import IMAGE_SUFFIXES
from dataset.files import write_bytes
from pfl_ext.tasks.detection_scores import CLASS, NO_BOX, SCORE

SEPARATOR = ";"
"""Between the labels of an image in a table."""
PROBABLE = 0.5
"""From this probability on, a label is predicted where an image may have several."""


@dataclass(frozen=True)
class Shown:
    """An image of which something is predicted.

    Attributes:
        image: its path, or its id in a data file.
        place: path of its mask in a folder, without the suffix.
        size: its height and width in pixels, to which predictions of places refer.
        user: whose it is; None for an image file.
        truth: names of its labels in the data file, or the numbers that it has instead of labels; None where
            there are none.
    """

    image: str
    place: Path
    size: tuple[int, int]
    user: str | None = None
    truth: Sequence[str] | None = None


def mask_places(images: Sequence[Path]) -> list[Path]:
    """Where the masks of images lie, by the images' places: without the suffix of an image, unless two masks
    would then have one place."""
    bare = [path.with_suffix("") if path.suffix.lower() in IMAGE_SUFFIXES else path for path in images]
    return bare if len(set(bare)) == len(set(images)) else list(images)


def mask_file(folder: Path, place: Path) -> Path:
    """The file of a mask in a folder, by the mask's place."""
    return folder / f"{place}.png"


class Writer(ABC):
    """Takes predictions batch by batch. `close` puts the last of them in place."""

    @abstractmethod
    def write(self, images: Sequence[Shown], predicted: Tensor) -> None:
        """Take the predictions of some images, ``[B, ...]``."""

    def close(self) -> None:  # noqa: B027
        """Write what is left; nothing, where `write` does all."""


def numbers_of(values: npt.NDArray[Any]) -> list[str]:
    """The numbers of one image as text."""
    return [f"{value:.9g}" for value in values.ravel().tolist()]


class Table(Writer):
    """CSV with a line for each image: its labels, the predicted ones, and each class's probability.

    Args:
        output: an open text file.
        classes: K names.
        exclusive: whether an image has exactly one class; the predicted one is then the likeliest.
        of_users: whether images have users and labels.
        probable: whether predictions are probabilities. Other numbers, as of a regression, predict no names.
    """

    def __init__(
        self, output: IO[str], classes: Sequence[str], exclusive: bool, of_users: bool, probable: bool
    ) -> None:
        self._rows, self._of_users = csv.writer(output, lineterminator="\n"), of_users
        self._classes, self._exclusive, self._probable = np.array(classes), exclusive, probable
        facts = ("user", "image", "truth") if of_users else ("image",)
        self._rows.writerow([*facts, *(["predicted"] if probable else []), *classes])

    def write(self, images: Sequence[Shown], predicted: Tensor) -> None:
        """Lines."""
        for shown, row in zip(images, predicted.cpu().numpy(), strict=True):
            chosen = [row.argmax()] if self._exclusive else np.flatnonzero(row >= PROBABLE)
            truth = SEPARATOR.join(shown.truth or ())
            facts = [shown.user, shown.image, truth] if self._of_users else [shown.image]
            names = [SEPARATOR.join(self._classes[chosen])] if self._probable else []
            self._rows.writerow([*facts, *names, *numbers_of(row)])


def check_table(images: Sequence[str], classes: Sequence[str], exclusive: bool) -> None:
    """Refuse names that a `Table` cannot hold, or by which its lists of labels could be read in two ways.

    Raises:
        ValueError: one line.
    """
    for image in images:
        try:
            image.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the file name {image!r} is not UTF-8, as tables are: rename it") from None
    unclear = [] if exclusive else [name for name in classes if SEPARATOR in name]
    if unclear:
        raise ValueError(
            f"the label {unclear[0]!r} has a {SEPARATOR}, which separates labels in a table: use "
            "benchmarks.predict.trained in Python, whose predictions are numbers in the order of the classes"
        )


class Masks(Writer):
    """A PNG for each image in a folder, of its size; a pixel's value is the number of its class, from 0.

    Args:
        folder: for the files.
        classes: K names; their colours are the palette.
    """

    def __init__(self, folder: Path, classes: Sequence[str]) -> None:
        from benchmarks.reporting.pictures import mask_palette  # matplotlib, which others can spare

        self._folder, self._palette = folder, mask_palette(len(classes)).tobytes()

    def write(self, images: Sequence[Shown], predicted: Tensor) -> None:
        """Files."""
        for shown, mask in zip(images, predicted.cpu().numpy(), strict=True):
            height, width = shown.size
            picture = Image.fromarray(mask).resize((width, height), Image.Resampling.NEAREST)
            picture.putpalette(self._palette)
            buffer = io.BytesIO()
            picture.save(buffer, "PNG")
            write_bytes(mask_file(self._folder, shown.place), buffer.getvalue())


class Boxes(Writer):
    """A list in COCO's format of results: boxes as left, top, width and height in pixels of the image.

    Args:
        output: an open text file.
        categories: id and name of each class.
        side: of the network's input in pixels, in which predicted boxes are.
    """

    def __init__(self, output: IO[str], categories: Sequence[tuple[int, str]], side: int) -> None:
        self._output, self._categories, self._side = output, categories, side
        self._before = "[\n"

    def write(self, images: Sequence[Shown], predicted: Tensor) -> None:
        """A line for each box."""
        for shown, rows in zip(images, predicted.cpu().numpy(), strict=True):
            down, across = (pixels / self._side for pixels in shown.size)
            for row in rows[rows[:, CLASS] != NO_BOX].tolist():
                left, top, right, bottom = row[0] * across, row[1] * down, row[2] * across, row[3] * down
                category, name = self._categories[int(row[CLASS])]
                found: dict[str, Any] = {
                    **({} if shown.user is None else {"user": shown.user}),
                    "image_id": shown.image,
                    "category_id": category,
                    "category": name,
                    "bbox": [round(v, 2) for v in (left, top, right - left, bottom - top)],
                    "score": round(row[SCORE], 5),
                }
                self._output.write(self._before + json.dumps(found, allow_nan=False))
                self._before = ",\n"

    def close(self) -> None:
        """End the list."""
        self._output.write("[]\n" if self._before == "[\n" else "\n]\n")
