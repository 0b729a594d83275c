"""The model of a run that has ended, built again from the run's folder alone; training data is not needed.

from benchmarks.predict import trained

model = trained("runs/fl-r-17")
probabilities = model.predict(model.read(["a.jpg", "b.png"]))   # [2, K], in the order of model.classes
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.compare.reading import read_any
from benchmarks.core.config.sections import TrainingConfig
from benchmarks.core.experiment import Experiment, classifier
from benchmarks.core.own_code import own_code, with_own_code
from benchmarks.reporting.runs import RunRecord, not_whole
from dataset.arrays import ByteArray
from dataset.files import OWN
from dataset.store import images as stored_images
from dataset.store.hdf5 import DataFile
from pfl_ext import checkpoint
from pfl_ext.data.normalisation import FIXED, Scale
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.randomness import torch_stream
from pfl_ext.tasks.detection_scores import CLASS, NO_BOX, SCORE
from pfl_ext.tasks.task import Task

BY_CLASS = ("per_class_ap", "per_class_accuracy", "per_class_iou")
"""What ``results.json`` of a run before the key ``classes`` has by the classes' names, in their order."""


@dataclass(frozen=True)
class Trained:
    """A trained model.

    Attributes:
        record: the run.
        experiment: its kind.
        classes: names of the K classes.
        network: takes uint8 images ``[B, H, W, 3]`` and gives outputs before any probability.
    """

    record: RunRecord
    experiment: type[Experiment[Any]]
    classes: tuple[str, ...]
    network: ImageClassifier

    @property
    def task(self) -> Task:
        """What was learnt."""
        return self.network.task

    @property
    def image_size(self) -> int:
        """The side in pixels at which the run read its images."""
        return int(self.record.config.data.image_size)

    def on(self, file: DataFile) -> Experiment[Any]:
        """The run's kind on a data file, such as its own.

        Raises:
            ValueError: when the file has other classes, or not what the run's config asks for.
        """
        config = self.record.directory / "config.yaml"
        experiment = self.experiment(self.experiment.benchmark.parse(["--config", str(config)]), file)
        if tuple(experiment.class_names) != self.classes:
            raise ValueError(
                f"{file.path} has other classes than the data of {self.record.directory}: give its file with "
                "--data_path, or images with --images"
            )
        return experiment

    def read(self, paths: Iterable[str | Path]) -> Tensor:
        """Image files as the run read its images: uint8 ``[B, S, S, 3]``, squashed to S.

        They are JPEG, PNG, WebP, GIF, BMP or TIFF.

        Raises:
            ValueError: for a file that is no such image; the message names it.
        """
        each = [read_image(Path(path), self.image_size)[0] for path in paths]
        return torch.from_numpy(np.stack(each)) if each else torch.empty((0, 0, 0, 3), dtype=torch.uint8)

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Predictions for uint8 images ``[B, H, W, 3]``, by kind of task.

        * labels or one class an image: probabilities ``[B, K]`` float32;
        * masks: the class of each pixel of the network's input, ``[B, S, S]`` uint8;
        * boxes: ``[B, D, 6]``: left, top, right and bottom in pixels of the network's input, class, score;
          best first, filled up with the class -1.
        """
        return self.task.predicted(self.network(images.to(self.network.mean.device)).float())

    def detect(self, images: Iterable[str | Path | ByteArray]) -> list[dict[str, Tensor]]:
        """The boxes in images, in pixels of each image, in the form of torchvision's detectors.

        Args:
            images: files, or RGB pixels ``[H, W, 3]`` uint8 such as a video's frames (OpenCV's are BGR).

        Returns:
            For each image, best first: ``boxes`` ``[n, 4]`` left, top, right, bottom; ``labels`` ``[n]``, of
            which 0 is the first of ``classes``; ``scores`` ``[n]``.

        Raises:
            ValueError: for a model that finds no boxes, and for what is no such image.
        """
        if self.task.outputs != "boxes":
            raise ValueError(f"{self.record.directory} finds no boxes: use predict")
        out = []
        for image in images:
            pixels, (height, width) = _pixels(image, self.image_size)
            (rows,) = self.predict(torch.from_numpy(pixels[None].copy())).cpu()
            rows = rows[rows[:, CLASS] != NO_BOX]
            scale = torch.tensor([width, height, width, height]) / self.network.input_size
            boxes, labels = rows[:, :CLASS] * scale, rows[:, CLASS].long()
            out.append({"boxes": boxes, "labels": labels, "scores": rows[:, SCORE]})
        return out


def _pixels(image: str | Path | ByteArray, side: int) -> tuple[ByteArray, tuple[int, int]]:
    """`read_image`, of a file or of RGB pixels."""
    if isinstance(image, str | Path):
        return read_image(Path(image), side)
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.shape[2:] != (3,):
        raise ValueError("an image must be a path, or RGB pixels of numpy's type uint8 and shape [H, W, 3]")
    return stored_images.resized(image, side), image.shape[:2]


def read_image(path: Path, side: int) -> tuple[ByteArray, tuple[int, int]]:
    """An image file as RGB ``[S, S, 3]``, decoded as a data file's images are, and its own height and width.

    Transparent images are laid over white.

    Raises:
        ValueError: when it is no image; the message names the file.
    """
    try:
        data = path.read_bytes()
        if stored_images.other_format(data) is None:
            width, height = stored_images.jpeg_size(data)  # says what is wrong with another file
            return stored_images.decode(data, side), (height, width)
        pixels = stored_images.to_pixels(data, "white")[0]
        return stored_images.resized(pixels, side), pixels.shape[:2]
    except OSError as fault:
        raise ValueError(f"{path} cannot be read: {fault.strerror}") from None
    except ValueError as fault:
        raise ValueError(f"{path} cannot be used: {fault}") from None


def trained(directory: str | Path, device: str | torch.device = "cpu") -> Trained:
    """The model of a run.

    Args:
        directory: of a run of any benchmark, which has ended.
        device: where the network computes.

    Raises:
        ValueError: for a run that has not ended, whose files do not fit together, or whose own code was
            edited after its training; one line.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a folder: give the folder of a run")
    record, experiment = read_any(directory)
    if record.results is None:
        raise ValueError(
            f"{directory}: the run has not finished; give its training command again to continue it"
        )
    _check_own_code(record, experiment)
    classes = _classes(record)
    file = directory / "model.safetensors"
    if not file.is_file():
        raise not_whole(directory, f"{file.name} is missing")
    task = experiment.task_of(record.config, len(classes))
    model = dataclasses.replace(record.config.model, trained="all")  # adapters are merged into the weights
    network = network_of(record, task, len(classes), model)
    try:
        network.load_state_dict(checkpoint.load(file)[0])
    except RuntimeError as fault:
        reason = " ".join(str(fault).split())
        raise not_whole(directory, f"{file.name} does not fit its config: {reason[:200]}") from None
    return Trained(record, experiment, classes, network.to(device).eval())


def _check_own_code(record: RunRecord, experiment: type[Experiment[Any]]) -> None:
    """Refuse files of the user's that were edited since the training, or that nobody names now: the weights
    may mean other things."""
    if record.config.own_code is None:  # it is computed by none of them
        return
    before, now = record.outcome.get("own_code", {}), own_code()
    edited = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    if edited:
        raise ValueError(
            f"{record.directory} was trained with another version of {', '.join(edited)} ({OWN}), so "
            "predictions would differ: restore the old file, or train again"
        )
    missing = sorted(before.keys() - now.keys())
    if missing and with_own_code(record.config, experiment.benchmark.own) != record.config:
        raise ValueError(
            f"{record.directory} was trained with {', '.join(missing)}: set {OWN} to these files of yours"
        )


def _classes(record: RunRecord) -> tuple[str, ...]:
    results = record.outcome
    found = results.get("classes") or next((results[key] for key in BY_CLASS if key in results), None)
    if not found or not isinstance(found, list | dict):
        raise not_whole(record.directory, "results.json does not name the classes")
    return tuple(map(str, found))


def network_of(record: RunRecord, task: Task, num_classes: int, model: ModelConfig) -> ImageClassifier:
    """The network of a run with weights as drawn."""
    config: TrainingConfig = record.config
    backbone = build_backbone(model, num_classes, torch_stream(config.seed, "model initialisation"))
    scale = FIXED.get(model.normalisation)
    if scale is None:
        found = record.outcome.get("input")
        if not found:
            raise not_whole(record.directory, "results.json does not hold the data's mean and deviation")
        scale = Scale(found["mean"], found["std"])
    return classifier(config, backbone, task, scale)
