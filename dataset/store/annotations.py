"""Annotations as typed columns: label sets, one class, masks and boxes.

Every annotation has the names of its K classes beside it (`dataset.store.index.DatasetIndex`), and its
elements are class numbers. Shape letters: N images, K classes, P labels of all images together, M boxes of
all images together, B bytes of all masks together.

Masks and boxes refer to the image in its own size, even if its pixels are stored or read at another size.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt
from PIL import Image

from dataset.arrays import ByteArray, Float32Array, IntArray

Kind = Literal["label set", "class", "mask", "boxes"]

_PNG_DEPTH_AT = 24  # of the bit depth in a PNG: after the signature, and length, name and size in IHDR
VOID = 255
"""The class number of a mask's pixels that belong to no class."""
BACKGROUND = "background"
"""The name of a mask's class 0, if that is for pixels of no object; also spelt Background or _background_."""

MAX_LABELS = 1 << 16
"""The most classes of an annotation, whose numbers are stored in 16 bits."""

CROWD, DIFFICULT = 1, 2
"""Bits of a box's flags: the box surrounds a group of objects (COCO); it need not be found (PASCAL VOC)."""

LEAF_TYPES = dict.fromkeys(("indptr", "offsets"), "<i8") | dict.fromkeys(("indices", "classes"), "<u2")
LEAF_TYPES |= {"png": "|u1", "corners": "<f4", "flags": "|u1"}
"""The types of the data sets that annotations are stored in."""


def is_background(name: str) -> bool:
    """Whether a class has the name of a mask's pixels of no object."""
    return name.strip("_").lower() == BACKGROUND


def has_background(classes: Mapping[str, int]) -> bool:
    """Whether class 0 of these, numbers by name, is for pixels of no object."""
    return any(number == 0 and is_background(name) for name, number in classes.items())


def check_num_labels(name: str, num_labels: int) -> None:
    """Raise ValueError if an annotation has more classes than can be numbered."""
    if num_labels > MAX_LABELS:
        raise ValueError(
            f"{name} has {num_labels:,} classes, but a file can have at most {MAX_LABELS:,}: check that "
            "these are classes, or leave some out"
        )


@dataclass(frozen=True)
class LabelMatrix:
    """A set of labels for each image: a sparse N x K 0/1 matrix in CSR form, sorted and unique in a row."""

    kind: ClassVar[Kind] = "label set"
    indptr: IntArray  # [N + 1]
    indices: npt.NDArray[np.uint16]  # [P]
    num_labels: int  # K

    @classmethod
    def from_pairs(
        cls, rows: npt.NDArray[Any], columns: npt.NDArray[Any], num_images: int, num_labels: int
    ) -> LabelMatrix:
        """The matrix of labels given by row and column, in any order; repeated pairs count once.

        Raises:
            ValueError: for more than `MAX_LABELS` labels.
        """
        check_num_labels("a label set", num_labels)
        width = max(num_labels, 1)
        flat = np.sort(rows * width + columns)
        flat = flat[np.diff(flat, prepend=-1) > 0]  # np.unique (numpy 2.3) takes ten times as long
        indptr = np.searchsorted(flat, np.arange(num_images + 1) * width).astype(np.int64)
        return cls(indptr, (flat % width).astype(np.uint16), num_labels)

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def take(self, rows: IntArray) -> LabelMatrix:
        """The matrix of these rows, in their order."""
        indptr, places = gathered(self.indptr, rows)
        return LabelMatrix(indptr, self.indices[places], self.num_labels)

    def lowest(self) -> LabelMatrix:
        """The lowest label of each image alone; none where an image has none."""
        any_label = np.diff(self.indptr) > 0
        return LabelMatrix(offsets_of(any_label), self.indices[self.indptr[:-1][any_label]], self.num_labels)

    def only(self, label: int) -> LabelMatrix:
        """The column of one label, ``[N, 1]``."""
        images = np.repeat(np.arange(len(self)), np.diff(self.indptr))[self.indices == label]
        return LabelMatrix.from_pairs(images, np.zeros_like(images), len(self), 1)

    def dense(self, rows: IntArray) -> ByteArray:
        """The multi-hot rows asked for, ``[len(rows), K]`` uint8."""
        taken = self.take(np.asarray(rows, np.int64))
        out = np.zeros((len(taken), self.num_labels), np.uint8)
        out[np.repeat(np.arange(len(taken)), np.diff(taken.indptr)), taken.indices] = 1
        return out

    def counts(self) -> IntArray:
        """Number of images with each label, ``[K]``."""
        return np.bincount(self.indices, minlength=self.num_labels).astype(np.int64)


class OneClass(LabelMatrix):
    """One class for each image: a label matrix with one label in each row."""

    kind: ClassVar[Kind] = "class"

    @classmethod
    def of(cls, classes: npt.NDArray[Any], num_labels: int) -> OneClass:
        """The matrix of the classes of images, ``[N]``.

        Raises:
            ValueError: for more than `MAX_LABELS` classes.
        """
        check_num_labels("an annotation", num_labels)
        return cls(np.arange(len(classes) + 1, dtype=np.int64), classes.astype(np.uint16), num_labels)

    def take(self, rows: IntArray) -> OneClass:
        """The classes of these images, in their order."""
        return self.of(self.indices[rows], self.num_labels)

    @property
    def classes(self) -> npt.NDArray[np.uint16]:
        """The class of each image, ``[N]``."""
        return self.indices


@dataclass(frozen=True)
class Masks:
    """A class for each pixel: one PNG of class numbers for each image, of the image's own size."""

    kind: ClassVar[Kind] = "mask"
    offsets: IntArray  # [N + 1]: the PNG of image i is png[offsets[i]:offsets[i + 1]]
    png: ByteArray  # [B]; of a file, mapped and not in memory
    num_labels: int  # K

    @classmethod
    def of(cls, masks: Sequence[bytes], num_labels: int) -> Masks:
        """The masks whose PNGs these are, one for each of N images."""
        data = np.frombuffer(b"".join(masks), np.uint8)
        return cls(offsets_of(np.array([len(mask) for mask in masks])), data, num_labels)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, rows: IntArray) -> Masks:
        """The masks of these images, in their order."""
        masks = [self.encoded(row) for row in rows.tolist()]
        return self.of(masks, self.num_labels)

    def encoded(self, row: int) -> bytes:
        """The PNG of one mask."""
        return self.png[int(self.offsets[row]) : int(self.offsets[row + 1])].tobytes()

    def read(self, row: int, side: int | None = None) -> ByteArray:
        """One mask, ``[H, W]``; with a side S, ``[S, S]``: the class at the centre of each of its pixels.

        Raises:
            ValueError: with a clause that says what is wrong.
        """
        mask = read_mask(self.encoded(row))
        return mask if side is None else np.asarray(Image.fromarray(mask).resize((side, side), 0))


@dataclass(frozen=True)
class Boxes:
    """Objects of each image, each with its class and its box."""

    kind: ClassVar[Kind] = "boxes"
    indptr: IntArray  # [N + 1]: image i has the objects indptr[i]:indptr[i + 1]
    corners: Float32Array  # [M, 4]: left, top, right, bottom in pixels of the image's own size
    classes: npt.NDArray[np.uint16]  # [M]
    flags: ByteArray  # [M]: `CROWD` and `DIFFICULT`
    num_labels: int  # K

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def read(self, row: int) -> tuple[Float32Array, npt.NDArray[np.uint16]]:
        """The corners, ``[m, 4]``, and classes, ``[m]``, of one image's objects."""
        here = slice(int(self.indptr[row]), int(self.indptr[row + 1]))
        return self.corners[here], self.classes[here]

    def take(self, rows: IntArray) -> Boxes:
        """The objects of these images, in their order."""
        indptr, places = gathered(self.indptr, rows)
        return Boxes(indptr, self.corners[places], self.classes[places], self.flags[places], self.num_labels)

    def counts(self) -> IntArray:
        """Number of objects of each class, ``[K]``."""
        return np.bincount(self.classes, minlength=self.num_labels).astype(np.int64)


Annotation = LabelMatrix | Masks | Boxes


LEAVES: dict[Kind, tuple[str, ...]] = {
    "label set": ("indptr", "indices"),
    "class": ("classes",),
    "mask": ("offsets", "png"),
    "boxes": ("indptr", "corners", "classes", "flags"),
}
"""The names of the data sets of each kind."""


def stored(annotation: Annotation) -> dict[str, npt.NDArray[Any]]:
    """The data sets of an annotation, by `LEAVES`."""
    leaves = LEAVES[annotation.kind]
    return {leaf: getattr(annotation, leaf).astype(LEAF_TYPES[leaf], copy=False) for leaf in leaves}


def restored(kind: Kind, columns: Mapping[str, npt.NDArray[Any]], num_labels: int) -> Annotation:
    """The annotation with these data sets, by `LEAVES`; boxes without ``flags`` have none set."""
    makers: dict[Kind, Callable[..., Annotation]] = {
        "label set": LabelMatrix, "class": OneClass.of, "mask": Masks, "boxes": Boxes
    }  # fmt: skip
    if kind == "boxes" and "flags" not in columns:
        columns = {**columns, "flags": np.zeros(len(columns["classes"]), np.uint8)}
    return makers[kind](*columns.values(), num_labels)


def present(annotation: Annotation, first: int = 0) -> LabelMatrix:
    """The classes from ``first`` on that each image contains, for any kind of annotation; masks are decoded.

    Raises:
        ValueError: with a clause, for a mask that cannot be read.
    """
    num_images, num_labels = len(annotation), annotation.num_labels
    if isinstance(annotation, LabelMatrix):
        return annotation
    if isinstance(annotation, Boxes):
        rows, classes = np.repeat(np.arange(num_images), np.diff(annotation.indptr)), annotation.classes
    else:
        found = [
            np.flatnonzero(np.bincount(annotation.read(row).ravel(), minlength=256))
            for row in range(num_images)
        ]
        classes = np.concatenate([*found, np.empty(0, np.int64)])
        rows = np.repeat(np.arange(num_images), [len(each) for each in found])
    counted = (classes >= first) & (classes < num_labels)
    return LabelMatrix.from_pairs(rows[counted], classes[counted], num_images, num_labels)


def check_annotation(name: str, annotation: Annotation, num_images: int) -> None:
    """Raise ValueError if the columns of an annotation contradict one another; masks are not decoded."""
    if isinstance(annotation, Masks):
        if not rises(annotation.offsets, num_images, len(annotation.png), least=1):
            raise ValueError(f"{name}: the offsets of its masks do not rise from 0 to the number of bytes")
        return
    check_num_labels(name, annotation.num_labels)
    numbers = annotation.classes if isinstance(annotation, Boxes) else annotation.indices
    if not rises(annotation.indptr, num_images, len(numbers), least=0):
        raise ValueError(f"{name}_indptr does not rise from 0 to the number of labels")
    if not within(numbers, annotation.num_labels):
        raise ValueError(f"a label index of {name} is out of range (0..{annotation.num_labels - 1})")
    if isinstance(annotation, Boxes):
        corners = annotation.corners
        if corners.shape != (len(numbers), 4) or not np.isfinite(corners).all() or (corners < 0).any():
            raise ValueError(f"{name}: a corner is negative or no number, or there are not four of each box")
        if (corners[:, :2] >= corners[:, 2:]).any():
            raise ValueError(f"{name}: a box is empty: its right is not beyond its left, or bottom below top")
        if len(annotation.flags) != len(numbers) or not within(annotation.flags, 2 * DIFFICULT):
            raise ValueError(f"{name}: a flag of a box is unknown, or there is not one for each box")
        return
    rising = np.ones(len(numbers), np.bool_)
    rising[1:] = numbers[1:] > numbers[:-1]
    first, end = annotation.indptr[:-1], annotation.indptr[1:]
    rising[first[first < end]] = True  # the first label of each image
    if not rising.all():
        raise ValueError(f"the label indices of an image in {name} are not sorted and unique")


def fault_of_mask(png: bytes, size: tuple[int, int], num_labels: int) -> str | None:
    """A clause that says what is wrong with an image's mask, given its height and width; None if nothing."""
    try:
        mask = read_mask(png)
    except ValueError as error:
        return str(error)
    if mask.shape != size:
        return f"its mask has {mask.shape[1]} x {mask.shape[0]} pixels, the image {size[1]} x {size[0]}"
    highest = int(mask[mask != VOID].max(initial=0))
    return f"its mask has the class {highest}, of {num_labels}" if highest >= num_labels else None


def fault_of_boxes(corners: npt.NDArray[Any], size: tuple[int, int]) -> str | None:
    """A clause that says what is wrong with an image's boxes ``[m, 4]``, given its height and width."""
    left, top, right, bottom = np.asarray(corners, np.float64).reshape(-1, 4).T
    inside = (
        (left >= 0) & (left < right) & (right <= size[1]) & (top >= 0) & (top < bottom) & (bottom <= size[0])
    )
    if inside.all():
        return None
    box = ", ".join(f"{value:g}" for value in np.asarray(corners).reshape(-1, 4)[int(np.argmin(inside))])
    return f"its box ({box}) is empty or not within the image of {size[1]} x {size[0]} pixels"


_UNREADABLE = (OSError, ValueError, SyntaxError, TypeError, EOFError, OverflowError)


def read_mask(png: bytes, as_grey: bool = False) -> ByteArray:
    """The class numbers in a PNG, ``[H, W]``; a palette is ignored.

    Args:
        png: the file.
        as_grey: whether to read grey of fewer bits and grey in colour channels, too, as levels to 255.

    Raises:
        ValueError: with a clause that says what is wrong.
    """
    try:
        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            as_grey = as_grey and image.mode in ("1", "L", "LA", "RGB", "RGBA")
            if image.mode not in ("L", "P") and not as_grey:
                raise ValueError(f"its mode is {image.mode}: it needs 8 bits for each pixel, a class number")
            if image.mode == "L" and png[_PNG_DEPTH_AT] != 8 and not as_grey:  # Pillow scales to 0..255
                raise ValueError(f"it is grey of {png[_PNG_DEPTH_AT]} bits: it needs 8, or a palette")
            if image.width * image.height > (1 << 20) + 1100 * len(png):
                raise ValueError(f"it declares {image.width} x {image.height} pixels in {len(png):,} bytes")
            if not as_grey:
                return cast(ByteArray, np.asarray(image))
            levels = np.asarray(image.convert("RGB"))
            if (levels != levels[:, :, :1]).any():
                raise ValueError("it has colours: it needs grey levels, or a palette")
            return np.ascontiguousarray(levels[:, :, 0])
    except (*_UNREADABLE, Image.DecompressionBombError) as error:
        raise ValueError(f"its mask cannot be used ({' '.join(str(error).split())})") from None


def encoded_mask(classes: ByteArray) -> bytes:
    """The PNG of class numbers ``[H, W]``, which `read_mask` reads."""
    buffer = io.BytesIO()
    Image.fromarray(classes).save(buffer, "PNG")
    return buffer.getvalue()


def offsets_of(counts: npt.NDArray[Any]) -> IntArray:
    """The offset of each part, and the end of the last: 0, counts[0], counts[0] + counts[1], ..."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def positions(counts: npt.NDArray[Any]) -> IntArray:
    """0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, ..."""
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    return np.arange(int(counts.sum()), dtype=np.int64) - starts.astype(np.int64)


def gathered(offsets: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
    """The offsets of only these rows' parts, and the positions of their elements among all elements."""
    counts = offsets[rows + 1] - offsets[rows]
    return offsets_of(counts), np.repeat(offsets[rows], counts) + positions(counts)


def within(values: npt.NDArray[Any], bound: int) -> bool:
    """Whether all values lie in 0..bound-1."""
    return not len(values) or bool(values.min() >= 0 and values.max() < bound)


def rises(offsets: npt.NDArray[Any], parts: int, total: int, least: int) -> bool:
    """Whether the offsets of ``parts`` parts rise from 0 to ``total``, each time by at least ``least``."""
    return bool(
        len(offsets) == parts + 1
        and offsets[0] == 0
        and offsets[-1] == total
        and (np.diff(offsets) >= least).all()
    )
