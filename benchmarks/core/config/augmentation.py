"""The part of a run's config that changes training images, and what of it cannot stand together."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from pfl_ext.configs import STRICT, Fraction
from pfl_ext.data.transforms import AugmentConfig
from pfl_ext.models.image_changes import KEYED, ImageChanges

MIXING = ("mixup", "cutmix")
"""The keys by which images of a batch are mixed."""


@dataclass(frozen=True, config=STRICT)
class AugmentSection(ImageChanges, AugmentConfig):
    """Augmentation of training images and labels; scores are computed without it."""

    label_smoothing: Fraction = 0.0
    """Share of a label, or of a pixel's class, that is spread over all classes; 0 for multi-label tasks."""

    def check(self, input_size: int) -> None:
        """Refuse a square larger than the input, and changes of images that have fixed views.

        Raises:
            ValueError: in one line.
        """
        if self.cutout is not None and self.cutout > input_size:
            raise ValueError(
                f"augment.cutout is {self.cutout}, but must be at most model.input_size = {input_size}: "
                "lower it"
            )
        for key in (*KEYED, *MIXING):
            if (value := getattr(self, key)) is not None and self.views is not None:
                raise ValueError(
                    f"augment.{key} is {value:g} and augment.views is {self.views}, but the two cannot be "
                    "combined: set one of them to none"
                )
