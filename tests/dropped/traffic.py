"""Detection by FCOS on ConvNeXt, trained by day and by night, where boxes count twice as much as classes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import Tensor

from benchmarks.core.execute import main as train
from benchmarks.fedcv.detection.config import Config
from benchmarks.fedcv.detection.train import FederatedDetection
from dataset.cli import run
from pfl_ext.data.transforms import Framing
from pfl_ext.models.decoders import Architecture
from pfl_ext.models.detection import FCOS
from pfl_ext.models.dropout import drawn, keys_in
from pfl_ext.models.encoders import Form
from pfl_ext.models.small import NETWORKS
from pfl_ext.tasks.detection import Detection

# torchvision's layers that compute each of five maps, and the channels of these; FCOS takes the last three
STEPS = [[f"features.{i}" for i in step] for step in ((0,), (1,), (2, 3), (4, 5), (6, 7))]
FORM = Form(STEPS, (96, 96, 192, 384, 768))
NETWORKS.add("fcos_convnext", Architecture(FCOS, "convnext_tiny", "boxes", form=lambda _: FORM, drawing=True))
NIGHT = 1 << 21  # the number of a stream of draws; those of this project are smaller


class ByNight(Detection):
    """The task with another loss, and darker images."""

    def augment(
        self, images: Tensor, targets: Tensor, crops: Tensor | None, framing: Framing
    ) -> tuple[Tensor, Tensor]:
        """A training image keeps 30 to 100 % of its light; pixels are in 0..1."""
        pixels, targets = super().augment(images, targets, crops, framing)
        if (keys := keys_in(crops)) is not None:
            light = 1 - 0.7 * drawn(keys, NIGHT, 1) / (1 << 24)
            pixels = pixels * light[:, :, None, None]
        return pixels, targets

    def image_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """FCOS's, with twice the loss of boxes."""
        classes, boxes, centres, places = self.sums(outputs, targets)
        return (classes + 2 * boxes + centres) / places


class Traffic(FederatedDetection):
    """The benchmark with this task."""

    @classmethod
    def task_of(cls, config: Config, num_classes: int) -> Detection:
        """Ours."""
        return ByNight(num_classes)


EXPERIMENT = Traffic


def main(argv: Sequence[str]) -> None:
    """As every benchmark's."""
    train(Traffic, argv, __doc__, "traffic")


if __name__ == "__main__":
    sys.exit(run(main))
