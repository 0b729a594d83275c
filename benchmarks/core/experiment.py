"""What a benchmark adds to training and scoring: it subclasses `Experiment`, and `execute` does the rest.

A benchmark's folder holds its config, and a ``train.py`` with the subclass, which it names ``EXPERIMENT``,
and ``main``. Only what has no default here must be written.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn

from benchmarks.core.code_version import PROJECT
from benchmarks.core.config.benchmark import Benchmark, Run
from benchmarks.core.config.sections import TrainingConfig
from benchmarks.core.config.trees import Tree, read_yaml
from benchmarks.core.mini import DataSource
from benchmarks.core.privacy_statement import USERS, ProtectedUnit
from benchmarks.core.weights import check_classes, check_origin
from benchmarks.reporting.tables import text_table
from dataset.store.hdf5 import DataFile
from dataset.store.probe import probe
from pfl_ext.algorithms.fedir import weighted_task
from pfl_ext.checkpoint import read_json
from pfl_ext.data.federated_dataset import ImageStore, Partition
from pfl_ext.data.normalisation import FIXED, Scale, scale_of
from pfl_ext.models.checks import check_groups, check_head_rate, check_known
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.decoders import encoder_of, outputs_of
from pfl_ext.models.depths import check_layer_decay
from pfl_ext.models.weights import IMAGENET
from pfl_ext.randomness import torch_stream
from pfl_ext.tasks.losses import TrainingLoss
from pfl_ext.tasks.score_kinds import ScoreKinds
from pfl_ext.tasks.task import Outputs, Task

C = TypeVar("C", bound=TrainingConfig)


def data_of(directory: Path) -> Path | None:
    """The file that a run learnt from; None: it has not ended, and does not say.

    A relative path counts from here; if there is no such file, from a folder above the run's where it has
    the data of the run.
    """
    results = directory / "results.json"
    said = read_json(results).get("dataset") if results.exists() else None
    if said is None or (path := Path(str(said))).is_file():
        return None if said is None else path
    above = (parent / path for parent in directory.resolve().parents)
    return next((place for place in above if place.is_file() and is_data_of(directory, place)), path)


def is_data_of(directory: Path, path: Path) -> bool | None:
    """Whether a file is what the run in ``directory`` learnt from; None: it does not say."""
    probe(path)  # before this process opens it
    with DataFile(path) as file:
        return has_data_of(directory, file)


def has_data_of(directory: Path, file: DataFile) -> bool | None:
    """`is_data_of`, for a file that is open."""
    said = (directory / "results.json", "data_sha256"), (directory / "checkpoint" / "data.json", "sha256")
    known = {read_json(place).get(key) for place, key in said if place.exists()} - {None}
    return known == {file.fingerprint} if known else None


class Experiment(ABC, Generic[C]):
    """One run of a benchmark on one data file.

    Args:
        run: what is trained, and how.
        file: the data, open as long as the experiment is used.

    Raises:
        ValueError: when the file does not hold what the run asks for.
    """

    benchmark: ClassVar[Benchmark[Any]]
    """Its settings, and how its command line is read."""
    headline: ClassVar[tuple[str, ...]]
    """The scores that runs are judged by, the first above all; the training curve shows them. The task says
    the unit of each, and whether lower is better."""
    scores: ClassVar[tuple[str, ...]]
    """The names of all scores of val."""
    final_splits: tuple[str, ...] = ("val", "test")
    """What the last and the best model are scored on at the end."""
    followed: str = "val"
    """What the scores of ``split("val")`` over the rounds are called: ``val``, by which a model may be
    chosen, or ``tracked``, which are those of test and choose nothing."""

    def __init_subclass__(cls, **more: Any) -> None:
        """The benchmark of a user's own class knows its module, so that a run counts the files of that."""
        super().__init_subclass__(**more)
        if hasattr(cls, "benchmark") and cls.__module__.partition(".")[0] not in PROJECT:
            cls.benchmark = dataclasses.replace(cls.benchmark, own=cls.__module__)

    def __init__(self, run: Run[C], file: DataFile) -> None:
        self.run, self.config, self.file = run, run.config, file

    @classmethod
    def source(cls, config: C) -> DataSource:
        """The data file where the command line names none; by default only the mini data set."""
        return DataSource()

    @classmethod
    def resolve_data(cls, argv: Sequence[str]) -> tuple[list[str], Path]:
        """The arguments and the file to train on; the mini data set, with its scale, where there is no other.

        The config of a run brings the run's file.

        Raises:
            ValueError: when a ``--data_path`` is given that does not exist, or a run's file is not there.
        """
        return cls._data_of(cls.benchmark.parse(argv), argv)

    @classmethod
    def resolve(cls, argv: Sequence[str]) -> tuple[Run[C], list[str], Path]:
        """The run that the arguments ask for, and what `resolve_data` makes of them; they are read once."""
        run = cls.benchmark.parse(argv)
        words, path = cls._data_of(run, argv)
        return (run if words == list(argv) else cls.benchmark.parse(words)), words, path

    @classmethod
    def _data_of(cls, run: Run[C], argv: Sequence[str]) -> tuple[list[str], Path]:
        config, scales = run.config, cls.benchmark.scales
        source = cls.source(config)
        if run.origin is None:
            return source.resolve(argv, run.data_path, scales, config.setting)
        if run.data_path is not None:  # no scale is laid over what a run resolved
            return source.resolve(argv, run.data_path, (), config.setting)
        if cls.source(cls.benchmark.read(read_yaml(run.origin), "config.yaml")).path != source.path:
            return source.resolve(argv, None, scales, config.setting)  # of another data set
        mini, path, of_a_run = source.mini.path, data_of(run.origin.parent), f"--config {run.origin}"
        if path is None and mini.is_file() and is_data_of(run.origin.parent, mini):
            path = mini  # a run that has not ended
        path = path or source.path
        if path is None or (path != mini and not path.is_file()):
            missing = "" if path is None else f", {path}, which is not there"
            raise ValueError(f"{of_a_run} needs the data file of its run{missing}: give it with --data_path")
        if path != mini and is_data_of(run.origin.parent, path) is False:
            raise ValueError(
                f"{of_a_run} belongs to a run on other data than {path} has now: give the file of the "
                "run with --data_path"
            )
        return list(argv), path

    @classmethod
    def ready_data(cls, run: Run[C], path: Path) -> None:
        """Draw the mini data set where `resolve_data` chose it for this run, and say so."""
        cls.source(run.config).ready(run.data_path, path)

    @abstractmethod
    def description(self) -> str:
        """What is learnt, for the screen: ``17 labels``."""

    @abstractmethod
    def split(self, name: str) -> ImageStore:
        """The store of ``train``, ``val`` or ``test``.

        Raises:
            ValueError: when the file has no such images.
        """

    def split_of_file(self, name: str) -> ImageStore:
        """A split by its name in the file; `split` gives test as val where test is followed.

        Raises:
            ValueError: when the file has no such images.
        """
        return self.split(name)

    @property
    @abstractmethod
    def class_names(self) -> Sequence[str]:
        """What the network has outputs for, in their order."""

    @classmethod
    @abstractmethod
    def task_of(cls, config: C, num_classes: int) -> Task:
        """What a run of this config learns."""

    def learnt(self) -> Task:
        """What this run learns, with its plain loss."""
        return self.task_of(self.config, len(self.class_names))

    @classmethod
    def score_kinds(cls, config: C, results: Tree | None = None) -> ScoreKinds:
        """How the scores of a run are read: as its results say, or else its task."""
        # which no number of classes changes
        return ScoreKinds.of(results or {}) or cls.task_of(config, 2).score_kinds

    def module(self) -> ImageClassifier:
        """The network before its first step, with outputs for each class."""
        num_classes = len(self.class_names)
        check_classes(self.config, self.run.weights, self.class_names)
        task = trained_task(self.config, self.learnt(), self.class_names)
        return build_model(self.config, num_classes, self.run.weights, task, self.split)

    scores_users: ClassVar[bool] = False
    """Whether users of val and test are scored one by one by `benchmarks.core.single_users`."""

    def partition(self) -> Partition | None:
        """Who owns the training images; None: the store's users."""
        return None

    def protected(self) -> ProtectedUnit:
        """Whom a private run's guarantee is about: the data's users, or the clients of a drawn partition."""
        return USERS

    def warning(self) -> str | None:
        """What is odd about the clients, for the screen at the start of federated training; None: nothing."""
        return None

    def check(self) -> None:
        """Refuse what would fail after training, before anything is written."""

    def final_results(
        self, directory: Path, model: PyTorchModel, metrics: Mapping[str, Metrics]
    ) -> Mapping[str, Any]:
        """What ``results.json`` holds besides.

        Args:
            directory: the run's, for files of the benchmark's own.
            model: the best one.
            metrics: its scores on each of `final_splits`.
        """
        return {}

    def draw(self, results: Tree, title: str, folder: Path) -> None:
        """Draw pictures of the results, besides the training curve, into a folder."""

    def rows(self, results: Tree) -> Mapping[str, Mapping[str, float]]:
        """The final table of some results, by the name of the row."""
        splits = {f"{name}, best model": results[name] for name in self.final_splits}
        return {**splits, "test, last model": results["last"]["test"]}

    def show(self, results: Tree) -> None:
        """Print that table."""
        print(text_table(self.rows(results), self.score_kinds(self.config, results)))


KINDS: Mapping[Outputs, tuple[str, str]] = {
    "image": ("a whole image", "resnet18"),
    "pixels": ("each pixel", "deeplabv3plus_efficientnet_lite0"),
    "boxes": ("boxes", "fcos_efficientnet_lite0"),
}
"""What networks have outputs for, in words, and a network that has them."""


def _check_outputs(arch: str, task: Task) -> None:
    """Refuse a name of no network, and a network whose outputs have another shape than the task's.

    Raises:
        ValueError: one line that names a network which fits.
    """
    check_known(arch)
    found, needed = outputs_of(arch), task.outputs
    if found != needed:
        encoder = encoder_of(arch)
        example = encoder if needed == "image" and encoder != arch else KINDS[needed][1]
        raise ValueError(
            f"model.arch is {arch}, which has outputs for {KINDS[found][0]}, and this task needs them for "
            f"{KINDS[needed][0]}: choose another, as {example}, or say so in a file of your own "
            f'(BUILDER.outputs = "{needed}")'
        )


def trained_task(config: TrainingConfig, task: Task, classes: Sequence[str]) -> Task:
    """The task with the loss that training minimises.

    Raises:
        ValueError: when the task does not support this loss, or a class of it does not exist.
    """
    augment = config.augment
    if augment.mixes and not task.mixable:
        raise ValueError(
            f"augment.mixup and augment.cutmix mix labels of whole images, which {type(task).__name__} does "
            "not have: set both to none"
        )
    loss = TrainingLoss.of(config.loss, classes, augment.label_smoothing, augment.mixes)
    if loss.is_plain:
        return task
    kinds = type(task).__mro__
    last = {
        name: next(k for k in kinds if name in vars(k)) for name in ("trained_by", "image_losses", "loss")
    }
    if not all(issubclass(last["trained_by"], last[name]) for name in ("image_losses", "loss")):
        return Task.trained_by(task, loss)  # refuses: a loss of one's own would not read this one
    return task.trained_by(loss)


def build_model(
    config: TrainingConfig,
    num_labels: int,
    weights: Path | None,
    task: Task,
    split: Callable[[str], ImageStore] | None = None,
) -> ImageClassifier:
    """The network of a setting: from scratch with GroupNorm, or pretrained with frozen statistics.

    Args:
        config: of the run.
        num_labels: K.
        weights: the file of its first weights.
        task: what it learns, as `trained_task` gives it.
        split: gives the store of ``train``, which the normalisation "data" reads.

    Raises:
        ValueError: when a file is asked for and none is given, or a value does not fit the network.
    """
    model, generator = config.model, torch_stream(config.seed, "model initialisation")
    _check_outputs(model.arch, task)
    if weights is None and model.weights_sha256 is not None:
        raise ValueError(
            f"the config needs weights with the SHA-256 {model.weights_sha256}: give their file with "
            "--weights"
        )
    check_origin(config, weights)
    backbone = build_backbone(
        model, num_labels, generator, (weights or IMAGENET) if model.pretrained else None
    )
    check_groups(backbone, model)
    for section in ("local", "server", "centralised") if model.parties is None else ():
        key = f"{section}.head_rate_factor"
        check_head_rate(backbone, key, getattr(config, section).head_rate_factor)
    check_layer_decay(backbone, model, "local.layer_decay", config.local.layer_decay)
    check_layer_decay(backbone, model, "centralised.layer_decay", config.centralised.layer_decay)
    scale = FIXED.get(model.normalisation)
    if scale is None:
        if split is None:
            raise ValueError(
                "model.normalisation is data, but this command has no data: choose another value"
            )
        scale = scale_of(split("train"))
    return classifier(config, backbone, weighted_task(config.federated, task), scale)


def classifier(config: TrainingConfig, backbone: nn.Module, task: Task, scale: Scale) -> ImageClassifier:
    """A backbone behind what the config does to images before it.

    Args:
        config: of the run.
        backbone: takes images and gives outputs.
        task: what is learnt.
        scale: of the images' colours.
    """
    return ImageClassifier(
        backbone,
        task=task,
        input_size=config.model.input_size,
        mean=scale.mean,
        std=scale.std,
        exact_crops=config.augment.crop != "resized",
        padding=config.augment.padding,
        changes=config.augment,
    )
