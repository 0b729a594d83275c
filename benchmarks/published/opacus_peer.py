"""A private row of single images beside opacus: the same features, noise, sampling and steps.

    python -m benchmarks.published.opacus_peer [--row scatternet-linear] [--seed 0] [--data_path F]
        [--output F] [--opacus PYTHON] [--gradients ghost|single] [--SECTION.KEY VALUE ...]

The features are those that our run with this seed trains on, standardised by the same noisy moments; they are
computed where they are not kept yet. opacus starts from our first weights and draws its own images and noise.
It has an environment of its own, ``.venv-opacus``, which ``make opacus-peer`` makes. Further words change the
row, for a try on little data; then our result of the row, which is printed beside, is left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.core.code_version import commit
from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.sections import TrainingConfig
from benchmarks.core.config.trees import Tree
from benchmarks.core.facts import hardware
from benchmarks.core.features import inputs_of
from benchmarks.core.federated import training_data
from benchmarks.core.ledger import calibrated
from benchmarks.core.run_directory import RunDirectory
from benchmarks.published.opacus_work import Work, write
from benchmarks.published.rows import RESULTS, read_row
from benchmarks.published.train import check_maker, run_name
from benchmarks.reporting.tables import print_row
from benchmarks.visual_classification.config import VISION
from benchmarks.visual_classification.train import VisualClassification
from dataset.cli import OneLineParser, output_file
from dataset.cli import run as run_command
from dataset.files import write_json
from dataset.store.hdf5 import DataFile
from pfl_ext.models.trained import head_of
from pfl_ext.privacy.accounting import Calibration

OPACUS = Path(".venv-opacus/bin/python")
BLOCK = 1024  # images whose features are copied at a time


def check(config: TrainingConfig) -> None:
    """Refuse a run that is not DP-SGD on single images.

    Raises:
        ValueError: one line that names the key.
    """
    privacy, local, server = config.privacy, config.local, config.server
    if privacy is None:
        raise ValueError("opacus trains privately, and this run has no privacy: choose a private row")
    for key, value, needed in (
        ("privacy.mechanism", privacy.mechanism, "gaussian"),
        ("privacy.clipping", privacy.clipping, "flat"),
        ("privacy.sampler", privacy.sampler, "poisson"),
        ("federated.algorithm", config.federated.algorithm, "fedavg"),
        ("model.trained", config.model.trained, "head"),
        ("model.random_features", config.model.random_features, None),
        ("augment.views", config.augment.views, None),
        ("augment.label_smoothing", config.augment.label_smoothing, 0.0),
        ("loss.focal_gamma", config.loss.focal_gamma, 0.0),
        ("server.optimizer", server.optimizer, "sgd"),
        ("server.head_rate_factor", server.head_rate_factor, 1.0),
        ("evaluation.average", config.evaluation.average, "none"),
        ("local.optimizer", local.optimizer, "sgd"),
        ("local.num_epochs", local.num_epochs, 1),
        ("local.weight_decay", local.weight_decay, 0.0),
        ("local.max_grad_norm", local.max_grad_norm, None),
        ("local.schedule", local.schedule, "constant"),
        ("local.head_rate_factor", local.head_rate_factor, 1.0),
        ("local.virtual_size", local.virtual_size, None),
    ):
        if value != needed:
            raise ValueError(f"{key} is {value}, and beside opacus it must be {needed}")


def work_of(run: AnyRun, calibration: Calibration, ghost: bool) -> Work:
    """Our training, as DP-SGD does it.

    A user's update is minus the local rate times the gradient of its one image. Clipped at C, it is that of
    the gradient clipped at C over the local rate.
    """
    config, rounds = run.config, run.config.federated.num_rounds
    assert config.privacy is not None
    local, system = config.local_learning_rate, calibration.executed
    return Work(
        rates=[config.server.rate(number, rounds) * local for number in range(rounds)],
        momentum=config.server.momentum,
        clipping_bound=config.privacy.clipping_bound / local,
        noise_multiplier=calibration.value_noise_multiplier,
        sampling_rate=system.sampling_probability,
        expected=system.cohort_size,
        releases=list(config.privacy.releases),
        delta=system.delta,
        every=config.evaluation.every_rounds,
        seed=config.seed,
        ghost=ghost,
    )


def prepare(run: AnyRun, data: Path, folder: Path, ghost: bool = True) -> Calibration:
    """Write what opacus trains, of a run that `check` lets pass, into a folder; what our noise is worth.

    Raises:
        ValueError: when a user has several images, or the last layer alone is not what is trained.
    """
    config = run.config
    with DataFile(data) as file:
        experiment = VisualClassification(run, file)  # type: ignore[arg-type]
        partition, module = experiment.partition(), experiment.module()
        users = training_data(run, experiment.split("train"), module.task, partition)
        if (users.partition.sizes != 1).any():
            raise ValueError("a user has several images, or none, and opacus protects single images")
        assert config.privacy is not None
        federated = config.federated
        calibration = calibrated(config.privacy, users.num_users, federated.cohort_size, federated.num_rounds)
        files = RunDirectory(run, folder / "run", file)
        whole, inputs = module, inputs_of(experiment, module, data)
        files.begin()
        inputs = inputs.standardised(experiment, whole, files)
        _, head = head_of(inputs.module.backbone)
        if len(inputs.module.input_shape) != 1 or not isinstance(head, nn.Linear):
            raise ValueError("the network is not a linear layer on features that are computed once")
        for name in ("train", "test"):
            _write_split(inputs.split(name), inputs.module.input_shape[0], name, folder)
        for name, tensor in head.state_dict().items():
            np.save(folder / f"{name}.npy", tensor.cpu().numpy())
        write(folder, work_of(run, calibration, ghost))
    return calibration


def _write_split(store: Any, width: int, name: str, folder: Path) -> None:
    count = int(store.user_offsets[-1])
    features = np.lib.format.open_memmap(
        folder / f"{name}_features.npy", "w+", np.dtype(np.float32), (count, width)
    )
    classes = np.empty(count, np.int64)
    for first in range(0, count, BLOCK):
        rows = np.arange(first, min(first + BLOCK, count))
        features[rows], targets = store.read(rows)
        classes[rows] = np.asarray(targets).argmax(1)
    features.flush()
    np.save(folder / f"{name}_classes.npy", classes)


def trained_by(python: Path, folder: Path) -> Tree:
    """What opacus' process prints on its last line.

    Raises:
        ValueError: with the last line of its errors, when it fails.
    """
    command = [str(python), "-m", "benchmarks.published.opacus_side", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        said = ended.stderr.splitlines() or ["it said nothing"]
        raise ValueError(f"{' '.join(command[:3])} ended with {ended.returncode}: {said[-1]}")
    found: Tree = json.loads(ended.stdout.splitlines()[-1])
    return found


def main(argv: Sequence[str]) -> None:
    """Train by opacus, print a table and write JSON."""
    program = "python -m benchmarks.published.opacus_peer"
    parser = OneLineParser(prog=program, description=__doc__, allow_abbrev=False)
    parser.add_argument("--row", default="scatternet-linear", help="a published row")
    parser.add_argument("--seed", type=int, default=0, help="seed of our run and of opacus' draws")
    parser.add_argument("--data_path", type=Path, help="the data file (data/cifar10.hdf5)")
    parser.add_argument("--output", "--output_file", type=Path, help="the JSON (bench/opacus-ROW-seedN.json)")
    parser.add_argument("--opacus", type=Path, default=OPACUS, help="a Python that has opacus")
    kinds = ("ghost", "single")
    parser.add_argument("--gradients", choices=kinds, default="ghost", help="norms alone, or each image's")
    args, rest = parser.parse_known_args(argv)
    if args.seed < 0:
        raise ValueError(f"--seed is {args.seed}: give a whole number from 0 on")
    if not args.opacus.is_file():
        raise ValueError(f"{args.opacus} is not there: make opacus-peer installs opacus")
    row = read_row(args.row)
    run = VISION.parse([*row.words(args.seed), *rest])
    check(run.config)
    data = args.data_path or VisualClassification.source(run.config).path
    if data is None or not data.is_file():
        raise ValueError(f"there is no data file {data}: give one with --data_path")
    is_row = run.config == VISION.parse(row.words(args.seed)).config
    if is_row:
        check_maker(data, run.config.data.dataset)
    output = args.output or Path("bench") / f"opacus-{run_name(row, args.seed)}.json"
    output_file("--output", output)
    with tempfile.TemporaryDirectory() as temporary:
        begin = time.perf_counter()
        calibration = prepare(run, data, Path(temporary), args.gradients == "ghost")
        seconds = time.perf_counter() - begin
        print(f"features and moments: {seconds:.0f} s; opacus trains", file=sys.stderr, flush=True)
        found = trained_by(args.opacus, Path(temporary))
    ours: Tree = {"epsilons": {"pld": calibration.epsilon_executed, "rdp": calibration.epsilon_rdp}}
    kept = RESULTS / f"{run_name(row, args.seed)}.json"
    if is_row and kept.is_file():
        result = json.loads(kept.read_text(encoding="utf-8"))
        ours |= {"accuracy": result["last"], "seconds": result["seconds"]}
    found["accuracy"] = list(found["curve"].values())[-1]
    facts = {
        "row": row.name,
        "seed": args.seed,
        "gradients": args.gradients,
        "hardware": hardware(),
        "commit": commit(),
        "words": rest,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, {**facts, "torch": torch.__version__, "ours": ours, "theirs": found})
    show(ours, found, run.config.federated.num_rounds)


def show(ours: Tree, theirs: Tree, rounds: int) -> None:
    """A row of the table for each side."""

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    print_row("side", f"accuracy after {rounds} rounds", "epsilon (accountant)", "seconds")
    print_row(*["---"] * 4)
    for side, found in (("ours", ours), (f"opacus {theirs['opacus']}", theirs)):
        spent = ", ".join(f"{number(value, 3)} ({name})" for name, value in found["epsilons"].items())
        print_row(side, number(found.get("accuracy"), 2), spent, number(found.get("seconds"), 0))


if __name__ == "__main__":
    sys.exit(run_command(main))
