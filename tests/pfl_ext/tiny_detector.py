"""Detectors of few parameters with the layers of large ones, so that tests cost little."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pfl_ext.models.decoders import Decoder, EncoderDecoder
from pfl_ext.models.detection import FCOS
from pfl_ext.models.encoders import Encoder
from pfl_ext.models.faster_rcnn import FasterRCNN
from pfl_ext.models.ssdlite import SSDLite
from pfl_ext.tasks.detection import Detection
from pfl_ext.tasks.detection_rcnn import FasterRCNNDetection
from pfl_ext.tasks.detection_ssd import SSDDetection

CHANNELS = (4, 4, 8, 8, 8)
TASKS = {"fcos": Detection, "ssdlite": SSDDetection, "fasterrcnn": FasterRCNNDetection}


class TinyEncoder(Encoder):
    def __init__(self, last: int = len(CHANNELS)) -> None:
        nn.Module.__init__(self)
        inputs = (3, *CHANNELS)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in zip(inputs, CHANNELS)
        )
        self.last = last

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = [images]
        for block in self.blocks:
            maps.append(block(maps[-1]))
        return maps[-self.last :]


class Tiny:
    """As `pfl_ext.models.decoders.Architecture`, with 200,000 parameters (fcos) or some 20,000."""

    encoder, outputs = "lenet", "boxes"

    def __init__(self, kind: str = "fcos") -> None:
        self.kind, self.task, self.drawing = kind, TASKS[kind], kind == "fasterrcnn"

    def __call__(self, num_labels: int, input_size: int) -> EncoderDecoder:
        decoders: dict[str, type[Decoder]] = {"ssdlite": SSDLite, "fasterrcnn": FasterRCNN, "fcos": FCOS}
        words: dict[str, Any] = {
            "fcos": {"width": 64, "convolutions": 1},
            "fasterrcnn": {"widths": (8, 16)},
            "ssdlite": {"more": (32, 32, 32, 32)},
        }
        last = 2 if self.kind == "ssdlite" else len(CHANNELS)
        decoder = decoders[self.kind](CHANNELS[-last:], num_labels, **words[self.kind])
        return EncoderDecoder(TinyEncoder(last), decoder)
