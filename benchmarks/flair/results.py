"""What is left of a run when it has ended: scores, results.json, pictures, the table on the screen."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path

import torch
from pfl.model.pytorch import PyTorchModel

from benchmarks.flair import paper, plots
from benchmarks.flair.config import Tree, digest
from benchmarks.flair.recorder import Recorder, columns
from benchmarks.flair.users import write_users
from dataset.flair.task import FlairTask
from pfl_ext import checkpoint
from pfl_ext.distributed import is_main
from pfl_ext.evaluation import SCORES, CentralEvaluation
from pfl_ext.metrics import average_precision
from pfl_ext.models import ImageClassifier, probe_checksum
from pfl_ext.per_user import shot_table


def hardware() -> str:
    """The processor and, if there is one, the GPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    name = f"{len(os.sched_getaffinity(0))} x {model}"
    return name + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "")


def commit() -> str | None:
    """The commit of this checkout, with ``+`` where tracked files differ from it; None outside git."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def final_scores(recorder: Recorder, model: PyTorchModel, task: FlairTask) -> Tree:
    """Val and test of the last model and of the best one; the model is left at the best."""
    threads = recorder.run.runtime.reader_threads
    evaluations = {name: CentralEvaluation(task.split(name), threads=threads) for name in ("val", "test")}
    metrics = {name: evaluation(model) for name, evaluation in evaluations.items()}
    last = {name: columns(scored) for name, scored in metrics.items()}
    if recorder.best.step != recorder.num_steps:
        model.pytorch_model.load_state_dict(recorder.best_weights())
        metrics = {name: evaluation(model) for name, evaluation in evaluations.items()}
    scores = metrics["test"][SCORES]
    ap = 100 * average_precision(scores.scores(), scores.targets())
    positives = {name: int(n) for name, n in zip(task.label_names, scores.targets().sum(0))}
    per_class = {name: float(value) for name, value in zip(task.label_names, ap)}
    config = recorder.run.config
    told: Tree = {}
    if is_main() and (config.evaluation.per_user or config.personal.num_epochs):
        told["per_user"] = write_users(
            recorder.directory, config, model.pytorch_model, task, scores.scores(), scores.targets()
        )
    return {
        "val": columns(metrics["val"]),
        "test": columns(metrics["test"]),
        "last": last,
        "best_step": recorder.best.step,
        "per_class_ap": per_class,
        "shots": shot_table(
            per_class, positives, task.split("train").label_counts(), config.evaluation.few_shot_below
        ),
        **told,
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
        paper.per_class(config.setting),
        title,
        directory / "plots" / "per_class_ap.png",
    )
    if recorder.ledger is not None:
        plots.privacy_curves(recorder.history(), title, directory / "plots" / "privacy.png")
        recorder.ledger.close()
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
        "data_sha256": recorder.data_sha256,
        "model_sha256": hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest(),
        "model_probe": probe_checksum(module),
    }
    checkpoint.write_json(directory / "results.json", results)
    return results


def show(results: Tree, directory: Path) -> None:
    """The table of results beside the paper's row."""
    prevalence = list(results["prevalence"].values())
    print(
        f"\n{results['setting']} on {results['dataset']}, seed {results['seed']}: the model of "
        f"{results['unit']} {results['best_step']} of {results['rounds']} was best on val; "
        f"{results['wall_clock_s']:.0f} s on {results['hardware']}"
    )
    rows = {
        "val, best model": results["val"],
        "test, best model": results["test"],
        "test, last model": results["last"]["test"],
        "test, FLAIR paper": paper.row(results["setting"]),
    }
    print(paper.results_table(rows))
    print(
        f"mean label prevalence on test (the C-AP of guessing): {100 * sum(prevalence) / len(prevalence):.1f}"
    )
    print(f"run directory: {directory} (metrics.jsonl, results.json, model.safetensors, plots/)")
