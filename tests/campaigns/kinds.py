"""The kinds of runs that are killed: their words, and the benchmark and data of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.core.config.benchmark import Benchmark
from benchmarks.fedcv.detection import train as detection
from benchmarks.fedcv.segmentation import train as segmentation
from benchmarks.flair.config import FLAIR
from benchmarks.flair.train import main as train
from dataset.flair.mini import MiniSpec, write_mini
from dataset.flair.mini_outlines import write_boxed, write_masked

SPEC = MiniSpec(train_users=12, val_users=5, test_users=5, image_size=20, num_fine_labels=40)
COHORT = 4
COMMON = (
    "--model.arch=squeezenet1_1",  # 0.7 million parameters: writing them takes long enough to be killed in
    "--data.image_size=20",
    "--model.input_size=18",
    "--runtime.checkpoint_every=3",
    "--runtime.keep_checkpoints=true",
    "--runtime.progress=false",
)
FEDERATED = (f"--federated.cohort_size={COHORT}", "--evaluation.every_rounds=2")
PRIVATE = (
    *FEDERATED,
    "--config=pfl-r-17",
    "--seed=0",
    "--privacy.epsilon=50",
    "--privacy.delta=0.01",
    "--privacy.noise_cohort_size=10",
    "--privacy.indicator_std_fraction=0.5",
)
OF_A_TASK = (
    *FEDERATED,
    "--data.image_size=32",
    "--model.input_size=32",
    "--model.pretrained=false",
    "--model.normalisation=half",
    "--local.batch_size=4",
    "--evaluation.best_by=last",
    "--runtime.checkpoint_every=1",
)
KINDS = {
    "fl": (*FEDERATED, "--config=fl-r-17"),
    "momentum": (*PRIVATE, "--server.optimizer=sgd", "--server.momentum=0.9", "--server.learning_rate=0.5"),
    "pfl": PRIVATE,
    "secret": tuple(word for word in PRIVATE if not word.startswith("--seed")),
    "centralised": ("--config=c-r-17", "--centralised.batch_size=16"),
    "scaffold": (*FEDERATED, "--config=fl-r-17", "--federated.algorithm=scaffold"),
    "ditto": (*FEDERATED, "--config=fl-r-17", "--federated.algorithm=ditto"),
    "dsgd": (
        *FEDERATED,
        "--config=fl-r-17",
        "--federated.algorithm=dsgd",
        "--evaluation.best_by=last",
    ),
    "segmentation": (*OF_A_TASK, "--config=camvid-fl", "--model.arch=deeplabv3plus_efficientnet_lite0"),
    "detection": (
        *OF_A_TASK,
        "--config=street-fl",
        "--model.arch=fcos_efficientnet_lite0",
        "--data.val_share=0",
        "--augment.flip=none",
    ),
}
"""``momentum`` is server momentum with adaptive clipping; ``pfl`` the paper's Adam with adaptive clipping;
``secret`` the same with noise from entropy. ``ditto`` and ``dsgd`` have loops of their own."""


class Subject(NamedTuple):
    """A benchmark and its data."""

    benchmark: Benchmark[Any]
    main: Callable[[Sequence[str]], None]
    file: str
    write: Callable[[Path, MiniSpec], None]
    spec: MiniSpec


def subject_of(kind: str) -> Subject:
    """The benchmark of a kind of run: FLAIR, but for those that say another."""
    small = replace(SPEC, image_size=32, max_user_images=3)
    if kind == "segmentation":
        return Subject(
            segmentation.EXPERIMENT.benchmark, segmentation.main, "masks.hdf5", write_masked, small
        )
    if kind == "detection":
        return Subject(detection.EXPERIMENT.benchmark, detection.main, "boxes.hdf5", write_boxed, small)
    return Subject(FLAIR, train, "mini.hdf5", write_mini, SPEC)
