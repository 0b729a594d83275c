"""Options drawn at random: what is not refused in one line trains, and goes on after a kill as before it.

    python -m tests.campaigns.combinations --draws 500 --state combinations.json [--seed 0] [--only flair]

A draw is a benchmark, an algorithm and other keys of a run's config, with values of the privacy matrix'
tests, so that new keys take part by themselves. Keys that the config refuses beside the others are left out.
Three runs of each draw:

* whole;
* killed after its first checkpoint and begun again: all that it records is the same, bit for bit;
* by pfl's own loop: the model is the same but for rounding. Where rounding decides what happens (signs,
  medians, largest values), differences are only counted.

A finding is a difference, an exception, or an error of several lines. Draw n is a function of (seed, n). With
``--state`` the same command goes on where it was broken off.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.core import execute
from benchmarks.core.config.benchmark import Benchmark
from benchmarks.fedcv.classification import train as classification
from benchmarks.fedcv.detection import train as detection
from benchmarks.fedcv.segmentation import train as segmentation
from benchmarks.flair.config import FLAIR
from benchmarks.flair.train import main as train
from dataset.cli import run
from dataset.files import write_json
from dataset.flair.mini import MiniSpec, write_mini
from dataset.flair.mini_outlines import write_boxed, write_masked
from pfl_ext.algorithms.algorithm import ALGORITHMS
from pfl_ext.models.image_changes import UNFIT
from tests.benchmarks.core.test_privacy_matrix import BY_KEY, candidates
from tests.benchmarks.sparing import sparingly
from tests.campaigns.kill_training import compare, outcome, remember_calibrations
from tests.campaigns.lives import At, live

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
GROUPS = "--model.groups=2"
"""With more groups, a norm at maps of one pixel has few values, whose variance rounding decides."""
LARGER = ("--model.input_size=32", "--data.image_size=32", "--model.normalisation=half", GROUPS)
SUBJECTS = {
    "flair": Subject(FLAIR, train, write_mini, SPEC, ("--config=fl-r-17", "--model.arch=simple_cnn"), 0.45),
    "classes": Subject(
        classification.EXPERIMENT.benchmark,
        classification.main,
        write_mini,
        replace(SPEC, coarse_labels=1),
        ("--config=fedavg", "--model.arch=simple_cnn", "--data.partition=none"),
        0.45,
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
    "loss.class_weights loss.absent_margin"
)
NOT_OF = {
    "flair": ("augment.label_smoothing",),
    "classes": ("loss.absent_gamma",),
    **dict.fromkeys(
        ("segmentation", "detection"),
        ("augment.mixup", "augment.cutmix", "model.bottleneck", *(f"augment.{key}" for key in UNFIT)),
    ),
}
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
    "augment.cutout": (5,),
    "loss.focal_gamma": (2.0,),
}
"""More values of some keys: those that a run is likely to accept."""
GOES_WITH: Mapping[str, tuple[str, ...]] = {
    "privacy": ("--federated.weighting=users", "--local.max_images=4", "--privacy.delta=0.01"),
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
WITHOUT = {"fedbuff": "--federated.cohort_size"}
"""The word of `COMMON` that an algorithm does not read."""
BY_ROUNDING = (
    "sign top_k median krum trimmed bulyan adam yogi adagrad ifca fedma cutout random_erasing rand_augment"
)
"""Parts of words with which rounding decides what happens: where pixels are all alike, as in a hidden square,
it also decides which of a max pool's equal values is the largest."""
NEAR = 1e-2
"""Largest distance of the engines' models, relative to how far training has moved them."""
OTHER_SEEDS = (4, 5)
"""Seeds that are tried where the models are farther apart: a ReLU that rounding turns has this effect with
few seeds, an error with all."""
VERDICTS = ("refused", "fine", "rounding", "finding")
FIRST = ".first"
"""Suffix of the file of a run's first model."""
KILL = At("benchmarks.core.recorder:Recorder.save", 1, False)


def drawn(
    seed: int, number: int, only: str | None, refusal: Callable[[str, Sequence[str]], str | None]
) -> tuple[str, tuple[str, ...]]:
    """Draw ``number``: the subject, and words that make a config with the subject's own.

    Args:
        seed: of the campaign.
        number: of the draw.
        only: the subject, if it is not drawn.
        refusal: what is said of a subject and words that make no config.
    """
    rng = np.random.default_rng([seed, number])
    subject = only or str(rng.choice(list(SUBJECTS), p=[each.share for each in SUBJECTS.values()]))
    words: tuple[str, ...] = ()
    if rng.random() < 0.8:
        name = str(rng.choice(ALGORITHMS.names()))
        words = (*GOES_WITH.get(name, ()), f"--federated.algorithm={name}")
    if rng.random() < 0.3 and "--model.arch=simple_cnn" in SUBJECTS[subject].words:
        words = (*WITH_NORMS, *words)
    for section in rng.choice(SECTIONS.split(), size=TRIED):
        left_out = (*NOT_DRAWN.split(), *NOT_OF.get(subject, ()))
        keys = [key for key in BY_KEY if key.startswith(f"{section}.") and key not in left_out]
        key = str(rng.choice(keys))
        default = BY_KEY[key][1]
        values = [_word(value) for value in (*candidates(key), *MORE.get(key, ()) * 2) if value != default]
        values = [value for value in values if value]
        if values:
            more = _joined(words, *GOES_WITH.get(section, ()), f"--{key}={values[rng.integers(len(values))]}")
            words = words if refusal(subject, more) else more
    return subject, words


def _joined(words: Sequence[str], *more: str) -> tuple[str, ...]:
    """Words of which the last for each key counts."""
    return tuple({word.partition("=")[0]: word for word in (*words, *more)}.values())


def _word(value: Any) -> str:
    """A value as it is typed; empty for one that is not typed as one word, and for a name of nothing."""
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return str(value) if isinstance(value, str | int | float) and value != "another" else ""


class Campaign:
    """Draws, one after another, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.log = folder / "log.txt"

    def _data(self, subject: str) -> Path:
        path = self._folder / f"{subject}.hdf5"
        if not path.exists():

            def write() -> int:
                SUBJECTS[subject].write(path, SUBJECTS[subject].spec)
                return 0

            live(write, None, self.log)
            for look in ("probe", "check_columns"):  # `sparingly`: the lives know the answer
                vars(execute)[look](path)
        return path

    def _live(self, subject: str, words: Sequence[str], name: str, death: At | None = None) -> int | None:
        argv, data = self._argv(subject, words), self._data(subject)

        def work() -> int:
            torch.set_num_threads(1)
            _keep_first_model(self._folder / f"{name}{FIRST}")
            return run(
                SUBJECTS[subject].main, [*argv, f"--data_path={data}", f"--run_dir={self._folder / name}"]
            )

        self.log.unlink(missing_ok=True)
        return live(work, death, self.log)

    def _argv(self, subject: str, words: Sequence[str]) -> list[str]:
        given = {word.split("=")[0] for word in words}
        given |= {key for name, key in WITHOUT.items() if f"--federated.algorithm={name}" in words}
        kept = [word for word in (*COMMON, *SUBJECTS[subject].words) if word.split("=")[0] not in given]
        last = {word.split("=")[0]: word for word in kept}
        return [*last.values(), *words]

    def refusal(self, subject: str, words: Sequence[str]) -> str | None:
        """What is said of words that make no config."""
        try:
            SUBJECTS[subject].benchmark.parse(self._argv(subject, words))
        except ValueError as fault:
            if "\n" in str(fault):
                raise RuntimeError(f"several lines for {subject} {words}: {fault}") from fault
            return str(fault)
        return None

    def judge(self, subject: str, words: tuple[str, ...]) -> tuple[str, str]:
        """``(kind, what)``: refused, fine, rounding or finding."""
        for path in self._folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.suffix == FIRST:
                path.unlink()
        try:
            code = self._live(subject, words, "whole")
        except RuntimeError as fault:
            return "finding", f"whole: {fault}"
        said = self.log.read_text().strip().splitlines()
        if code == 2:
            errors = [line for line in said if "error" in line.lower()]
            fine = bool(said) and "Traceback" not in "".join(said) and len(errors) <= 1
            return ("refused" if fine else "finding"), said[-1] if said else "no line"
        if code != 0:
            return "finding", f"whole ended with {code}: {' / '.join(said[-4:])}"
        try:
            whole = outcome(self._folder / "whole")
            killed = self._live(subject, words, "killed", KILL)
            if killed is None and self._live(subject, words, "killed") != 0:
                return "finding", f"not taken up: {self.log.read_text()[-600:]}"
            compare("killed", outcome(self._folder / "killed"), whole)
            stock = (*words, "--runtime.engine=stock")
            if self.refusal(subject, stock) is not None:
                return "fine", "one engine"
            if self._live(subject, stock, "stock") != 0:
                return "finding", f"stock: {self.log.read_text()[-600:]}"
            off = self._distance("whole", "stock")
            for seed in OTHER_SEEDS if off > NEAR or math.isnan(off) else ():
                names = f"whole{seed}", f"stock{seed}"
                for name, run_words in zip(names, (words, stock)):
                    if self._live(subject, _joined(run_words, f"--seed={seed}"), name) != 0:
                        return "finding", f"{name}: {self.log.read_text()[-600:]}"
                off = min(off, self._distance(*names))
        except (RuntimeError, OSError, KeyError) as fault:
            return "finding", f"{type(fault).__name__}: {str(fault)[:1500]}"
        if off > NEAR or math.isnan(off):
            by_rounding = any(part in " ".join(words) for part in BY_ROUNDING.split())
            return ("rounding" if by_rounding else "finding"), f"engines differ by {off:.2g} of the way"
        return "fine", f"{off:.1e}"

    def _distance(self, name: str, other_name: str) -> float:
        """How far the models of two runs are from each other, relative to the way from the first model."""
        one, other, first = (
            _vector(self._folder / path)
            for path in (f"{name}/model.safetensors", f"{other_name}/model.safetensors", f"{name}{FIRST}")
        )
        if one is None or other is None:
            return 0.0
        moved = one - first if first is not None and first.shape == one.shape else one
        way, gap = float(moved.norm()), float((one - other).norm())
        return gap / way if way else gap


def _vector(path: Path) -> torch.Tensor | None:
    if not path.exists():
        return None
    tensors = load_file(path)
    parts = [tensors[name].double().reshape(-1) for name in sorted(tensors)]
    return torch.cat(parts) if parts else None


def _keep_first_model(path: Path) -> None:
    """Have this process save the model that its run begins with."""
    real = vars(execute)["train_federated"]

    def noting(run: Any, store: Any, val: Any, module: Any, *more: Any, **given: Any) -> Any:
        if not path.exists():
            state = {k: v.detach().clone().contiguous() for k, v in module.backbone.state_dict().items()}
            save_file(state, path)
        return real(run, store, val, module, *more, **given)

    vars(execute)["train_federated"] = noting


def main() -> None:
    """Run the campaign and say what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--draws", type=int, default=200, help="how many; with --state, in all calls together"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=SUBJECTS)
    parser.add_argument("--state", type=Path)
    given = parser.parse_args()
    remember_calibrations()
    seen: list[list[Any]] = []
    if given.state is not None and given.state.exists():
        seen = json.loads(given.state.read_text())
    with tempfile.TemporaryDirectory() as folder, sparingly():
        campaign = Campaign(Path(folder))
        for number in range(given.first + len(seen), given.first + given.draws):
            subject, words = drawn(given.seed, number, given.only, campaign.refusal)
            verdict, what = campaign.judge(subject, words)
            seen.append([verdict, number, subject, " ".join(words), what])
            if verdict in ("rounding", "finding"):
                print(f"{verdict} {number}: {subject} {' '.join(words)}\n    {what}", flush=True)
            if given.state is not None:
                write_json(given.state, seen)
    counts = Counter(verdict for verdict, *_ in seen)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS))
    if counts["finding"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
