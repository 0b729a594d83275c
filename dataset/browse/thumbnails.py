"""Small pictures of images with their masks and boxes drawn over them, and descriptions in words."""

from __future__ import annotations

import colorsys
import io
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from dataset.arrays import ByteArray
from dataset.pages import Html, join, picture, tag
from dataset.store.annotations import Boxes, LabelMatrix, Masks, has_background
from dataset.store.hdf5 import DataFile

QUALITY = 82
GOLDEN = 0.618034
OPAQUE = 0.55
"""Share of a class's colour over an image; pixels without a class are not changed."""
TINY = 96
"""Images whose sides are below this are kept as they are, and the page shows their pixels as squares."""
MOST_NAMES = 6
Pixels = ByteArray


@dataclass(frozen=True)
class Thumbnail:
    """A picture and its description."""

    html: Html
    size: int
    """Bytes in the page."""
    classes: frozenset[tuple[str, int]]
    """Annotation and class of what is drawn over the image."""


def colour(number: int, of: int) -> tuple[int, int, int]:
    """Colour of a class, RGB. There are as many hues as classes, and near numbers have distant hues.

    Args:
        number: the class number.
        of: the number of classes.
    """
    step = next(n for n in range(max(round(GOLDEN * of), 1), 2 * of + 2) if math.gcd(n, of) == 1)
    share = 0.95 if number % 2 else 0.65
    parts = colorsys.hsv_to_rgb(number * step % of / of, share, 0.95)
    red, green, blue = (round(255 * part) for part in parts)
    return red, green, blue


def thumbnail(file: DataFile, split: str, row: int, user: str, side: int) -> Thumbnail:
    """One image, no longer than ``side`` pixels, with its masks and boxes, and its labels below it.

    Raises:
        ValueError: when the image or its mask cannot be read; the message names the image.
    """
    index = file.split(split)
    (own,) = file.read_own(split, np.array([row], np.int64))
    height, width = own.shape[:2] if index.image_sizes is None else index.image_sizes[row].tolist()
    scale = min(side / max(width, height), 1.0)
    size = max(round(width * scale), 1), max(round(height * scale), 1)
    image = Image.fromarray(own).resize(size, Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.BOX)
    words, drawn = [], set[tuple[str, int]]()
    for name, annotation in index.annotations.items():
        names = {number: text for text, number in file.label_mapping(name).items()}
        if isinstance(annotation, LabelMatrix):
            found = annotation.indices[annotation.indptr[row] : annotation.indptr[row + 1]].tolist()
            words.append((name, _listed([names[k] for k in found], "no label")))
        elif isinstance(annotation, Masks):
            image, present = _masked(image, annotation, file, split, row, name)
            drawn |= {(name, k) for k in present}
            words.append((name, _listed([names[k] for k in sorted(present)], "no class")))
        elif isinstance(annotation, Boxes):
            counts = _boxed(image, annotation, row, (image.width / width, image.height / height))
            drawn |= {(name, k) for k in counts}
            words.append((name, _counted({names[k]: n for k, n in counts.items()})))
    return _figure(image, index.image_ids[row], user, words, frozenset(drawn))


def _figure(
    image: Image.Image,
    image_id: str,
    user: str,
    words: list[tuple[str, str]],
    drawn: frozenset[tuple[str, int]],
) -> Thumbnail:
    """The element of the page."""
    tiny = max(image.size) < TINY
    kind, content = "png" if tiny else "jpeg", io.BytesIO()
    image.save(content, kind, quality=QUALITY, optimize=True)  # PNG has no quality
    alt = f"Image {image_id} of user {user}; " + "; ".join(f"{name}: {text}" for name, text in words)
    several = len(words) > 1
    lines = [tag("span", tag("b", f"{name}: ") if several else "", text) for name, text in words]
    shown = picture(content.getvalue(), kind, alt.rstrip("; "), image.width, image.height)
    whole = tag("figure", shown, tag("figcaption", join(lines, " ")), class_="tiny" if tiny else None)
    return Thumbnail(whole, len(whole.encode()), drawn)


def _masked(
    image: Image.Image, annotation: Masks, file: DataFile, split: str, row: int, name: str
) -> tuple[Image.Image, set[int]]:
    """The image under its mask, and the classes of the mask."""
    side = max(image.size)
    numbers = file.read_masks(split, np.array([row], np.int64), name, side)[0]
    numbers = np.asarray(Image.fromarray(numbers).resize(image.size, Image.Resampling.NEAREST))
    palette = np.zeros((256, 3))
    palette[: annotation.num_labels] = [
        colour(number, annotation.num_labels) for number in range(annotation.num_labels)
    ]
    pixels = np.asarray(image, np.float64)
    background = has_background(file.label_mapping(name))
    clear = (numbers >= annotation.num_labels) | ((numbers == 0) & background)
    share = np.where(clear, 0.0, OPAQUE)[..., None]
    blended = (1 - share) * pixels + share * palette[numbers]
    found = {int(k) for k in np.unique(numbers[~clear])}
    return Image.fromarray(blended.round().astype(np.uint8)), found


def _boxed(image: Image.Image, annotation: Boxes, row: int, scale: tuple[float, float]) -> Counter[int]:
    """Draw the boxes over the image; how many there are of each class."""
    corners, classes = annotation.read(row)
    pen, line = ImageDraw.Draw(image), 2 if max(image.size) >= TINY else 1
    for (left, top, right, bottom), number in zip((corners * np.tile(scale, 2)).tolist(), classes.tolist()):
        edges = min(left, right - 1), min(top, bottom - 1), right - 1, bottom - 1
        pen.rectangle(edges, outline=colour(number, annotation.num_labels), width=line)
    return Counter(classes.tolist())


def _listed(names: list[str], empty: str) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more or empty


def _counted(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return _listed([f"{n} × {name}" if n > 1 else name for name, n in ordered], "no box")


def _background(rgb: tuple[int, int, int]) -> str:
    return "background:#{:02x}{:02x}{:02x}".format(*rgb)


def legend(names: Mapping[str, Mapping[int, str]], drawn: frozenset[tuple[str, int]]) -> Html:
    """The colours of the classes that are drawn over images."""
    several = len({name for name, _ in drawn}) > 1
    items = [
        tag(
            "li",
            tag("i", class_="patch", style=_background(colour(number, len(names[name])))),
            f"{names[name][number]} ({name})" if several else names[name][number],
        )
        for name, number in sorted(drawn)
    ]
    return tag("ul", *items, class_="legend")
