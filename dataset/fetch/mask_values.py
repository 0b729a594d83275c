"""Masks whose pixels have other values than the numbers of classes, such as 0 and 255; classes in no mask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dataset.store.annotations import VOID, encoded_mask, read_mask


def values_of(text: str) -> tuple[int, ...]:
    """The numbers of ``--mask_values``, such as 0,255.

    Raises:
        ValueError: when they are not different numbers from 0 to 255.
    """
    words = [word.strip() for word in text.split(",")]
    values = tuple(int(word) for word in words if word.isascii() and word.isdecimal())
    if len(values) < len(words) or len(set(values)) < len(values) or max(values) > VOID:
        raise ValueError(
            f"--mask_values is {text!r}; give different numbers from 0 to 255, one for each class in its "
            "order, as in 0,255"
        )
    return values


def numbered(png: bytes, values: Sequence[int]) -> bytes:
    """The mask whose pixels have the values of their classes, as a mask of class numbers.

    Args:
        png: of 8 bits, or of 1 bit (0 and 255), or of a colour image whose three channels are equal.
        values: of the classes, in their order.

    Raises:
        ValueError: with a clause that says what is wrong.
    """
    mask = read_mask(png, as_grey=True)
    classes = np.full(256, VOID, np.uint8)
    classes[list(values)] = np.arange(len(values), dtype=np.uint8)
    if others := sorted({*np.unique(mask).tolist()} - {*values}):
        raise ValueError(
            f"it has pixels of the value {others[0]}, which is not one of --mask_values "
            f"{','.join(map(str, values))}"
        )
    return encoded_mask(classes[mask])


def check_classes(masks: Iterable[bytes], classes: Sequence[str], origin: str) -> str | None:
    """A warning that names the classes that no mask has; masks are read until all classes were found.

    Raises:
        ValueError: when no mask has a class but the first, so that there is nothing to learn.
    """
    found: set[int] = set()
    missing = {*range(1, len(classes))}
    for png in masks:
        try:
            here = {*np.unique(read_mask(png)).tolist()}
        except ValueError:  # which is reported with its image
            return None
        found |= here
        missing -= here
        if not missing and len(classes) > 1:
            return None
    if not found:
        return None
    void = "; pixels of the value 255 have no class" if VOID in found else ""
    if len(classes) == 2 and void:
        void += f": if they are {classes[1]}, give --mask_values 0,255"
    if found <= {0, VOID}:
        more = "" if len(classes) > 1 else " (list all classes in classes.txt, background first)"
        raise ValueError(f"{origin}: no mask has a pixel of a class other than {classes[0]}{more}{void}")
    names = ", ".join(classes[k] for k in sorted(missing))
    return f"WARNING: no mask has a pixel of {names}{void}" if missing else None
