"""Train and evaluate one setting of the FLAIR benchmark.

    python -m benchmarks.flair.train --config fl-r-17 --data_path data/flair.hdf5

Without ``--data_path`` and without a file at data/flair.hdf5, the embedded mini data set is drawn and used
at a scale for a laptop. Any field of `benchmarks.flair.config` can be given as ``--section.field value``
or ``--section.field=value``; the command line wins over the YAML file.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from dataset.flair.mini import MiniSpec, write_mini
from pfl.internal.ops.pytorch_ops import get_default_device

from benchmarks.flair import paper, plots
from benchmarks.flair.centralised import train_centralised
from benchmarks.flair.config import Config, Tree, digest, parse, usage
from benchmarks.flair.federated import train_federated
from benchmarks.flair.recorder import Recorder, columns
from dataset.command_line import run as run_command
from dataset.flair.hdf5 import FlairFile
from dataset.flair.task import FlairTask
from pfl_ext import checkpoint
from pfl_ext.evaluation import SCORES, CentralEvaluation
from pfl_ext.metrics import average_precision
from pfl_ext.models import ImageClassifier, build_backbone, probe_checksum
from pfl_ext.randomness import torch_stream

FLAIR_FILE = Path("data/flair.hdf5")
MINI = MiniSpec(train_users=600, val_users=120, test_users=120, image_size=36, num_fine_labels=68)
MINI_FILE = Path("data/flair-mini.hdf5")


def resolve_data(argv: Sequence[str]) -> tuple[list[str], Path]:
    """The arguments and the file to train on; the mini data set, with its scale, where there is no other.

    :raises ValueError: when a ``--data_path`` is given that does not exist.
    """
    given = parse(argv).data_path
    if given is not None:
        if not given.is_file():
            raise ValueError(
                f"--data_path {given}: no such file; make it with python -m dataset.flair.download_preprocess"
            )
        return list(argv), given
    if FLAIR_FILE.is_file():
        return list(argv), FLAIR_FILE
    print(
        f"no FLAIR file at {FLAIR_FILE}: running on the embedded mini data set, {MINI_FILE}, at laptop scale"
    )
    if not MINI_FILE.is_file():
        MINI_FILE.parent.mkdir(parents=True, exist_ok=True)
        write_mini(MINI_FILE, MINI)
    has_scale = any(word == "--scale" or word.startswith("--scale=") for word in argv)
    return [*argv, *([] if has_scale else ["--scale", "mini"])], MINI_FILE


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
    return ImageClassifier(backbone, input_size=config.model.input_size)


def hardware() -> str:
    """The processor and, if there is one, the GPU."""
    info = Path("/proc/cpuinfo")
    models = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    name = f"{len(os.sched_getaffinity(0))} x {models[0] if models else platform.processor()}"
    return name + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "")


def commit() -> str | None:
    """The commit of this checkout, with ``+`` where tracked files differ from it; None outside git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed.strip() else "")


def final_scores(recorder: Recorder, model: Any, task: FlairTask) -> Tree:
    """Val and test of the last model and of the best one; the model is left at the best."""
    threads = recorder.run.runtime.reader_threads
    splits = [name for name in ("val", "test")]
    evaluations = {name: CentralEvaluation(task.split(name), threads=threads) for name in splits}
    last = {name: columns(evaluations[name](model)) for name in splits}
    model.pytorch_model.load_state_dict(recorder.best_weights())
    val, test = evaluations["val"](model), evaluations["test"](model)
    scores = test[SCORES]
    ap = 100 * average_precision(scores.scores(), scores.targets())
    return {
        "val": columns(val),
        "test": columns(test),
        "last": last,
        "best_step": recorder.best.step,
        "per_class_ap": {name: float(value) for name, value in zip(task.label_names, ap)},
        "prevalence": {name: float(p) for name, p in zip(task.label_names, scores.targets().mean(0))},
    }


def write_results(recorder: Recorder, scores: Tree, module: ImageClassifier, data_path: Path) -> Tree:
    """``model.safetensors``, plots and ``results.json``, the last of which says that the run has ended."""
    config, directory = recorder.run.config, recorder.directory
    checkpoint.save(directory / "model.safetensors", module.state_dict(), {"config_sha256": digest(config)})
    names, ap = list(scores["per_class_ap"]), list(scores["per_class_ap"].values())
    title = f"{config.setting} on {data_path.stem}, seed {config.seed}"
    plots.training_curve(recorder.history(), recorder.unit, title, directory / "plots" / "training_curve.png")
    plots.per_class_bars(
        names,
        ap,
        list(scores["prevalence"].values()),
        paper.per_class(config.setting.removesuffix("-17")) or paper.per_class(config.setting),
        title,
        directory / "plots" / "per_class_ap.png",
    )
    results = {
        "setting": config.setting,
        "dataset": str(data_path),
        "seed": config.seed,
        "rounds": recorder.num_steps,
        "unit": recorder.unit,
        **scores,
        "wall_clock_s": round(recorder.wall_clock, 3),
        "hardware": hardware(),
        "commit": commit(),
        "torch": torch.__version__,
        "config_sha256": digest(config),
        "model_sha256": hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest(),
        "model_probe": probe_checksum(module),
    }
    checkpoint.write_json(directory / "results.json", results)
    return results


def show(results: Tree, directory: Path) -> None:
    """The table of results beside the paper's row."""
    mean_prevalence = 100 * sum(results["prevalence"].values()) / len(results["prevalence"])
    print(
        f"\n{results['setting']} on {results['dataset']}, seed {results['seed']}: best model of {results['unit']} "
        f"{results['best_step']} of {results['rounds']}, {results['wall_clock_s']:.0f} s, on {results['hardware']}"
    )
    print(
        paper.results_table(
            {
                "val, best model": results["val"],
                "test, best model": results["test"],
                "test, last model": results["last"]["test"],
                "test, FLAIR paper": paper.row(results["setting"]),
            }
        )
    )
    print(f"mean label prevalence on test (the C-AP of guessing): {mean_prevalence:.1f}")
    print(f"run directory: {directory} (metrics.jsonl, results.json, model.safetensors, plots/)")


def main(argv: Sequence[str]) -> None:
    """Parse, build, train, report."""
    if {"--help", "-h"} & set(argv):
        print(__doc__ + "\n" + usage())
        return
    argv, data_path = resolve_data(argv)
    run = parse(argv)
    if run.runtime.device != "auto":
        os.environ["PFL_PYTORCH_DEVICE"] = run.runtime.device
    if run.runtime.threads is not None:
        torch.set_num_threads(run.runtime.threads)
    config = run.config
    federated = config.mode == "federated"
    directory = run.run_dir or Path("runs") / f"{config.setting.lower()}-{data_path.stem}-seed{config.seed}"
    with FlairFile(data_path) as file:
        task = FlairTask(
            file,
            config.data.taxonomy,
            config.data.image_size,
            config.data.binary_label,
            int(run.runtime.cache_gb * 1e9),
        )
        num_steps = config.federated.num_rounds if federated else config.centralised.num_epochs
        recorder = Recorder(run, directory, num_steps, "round" if federated else "epoch")
        results = recorder.finished()
        if results is None:
            module = build_model(config, len(task.label_names), run.weights)
            print(
                f"training {config.setting} ({len(task.label_names)} labels) on {data_path}, device {get_default_device()}, into {directory}"
            )
            train = train_federated if federated else train_centralised
            model = train(run, task.split("train"), task.split("val"), module, recorder)
            results = write_results(recorder, final_scores(recorder, model, task), module, data_path)
    show(results, directory)


if __name__ == "__main__":
    sys.exit(run_command(main))
