"""Train and evaluate one setting of the FLAIR benchmark.

    python -m benchmarks.flair.train --config fl-r-17 --data_path data/flair.hdf5

Without ``--data_path`` and without a file at data/flair.hdf5, the embedded mini data set is drawn and used
at a scale for a laptop. Any field of `benchmarks.flair.config` can be given as ``--section.field value``
or ``--section.field=value``; the command line wins over the YAML file.

SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 finish the round (epoch, when centralised), write a checkpoint and exit
with 75; a second signal abandons the round, and the run goes on from the checkpoint before. The same command
goes on. Exit codes: 0 done, 2 a mistake of the user's in one line, 75 stopped by a signal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from pfl.internal.ops.pytorch_ops import get_default_device

from benchmarks.flair.centralised import train_centralised
from benchmarks.flair.config import Config, Run, parse, short_digest, usage
from benchmarks.flair.facts import dataset_facts, start_facts
from benchmarks.flair.federated import train_federated
from benchmarks.flair.recorder import Recorder
from benchmarks.flair.results import final_scores, show, write_results
from benchmarks.flair.tracking import tracking
from dataset.command_line import run as run_command
from dataset.flair.hdf5 import FlairFile
from dataset.flair.mini import VERSION as MINI_VERSION
from dataset.flair.mini import MiniSpec, write_mini
from dataset.flair.probe import probe
from dataset.flair.task import FlairTask
from dataset.signals import held
from pfl_ext.checkpoint import sole_owner
from pfl_ext.distributed import barrier, connected, current, is_main
from pfl_ext.models import ImageClassifier, build_backbone
from pfl_ext.randomness import torch_stream

PFL_DEVICE = "PFL_PYTORCH_DEVICE"  # the environment variable by which pfl is told
FLAIR_FILE = Path("data/flair.hdf5")
MINI = MiniSpec(
    train_users=600, val_users=60, test_users=120, image_size=36, num_fine_labels=68, difficulty=0.25
)
MINI_FILE = Path(f"data/flair-mini-{zlib.crc32(f'{MINI_VERSION} {MINI}'.encode()):08x}.hdf5")
MINI_WORD = Path("mini")
"""``--data_path mini`` asks for the mini data set even where there is a FLAIR file."""


def resolve_data(argv: Sequence[str]) -> tuple[list[str], Path]:
    """The arguments and the file to train on; the mini data set, with its scale, where there is no other.

    :raises ValueError: when a ``--data_path`` is given that does not exist.
    """
    given = parse(argv).data_path or (FLAIR_FILE if FLAIR_FILE.is_file() else MINI_WORD)
    if given != MINI_WORD:
        if not given.is_file():
            raise ValueError(
                f"--data_path {given}: no such file; make it with python -m dataset.flair.download_preprocess"
            )
        return list(argv), given
    has_scale = any(word == "--scale" or word.startswith("--scale=") for word in argv)
    return [*argv, *([] if has_scale else ["--scale", "mini"])], MINI_FILE


def draw_mini() -> None:
    """Make the mini data set's file unless it is there."""
    print(
        f"no FLAIR file (make flair-data gets it): running on the embedded mini data set, {MINI_FILE}, "
        "at laptop scale"
    )
    if not MINI_FILE.is_file():
        MINI_FILE.parent.mkdir(parents=True, exist_ok=True)
        write_mini(MINI_FILE, MINI)


def flair_task(run: Run, file: FlairFile) -> FlairTask:
    """The file as the images and targets that a run asks for."""
    data = run.config.data
    cache = int(run.runtime.cache_gb * 1e9)
    return FlairTask(file, data.taxonomy, data.image_size, data.binary_label, cache)


def build_model(config: Config, num_labels: int, weights: Path | None) -> ImageClassifier:
    """The network of a setting: from scratch with GroupNorm, or pretrained with frozen statistics."""
    if weights is not None and not config.model.pretrained:
        raise ValueError(
            "--weights is for fine-tuning settings: add --model.pretrained=true, or choose a fl-f-* config"
        )
    backbone = build_backbone(
        config.model.arch,
        num_labels,
        norm="frozen_batch" if config.model.pretrained else "group",
        weights=(weights or "imagenet") if config.model.pretrained else None,
        init=config.model.init,
        generator=torch_stream(config.seed, "model initialisation"),
        groups=config.model.groups,
    )
    exact = config.augment.crop == "crop"
    return ImageClassifier(backbone, input_size=config.model.input_size, exact_crops=exact)


@contextlib.contextmanager
def pfl_device(name: str) -> Iterator[None]:
    """Have pfl use this device within; ``auto`` leaves the choice to pfl.

    :raises ValueError: for a device that torch does not know or that this machine lacks.
    """
    before = os.environ.get(PFL_DEVICE)
    try:
        if name != "auto":
            torch.empty(0, device=name)
            os.environ[PFL_DEVICE] = name
    except (RuntimeError, AssertionError) as fault:
        raise ValueError(f"runtime.device is {name!r}: {str(fault).splitlines()[0]}") from fault
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(PFL_DEVICE, None)
        else:
            os.environ[PFL_DEVICE] = before


def execute(run: Run, data_path: Path) -> None:
    """Train and report one run, or show the results that it already has."""
    config = run.config
    federated = config.mode == "federated"
    if not federated and current() is not None:
        raise ValueError("centralised training runs in one process: start it without a launcher, NP=1")
    directory = run.run_dir or Path("runs") / f"{config.setting.lower()}-{data_path.stem}-seed{config.seed}"
    if is_main():
        probe(data_path)
    directory = Path(str(directory).replace("{digest}", short_digest(config)))
    with FlairFile(data_path) as file, sole_owner(directory) if is_main() else contextlib.nullcontext():
        task = flair_task(run, file)
        num_steps = config.federated.num_rounds if federated else config.centralised.num_epochs
        recorder = Recorder(run, directory, num_steps, "round" if federated else "epoch", file.fingerprint)
        results = recorder.finished()
        if results is None:
            module = build_model(config, len(task.label_names), run.weights)
            facts = {"data": dataset_facts(file), **start_facts(config, module, run.weights)}
            what = f"{config.setting} ({len(task.label_names)} labels) on {data_path}"
            if is_main():
                print(f"training {what}, device {get_default_device()}, into {directory}")
            train = train_federated if federated else train_centralised
            with tracking(run, directory, data_path.stem, recorder.unit) as recorder.tracking:
                with held(recorder.unit) as recorder.held:
                    model = train(run, task.split("train"), task.split("val"), module, recorder)
                scores = final_scores(recorder, model, task)
                if is_main():
                    results = write_results(recorder, {**scores, **facts}, module, data_path)
                    if recorder.tracking is not None:
                        recorder.tracking.finish(results)
    if results is not None and is_main():
        show(results, directory)


def main(argv: Sequence[str]) -> None:
    """Parse, build, train, report."""
    if {"--help", "-h"} & set(argv):
        print(__doc__ + "\n" + usage())
        return
    logging.getLogger("absl").setLevel(logging.ERROR)  # dp-accounting tells of each RDP order that it skips
    argv, data_path = resolve_data(argv)
    run = parse(argv)
    if run.runtime.threads is not None:
        torch.set_num_threads(run.runtime.threads)
    runtime = run.runtime
    workers = connected(
        runtime.device,
        threads=runtime.threads,
        timeout=runtime.worker_timeout_s,
        compress=runtime.reduce == "bf16",
    )
    with workers as device, pfl_device(device):
        if data_path == MINI_FILE != run.data_path:
            if is_main():
                draw_mini()
            barrier()
        execute(run, data_path)


if __name__ == "__main__":
    sys.exit(run_command(main))
