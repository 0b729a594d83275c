"""What a run's network is fed: images, or the features that its frozen layers give, which are computed once.

A run of which only the last layers are trained (``model.trained: head``) sees the same features of an image
in every round, if no crop or flip is drawn, or those of a few views of it, if ``augment.views`` are. They are
kept beside the data file (`dataset.store.features`), for this run and for all others with the same images,
weights and transform.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pfl.internal.ops.pytorch_ops import get_default_device

from benchmarks.core.config.augmentation import MIXING
from benchmarks.core.config.effects import draws_crops
from benchmarks.core.config.sections import TrainingConfig
from benchmarks.core.experiment import Experiment
from benchmarks.core.kept_features import BATCH, KeptFeatures
from benchmarks.core.run_directory import RunDirectory
from benchmarks.core.secret import Secret
from dataset.arrays import Float32Array, IntArray
from dataset.store.views import SplitImages
from pfl_ext.data.federated_dataset import ImageStore, Partition, natural_partition
from pfl_ext.engine.cpu.layers import kernels_for, layers_for
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.config import ON_FEATURES
from pfl_ext.models.features import Split
from pfl_ext.models.image_changes import KEYED
from pfl_ext.models.prefix import Prefix
from pfl_ext.models.standardised import Standardised, standardised_in
from pfl_ext.privacy.moments import Release, channel_moments
from pfl_ext.tasks.task import Task
from pfl_ext.workers.distributed import is_main

NO_FILE = "no data file was given to read its images from"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The network that is trained and scored, and the stores of what it is fed."""

    module: ImageClassifier
    split: Callable[[str], ImageStore]

    def standardised(
        self, experiment: Experiment[Any], whole: ImageClassifier, files: RunDirectory
    ) -> Inputs:
        """These inputs with features by whose moments over the training users a network standardises them.

        The layer of the whole network is set, too. Moments are a function of the features and the secret of
        the run: one that is killed and goes on releases the same again.

        Args:
            experiment: of the run.
            whole: the network before its first step.
            files: the run's directory, which holds the secret.
        """
        layer = standardised_in(whole)
        if layer is None:
            return self
        train, partition, secret = self.split("train"), experiment.partition(), files.secret()
        assert isinstance(train, SplitImages)
        layer.set(*_moments(experiment.config, train, partition or natural_partition(train), secret, layer))
        width = int(self.module.input_shape[0]) // layer.num_channels
        mean, scale = (t.cpu().numpy().repeat(width) for t in (layer.mean, layer.scale))

        def split(name: str) -> ImageStore:
            store = self.split(name)
            assert isinstance(store, SplitImages)
            return dataclasses.replace(store, pixels=_Standardised(store.pixels, mean, scale))

        return Inputs(self.module, split)


@dataclasses.dataclass(frozen=True)
class _Standardised:
    """Features that are standardised where they are read."""

    features: Any
    mean: Float32Array
    scale: Float32Array

    def read(self, split: str, rows: IntArray) -> Float32Array:
        """``[n, D]``."""
        found: Float32Array = self.features.read(split, rows)
        found = found - self.mean
        found *= self.scale
        return found


def _moments(
    config: TrainingConfig, train: SplitImages, users: Partition, secret: Secret | None, layer: Standardised
) -> tuple[torch.Tensor, torch.Tensor]:
    """Private where the run is."""
    release = None
    if secret is not None:
        assert config.privacy is not None, "local privacy has no such release"
        assert config.privacy.moments_multiplier is not None
        bounds = (config.privacy.mean_bound, config.privacy.square_bound)
        release = Release(config.privacy.moments_multiplier, bounds, secret.noise_seed)

    def read(rows: IntArray) -> Float32Array:
        found: Float32Array = train.pixels.read(train.file_split, train.file_rows[rows])
        return found

    return channel_moments(read, users, layer.num_channels, release)


def inputs_of(experiment: Experiment[Any], module: ImageClassifier, data: Path) -> Inputs:
    """Features where they can be computed once, and images elsewhere. All workers call this.

    Args:
        experiment: of the run.
        module: the whole network, before its first step.
        data: the data file.

    Raises:
        ValueError: when there is no room for the features, or a network needs them and they are not cached.
    """
    run, images = experiment.run, Inputs(module, experiment.split)
    needed = next(_needs_kept(run.config), None)
    if needed is not None and not run.runtime.cache_features:
        raise ValueError(
            f"{needed[0]}, which is for features that are computed once: set runtime.cache_features to true, "
            f"or {needed[1]}"
        )
    layer = standardised_in(module)
    if layer is not None:
        layer.clear()  # its features are the same for all runs
    if run.config.model.trained == "last_blocks" and run.runtime.cache_features:
        return _maps(experiment, images)
    if run.config.model.trained not in (*ON_FEATURES, "names") or not run.runtime.cache_features:
        return images
    split, why, stores = None, _reason(run.config, module.task), _labelled(experiment)
    module.to(get_default_device())
    if not run.config.model.dropout:  # with which two passes differ
        try:
            split = Split(module)
        except ValueError as fault:
            why = str(fault)  # rather than a remedy that would not help
    if split is None or why or stores is None:
        if needed is not None:
            raise ValueError(f"{needed[0]}, but features are not computed only once: {why or NO_FILE}")
        if is_main() and why:
            print(f"the frozen layers are computed in every round: {why}", flush=True)
        return images
    kept = KeptFeatures(run, split, data, experiment.file)
    fed: dict[str, SplitImages] = {}
    if run.config.augment.views is not None:  # training sees views alone, and scores whole images alone
        train = stores.pop("train")
        fed["train"] = dataclasses.replace(train, pixels=kept.views(train, run.config.augment.views))
    cache = kept.whole_images(list(stores.values()))
    fed |= {name: dataclasses.replace(store, pixels=cache) for name, store in stores.items()}
    return Inputs(split.classifier, fed.__getitem__)


def _labelled(experiment: Experiment[Any]) -> dict[str, SplitImages] | None:
    """The stores of all splits; None if one has other targets than labels, or its own way to read."""
    names = dict.fromkeys(("train", "val", *experiment.final_splits))
    splits = {name: experiment.split(name) for name in names}
    stores = {
        name: store
        for name, store in splits.items()
        if isinstance(store, SplitImages) and type(store).read is SplitImages.read
    }
    return stores if len(stores) == len(splits) else None


def _needs_kept(config: TrainingConfig) -> Iterator[tuple[str, str]]:
    """What a run has that gives other numbers if features are not kept, and what a run without it sets."""
    if config.model.channel_norm == "data":
        yield "model.channel_norm is data", "model.channel_norm to group"
    if config.augment.views is not None:
        yield f"augment.views is {config.augment.views}", "augment.views to none"
    if config.model.feature_format != "float32":
        yield f"model.feature_format is {config.model.feature_format}", "model.feature_format to float32"


@dataclasses.dataclass(frozen=True)
class _Maps:
    """What frozen blocks give, computed where a user's images are read: once a round."""

    images: Any
    prefix: Prefix

    def read(self, split: str, rows: IntArray) -> Float32Array:
        """``[n, ...]``."""
        batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)] or [rows]
        parts = [torch.from_numpy(self.images.read(split, batch)) for batch in batches]
        return np.concatenate([self.prefix.maps(part) for part in parts])


def _maps(experiment: Experiment[Any], images: Inputs) -> Inputs:
    """What frozen blocks give, where an image is the same in every step; else the images."""
    run, module = experiment.run, images.module.to(get_default_device())
    why = _reason(run.config, module.task)
    if module.mean.device.type != "cpu":
        why = why or "images are on a CPU, but the network is not"
    stores = _labelled(experiment)
    compiled = run.runtime.engine == "fast" and run.runtime.cpu_kernels
    layers = layers_for(kernels_for(module) if compiled and not why else None, None)
    try:
        prefix = None
        if not why and stores is not None:
            faster = (lambda network: network) if layers is None else layers.replaced
            prefix = Prefix(module, faster)
    except ValueError as fault:
        why = str(fault)
    if prefix is None or stores is None:
        if is_main() and why:
            print(f"the frozen layers are computed in every step: {why}", flush=True)
        return images
    if is_main():
        print(f"the layers up to {prefix.last} are computed once a round for each user", flush=True)
    fed = {n: dataclasses.replace(store, pixels=_Maps(store.pixels, prefix)) for n, store in stores.items()}
    return Inputs(prefix.classifier, fed.__getitem__)


def _reason(config: TrainingConfig, task: Task) -> str | None:
    """`reason_against`; or that a task changes images itself, which would be done once, or not at all."""
    own = [name for name in ("augment", "pixels") if getattr(type(task), name) is not getattr(Task, name)]
    return reason_against(config) or (f"{type(task).__name__} has its own {own[0]}" if own else None)


def reason_against(config: TrainingConfig) -> str | None:
    """Why an image has other features in each round; None where it always has the same, or the same few."""
    if config.model.dropout:
        return "model.dropout is true"
    for key in (*KEYED, *MIXING):
        if (value := getattr(config.augment, key)) is not None:
            return f"augment.{key} is {value:g}"
    if config.augment.views is not None:
        return None
    if config.augment.flip != "none":
        unread = config.model.trained not in ON_FEATURES
        unread |= "augment.views" in config.federated.chosen.idle.split()
        views = "" if unread else ", and with augment.views for a few"
        return f"augment.flip is {config.augment.flip}; with none they are computed once{views}"
    if draws_crops(config):
        return (
            "crops are drawn; with augment.crop=crop and model.input_size equal to data.image_size "
            "they are computed once"
        )
    return None
