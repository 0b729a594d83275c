"""Pictures of images: predicted masks and boxes beside the truth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.reporting.plots import legend_below, save
from dataset.arrays import ByteArray, Float32Array, FloatArray, IntArray
from pfl_ext.tasks.segmentation import VOID

SURE = 0.3
"""Boxes with at least this score are drawn."""
DISTINCT = (
    "808080", "e6194b", "3cb44b", "ffe119", "4363d8", "f58231", "911eb4", "46f0f0", "f032e6", "bcf60c",
    "fabebe", "008080", "e6beff", "9a6324", "000000", "800000", "aaffc3", "808000", "2aa4ff", "000075",
)  # fmt: skip
"""Colours that differ from each other and from white, most of Trubetskoy's list, sashamaps.net."""
LEGEND_LINE = 0.19
"""Height of a line of the legend, in inches."""
WIDTH = 5.4
"""Width of a picture, in inches."""
MOST_LETTERS = 20
"""Letters of a user's name beside an image."""


def masks(
    images: Float32Array,
    truth: ByteArray,
    predicted: IntArray,
    names: Sequence[str],
    title: str,
    path: Path,
    users: Sequence[str] = (),
) -> None:
    """A row for each image: the image, its mask and the predicted mask; pixels without a class are white.

    Args:
        images: ``[n, S, S, 3]`` in 0..1.
        truth: class numbers ``[n, S, S]``, 255 for no class.
        predicted: class numbers ``[n, S, S]``.
        names: of the classes.
        title: of the picture.
        path: of the file.
        users: whose each image is, to be written beside it.
    """
    palette = mask_palette(len(names)) / 255
    found = {*np.unique(truth).tolist(), *np.unique(predicted).tolist()}
    rows = list(zip(images, palette[truth], palette[predicted]))
    figure, _ = _panels(rows, ("image", "mask", "predicted"), users)
    if VOID in found:
        void: dict[str, Any] = {"color": "white", "markeredgecolor": "black", "markeredgewidth": 0.6}
        figure.axes[0].plot([], [], "s", **void, label="no class")
    _finish(figure, palette, sorted(found - {VOID}), names, title, path)


def boxes(
    images: Float32Array,
    truth: Float32Array,
    predicted: Float32Array,
    names: Sequence[str],
    title: str,
    path: Path,
    users: Sequence[str] = (),
) -> None:
    """A row for each image: with its boxes, and with the predicted boxes whose score is at least `SURE`.

    Args:
        images: ``[n, S, S, 3]`` in 0..1.
        truth: ``[n, M, 6]``: left, top, right and bottom in pixels, class, flags; the class -1 is no box.
        predicted: ``[n, D, 6]``: the same with a score in the place of flags.
        names: of the classes.
        title: of the picture.
        path: of the file.
        users: whose each image is, to be written beside it.
    """
    palette = _palette(len(names))
    heads = "truth", f"predicted, score from {SURE}"
    figure, panels = _panels([(image, image) for image in images], heads, users)
    shown = set()
    for row, (true, found) in zip(panels, zip(truth, predicted)):
        for axes, drawn in zip(row, (true, found[found[:, 5] >= SURE])):
            for left, top, right, bottom, number in drawn[drawn[:, 4] >= 0, :5].tolist():
                colour = palette[int(number)]
                axes.add_patch(
                    Rectangle(
                        (left - 0.5, top - 0.5), right - left, bottom - top, fill=False, ec=colour, lw=1.2
                    )
                )
                shown.add(int(number))
    _finish(figure, palette, sorted(shown), names, title, path)


def mask_palette(number: int) -> ByteArray:
    """The colours of masks by class number, ``[256, 3]``; white beyond the classes, as for `VOID`."""
    palette = np.full((256, 3), 255, np.uint8)
    palette[:number] = (255 * _palette(number)).round()
    return palette


def _palette(number: int) -> FloatArray:
    """A colour for each class, ``[C, 3]``: of `DISTINCT`, where they are enough."""
    if number <= len(DISTINCT):
        return np.array([to_rgb(f"#{code}") for code in DISTINCT[:number]])
    colours: FloatArray = colormaps["turbo"](np.linspace(0.03, 0.97, number))[:, :3]
    return colours


def _panels(
    rows: Sequence[Sequence[Any]], heads: Sequence[str], users: Sequence[str]
) -> tuple[Figure, npt.NDArray[Any]]:
    """A figure with these pictures in rows, beside their users and under their heads, and its axes."""
    height = 0.8 + (WIDTH / len(heads) - 0.1) * len(rows)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = figure.subplots(len(rows), len(heads), squeeze=False)
    axes: Axes
    for row, pictures in zip(panels, rows):
        for axes, picture in zip(row, pictures):
            axes.imshow(picture, interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
    for axes, head in zip(panels[0], heads):
        axes.set_title(head, fontsize="medium")
    for axes, user in zip(panels[:, 0], users):
        axes.set_ylabel(user if len(user) <= MOST_LETTERS else f"{user[:MOST_LETTERS]}...", fontsize="small")
    return figure, panels


def _finish(
    figure: Figure,
    palette: FloatArray,
    shown: Sequence[int],
    names: Sequence[str],
    title: str,
    path: Path,
) -> None:
    """Add the classes that are shown and the title, and write the file."""
    for number in shown:
        figure.axes[0].plot([], [], "s", color=palette[number], label=names[number])
    figure.suptitle(title)
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE * -(-len(shown) // 3))
    legend_below(figure)
    save(figure, path)
