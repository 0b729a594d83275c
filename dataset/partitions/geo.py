"""Partitions by place: S2 cells, which are divided in four while they contain too many images.

Hsu, Qi and Brown, Section 4.1 (iNaturalist-Geo): starting from the six faces of S2's cube, every cell with
more than N_max images is divided into its four children; then cells with fewer than N_min = 0.01 N_max are
dropped.

A cell id is a 64-bit number whose last set bit says its level; the ids of all that lies in a cell are a range
around the cell's own. Shape letters: N images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import s2cell

from dataset.files import utf8
from dataset.partitions.assignments import NOBODY, csv_rows

LEAF_LEVEL = 30
MIN_SHARE = 0.01
"""N_min / N_max."""

Ids = npt.NDArray[np.uint64]


def leaf_ids(latitudes: Sequence[float], longitudes: Sequence[float]) -> Ids:
    """The smallest cell (of about a square centimetre) at each place on the earth, ``[N]``; degrees."""
    found = [s2cell.lat_lon_to_cell_id(lat, lon) for lat, lon in zip(latitudes, longitudes)]
    return np.array(found, np.uint64)


def ancestors(leaves: Ids, level: int) -> Ids:
    """The cell of a level that holds each leaf."""
    last = np.uint64(1 << (2 * (LEAF_LEVEL - level)))
    return np.asarray((leaves & ~(last - np.uint64(1)) & ~last) | last, np.uint64)


def geo_partition(leaves: Ids, max_images: int, min_share: float = MIN_SHARE) -> list[str]:
    """The token of each image's cell, ``[N]``; ``NA`` where the cell was dropped.

    A leaf cell is not divided any further, however many images lie in it.

    Raises:
        ValueError: for ``max_images`` below 1.
    """
    if max_images < 1:
        raise ValueError(f"a cell may have at most {max_images} images; give a number of at least 1")
    cells = ancestors(leaves, 0)
    undecided = np.ones(len(leaves), np.bool_)
    for level in range(1, LEAF_LEVEL + 1):
        _, inverse, counts = np.unique(cells, return_inverse=True, return_counts=True)
        undecided &= counts[inverse] > max_images
        if not undecided.any():
            break
        cells[undecided] = ancestors(leaves[undecided], level)
    held, inverse, counts = np.unique(cells, return_inverse=True, return_counts=True)
    tokens = [s2cell.cell_id_to_token(int(cell)) for cell in held]
    names = [token if count >= min_share * max_images else NOBODY for token, count in zip(tokens, counts)]
    return [names[cell] for cell in inverse.tolist()]


def read_coordinates(path: Path) -> dict[str, tuple[float, float]]:
    """Latitude and longitude of each image from a CSV with the columns ``image_id,latitude,longitude``.

    Raises:
        ValueError: that names file and line.
    """
    text = utf8(path.read_bytes(), str(path))
    found: dict[str, tuple[float, float]] = {}
    for where, row in csv_rows(text, str(path), ("image_id", "latitude", "longitude"), ()):
        try:
            place = float(row["latitude"]), float(row["longitude"])
        except ValueError:
            raise ValueError(f"{where} has no latitude and longitude in degrees") from None
        if not (-90 <= place[0] <= 90 and -180 <= place[1] <= 180):
            raise ValueError(
                f"{where}: latitude {place[0]}, longitude {place[1]} is not a place on the earth (give "
                "degrees)"
            )
        found[row["image_id"]] = place
    return found
