"""How training images change by their keys (`pfl_ext.models.dropout`), each image by itself.

A key is a function of (seed, round, user, step). So an image changes in the same way on any device, in any
batch and in a resumed run; without keys, as in evaluation, it stays.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.configs import STRICT
from pfl_ext.models.color_jitter import jittered
from pfl_ext.models.cutout import cut_out
from pfl_ext.models.pixel_noise import noisy
from pfl_ext.models.rand_augment import STRONGEST, rand_augmented
from pfl_ext.models.random_erasing import erased
from pfl_ext.tasks.task import Task

UNFIT = {
    "rand_augment": "has targets at places of an image, from which it moves pixels",
    "cutout": "needs all parts of an image",
    "random_erasing": "needs all parts of an image",
}
"""Why a task whose targets have positions in the image cannot be combined with a key."""


@dataclass(frozen=True, config=STRICT)
class ImageChanges:
    """Changes of training images, in the order in which they are made."""

    rand_augment: Annotated[int, Field(ge=1, le=STRONGEST)] | None = None
    """RandAugment: two operations, drawn for each image, of this magnitude from 1 to 30; none: off."""
    color_jitter: Annotated[float, Field(gt=0, le=1)] | None = None
    """Brightness, contrast, saturation change by random factors from 1 - this to 1 + this; none: off."""
    noise: Annotated[float, Field(gt=0, le=1)] | None = None
    """Standard deviation of Gaussian noise on each value of an image, whose pixels are in 0..1; none: off."""
    cutout: PositiveInt | None = None
    """Side of a square that is hidden at a random place of each image, in pixels; none: nothing is hidden."""
    random_erasing: Annotated[float, Field(gt=0, le=1)] | None = None
    """Probability that a random rectangle of an image is hidden; none: nothing is hidden."""

    @property
    def keyed(self) -> bool:
        """Whether training images need keys."""
        return any(getattr(self, key) is not None for key in KEYED)

    @property
    def of_pixels(self) -> bool:
        """Whether pixels change before they are normalised; a new one may depend on all of the image."""
        return self.rand_augment is not None or self.color_jitter is not None

    @property
    def waits(self) -> bool:
        """Whether a GPU is waited for, so that training steps cannot be recorded."""
        return self.rand_augment is not None

    def check_task(self, task: Task) -> None:
        """Refuse changes that a task's targets would not follow.

        Raises:
            ValueError: one line with the reason.
        """
        for key, why in UNFIT.items():
            if (value := getattr(self, key)) is not None and type(task).augment is not Task.augment:
                raise ValueError(
                    f"augment.{key} is {value:g}, but {type(task).__name__} {why}: set augment.{key} to none"
                )

    def pixels(self, pixels: Tensor, crops: Tensor | None) -> Tensor:
        """Images before normalisation, ``[B, 3, S, S]`` in 0..1, with their changes.

        Args:
            pixels: of the crops.
            crops: ``[B, 9]`` or more, with keys; others, and None, change nothing.
        """
        if self.rand_augment is not None:
            pixels = rand_augmented(pixels, crops, self.rand_augment)
        return pixels if self.color_jitter is None else jittered(pixels, crops, self.color_jitter)

    def inputs(self, x: Tensor, crops: Tensor | None, std: Tensor) -> Tensor:
        """A network's input ``[B, 3, S, S]`` with noise, and of which parts are hidden.

        ``crops`` are those of `pixels`, and ``std`` ``[3]`` is what pixels were divided by.
        """
        if self.noise is not None:
            x = noisy(x, crops, self.noise, std)
        if self.cutout is not None:
            x = cut_out(x, crops, self.cutout)
        return x if self.random_erasing is None else erased(x, crops, self.random_erasing)


KEYED = tuple(item.name for item in fields(ImageChanges))
"""The keys of a run's config by which images change."""
