"""A file as training sees it, if each image has another annotation than labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dataset.arrays import BoolArray
from dataset.store.annotations import Boxes, Masks
from dataset.store.views import KINDS, SingleLabelView


@dataclass(frozen=True)
class AnnotatedView(SingleLabelView):
    """A file seen as images with masks, or with boxes. All images take part.

    Partitions and a carved val are those of `SingleLabelView`, whose ``taxonomy`` names the annotation here.

    Raises:
        ValueError: also when the annotation is of another kind.
    """

    kind: ClassVar[type[Masks] | type[Boxes]]
    purpose: ClassVar[str]
    """The kind of annotation in words, for a message."""
    truth: ClassVar[str]
    """What an image must have to count in a score, in words, for a message."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.file.splits:
            annotations = self.file.split(name).annotations
            if not isinstance(annotations[self.taxonomy], self.kind):
                known = [other for other, found in annotations.items() if isinstance(found, self.kind)]
                raise ValueError(
                    f"{self.taxonomy} of {self.file.path} has no {KINDS[self.kind.kind]}, but this task "
                    f"needs {self.purpose}: set data.taxonomy to "
                    f"{' or '.join(known) or 'that of another file'}"
                )

    def has_truth(self, split: str) -> bool:
        """Whether a split has anything that can be learnt or scored, which `truth` names."""
        raise NotImplementedError

    def _usable(self, file_split: str) -> BoolArray:
        return np.ones(self.file.split(file_split).num_images, bool)
