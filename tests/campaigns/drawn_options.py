"""Benchmarks, and keys of their configs drawn at random for `tests.campaigns.combinations`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.core.config.benchmark import Benchmark
from benchmarks.fedcv.classification import train as classification
from benchmarks.fedcv.detection import train as detection
from benchmarks.fedcv.segmentation import train as segmentation
from benchmarks.flair.config import FLAIR
from benchmarks.flair.train import main as train
from benchmarks.visual_classification.config import VISION
from benchmarks.visual_classification.train import main as vision
from dataset.flair.mini import MiniSpec, write_mini
from dataset.flair.mini_outlines import write_boxed, write_masked
from pfl_ext.algorithms.algorithm import ALGORITHMS
from pfl_ext.models.image_changes import UNFIT
from tests.benchmarks.core.test_privacy_matrix import BY_KEY, candidates

SPEC = MiniSpec(
    train_users=8, val_users=3, test_users=3, image_size=20, num_fine_labels=24, max_user_images=7
)
COMMON = (
    *("--federated.cohort_size=4", "--federated.num_rounds=3", "--evaluation.every_rounds=2", "--seed=3"),
    *("--model.input_size=16", "--data.image_size=20", "--model.pretrained=false", "--local.batch_size=3"),
    *("--runtime.checkpoint_every=1", "--runtime.keep_checkpoints=true", "--runtime.progress=false"),
    "--evaluation.best_by=last",
)


class Subject(NamedTuple):
    """A benchmark, its data, and words that make it small."""

    benchmark: Benchmark[Any]
    main: Callable[[Sequence[str]], None]
    write: Callable[[Path, MiniSpec], object]
    spec: MiniSpec
    words: tuple[str, ...]
    share: float
    """Share of all draws."""


OF_PLACES = replace(SPEC, image_size=32, max_user_images=3)
PLAIN, GROUPS = "--model.arch=simple_cnn", "--model.groups=2"
"""With more groups, a norm at maps of one pixel has few values, whose variance rounding decides."""
LARGER = ("--model.input_size=32", "--data.image_size=32", "--model.normalisation=half", GROUPS)
SUBJECTS = {
    "flair": Subject(FLAIR, train, write_mini, SPEC, ("--config=fl-r-17", PLAIN), 0.4),
    "classes": Subject(
        classification.EXPERIMENT.benchmark,
        classification.main,
        write_mini,
        replace(SPEC, coarse_labels=1),
        ("--config=fedavg", PLAIN, "--data.partition=none"),
        0.35,
    ),
    "vision": Subject(
        VISION,
        vision,
        write_mini,
        replace(SPEC, coarse_labels=1),
        ("--config=cifar10-fedavg", PLAIN, "--data.partition=none"),
        0.15,
    ),
    "segmentation": Subject(
        segmentation.EXPERIMENT.benchmark,
        segmentation.main,
        write_masked,
        OF_PLACES,
        ("--config=camvid-fl", "--model.arch=deeplabv3plus_efficientnet_lite0", *LARGER),
        0.05,
    ),
    "detection": Subject(
        detection.EXPERIMENT.benchmark,
        detection.main,
        write_boxed,
        OF_PLACES,
        ("--config=street-fl", "--model.arch=fcos_efficientnet_lite0", "--data.val_share=0", *LARGER),
        0.05,
    ),
}
SECTIONS = (
    "model model augment augment loss local local local server federated federated compression aggregation "
    "attack devices evaluation privacy local_privacy data"
)
"""Separated by blanks, as are `NOT_DRAWN` and `BY_ROUNDING`; each is drawn as often as it stands here."""
TRIED = 9
"""Keys that are tried in a draw; those that are refused beside the others are left out."""
NOT_DRAWN = (
    "model.arch model.input_size model.pretrained model.weights_sha256 model.parties model.genotype "
    "data.image_size data.dataset data.taxonomy federated.algorithm federated.num_rounds "
    "federated.cohort_size evaluation.every_rounds evaluation.every_epochs evaluation.best_by "
    "loss.class_weights loss.absent_margin runtime.tune runtime.device runtime.track runtime.progress "
    "runtime.cache_gb runtime.lanes runtime.threads"
)
SET_PRIVATELY = (
    "privacy.release privacy.noise_seed local_privacy.noise_seed privacy.noise_cohort_size "
    "privacy.noise_population"
)
"""Keys that a campaign of private runs sets itself."""
OF_NO_PLACES = (
    *("augment.mixup", "augment.cutmix", "model.bottleneck", "model.random_features", "federated.reweight"),
    *("data.val_share", "loss.absent_gamma", *(f"augment.{key}" for key in UNFIT)),
)
NOT_OF = {
    "flair": ("augment.label_smoothing", "loss.dice"),
    **dict.fromkeys(("classes", "vision"), ("loss.absent_gamma", "loss.dice")),
    "segmentation": OF_NO_PLACES,
    "detection": (*OF_NO_PLACES, "augment.label_smoothing", "loss.focal_gamma", "loss.dice"),
}
"""Keys that a subject's runs refuse."""
ONE_LABEL_AN_IMAGE = ("fedcof", "fedgkt", "fedncm", "fed3r", "moon", "vertical")
"""Algorithms that masks and boxes refuse."""
MORE: Mapping[str, tuple[Any, ...]] = {
    "local.num_epochs": (2,),
    "local.learning_rate": (0.02,),
    "local.momentum": (0.9,),
    "local.max_images": (1, 4),
    "local.virtual_size": (4,),
    "local.batch_size": (1, 2, 16),
    "server.learning_rate": (0.5,),
    "server.momentum": (0.9,),
    "data.partition": ("iid-clients-6-seed-0", "quantity-linear-clients-5-seed-1"),
    "devices.drop_out": (0.4,),
    "attack.share": (0.3,),
    "privacy.epsilon": (50.0,),
    "privacy.delta": (0.01,),
    "local_privacy.epsilon": (100.0,),
    "model.lora_rank": (2,),
    "evaluation.average_from_round": (1,),
    "evaluation.average_every": (2,),
    "local.schedule_cycle": (2,),
    "local.final_learning_rate": (0.01,),
    "augment.cutout": (5,),
    "loss.focal_gamma": (2.0,),
}
"""More values of some keys: those that a run is likely to accept."""
GOES_WITH: Mapping[str, tuple[str, ...]] = {
    "privacy": (
        *("--federated.weighting=users", "--local.max_images=4", "--privacy.delta=0.01"),
        "--privacy.indicator_std_fraction=0.5",
    ),
    "local_privacy": ("--federated.weighting=users", "--local.max_images=4", "--local_privacy.delta=0.01"),
    **dict.fromkeys(("fedncm", "fed3r", "fedcof"), ("--model.trained=head", "--federated.num_rounds=2")),
    "turbo_aggregate": ("--federated.options.group_size=3", "--federated.cohort_size=6"),
    "vertical": ("--model.parties=4", "--augment.flip=none"),
    "fednas": ("--model.arch=darts_search", "--model.cells=3", "--model.cell_channels=4", "--model.groups=2"),
    "fedbuff": (
        *("--federated.options.concurrency=3", "--federated.options.buffer_size=2"),
        *(f"--devices.classes.slow.{key}=1" for key in ("share", "ms_per_sample", "kbps_up", "kbps_down")),
    ),
}
"""Words that a section or an algorithm needs nearly always."""
WITH_NORMS = ("--model.arch=shufflenet_v2_x0_5", GROUPS)
"""A small network with norms and branches, in the place of the plain one."""
ONE_PASS = ("--model.trained=head", "--federated.num_rounds=1", "--federated.cohort_size=8")
"""What a private head in closed form needs."""
Refusal = Callable[[str, Sequence[str]], str | None]
"""What is said of a subject and words that make no config."""
WITHOUT = {"fedbuff": "--federated.cohort_size"}
"""The word of `COMMON` that an algorithm does not read."""


def drawn(
    seed: int, number: int, only: str | None, refusal: Refusal, algorithm: str | None = None
) -> tuple[str, tuple[str, ...]]:
    """Draw ``number``: the subject, and words that make a config with the subject's own.

    Args:
        seed: of the campaign.
        number: of the draw.
        only: the subject, if it is not drawn.
        refusal: what is said of a subject and words that make no config.
        algorithm: the algorithm, if it is not drawn.
    """
    rng = np.random.default_rng([seed, number])
    subject = only or _subject(rng)
    words: tuple[str, ...] = ()
    if algorithm is not None or rng.random() < 0.8:
        unfit = ONE_LABEL_AN_IMAGE if subject in ("segmentation", "detection") else ()
        name = algorithm or str(rng.choice([each for each in ALGORITHMS.names() if each not in unfit]))
        words = (*GOES_WITH.get(name, ()), f"--federated.algorithm={name}")
    if rng.random() < 0.3 and PLAIN in SUBJECTS[subject].words:
        words = (*WITH_NORMS, *words)
    return subject, _with_more(rng, subject, words, refusal, SECTIONS.split(), ())


def drawn_privately(
    seed: int, number: int, only: str | None, refusal: Refusal, algorithm: str | None = None
) -> tuple[str, tuple[str, ...]]:
    """As `drawn`, with central or local privacy, and steps and bounds of any size."""
    rng = np.random.default_rng([seed, number, 1])
    subject, section = (
        only or _subject(rng),
        str(rng.choice(["privacy", "privacy", "privacy", "local_privacy"])),
    )
    bound = rng.choice([1e-9, 0.001, 0.02, 1.0, 30.0])
    words: tuple[str, ...] = (
        *("--federated.weighting=users", f"--{section}.delta=0.01", f"--{section}.clipping_bound={bound}"),
        f"--{section}.epsilon={50 if section == 'privacy' else 100}",
    )
    tried: list[tuple[str, ...]] = [
        (f"--local.learning_rate={rng.choice([0.01, 0.1, 0.1, 1.0, 1e2, 1e20])}",)
    ]
    if rng.random() < 0.3 and PLAIN in SUBJECTS[subject].words:
        tried.append(WITH_NORMS)
    if section == "privacy":
        tried += [
            ("--privacy.noise_cohort_size=none", "--privacy.noise_population=none"),
            (f"--privacy.sampler={rng.choice(['poisson', 'fixed', 'cyclic'])}",),
            (f"--privacy.mechanism={rng.choice(['gaussian', 'adaptive'])}",),
            ("--privacy.indicator_std_fraction=0.5",),
        ]
    argued = [name for name in ALGORITHMS.names() if "privacy" not in ALGORITHMS[name].refusals]
    name = algorithm or str(rng.choice(argued))
    at_once = ONE_PASS if ALGORITHMS[name].once else ()
    tried.append((*at_once, f"--federated.algorithm={name}"))
    for more in tried:
        words = words if refusal(subject, joined(words, *more)) else joined(words, *more)
    other = "local_privacy" if section == "privacy" else "privacy"
    sections = [each for each in SECTIONS.split() if each not in (other, "attack")]
    sections += ["augment", "augment", "compression", *["runtime"] * 3]
    return subject, _with_more(rng, subject, words, refusal, sections, SET_PRIVATELY.split())


def _subject(rng: np.random.Generator) -> str:
    return str(rng.choice(list(SUBJECTS), p=[each.share for each in SUBJECTS.values()]))


def _with_more(
    rng: np.random.Generator,
    subject: str,
    words: tuple[str, ...],
    refusal: Refusal,
    sections: Sequence[str],
    left_out: Sequence[str],
) -> tuple[str, ...]:
    """The words with keys of some of these sections, where they are not refused."""
    left_out = (*NOT_DRAWN.split(), *NOT_OF.get(subject, ()), *left_out)
    for section in rng.choice(sections, size=TRIED):
        keys = [key for key in BY_KEY if key.startswith(f"{section}.") and key not in left_out]
        if not keys:
            continue
        key = str(rng.choice(keys))
        default = BY_KEY[key][1]
        values = [_word(value) for value in (*candidates(key), *MORE.get(key, ()) * 2) if value != default]
        values = [value for value in values if value]
        if values:
            value = f"--{key}={values[rng.integers(len(values))]}"
            needs = (
                () if any(word.startswith(f"--{section}.") for word in words) else GOES_WITH.get(section, ())
            )
            more = joined(words, *needs, value)
            words = words if refusal(subject, more) else more
    return words


def joined(words: Sequence[str], *more: str) -> tuple[str, ...]:
    """Words of which the last for each key counts."""
    return tuple({word.partition("=")[0]: word for word in (*words, *more)}.values())


def _word(value: Any) -> str:
    """A value as it is typed; empty for one that is not typed as one word, and for a name of nothing."""
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return str(value) if isinstance(value, str | int | float) and value != "another" else ""
